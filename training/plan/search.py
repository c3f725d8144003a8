"""All layouts of a model on a cluster: which cannot be, which do not fit, and the others by their seconds."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from core.errors import UserError
from training.plan.case import AXES, MERGES, RECOMPUTE, WIRES, Case, Layout
from training.plan.clusters import Numbers
from training.plan.memory import memory
from training.plan.time import seconds

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)  # what the paper searched (CO2, arXiv 2401.16265)
LARGEST_MICRO = 32  # samples
CHUNKS = (1, 2, 3, 4)
ALIKE = 0.01  # layouts whose seconds differ by less are ordered by what they cost otherwise
MOST = 1 << 16  # devices
GB = 1e9


def name(x: Layout, m: Numbers) -> str:
    """tp2.pp2.dp2, and where it is so .v2, .mb4, .zero1 or .zero2 or .fsdp (ZeRO-3), .co2x2. x: one layout."""
    text = f"tp{x.tp}.pp{x.pp}.dp{x.dp}" + (f".v{x.v}" if x.v > 1 else "") + (f".mb{m}" if m > 1 else "")
    text += ("", ".zero1", ".zero2", ".fsdp")[int(x.zero)]
    return text + (f".co2x{x.islands}" if x.islands > 1 else "")


NAME = re.compile(
    r"tp(?P<tp>\d+)\.pp(?P<pp>\d+)\.dp(?P<dp>\d+)(?:\.v(?P<v>\d+))?(?:\.mb(?P<m>\d+))?"
    r"(?:\.(?P<zero>zero1|zero2|fsdp))?(?:\.co2x(?P<islands>\d+))?"
)


@dataclass(frozen=True)
class Named:
    """What the name of a layout says. m: None leaves micro-batches open."""

    tp: int
    pp: int
    dp: int
    v: int
    m: int | None
    zero: int
    islands: int

    @classmethod
    def parse(cls, text: str) -> Named:
        found = NAME.fullmatch(text)
        if found is None or not all(int(found[k] or 1) for k in ("tp", "pp", "dp", "v", "m", "islands")):
            raise UserError(
                f"layout {text!r}: give one such as tp2.pp2.dp2, with .v2, .mb4, .zero1, .zero2, .fsdp or .co2x2"
            )
        zero = ("", "zero1", "zero2", "fsdp").index(found["zero"] or "")
        numbers = {k: int(found[k] or 1) for k in ("tp", "pp", "dp", "v", "islands")}
        return cls(**numbers, m=int(found["m"]) if found["m"] else None, zero=zero)

    def holds(self, c: Case) -> Numbers:
        """Of which of a case's layouts it is the name."""
        x = c.layout
        same = [getattr(x, k) == getattr(self, k) for k in ("tp", "pp", "dp", "v", "zero", "islands")]
        return np.all([*same, np.broadcast_to(True if self.m is None else c.micro_batches == self.m, x.shape)], axis=0)

    def check(self, c: Case) -> None:
        """UserError: the first rule that forbids it."""
        for rules in (OF_SPLITS, OF_STEPS):
            share = c.batch // (self.dp * self.islands)
            if rules is OF_STEPS and self.m is not None and share % self.m:
                near = min(divisors(share), key=lambda k: abs(k - (self.m or 1)))
                raise UserError(
                    f"mb{self.m} does not divide the {share} samples of a replica: the nearest that does is {near}"
                )
            micro = share // (self.m or share) if rules is OF_STEPS else 1
            one = replace(c, layout=Layout(self.tp, self.pp, self.dp, self.islands, micro, self.v, self.zero))
            for _, holds, why in rules:
                if np.any(holds(one)):
                    raise UserError(f"layout {name(one.layout, self.m or 1)}: {why(one)}")


# -- what cannot be ---------------------------------------------------------------------------------------------------


def nearest(number: int, unit: int) -> int:
    """The multiple of unit, 1 or more times, that lies nearest."""
    return max(1, round(number / unit)) * unit


