"""The reducer that sends each layer in a way of its own, and chooses those ways anew while training goes on.

    G = the mean of d + e, what the worker wanted to send, over the last ten reductions
    at fixed reductions, before anything is sent (Clock):
        e[l, c] = ||G_l - C_c(G_l)|| for each layer and choice
        the errors' mean over the workers, which travels with this reduction
    when it has landed (where NCCL moves the tensors, at the next reduction's begin), on every worker alike:
        the fewest bytes whose summed errors stay within the uniform setting's (core/compression/lgreco.py)
        the next reduction sends in the new ways; what error feedback holds goes along

After the abstract and the released code of L-GreCo, which sums up the last ten likewise, and allocates ranks alone,
from the first worker's errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import Bucket, Scalars, copy
from ..comm import Reducer, Stage, moved_by_nccl, sum_flats
from ..errors import UserError
from ..stats import HostCopy, Seconds, between, mark
from .formats import BLOCK, INTS, NarrowFormat
from .lgreco import (
    Allocation,
    Choice,
    Clock,
    Decider,
    Factored,
    Layer,
    LGrecoConfig,
    Sparse,
    curve,
    fill,
    low_rank,
    moved,
    top_k,
)
from .quantized import Part, Quantized, chunk_of


class Layout:
    """Where the layers of the `number`-th bucket lie in staging and in error feedback's memory, for one allocation.

    First come the layers of each int format, padded to whole blocks a worker, then those of top-k and low rank, last
    those that travel as they are, and the buffers. Attributes: values, held, layer -> its elements in staging and in
    errors, 1-d, in the bucket's own order; of_kind, kind -> layers.
    """

    def __init__(self, number: int, of: LGreco):
        self.bucket, layers, allocation, world_size = of.buckets[number], of.layers, of.chosen, of.world_size
        self.world_size, bucket = world_size, self.bucket
        self.staging, self.errors, self.means = of.staging[number], of.errors[number], of.means[number]
        mine = [i for i, layer in enumerate(layers) if layer.bucket == number]
        self.of_kind = {k: [i for i in mine if allocation[i].kind == k] for k in ("int", "top", "rank", "raw")}
        starts: dict[int, int] = {}
        self._ints: list[
            tuple[NarrowFormat, int, int, int]
        ] = []  # format, start, elements, elements of a worker's chunk
        begin = end = 0
        for compression in INTS:
            begin = end
            for i in (i for i in self.of_kind["int"] if allocation[i].compression == compression):
                starts[i], end = end, end + layers[i].numel
            if chunk := chunk_of(end - begin, world_size):
                self._ints.append((compression, begin, end - begin, chunk))
            end = begin + world_size * chunk
        for kind in ("top", "rank", "raw"):
            begin = end
            for i in self.of_kind[kind]:
                starts[i], end = end, end + layers[i].numel
        self.values, self.held = (
            {i: flat[starts[i] : starts[i] + layers[i].numel] for i in mine} for flat in (self.staging, self.errors)
        )
        self._payload = in_bucket(bucket.payload, layers, mine)
        self._plain = self.staging[begin : end + len(bucket.values)]  # what travels as it is, and the buffers
        self._buffers = self.staging[end : end + len(bucket.values)]

    def gather(self) -> None:
        """Copies the bucket's payload and buffers to staging."""
        copy([*self.values.values()], self._payload)
        self._buffers.copy_(self.bucket.values)

    def land(self) -> None:
        """Copies them back."""
        copy(self._payload, [*self.values.values()])
        self.bucket.values.copy_(self._buffers)

    def parts(self) -> Iterator[tuple[Part, NarrowFormat, Tensor, Tensor]]:
        """Yields for each int format, at least one, its layers and the memory of error feedback's two stages. The first
        part also has what travels as it is."""
        plain, place = self._plain, 0
        for compression, begin, size, chunk in self._ints or [(INTS[0], 0, 0, 0)]:
            own = self.errors[begin : begin + self.world_size * chunk]
            part = Part(self.staging, size, self.staging[begin : begin + size], plain, self.bucket.scalars)
            yield part, compression, own, self.means[place : place + chunk]
            plain, place = plain[:0], place + chunk


