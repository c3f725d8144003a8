"""The reducer that sends each layer in a way of its own, and chooses those ways anew while training goes on.

    every `every`-th reduction, or less often where that would take too much of the time, before anything is sent:
        G = d + e, what the worker wants to send; e[l, c] = ||G_l - C_c(G_l)|| for each layer and choice
        the errors' mean over the workers, which travels with this reduction, as do the seconds that it takes
    when it has landed (where NCCL moves the tensors, at the next reduction's begin), on every worker alike:
        the fewest bytes whose summed errors stay within the uniform setting's (core/lgreco/allocate.py)
        the next reduction sends in the new ways; what error feedback holds goes along

After the abstract and the released code of L-GreCo, which allocates ranks alone, from the first worker's errors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..flat import Bucket, Scalars, copy
from ..flight import moved_by_nccl
from ..groups import Stage, all_reduce
from ..stats import Mark, Seconds, between, mark, ready
from ..wires.formats import BLOCK, INTS, Rounding
from ..wires.quantized import Quantized
from .choices import Choice, code
from .clock import Clock
from .config import FIXED, LGrecoConfig
from .curves import curve, norm
from .decide import Allocation, Decider
from .layout import Layout, Part, in_bucket, layers_of, slack
from .lowrank import Factored, LowRank, fill
from .sparse import Sparse, TopK

NOT_FINITE, NOBODY = -1.0, -2.0  # in place of a layer's curve


class LGreco:
    """See the module. like: the uniform setting; every, first: in place of what config leaves open.

    state: "error_feedback" and "mean_error_feedback", in an order that follows the allocation; "allocation", by which
    a resumed run goes on with it; low rank's "q", how many of its columns are in use, the layers' norms at the last
    decision, and the clock; "asked", the curves that no decision has been made of yet. All zeros is the start: every
    layer as `like` says, or as LEGACY's rule does. Where NCCL moves the tensors the host waits, at the launch after a
    reduction that asked, until that has landed.
    """

    kind = "lgreco"

    def __init__(
        self,
        buckets: Sequence[Bucket],
        scalars: Scalars,
        rank: int,
        world_size: int,
        like: str,
        config: LGrecoConfig,
        rounding: Rounding = "nearest",
        *,
        every: int = 20,
        first: int = 3,
    ):
        self.buckets, self.scalars, self.config = buckets, scalars, config
        self.rounding: Rounding = rounding
        self.rank, self.world_size, self.scale = rank, world_size, 1.0
        every, first = (b if a is None else a for a, b in ((config.every, every), (config.first, first)))
        self.clock = Clock(every, first, config.time_share)
        self.layers = layers_of(buckets)
        self.decider = Decider(self.layers, like, config, world_size)
        self.chosen: Sequence[Choice] = self.decider.start
        self.allocation: Allocation | None = None  # the last decision
        self._codes = {code(c): c for c in self.decider.choices}
        self._make_state()
        self._lay_out()

    def _make_state(self) -> None:
        n, decider, many = self.world_size, self.decider, len(self.layers)
        flats = [b.flat for b in self.buckets]
        self._staging = [b.flat.new_zeros(b.numel + slack(n) + len(b.values)) for b in self.buckets]
        self._errors = [b.flat.new_zeros(b.numel + slack(n)) for b in self.buckets]
        self._mean_errors = [b.flat.new_zeros(-(-b.numel // n) + len(INTS) * BLOCK) for b in self.buckets]
        ranks = [
            max(
                (int(c.value) for c, ok in zip(decider.choices, row, strict=True) if ok and c.kind == "rank"), default=0
            )
            for row in decider.offered.tolist()
        ]
        self._q = [flats[z.bucket].new_zeros(z.columns * r) for z, r in zip(self.layers, ranks, strict=True)]
        self._codes_now, self._filled = torch.zeros(many, dtype=torch.float64), torch.zeros(many, dtype=torch.float64)
        self._asked_by = torch.zeros(2, dtype=torch.float64)  # the reduction that asked, 0: all is decided; and seconds
        self._asked = flats[0].new_zeros((many + 1) * (len(decider.choices) + 1), dtype=torch.float64)
        # the reduction that asked, and its copy on the way to the host
        self._coming: tuple[int, Tensor, Mark] = (0, self._asked, 0.0)
        self._took: Seconds = 0.0  # to ask, last
        self.state = {
            "error_feedback": self._errors,
            "mean_error_feedback": self._mean_errors,
            "allocation": [self._codes_now, self._filled, decider.before, self.clock.numbers],
            "q": self._q,
            "asked": [self._asked, self._asked_by],
        }

    def become(self, kind: str) -> None:
        """See Reducer."""

    def due(self, number: int) -> bool:
        """Whether the curves are taken in this reduction."""
        return self.config.rule not in FIXED and self.clock.due(number)

    # -- one reduction --------------------------------------------------------------------------------------

    @torch.no_grad()
    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        yield [], 0  # the encoding, too, is done in the background
        self.clock.tick(mark(self._asked.device))
        self._follow()
        if self._decide():
            self._follow()
        for bucket, layout, staging in zip(self.buckets, self._layouts, self._staging, strict=True):
            copy(layout.views(staging, self.layers), in_bucket(bucket.payload, self.layers, layout.order))
        asked = self._ask(number) if self.due(number) else None
        self._take_raw()
        parts = [self._ints.stages(group, number), *(part.stages(group) for part in self._others)]
        if asked is not None and group is not None:
            parts.append(iter([all_reduce([asked], group)]))
        yield from together(parts)
        self._land()
        if asked is not None:
            self._hear(asked, number)
            if self._at_once(group):
                self._decide()

    def _at_once(self, group: dist.ProcessGroup | None) -> bool:
        """Whether what has been asked can be read at the end of its own stages: over NCCL these are only queued."""
        return group is None or not moved_by_nccl(group, self._asked.device)

    def _take_raw(self) -> None:
        """What travels as it is, buffers and layers: these with what an earlier format of theirs has left."""
        moved = self.scalars["steps"] * self.scalars["weight"] != 0
        for bucket, layout, staging, errors in self._each():
            start, n = layout.raw
            held = errors[start : start + n]
            staging[start : start + n].add_(torch.where(moved, held, 0.0))
            held.copy_(torch.where(moved, 0.0, held))
            staging[start + n : start + n + len(bucket.values)].copy_(bucket.values)

    def _land(self) -> None:
        for bucket, layout, staging, _ in self._each():
            copy(in_bucket(bucket.payload, self.layers, layout.order), layout.views(staging, self.layers))
            start = sum(layout.raw)
            bucket.values.copy_(staging[start : start + len(bucket.values)])

    def _each(self) -> Iterator[tuple[Bucket, Layout, Tensor, Tensor]]:
        return zip(self.buckets, self._layouts, self._staging, self._errors, strict=True)

    # -- the allocation -------------------------------------------------------------------------------------

    def _ask(self, number: int) -> Tensor:
        """float64 [layers + 1, choices + 1]: this worker's errors, and the norm of each layer; last what the clock has
        to know."""
        began = mark(self._asked.device)
        rows = []
        found = {}
        for _, layout, staging, errors in self._each():
            pairs = zip(layout.views(staging, self.layers), layout.views(errors, self.layers), strict=True)
            found |= dict(zip(layout.order, pairs, strict=True))
        for i, layer in enumerate(self.layers):
            wanted = found[i][0] + found[i][1]
            row = curve(wanted, layer, self.decider.choices, self.decider.offered[i].tolist(), i)
            row = torch.where(row.isinf(), 0.0, row)  # not offered: their sum would hide another worker's NaN
            rows.append(torch.cat([row, norm(wanted)[None]]))
        asked = torch.stack([*rows, torch.zeros_like(rows[0])])
        self._took = between(began, mark(asked.device))
        self.clock.spend(self._took)
        self.clock.tell(asked[-1, :3])
        known = float(self._took) if ready(self._took) else 0.0
        for place, value in zip(self._asked_by, (number, known), strict=True):
            place.fill_(value)
        return asked

    def _hear(self, asked: Tensor, number: int) -> None:
        """The sums of what the workers asked with have landed: keeps their means for `_decide`, NOT_FINITE for such a
        layer, and NOBODY for all where nobody has moved."""
        mean = asked / self.world_size
        moved = self.scalars["steps"] * self.scalars["weight"] != 0
        layers = torch.where(mean[:-1].isfinite().all(1, keepdim=True), mean[:-1], NOT_FINITE)
        self._asked.view_as(mean).copy_(torch.cat([torch.where(moved, layers, NOBODY), mean[-1:]]))
        self._coming = number, self._asked.to("cpu", non_blocking=True), mark(asked.device)

    def _heard(self, number: int) -> Tensor:
        """On a GPU the host waits for the copy alone, not for what was queued since; after a checkpoint for all."""
        asked_by, table, copied = self._coming
        if asked_by != number:
            table = self._asked.cpu()
        elif isinstance(copied, torch.cuda.Event):
            copied.synchronize()
        return table.view(len(self.layers) + 1, -1)

    def _decide(self) -> bool:
        """Whether there was something to decide."""
        number, seconds = self._asked_by.tolist()
        if not number:
            return False
        self._asked_by.zero_()
        table = self._heard(int(number))
        seconds = float(self._took) if self._coming[0] == number else seconds  # a checkpoint's may lack a GPU's
        began = time.perf_counter()
        late = self.clock.plan(int(number), *table[-1, :3].tolist())
        if (table[:-1] == NOBODY).all():
            return False
        curves = torch.where(table[:-1] == NOT_FINITE, float("nan"), table[:-1])
        found = self.decider.decide(curves[:, :-1], curves[:, -1], self.chosen, int(number))
        if list(found.choices) != list(self.chosen):
            self._switch(found.choices)
        programme = time.perf_counter() - began
        self.clock.spend(programme)
        self.allocation = replace(found, reason=found.reason + late, seconds=(seconds, programme))
        return True

    def _switch(self, choices: Sequence[Choice]) -> None:
        """To another allocation, from the next reduction on. What this worker holds back of the means that it encoded
        it owes to all, so n times of it joins what it holds back of its own: nothing is lost, and nothing is sent."""
        for (_, layout, _, errors), means in zip(self._each(), self._mean_errors, strict=True):
            place = 0
            for start, _, padded in layout.ints.values():
                chunk = padded // self.world_size
                own = start + self.rank * chunk
                errors[own : own + chunk].add_(means[place : place + chunk], alpha=self.world_size)
                place += chunk
            means.zero_()
        before = self._layouts
        self.chosen = choices
        self._lay_out()
        for old, new, errors in zip(before, self._layouts, self._errors, strict=True):
            kept = [view.clone() for view in old.views(errors, self.layers)]
            errors.zero_()
            copy(new.views(errors, self.layers), kept)
        self._codes_now.copy_(torch.tensor([code(c) for c in choices], dtype=torch.float64))

    def _follow(self) -> None:
        """A checkpoint, or a new start, may have brought another allocation; low rank may need more columns."""
        found = [self._choice(i, number) for i, number in enumerate(self._codes_now.tolist())]
        if found != list(self.chosen):
            self.chosen = found
            self._lay_out()
        for i, (choice, filled) in enumerate(zip(found, self._filled.tolist(), strict=True)):
            r = int(choice.value) if choice.kind == "rank" else 0
            if r:
                fill(self._q_of(i, r), int(filled), seed=i)
            self._filled[i] = r or filled

    def _choice(self, layer: int, number: float) -> Choice:
        if not number:
            return self.decider.start[layer]
        if number not in self._codes:
            raise UserError(
                f"the checkpoint sends layer {layer} in a way ({number:g}) that wire.like={self.decider.name!r} with "
                f"family={self.config.family!r} does not offer: resume with the settings that wrote it"
            )
        return self._codes[number]

    def _q_of(self, layer: int, rank: int) -> Tensor:
        return self._q[layer].view(self.layers[layer].columns, -1)[:, :rank]

    # -- what sends -----------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Builds the parts of the present allocation over views of the staging tensors and of the state."""
        self._layouts = [Layout(i, self.layers, self.chosen, self.world_size) for i in range(len(self.buckets))]
        self._ints = self._quantized()
        self._others: list[TopK | LowRank] = []
        for _, layout, staging, errors in self._each():
            values, held = (
                dict(zip(layout.order, layout.views(f, self.layers), strict=True)) for f in (staging, errors)
            )
            top, rank = layout.of_kind["top"], layout.of_kind["rank"]
            if top:
                sparse = [Sparse(values[i], held[i], self.layers[i].kept(self.chosen[i].value)) for i in top]
                self._others.append(TopK(sparse, self.scalars, self.world_size))
            if rank:
                matrices = [[flat[i].view(self.layers[i].rows, -1) for i in rank] for flat in (values, held)]
                qs = [self._q_of(i, int(self.chosen[i].value)) for i in rank]
                factored = [Factored(*three) for three in zip(*matrices, qs, strict=True)]
                self._others.append(LowRank(factored, self.scalars, self.world_size))

    def _quantized(self) -> Quantized:
        """The layers of each int format in each bucket. A bucket's first part carries what travels as it is."""
        parts, wires, own, means = [], [], [], []
        for (bucket, layout, staging, errors), mean_errors in zip(self._each(), self._mean_errors, strict=True):
            raw = sum(layout.raw)
            values, place = staging[layout.raw[0] : raw + len(bucket.values)], 0
            for wire, (start, n, padded) in (layout.ints or {INTS[0]: (0, 0, 0)}).items():
                parts.append(Part(staging, staging[start : start + n], values, bucket.scalars))
                wires.append(wire)
                own.append(errors[start : start + padded])
                means.append(mean_errors[place : place + padded // self.world_size])
                values, place = values[:0], place + padded // self.world_size
        workers = self.rank, self.world_size
        return Quantized(parts, self.scalars, *workers, wires, self.rounding, memory=(own, means))


def together(parts: Sequence[Iterator[Stage]]) -> Iterator[Stage]:
    """The stages of several reductions side by side: the first of each, then the second of each, in this order."""
    going = list(parts)
    while going:
        stages = [(part, next(part, None)) for part in going]
        going = [part for part, stage in stages if stage is not None]
        works = [work for _, stage in stages if stage is not None for work in stage[0]]
        if going:
            yield works, sum(stage[1] for _, stage in stages if stage is not None)