Rule = tuple[str, Callable[[Case], Numbers], Callable[[Case], str]]  # reason, where it holds, and of one layout why
OF_SPLITS: tuple[Rule, ...] = (
    (
        "devices",
        lambda c: c.layout.ranks != c.cluster.devices,
        lambda c: f"it has {c.layout.ranks} ranks, the cluster {c.cluster.devices} devices: give as many",
    ),
    (
        "heads",
        lambda c: (c.model.heads % c.layout.tp != 0) | (c.model.kv_heads % c.layout.tp != 0),
        lambda c: (
            f"tp{c.layout.tp} does not divide {c.model.heads} heads ({c.model.kv_heads} of keys): give one that does"
        ),
    ),
    (
        "layers",
        lambda c: c.model.layers % c.layout.pp != 0,
        lambda c: f"pp{c.layout.pp} does not divide {c.model.layers} layers: give stages that do",
    ),
    (
        "islands",
        lambda c: (c.cluster.per_node % c.island != 0) & (c.island % c.cluster.per_node != 0),
        lambda c: f"an island of {c.island} neither divides a node of {c.cluster.per_node} nor fills whole ones",
    ),
    (
        "batch",
        lambda c: c.batch % (c.layout.dp * c.layout.islands) != 0,
        lambda c: (
            f"batch {c.batch} does not divide among {c.layout.dp * c.layout.islands} replicas: the nearest that does "
            f"is {nearest(c.batch, c.layout.dp * c.layout.islands)}"
        ),
    ),
)
OF_STEPS: tuple[Rule, ...] = (
    (
        "micro-batches",
        lambda c: c.micro_batches < c.layout.pp,
        lambda c: f"{c.micro_batches} micro-batches are fewer than {c.layout.pp} stages: give mb{c.layout.pp} or more",
    ),
    (
        "interleaving",
        lambda c: (
            (c.layout.v > 1)
            & (
                (c.layout.pp == 1)
                | (c.model.layers % (c.layout.pp * c.layout.v) != 0)
                | (c.micro_batches % c.layout.pp != 0)
            )
        ),
        lambda c: (
            f"v{c.layout.v} needs two stages or more, {c.layout.pp * c.layout.v} chunks that divide {c.model.layers} "
            f"layers, and micro-batches ({c.micro_batches}) that are a multiple of {c.layout.pp} stages"
        ),
    ),
    (
        "zero",
        lambda c: (c.layout.zero > 0) & (c.layout.dp == 1),
        lambda c: f"ZeRO-{c.layout.zero} with dp1 has nothing to share out: leave it out, or give dp2 or more",
    ),
)  # fmt: skip


def notes(c: Case) -> str:
    """What to know of one layout that can be."""
    x, found = c.layout, []
    if c.cluster.crosses(x.tp, 1):
        found.append("TP reaches across nodes")
    if x.zero >= 2 and x.pp > 1:
        found.append(f"ZeRO-{x.zero} gathers and reduces for each micro-batch of a pipeline")
    if x.zero == 1 and x.tp > 1:
        found.append("ZeRO-1 with TP is costed, not run: torch's ZeroRedundancyOptimizer takes no DTensors")
    if x.sequence:
        found.append("sequence parallelism is costed, not run")
    return "; ".join(found)


