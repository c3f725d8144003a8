"""The reducer that sends each layer in a way of its own, and chooses those ways anew while training goes on.

    G = the mean of d + e, what the worker wanted to send, over the last ten reductions
    at fixed reductions, before anything is sent (Clock):
        e[l, c] = ||G_l - C_c(G_l)|| for each layer and choice
        the errors' mean over the workers, which travels with this reduction
    when it has landed (where NCCL moves the tensors, at the next reduction's begin), on every worker alike:
        the fewest bytes whose summed errors stay within the uniform setting's (core/lgreco/decide.py)
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

from ..errors import UserError
from ..flat import Bucket, Scalars, copy
from ..flight import Reducer
from ..groups import Stage, all_reduce, moved_by_nccl
from ..stats import Mark, Seconds, between, mark
from ..wires.formats import BLOCK, INTS, Wire
from ..wires.quantized import Part, Quantized, chunk_of
from .choices import Choice, Layer, LGrecoConfig
from .decide import Allocation, Clock, Decider, curve
from .senders import Factored, Sparse, fill, low_rank, moved, top_k


class Memory:
    """A bucket's tensors that outlive an allocation: staging, where the layers are gathered; errors and means, what
    error feedback holds back of the worker's own and of the means that it encodes."""

    def __init__(self, bucket: Bucket, world_size: int):
        slack = len(INTS) * world_size * BLOCK  # each int format is padded to whole blocks a worker
        self.staging = bucket.flat.new_zeros(bucket.numel + slack + len(bucket.values))
        self.errors = bucket.flat.new_zeros(bucket.numel + slack)
        self.means = bucket.flat.new_zeros(-(-bucket.numel // world_size) + len(INTS) * BLOCK)


class Layout:
    """For one bucket, the `number`-th, and one allocation: a flat order of its layers, first those of each int format,
    each padded to whole blocks a worker; then top-k's and low rank's; last those that travel as they are, and behind
    them the buffers.

    values, held: layer -> its elements in staging and in errors, 1-d, in the bucket's own order. raw: (start, elements)
    in staging of the layers that travel as they are. of_kind: kind -> layers.
    """

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        memory: Memory,
        layers: Sequence[Layer],
        allocation: Sequence[Choice],
        world_size: int,
    ):
        self.bucket, self.memory, self.world_size = bucket, memory, world_size
        mine = [i for i, layer in enumerate(layers) if layer.bucket == number]
        self.of_kind = {k: [i for i in mine if allocation[i].kind == k] for k in ("int", "top", "rank", "raw")}
        starts: dict[int, int] = {}
        self._ints: list[tuple[Wire, int, int, int]] = []  # format, start, elements, elements of a worker's chunk
        end = 0
        for wire in INTS:
            begin = end
            for i in (i for i in self.of_kind["int"] if allocation[i].wire == wire):
                starts[i], end = end, end + layers[i].numel
            chunk = chunk_of(end - begin, world_size)
            if chunk:
                self._ints.append((wire, begin, end - begin, chunk))
            end = begin + world_size * chunk
        for kind in ("top", "rank", "raw"):
            begin = end
            for i in self.of_kind[kind]:
                starts[i], end = end, end + layers[i].numel
        self.raw = begin, end - begin
        self.values, self.held = (
            {i: flat[starts[i] : starts[i] + layers[i].numel] for i in mine} for flat in (memory.staging, memory.errors)
        )
        self._payload = in_bucket(bucket.payload, layers, mine)
        self._buffers = memory.staging[end : end + len(bucket.values)]

    def gather(self) -> None:
        """From the bucket's payload to staging, buffers too."""
        copy([*self.values.values()], self._payload)
        self._buffers.copy_(self.bucket.values)

    def land(self) -> None:
        """And back."""
        copy(self._payload, [*self.values.values()])
        self.bucket.values.copy_(self._buffers)

    def parts(self) -> Iterator[tuple[Part, Wire, Tensor, Tensor]]:
        """For each int format, at least one: its layers, in the first part also the values that travel as they are, and
        the memory of error feedback's two stages."""
        start, count = self.raw
        staging, values = self.memory.staging, self.memory.staging[start : start + count + len(self._buffers)]
        place = 0
        for wire, begin, size, chunk in self._ints or [(INTS[0], 0, 0, 0)]:
            own = self.memory.errors[begin : begin + self.world_size * chunk]
            part = Part(staging, size, staging[begin : begin + size], values, self.bucket.scalars)
            yield part, wire, own, self.memory.means[place : place + chunk]
            values, place = values[:0], place + chunk

    def owe(self, rank: int) -> None:
        """What this worker holds back of the means that it encoded it owes to all, so n times of it joins what it holds
        back of its own: nothing is lost, and nothing is sent."""
        for _, _, own, means in self.parts():
            chunk = len(means)
            own[rank * chunk : (rank + 1) * chunk].add_(means, alpha=self.world_size)
        self.memory.means.zero_()


def layers_of(buckets: Sequence[Bucket]) -> list[Layer]:
    """Every parameter with elements, in the buckets' order."""
    layers = []
    for number, bucket in enumerate(buckets):
        start = 0
        for p in bucket.params:
            if p.numel():
                rows = p.shape[0] if p.dim() > 1 else p.numel()
                columns = p.numel() // rows
                size = bucket.flat.element_size()
                layers.append(Layer(number, start, p.numel(), rows, columns, size, tuple(p.shape)))
            start += p.numel()
    return layers


def in_bucket(flat: Tensor, layers: Sequence[Layer], order: Sequence[int]) -> list[Tensor]:
    """The layers' elements in a bucket's payload, 1-d."""
    return [flat[layers[i].start : layers[i].start + layers[i].numel] for i in order]


NOT_FINITE, NOBODY = -1.0, -2.0  # in place of a layer's curve
EVERY, FIRST = 20, 3  # reductions, where the settings leave them open


class LGreco(Reducer):
    """See the module. like: the uniform setting.

    state: "error_feedback" and "mean_error_feedback", in an order that follows the allocation; "allocation", by which
    a resumed run goes on with it: the choices' values, the columns of "q", low rank's, that are in use, and the clock;
    "summed", G's sum so far, in the buckets' own order, and the number of its summands;
    "asked", the curves that no decision has been made of yet. All zeros is the start. Where NCCL moves the tensors the
    host waits, at the launch after a reduction that asked, until that has landed.
    """

    kind = "lgreco"

    def __init__(
        self, buckets: Sequence[Bucket], scalars: Scalars, rank: int, world_size: int, like: str, config: LGrecoConfig
    ):
        self.buckets, self.scalars, self.config = buckets, scalars, config
        self.rank, self.world_size, self.scale = rank, world_size, 1.0
        self.clock = Clock(config.every or EVERY, config.first or FIRST)
        self.layers = layers_of(buckets)
        self.decider = Decider(self.layers, like, config, world_size)
        self.chosen: Sequence[Choice] = self.decider.uniform
        self.allocation: Allocation | None = None  # the last decision
        self._make_state()
        self._lay_out()

    def _make_state(self) -> None:
        flats, decider, many = [b.flat for b in self.buckets], self.decider, len(self.layers)
        self._memory = [Memory(b, self.world_size) for b in self.buckets]
        ranks = torch.tensor([c.value if c.kind == "rank" else 0 for c in decider.choices])
        highest = (decider.offered * ranks).amax(1).int().tolist()
        self._q = [flats[z.bucket].new_zeros(z.columns * r) for z, r in zip(self.layers, highest, strict=True)]
        self._values, self._filled = (torch.zeros(many, dtype=torch.float64) for _ in range(2))
        self._sums = [] if decider.fixed else [b.flat.new_zeros(b.numel) for b in self.buckets]
        self._summands = flats[0].new_zeros(1, dtype=torch.float64)
        self._asked_by = torch.zeros(1, dtype=torch.float64)  # the reduction that asked; 0: all is decided
        self._asked = flats[0].new_zeros(many * len(decider.choices), dtype=torch.float64)
        # the reduction that asked, and its copy on the way to the host
        self._coming: tuple[int, Tensor, Mark] = (0, self._asked, 0.0)
        self._took: Seconds = 0.0  # to ask, last
        self.state = {
            "error_feedback": [m.errors for m in self._memory],
            "mean_error_feedback": [m.means for m in self._memory],
            "allocation": [self._values, self._filled, self.clock.numbers],
            "q": self._q,
            "summed": [*self._sums, self._summands],
            "asked": [self._asked, self._asked_by],
        }

    def due(self, number: int) -> bool:
        """Whether the curves are taken in this reduction."""
        return not self.decider.fixed and self.clock.due(number)

    @torch.no_grad()
    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        yield [], 0  # the encoding, too, is done in the background
        self._follow()
        if self._decide():
            self._follow()
        for layout in self._layouts:
            layout.gather()
        own = moved(self.scalars)
        self._sum_up(number, own)
        asked = self._ask(number) if self.due(number) else None
        parts = [self._ints.stages(group, number), *(stages(group) for stages in self._others)]
        if asked is not None and group is not None:
            parts.append(iter([all_reduce([asked], group)]))
        yield from together(parts)
        for layout in self._layouts:
            layout.land()
        if asked is not None:
            self._hear(asked, number)
            if self._at_once(group):
                self._decide()

    def _at_once(self, group: dist.ProcessGroup | None) -> bool:
        """Whether what has been asked can be read at the end of its own stages: over NCCL these are only queued."""
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
        """The layers' elements in the sums."""
        return [self._sums[z.bucket][z.start : z.start + z.numel] for z in self.layers]

    def _ask(self, number: int) -> Tensor:
        """float64 [layers, choices]: this worker's errors. The next sum begins."""
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
        """The sums of what the workers asked with have landed: keeps their means for `_decide`, NOT_FINITE for such a
        layer, and NOBODY for all where nobody has moved."""
        mean = asked / self.world_size
        layers = torch.where(mean.isfinite().all(1, keepdim=True), mean, NOT_FINITE)
        self._asked.view_as(mean).copy_(torch.where(moved(self.scalars), layers, NOBODY))
        self._coming = number, self._asked.to("cpu", non_blocking=True), mark(asked.device)

    def _heard(self, number: int) -> Tensor:
        """On a GPU the host waits for the copy alone, not for what was queued since; after a checkpoint for all."""
        asked_by, table, copied = self._coming
        if asked_by != number:
            table = self._asked.cpu()
        elif isinstance(copied, torch.cuda.Event):
            copied.synchronize()
        return table.view(len(self.layers), -1)

    def _decide(self) -> bool:
        """Whether there was something to decide."""
        number = int(self._asked_by)
        if not number:
            return False
        self._asked_by.zero_()
        table = self._heard(number)
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
        """To another allocation, from the next reduction on; what is held back moves along."""
        before = self._layouts
        for layout in before:
            layout.owe(self.rank)
        self.chosen = choices
        self._lay_out()
        for old, new in zip(before, self._layouts, strict=True):
            kept = [held.clone() for held in old.held.values()]
            new.memory.errors.zero_()
            copy([*new.held.values()], kept)
        self._values.copy_(torch.tensor([c.value for c in choices], dtype=torch.float64))

    def _follow(self) -> None:
        """A checkpoint, or a new start, may have brought another allocation; low rank may need more columns."""
        found = [self._choice(i, value) for i, value in enumerate(self._values.tolist())]
        if found != list(self.chosen):
            self.chosen = found
            self._lay_out()
        for i, (choice, filled) in enumerate(zip(found, self._filled.tolist(), strict=True)):
            r = int(choice.value) if choice.kind == "rank" else 0
            if r:
                fill(self._q_of(i, r), int(filled), seed=i)
            self._filled[i] = r or filled

    def _choice(self, layer: int, value: float) -> Choice:
        """The one of that value; 0: of the start, or as it is."""
        found = [c for c in self.decider.choices if c.value == value] if value else [self.decider.uniform[layer]]
        if not found:
            raise UserError(
                f"the checkpoint sends layer {layer} in a way ({value:g}) that wire.like={self.decider.name!r} does "
                "not offer: resume with the settings that wrote it"
            )
        return found[0]

    # -- what sends -----------------------------------------------------------------------------------------

    def _q_of(self, layer: int, rank: int) -> Tensor:
        return self._q[layer].view(self.layers[layer].columns, -1)[:, :rank]

    def _lay_out(self) -> None:
        """Builds the senders of the present allocation over views of the memory."""
        n = self.world_size
        self._layouts = [
            Layout(i, bucket, memory, self.layers, self.chosen, n)
            for i, (bucket, memory) in enumerate(zip(self.buckets, self._memory, strict=True))
        ]
        parts, wires, own, means = map(list, zip(*(p for each in self._layouts for p in each.parts()), strict=True))
        self._ints = Quantized(parts, self.scalars, self.rank, n, wires, memory=(own, means))
        self._others: list[Callable[..., Iterator[Stage]]] = []
        for layout in self._layouts:
            values, held, chosen = layout.values, layout.held, self.chosen
            if top := layout.of_kind["top"]:
                sparse = [Sparse(values[i], held[i], self.layers[i].kept(chosen[i].value)) for i in top]
                self._others.append(partial(top_k, sparse, self.scalars, n))
            if ranks := layout.of_kind["rank"]:
                rows = {i: (self.layers[i].rows, -1) for i in ranks}
                qs = {i: self._q_of(i, int(chosen[i].value)) for i in ranks}
                factored = [Factored(values[i].view(rows[i]), held[i].view(rows[i]), qs[i]) for i in ranks]
                self._others.append(partial(low_rank, factored, self.scalars, n))


def together(parts: Sequence[Iterator[Stage]]) -> Iterator[Stage]:
    """The stages of several reductions side by side: the first of each, then the second of each, in this order."""
    going = list(parts)
    while going:
        stages = [(part, next(part, None)) for part in going]
        going = [part for part, stage in stages if stage is not None]
        works = [work for _, stage in stages if stage is not None for work in stage[0]]
        if going:
            yield works, sum(stage[1] for _, stage in stages if stage is not None)
