"""Enumerates the layouts of a model on a cluster, drops invalid and too large layouts, and sorts the rest by time."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from core.errors import UserError
from training.layout import Layout
from training.plan.case import AXES, FORMATS, MERGES, RECOMPUTE, Case, Layouts, Numbers
from training.plan.memory import memory
from training.plan.time import seconds

TAUS = (1, 3, 6, 12, 24, 48, 96, 192)  # searched in the paper (CO2, arXiv 2401.16265)
LARGEST_MICRO = 32  # samples
CHUNKS = (1, 2, 3, 4)
ALIKE = 0.01  # layouts whose seconds differ by a smaller share are ordered by their other costs
MOST = 1 << 16  # devices; with more, the kinds of Plan.best would collide
PADDED = 64  # language.train pads the vocabulary to a multiple of it
NAMED = ("tp", "pp", "dp", "v", "zero", "islands")  # axes that appear in a name unchanged
GB, CENT = 1e9, 1e7


def named(c: Case) -> Layout:
    """The name of a case with one layout."""
    x, m = c.layout, int(c.micro_batches)
    sizes = {axis: int(getattr(x, axis)) for axis in NAMED}
    return Layout(**sizes, microbatches=m if m > 1 else 0)


# -- invalid layouts --------------------------------------------------------------------------------------------------

Rule = Callable[[Case], Numbers]
OF_SPLITS: dict[str, Rule] = {
    "devices": lambda c: c.layout.ranks != c.cluster.devices,
    "heads": lambda c: (c.model.heads % c.layout.tp != 0) | (c.model.kv_heads % c.layout.tp != 0),
    "layers": lambda c: c.model.layers % c.layout.pp != 0,
    "islands": lambda c: (c.cluster.per_node % c.island != 0) & (c.island % c.cluster.per_node != 0),
    "batch": lambda c: c.batch % (c.layout.dp * c.layout.islands) != 0,
}
OF_STEPS: dict[str, Rule] = {
    "micro-batches": lambda c: c.micro_batches < c.layout.pp,
    "interleaving": lambda c: (
        (c.layout.v > 1) & ((c.model.layers % (c.layout.pp * c.layout.v) != 0) | (c.micro_batches % c.layout.pp != 0))
    ),
}


def check(name: Layout, c: Case) -> None:
    """Raises UserError if a layout that a user names does not fit the cluster, the model or the batch."""
    k, m = c.cluster, c.model
    if name.devices != k.devices:
        raise UserError(f"layout={name}: it takes {name.devices} devices, {k.name} has {k.devices}: name as many")
    if k.per_node % (n := name.island_size) and n % k.per_node:
        raise UserError(f"layout={name}: islands of {n} neither divide nodes of {k.per_node} nor fill them")
    if name.zero and name.dp == 1:
        raise UserError(f"layout={name}: dp is 1, ZeRO has nothing to share out: leave it out")
    padded = -(-m.vocabulary // PADDED) * PADDED
    name.check_model(layers=m.layers, heads=m.heads, key_heads=m.kv_heads, vocabulary=padded)
    if name.microbatches or name.pp > 1 or c.batch % name.data_workers:
        name.check_batch(c.batch)


def notes(c: Case) -> str:
    """Remarks on a case with one valid layout."""
    x, refused = c.layout, ""
    try:
        if x.ranks > 1:
            named(c).check_runs()
    except UserError as error:
        refused = f"costed, not run: {error}"
    of = {
        "TP reaches across nodes": c.cluster.crosses(x.tp, 1),
        f"ZeRO-{x.zero} with a pipeline keeps whole gradients until its last micro-batch": x.zero >= 2 and x.pp > 1,
        refused: refused,
        "CO2's outer state in the host's memory is costed, not run, with TP or stages": x.offload and x.tp * x.pp > 1,
    }
    return "; ".join(text for text, told in of.items() if told)


# -- enumeration ------------------------------------------------------------------------------------------------------


def divisors(n: int) -> list[int]:
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def splits(c: Case) -> Iterator[tuple[int, int, int, int]]:
    """All (t, p, d, I) on the cluster, where t is a power of two."""
    devices = c.cluster.devices
    for tp, pp in itertools.product((2**k for k in range(devices.bit_length())), divisors(devices)):
        left, rest = divmod(devices, tp * pp)
        if left:  # the first rule counts splits that leave devices over
            yield from ((tp, pp, left // islands, islands) for islands in ([1] if rest else divisors(left)))


def steps(c: Case, split: tuple[int, int, int, int], only: Layout | None = None) -> Layouts:
    """All layouts of a split (t, p, d, I). `only` keeps the chunks, micro-batches and ZeRO stage of a name."""
    tp, pp, dp, islands = split
    share = c.batch // (dp * islands)
    micros = [b for b in divisors(share) if b <= LARGEST_MICRO]
    if only is not None and only.microbatches:
        micros = [share // only.microbatches]
    methods = [(1, 0, 0, 0)]
    if islands > 1:
        kinds = [*itertools.product(range(len(FORMATS)), range(len(MERGES)), (0,)), (0, MERGES.index("restart"), 1)]
        methods = [(tau, *kind) for tau in TAUS for kind in kinds]
    chunks, zeros = CHUNKS if pp > 1 else (1,), range(4 if dp > 1 else 1)
    if only is not None:
        chunks, zeros = (only.v,), (only.zero,)
    inner = micros, chunks, zeros, range(len(RECOMPUTE))
    *axes, which = (axis.ravel() for axis in np.meshgrid(*inner, np.arange(len(methods)), indexing="ij"))
    one = np.ones_like(which)
    return Layouts(tp * one, pp * one, dp * one, islands * one, *axes, *np.array(methods)[which].T)


@dataclass(frozen=True)
class Plan:
    """The layouts that fit, with their bytes and seconds by part, and the number of dropped layouts by reason.

    `miss` is the layout that needs the least memory of all that do not fit, with its gigabytes.
    """

    case: Case
    memory: dict[str, Numbers]
    seconds: dict[str, Numbers]
    dropped: Counter[str]
    miss: str

    @cached_property
    def bytes(self) -> Numbers:
        return sum(self.memory.values())

    @cached_property
    def total(self) -> Numbers:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def pick(self, rows: Numbers) -> int:
        """The preferred layout of all within ALIKE of the fastest.

        The order of preference: synchronous, a smaller tau, less compression, the merge with the lower loss
        (results/loss.md), no offload, no recomputation, a tenth of memory left, less ZeRO.
        """
        rows = rows[self.total[rows] <= self.total[rows].min() * (1 + ALIKE)]
        c = replace(self.case, layout=self.case.layout[rows])
        x, size = c.layout, self.bytes[rows]
        settings = x.islands > 1, x.tau, x.compression, x.merge, x.offload, x.recompute
        keys = *settings, size > 0.9 * c.cluster.device.memory, x.zero, c.micro_batches, size
        return int(rows[np.lexsort(keys[::-1])[0]])

    @cached_property
    def best(self) -> list[int]:
        """Rows with the best of each TP x PP x DP, islands, interleaving and ZeRO: the preferred, then the fastest."""
        x = self.case.layout
        kinds = (((x.tp * MOST + x.pp) * MOST + x.islands) * 8 + x.v) * 4 + x.zero  # dp follows from these
        order = np.argsort(kinds, kind="stable")
        picked = [self.pick(rows) for rows in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)]
        picked.sort(key=lambda row: (self.total[row], self.bytes[row]))
        first = self.pick(np.array(picked))
        return [first, *(row for row in picked if row != first)]

    def at(self, row: int) -> Case:
        """The case with only the layout of this row."""
        return replace(self.case, layout=self.case.layout[row])

    def name(self, row: int) -> str:
        return str(named(self.at(row)))


def plan(case: Case, only: Layout | None = None) -> Plan:
    """Searches all layouts that use all nodes, or `only` layouts of a name. The case's own layouts are ignored.

    Raises:
        UserError: If no layout is valid, or none fits.
    """
    if (devices := case.cluster.devices) > MOST:
        raise UserError(f"{case.cluster.name} has {devices} devices: the planner takes {MOST}: give fewer --nodes")
    if only is not None:
        check(only, case)
    found = np.array([*splits(case)] if only is None else [(only.tp, only.pp, only.dp, only.islands)])
    dropped: Counter[str] = Counter()
    kept = sieve(replace(case, layout=Layouts(*found.T, micro=1)), OF_SPLITS, dropped)
    x = kept.layout
    each = zip(*(axis.tolist() for axis in (x.tp, x.pp, x.dp, x.islands)), strict=True)
    whole = [steps(case, split, only) for split in each]
    if whole:
        every = Layouts(*(np.concatenate([getattr(part, axis) for part in whole]) for axis in AXES))
        kept = sieve(replace(case, layout=every), OF_STEPS, dropped)
    if not kept.layout.shape[0]:
        raise UserError(
            f"no layout can be: failures by reason: {listed(dropped)}: give another --batch, --nodes or --per_node"
        )
    return fitting(kept, dropped if only is None else Counter())


def sieve(c: Case, rules: dict[str, Rule], dropped: Counter[str]) -> Case:
    """Drops the layouts that a rule forbids. Each counts for the first such rule."""
    for reason, rule in rules.items():
        bad = np.broadcast_to(rule(c), c.layout.shape)
        if bad.any():
            dropped[reason] += int(bad.sum())
            c = replace(c, layout=c.layout[~bad])
    return c


def fitting(c: Case, dropped: Counter[str]) -> Plan:
    """Drops the layouts that do not fit in the devices' memory."""
    needs, has, miss = memory(c), c.cluster.device.memory, ""
    total: Numbers = sum(needs.values())
    fits = total <= has
    if not fits.all():
        dropped["memory"] += int((~fits).sum())
        least = int(np.where(fits, np.inf, total).argmin())
        needed = math.ceil(total[least] / CENT) / 100  # rounded up, so never equal to the device's memory
        miss = f"{named(replace(c, layout=c.layout[least]))} needs {needed:.2f} GB of {has / GB:.2f}"
    if not fits.any():
        raise UserError(f"nothing fits: {listed(dropped)}; the nearest miss, {miss}: more devices, a smaller --batch")
    c = replace(c, layout=c.layout[fits])
    return Plan(c, {part: sizes[fits] for part, sizes in needs.items()}, seconds(c), dropped, miss)


def listed(dropped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common())