# -- enumeration ------------------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def splits(c: Case) -> Iterator[tuple[int, int, int, int]]:
    """t in powers of two, p stages, d ranks, I islands."""
    devices = c.cluster.devices
    for tp in (2**k for k in range(devices.bit_length())):
        for pp in divisors(devices):
            left, rest = divmod(devices, tp * pp)
            if not left:
                continue
            if rest:
                yield tp, pp, left, 1  # which the first rule counts
                continue
            yield from ((tp, pp, left // islands, islands) for islands in divisors(left))


def steps(c: Case, split: tuple[int, int, int, int], only: Named | None = None) -> Layout:
    """All that a split leaves open; only: what else a name says."""
    tp, pp, dp, islands = split
    island, share = tp * pp * dp, c.batch // (dp * islands)
    micros = [b for b in divisors(share) if b <= LARGEST_MICRO]
    if only is not None and only.m is not None:
        micros = [share // only.m]
    recomputes = [k for k, kind in enumerate(RECOMPUTE) if not (c.software.fused and kind == "selective")]
    methods = [(1, 0, 0, 0)]
    if islands > 1:  # shared outer state takes float32 and the paper's merge (core/sharded/checks.py)
        paper = MERGES.index("outer")
        kinds = [(0, paper, 0), (0, paper, 1)]
        if island == 1:
            kinds = [*itertools.product(range(len(WIRES)), range(len(MERGES)), (0,)), (0, paper, 1)]
        methods = [(tau, *kind) for tau in TAUS for kind in kinds]
    inner = (
        micros,
        CHUNKS if pp > 1 else (1,),
        range(4) if dp > 1 else (0,),
        recomputes,
        (0, 1) if tp > 1 and c.software.megatron else (0,),
    )
    *axes, which = (axis.ravel() for axis in np.meshgrid(*inner, np.arange(len(methods)), indexing="ij"))
    one = np.ones_like(which)
    return Layout(tp * one, pp * one, dp * one, islands * one, *axes, *np.array(methods)[which].T)


@dataclass(frozen=True)
class Plan:
    """What fits, and how many layouts were dropped for which reason."""

    case: Case
    """Its layouts fit."""
    memory: dict[str, Numbers]
    seconds: dict[str, Numbers]
    dropped: Counter[str]
    miss: str
    """Of what does not fit, the layout that needs least, with its gigabytes."""

    @cached_property
    def bytes(self) -> Numbers:
        return sum(self.memory.values())

    @cached_property
    def total(self) -> Numbers:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def count(self) -> int:
        return len(self.total) + sum(self.dropped.values())

    def pick(self, rows: Numbers) -> int:
        """Of those within ALIKE of the fastest: synchronous, a smaller tau, a wider wire, the merge that costs less loss
        (results/loss.md), nothing offloaded, a tenth of the memory left, fewer micro-batches, less memory."""
        rows = rows[self.total[rows] <= self.total[rows].min() * (1 + ALIKE)]
        c = replace(self.case, layout=self.case.layout[rows])
        x, size = c.layout, self.bytes[rows]
        tight = size > 0.9 * c.cluster.device.memory
        keys = (x.islands > 1, x.tau, x.wire, x.merge, x.offload, x.sequence, tight, c.micro_batches, size)
        return int(rows[np.lexsort(keys[::-1])[0]])

    @cached_property
    def best(self) -> list[int]:
        """The best of each TP x PP x DP, islands, interleaving and ZeRO: rows, the fastest first; the first is picked."""
        x = self.case.layout
        kinds = (((x.tp * MOST + x.pp) * MOST + x.islands) * 8 + x.v) * 4 + x.zero  # which leave dp no choice
        order = np.argsort(kinds, kind="stable")
        picked = [self.pick(rows) for rows in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)]
        picked.sort(key=lambda row: self.total[row])
        first = self.pick(np.array(picked))
        return [first, *(row for row in picked if row != first)]

    def at(self, row: int) -> Case:
        """Of one layout."""
        return replace(self.case, layout=self.case.layout[row])

    def name(self, row: int) -> str:
        one = self.at(row)
        return name(one.layout, one.micro_batches)


def joined(parts: list[Layout]) -> Layout:
    return Layout(*(np.concatenate([getattr(part, axis) for part in parts]) for axis in AXES))


def plan(case: Case, only: Named | None = None) -> Plan:
    """Of all layouts, or of one name's; the case's own is not looked at. UserError: none can be, or none fits."""
    if only is not None:
        only.check(case)
    found = np.array([*splits(case)] if only is None else [(only.tp, only.pp, only.dp, only.islands)])
    dropped: Counter[str] = Counter()
    kept = sieve(replace(case, layout=Layout(*found.T, micro=1)), OF_SPLITS, dropped)
    whole = [
        steps(case, split, only) for split in zip(*(getattr(kept.layout, f).tolist() for f in AXES[:4]), strict=True)
    ]
    if whole:
        kept = sieve(replace(case, layout=joined(whole)), OF_STEPS, dropped)
    if only is not None and whole:
        kept = replace(kept, layout=kept.layout[only.holds(kept)])
    if not kept.layout.shape[0]:
        raise UserError(f"no layout can be: {listed(dropped)}; {hint(case, dropped)}")
    return fitting(kept, dropped if only is None else Counter())


def sieve(c: Case, rules: tuple[Rule, ...], dropped: Counter[str]) -> Case:
    """Without what a rule forbids; the first one counts."""
    for reason, holds, _ in rules:
        bad = np.broadcast_to(holds(c), c.layout.shape)
        if bad.any():
            dropped[reason] += int(bad.sum())
            c = replace(c, layout=c.layout[~bad])
    return c


def fitting(c: Case, dropped: Counter[str]) -> Plan:
    """What fits the devices' memory."""
    needs = memory(c)
    total = sum(needs.values())
    fits = total <= c.cluster.device.memory
    miss = ""
    if not fits.all():
        dropped["memory"] += int((~fits).sum())
        least = int(np.where(fits, np.inf, total).argmin())
        one = replace(c, layout=c.layout[least])
        has = c.cluster.device.memory
        miss = f"{name(one.layout, one.micro_batches)} needs {total[least] / GB:.2f} GB of {has / GB:.2f}"
    if not fits.any():
        raise UserError(
            f"nothing fits: {listed(dropped)}; the nearest miss, {miss}: more devices or --memory_gb, a smaller --batch"
        )
    c = replace(c, layout=c.layout[fits])
    return Plan(c, {part: sizes[fits] for part, sizes in needs.items()}, seconds(c), dropped, miss)


def listed(dropped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common())


def hint(c: Case, dropped: Counter[str]) -> str:
    """What would let more layouts be."""
    m, n = c.model, c.cluster.devices
    found = []
    if dropped["batch"]:
        found.append(f"batch {c.batch}: {nearest(c.batch, n)} is the nearest that divides among {n} replicas")
    if dropped["layers"]:
        found.append(f"{m.layers} layers divide among {', '.join(map(str, divisors(m.layers)[:-1]))} stages")
    if dropped["heads"]:
        found.append(f"{m.heads} heads are cut by TP up to {np.gcd(m.heads, np.gcd(m.kv_heads, 1 << 20))}")
    return "; ".join(found)