def layers_of(buckets: Sequence[Bucket]) -> list[Layer]:
    """Returns every parameter with elements, in the buckets' order."""
    layers = []
    for number, bucket in enumerate(buckets):
        start = 0
        for p in bucket.params:
            if n := p.numel():
                rows = p.shape[0] if p.dim() > 1 else n
                layers.append(Layer(number, start, n, rows, n // rows, bucket.flat.element_size(), tuple(p.shape)))
            start += n
    return layers


def in_bucket(flat: Tensor, layers: Sequence[Layer], order: Sequence[int]) -> list[Tensor]:
    """Returns the layers' elements in a bucket's payload, 1-d."""
    return [flat[layers[i].start : layers[i].start + layers[i].numel] for i in order]


NOT_FINITE, NOBODY = -1.0, -2.0  # in place of a layer's curve
EVERY, FIRST = 20, 3  # reductions, where the settings leave them open


class LGreco(Reducer):
    """See the module. like: the uniform setting.

    A checkpoint's state, of which all zeros is the start:
        error_feedback, mean_error_feedback: what is held back, in an order that follows the allocation.
        allocation: the choices' values, the columns of "q", low rank's, that are in use, and the clock.
        summed: G's sum so far, in the buckets' own order, and the number of its summands.
        asked: the curves that no decision has been made from yet, and the reduction that asked.
    """

    kind = "lgreco"

    def __init__(
        self, buckets: Sequence[Bucket], scalars: Scalars, rank: int, world_size: int, like: str, config: LGrecoConfig
    ):
        self.buckets, self.scalars, self.config = buckets, scalars, config
        self.rank, self.world_size, self.scale = rank, world_size, 1.0
        self.clock = Clock(config.every or EVERY, config.first or FIRST)
        self.layers = layers_of(buckets)
        self.decider = decider = Decider(self.layers, like, config, world_size)
        self.chosen: Sequence[Choice] = decider.uniform
        self.allocation: Allocation | None = None  # the last decision
        flats, many = [b.flat for b in buckets], len(self.layers)
        slack = len(INTS) * world_size * BLOCK  # each int format is padded to whole blocks a worker
        self.staging = [b.flat.new_zeros(b.numel + slack + len(b.values)) for b in buckets]
        self.errors = [b.flat.new_zeros(b.numel + slack) for b in buckets]
        self.means = [b.flat.new_zeros(-(-b.numel // world_size) + len(INTS) * BLOCK) for b in buckets]
        ranks = torch.tensor([c.value if c.kind == "rank" else 0 for c in decider.choices])
        highest = (decider.offered * ranks).amax(1).int().tolist()
        self._q = [flats[z.bucket].new_zeros(z.columns * r) for z, r in zip(self.layers, highest, strict=True)]
        self._values, self._filled = (torch.zeros(many, dtype=torch.float64) for _ in range(2))
        self._sums = [] if decider.fixed else [b.flat.new_zeros(b.numel) for b in buckets]
        self._summands = flats[0].new_zeros(1, dtype=torch.float64)
        self._asked_by = torch.zeros(1, dtype=torch.float64)  # the reduction that asked; 0: all is decided
        self._asked = flats[0].new_zeros(many * len(decider.choices), dtype=torch.float64)
        self._coming: tuple[int, HostCopy | None] = (0, None)  # the reduction that asked, and its copy for the host
        self._took: Seconds = 0.0  # to ask, last
        self.state = {
            "error_feedback": self.errors,
            "mean_error_feedback": self.means,
            "allocation": [self._values, self._filled, self.clock.numbers],
            "q": self._q,
            "summed": [*self._sums, self._summands],
            "asked": [self._asked, self._asked_by],
        }
        self._lay_out()

    @torch.no_grad()
    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        yield [], 0  # the encoding, too, is done in the background
        self._follow()
        if self._decide():
            self._follow()
        for layout in self._layouts:
            layout.gather()
        self._sum_up(number, moved(self.scalars))
        asked = self._ask(number) if not self.decider.fixed and self.clock.due(number) else None
        parts = [self._ints.stages(group, number), *(stages(group) for stages in self._others)]
        if asked is not None and group is not None:
            parts.append(iter([sum_flats([asked], group)]))
        # the stages of these reductions side by side: the first of each, then the second of each, in this order
        while stages := [stage for part in parts if (stage := next(part, None)) is not None]:
            yield [work for works, _ in stages for work in works], sum(sent for _, sent in stages)
        for layout in self._layouts:
            layout.land()
        if asked is not None:
            self._hear(asked, number)
            if self._at_once(group):
                self._decide()

    def _at_once(self, group: dist.ProcessGroup | None) -> bool:
        """Whether the stages' end has what was asked for. Over NCCL all is only queued there, so the next reduction
        reads it, and the host waits for it."""
        return group is None or not moved_by_nccl(group, self._asked.device)

    # -- the allocation -------------------------------------------------------------------------------------

    def _sum_up(self, number: int, own: Tensor) -> None:
        """Adds what the worker wants to send, if it has moved: 0-d bool."""
        if self.decider.fixed or not self.clock.counts(number):
            return
        self._summands += 1
        for i, into in enumerate(self._sum_views()):
            layout = self._layouts[self.layers[i].bucket]
            into.add_(torch.where(own, layout.values[i] + layout.held[i], 0.0))

    def _sum_views(self) -> list[Tensor]:
        return [self._sums[z.bucket][z.start : z.start + z.numel] for z in self.layers]

    def _ask(self, number: int) -> Tensor:
        """Returns this worker's errors, float64 [layers, choices]. The next sum begins."""
        began = mark(self._asked.device)
        rows, count = [], self._summands.clamp(min=1)
        for i, (layer, wanted) in enumerate(zip(self.layers, self._sum_views(), strict=True)):
            row = curve(wanted, layer, self.decider.choices, self.decider.offered[i].tolist(), i)
            rows.append(torch.where(row.isinf(), 0.0, row) / count)  # not offered: would hide another worker's NaN
        for flat in (*self._sums, self._summands):
            flat.zero_()
        asked = torch.stack(rows)
        self._took = between(began, mark(asked.device))
        self._asked_by.fill_(number)
        return asked

    def _hear(self, asked: Tensor, number: int) -> None:
        """Keeps the workers' means of their errors for `_decide`, from their sums: NOT_FINITE for a layer that is not,
        and NOBODY for all if nobody has moved."""
        mean = asked / self.world_size
        layers = torch.where(mean.isfinite().all(1, keepdim=True), mean, NOT_FINITE)
        self._asked.view_as(mean).copy_(torch.where(moved(self.scalars), layers, NOBODY))
        self._coming = number, HostCopy(self._asked)

    def _decide(self) -> bool:
        """Decides from what was asked, and returns whether there was something to decide from."""
        if not (number := int(self._asked_by)):
            return False
        self._asked_by.zero_()
        asked_by, coming = self._coming
        # the host waits for the copy alone, not for what was queued since; after a checkpoint for all
        heard = coming.read() if coming and asked_by == number else self._asked.tolist()
        table = torch.tensor(heard, dtype=torch.float64).view(len(self.layers), -1)
        began = time.perf_counter()
        self.clock.plan(number)
        if (table == NOBODY).all():
            return False
        curves = torch.where(table == NOT_FINITE, float("nan"), table)
        found = self.decider.decide(curves, self.chosen, number)
        if list(found.choices) != list(self.chosen):
            self._switch(found.choices)
        self.allocation = replace(found, seconds=(float(self._took), time.perf_counter() - began))
        return True

    def _switch(self, choices: Sequence[Choice]) -> None:
        """Changes to another allocation from the next reduction on; what is held back moves along."""
        before = self._layouts
        for layout in before:
            # What this worker holds back of the means that it encoded it owes to all, so n times of it joins what it
            # holds back of its own: nothing is lost, and nothing is sent.
            for _, _, own, means in layout.parts():
                chunk = len(means)
                own[self.rank * chunk : (self.rank + 1) * chunk].add_(means, alpha=self.world_size)
            layout.means.zero_()
        self.chosen = choices
        self._lay_out()
        for old, new in zip(before, self._layouts, strict=True):
            kept = [held.clone() for held in old.held.values()]
            new.errors.zero_()
            copy([*new.held.values()], kept)
        self._values.copy_(torch.tensor([c.value for c in choices], dtype=torch.float64))

    def _follow(self) -> None:
        """Takes the allocation that a checkpoint, or a new start, has brought, and fills new columns of low rank."""
        found: list[Choice] = []
        for layer, value in enumerate(self._values.tolist()):  # 0: of the start, or as it is
            offered = [c for c in self.decider.choices if c.value == value] if value else [self.decider.uniform[layer]]
            if not offered:
                raise UserError(
                    f"the checkpoint sends layer {layer} in a way ({value:g}) that compression.like="
                    f"{self.decider.name!r} does not offer: resume with the settings that wrote it"
                )
            found.append(offered[0])
        if found != list(self.chosen):
            self.chosen = found
            self._lay_out()
        for i, (choice, filled) in enumerate(zip(found, self._filled.tolist(), strict=True)):
            if choice.kind == "rank":
                fill(self._q_of(i), int(filled), seed=i)
                self._filled[i] = int(choice.value)

    # -- what sends -----------------------------------------------------------------------------------------

    def _q_of(self, layer: int) -> Tensor:
        """[columns, the chosen rank]"""
        return self._q[layer].view(self.layers[layer].columns, -1)[:, : int(self.chosen[layer].value)]

    def _lay_out(self) -> None:
        """Builds the senders of the present allocation over views of the memory."""
        n, chosen = self.world_size, self.chosen
        self._layouts = [Layout(i, self) for i in range(len(self.buckets))]
        parts, compressions, own, means = map(
            list, zip(*(p for each in self._layouts for p in each.parts()), strict=True)
        )
        self._ints = Quantized(parts, self.scalars, self.rank, n, compressions, memory=(own, means))
        self._others: list[Callable[..., Iterator[Stage]]] = []
        for layout in self._layouts:
            values, held = layout.values, layout.held
            if top := layout.of_kind["top"]:
                sparse = [Sparse(values[i], held[i], self.layers[i].kept(chosen[i].value)) for i in top]
                self._others.append(partial(top_k, sparse, self.scalars, n))
            if ranks := layout.of_kind["rank"]:
                rows = {i: (self.layers[i].rows, -1) for i in ranks}
                factored = [Factored(values[i].view(rows[i]), held[i].view(rows[i]), self._q_of(i)) for i in ranks]
                self._others.append(partial(low_rank, factored, self.scalars, n))
