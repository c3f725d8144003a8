"""The reducer of L-GreCo, which sends each layer in its own way, and chooses these ways again as training goes on:

    G = the sum of d + e, which the worker has to send, over the last ten reductions
    at fixed reductions, before anything is sent (Decider.decides):
        e[l, c] = ||G_l - C_c(G_l)|| for each layer and choice
        the errors' sum over the workers, which follows this reduction
    at the beginning of the next reduction, equally on every worker:
        the fewest bytes whose summed errors stay within the uniform setting's (core/compression/lgreco/choices.py)
        it sends in the new ways; the error feedback moves along

We follow the abstract and the released code of L-GreCo. The released code also sums the last ten reductions. It
allocates ranks only, from the first worker's errors. A common factor of all errors changes no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...buckets import Bucket, BucketShare, Part, Scalars, copy
from ...comm import BACKGROUND, Reducer, Stage, sum_flats
from ...errors import UserError, log
from ...stats import HostCopy
from ..formats import BLOCK, INTS
from ..quantized import Quantized, chunk_of, moved
from .choices import Allocation, Choice, Decider, Layer, LGrecoConfig, curve, fill, low_rank, top_k


class Layout:
    """One bucket's layers in staging and in error feedback's memory, and what sends them, for one allocation.

    First come the layers of each int format, padded to whole blocks per worker, then top-k and low rank. Uncompressed
    layers and the buffers come last.

    Args:
        number: Number of the bucket.
        of: The reducer.

    Attributes:
        values: Each layer's elements in staging, 1-d, in the bucket's order.
        held: Each layer's elements in the errors, 1-d, in the bucket's order.
        residuals: The memory of error feedback's two stages, for each int format.
        senders: Functions from the group to the stages of a reduction, which run together.
    """

    def __init__(self, number: int, of: LGreco):
        self.bucket, layers, n = of.buckets[number], of.layers, of.world_size
        staging, errors, self.means = of.staging[number], of.errors[number], of.means[number]
        mine = [i for i, layer in enumerate(layers) if layer.bucket == number]
        kinds = {i: of.chosen[i].compression if of.chosen[i].kind == "int" else of.chosen[i].kind for i in mine}
        starts: dict[int, int] = {}
        ints: list[Any] = []  # format; slices of the elements, of the same with padding, and of a worker's chunk
        begin = end = place = 0
        for kind in (*INTS, "top", "rank", "raw"):
            begin = end
            for i in (i for i in mine if kinds[i] == kind):
                starts[i], end = end, end + layers[i].numel
            if kind in INTS and begin < end:
                chunk, own = chunk_of(end - begin, n), slice(begin, end)
                end = begin + n * chunk
                ints.append((kind, own, slice(begin, end), slice(place, place + chunk)))
                place += chunk
        self.values, self.held = (
            {i: flat[starts[i] : starts[i] + layers[i].numel] for i in mine} for flat in (staging, errors)
        )
        self._payload = self.bucket.payload.split([layers[i].numel for i in mine])
        self.values_sent = len(self.bucket.values)
        plain = staging[begin : end + self.values_sent]  # uncompressed layers, and the buffers
        self._buffers = plain[end - begin :]
        # at least one part, because the first one also has the uncompressed layers and the buffers
        ints = ints or [(INTS[0], *3 * [slice(0)])]
        parts = list[Part]()
        for _, own, _, _ in ints:
            values = staging[own]
            parts.append(Part(staging, len(values), values, plain, self.bucket.scalars))
            plain = plain[:0]
        self.residuals = [(errors[padded], self.means[chunk]) for _, _, padded, chunk in ints]
        memory = [own for own, _ in self.residuals], [means for _, means in self.residuals]
        quantized = Quantized(parts, of.scalars, of.rank, n, [kind for kind, *_ in ints], memory=memory)
        self.senders: list[Callable[..., Iterator[Stage]]] = [partial(quantized.stages, number=0)]
        if top := [i for i in mine if kinds[i] == "top"]:
            sparse = [(self.values[i], self.held[i], layers[i].kept(of.chosen[i].value)) for i in top]
            self.senders.append(partial(top_k, sparse, of.scalars, n))
        if ranks := [i for i in mine if kinds[i] == "rank"]:
            rows = {i: (layers[i].rows, -1) for i in ranks}
            factored = [(self.values[i].view(rows[i]), self.held[i].view(rows[i]), of.q_of(i)) for i in ranks]
            self.senders.append(partial(low_rank, factored, of.scalars, n))

    def gather(self) -> None:
        """Copies the bucket's payload and buffers to staging."""
        copy([*self.values.values()], self._payload)
        self._buffers.copy_(self.bucket.values)

    def land(self) -> None:
        """Copies staging back to the bucket."""
        copy(self._payload, [*self.values.values()])
        self.bucket.values.copy_(self._buffers)


def layers_of(buckets: Sequence[Bucket | BucketShare]) -> list[Layer]:
    """Returns every parameter that has elements, in the buckets' order."""
    layers = []
    for number, bucket in enumerate(buckets):
        for p in bucket.params:
            if n := p.numel():
                rows = p.shape[0] if p.dim() > 1 else n
                layers.append(Layer(number, n, rows, n // rows, bucket.flat.element_size()))
    return layers


NOT_FINITE = -1.0  # replaces a layer's curve


class LGreco(Reducer):
    """The reducer of L-GreCo, see the module.

    A checkpoint's state starts as zeros. It has these parts:

    - `error_feedback`, `mean_error_feedback`: the residuals, in an order that follows the allocation.
    - `allocation`: the choices' values, all 0 before the first reduction.
    - `q`: the factors of low rank.
    - `summed`: G so far for each layer.
    - `asked`: the last curves, or zeros if no worker had moved.

    Args:
        buckets, scalars, rank, world_size: See Reducer.
        like: The uniform setting, such as int4.
        config: The settings of L-GreCo.
    """

    kind = "lgreco"

    def __init__(
        self,
        buckets: Sequence[Bucket | BucketShare],
        scalars: Scalars,
        rank: int,
        world_size: int,
        like: str,
        config: LGrecoConfig,
    ):
        self.buckets, self.scalars = buckets, scalars
        self.rank, self.world_size, self.scale = rank, world_size, 1.0
        self.layers = layers_of(buckets)
        self.decider = decider = Decider(self.layers, like, config, world_size)
        self.allocation: Allocation | None = None  # the last decision
        flats, many = [b.flat for b in buckets], len(self.layers)
        slack = len(INTS) * world_size * BLOCK  # each int format is padded to whole blocks a worker
        self.staging = [b.flat.new_zeros(b.numel + slack + len(b.values)) for b in buckets]
        self.errors = [b.flat.new_zeros(b.numel + slack) for b in buckets]
        self.means = [b.flat.new_zeros(-(-b.numel // world_size) + len(INTS) * BLOCK) for b in buckets]
        ranks = torch.tensor([c.value if c.kind == "rank" else 0 for c in decider.choices], device="cpu")
        highest = (decider.offered * ranks).amax(1).int().tolist()
        self._q = [flats[z.bucket].new_zeros(z.columns * r) for z, r in zip(self.layers, highest, strict=True)]
        self._values = torch.zeros(many, dtype=torch.float64, device="cpu")
        self._coming: tuple[int, HostCopy | None] = (0, None)  # the last decision, and its curves' copy to the host
        self.state = {"error_feedback": self.errors, "mean_error_feedback": self.means}
        self.state |= {"allocation": [self._values], "q": self._q}
        if not decider.fixed:
            self._sums = [flats[z.bucket].new_zeros(z.numel) for z in self.layers]
            self._asked = flats[0].new_zeros(many * len(decider.choices), dtype=torch.float64)
            self.state |= {"summed": self._sums, "asked": [self._asked]}
        self._lay_out(decider.uniform)

    @torch.no_grad()
    def of_bucket(self, i: int, group: dist.ProcessGroup | None, number: int, turn: int) -> Iterator[Stage]:
        yield BACKGROUND  # the encoding
        if turn == 0:
            self._follow()
            if self.decider.decides(number - 1):
                self._decide(number - 1)
        layout = self._layouts[i]
        layout.gather()
        if self.decider.sums(number):
            own = moved(self.scalars)
            for layer, values in layout.values.items():
                self._sums[layer].add_(torch.where(own, values + layout.held[layer], 0.0))
        parts = [stages(group) for stages in layout.senders]
        # The steps of these reductions run together: the first step of each, then the second of each, in this order.
        while stages := [stage for part in parts if (stage := next(part, None)) is not None]:
            yield [work for works, _ in stages for work in works], sum(sent for _, sent in stages)
        layout.land()
        if turn + 1 == len(self._layouts) and self.decider.decides(number):
            asked = self._ask()
            if group is not None:
                yield sum_flats([asked], group)
            self._receive(asked, number)

    # -- the allocation -------------------------------------------------------------------------------------

    def _ask(self) -> Tensor:
        """Returns this worker's errors, float64 [layers, choices], and resets the sum."""
        choices, offered = self.decider.choices, self.decider.offered.tolist()
        of_each = enumerate(zip(self.layers, self._sums, offered, strict=True))
        rows = [curve(wanted, layer, choices, its, seed=i) for i, (layer, wanted, its) in of_each]
        for flat in self._sums:
            flat.zero_()
        return torch.stack(rows)

    def _receive(self, asked: Tensor, number: int) -> None:
        """Keeps the workers' summed errors for `_decide`. A layer that is not finite gets NOT_FINITE."""
        layers = torch.where(asked.isfinite().all(1, keepdim=True), asked, NOT_FINITE)
        self._asked.view_as(asked).copy_(torch.where(moved(self.scalars), layers, 0.0))
        self._coming = number, HostCopy(self._asked)

    def _decide(self, number: int) -> None:
        """Decides from the errors of the `number`-th reduction."""
        asked_by, coming = self._coming
        # The host waits only for the copy, and not for later work. After a checkpoint is loaded it waits for all work.
        heard = coming.read() if coming and asked_by == number else self._asked.tolist()
        if not any(heard):
            return
        table = torch.tensor(heard, dtype=torch.float64, device="cpu").view(len(self.layers), -1)
        curves = torch.where(table == NOT_FINITE, float("nan"), table)
        self.allocation = found = self.decider.decide(curves, self.chosen, number)
        if list(found.choices) != list(self.chosen):
            self._switch(found.choices)
        if self.rank == 0:
            log.info("all-reduce %d: lgreco: %s", number, found.reason)

    def _switch(self, choices: Sequence[Choice]) -> None:
        """Changes the allocation from the next reduction on. The residuals move along, and Q gets new columns."""
        before = self._layouts
        for layout in before:
            # This worker's residual of the averages that it encoded belongs to all workers. So n times this residual
            # is added to the worker's own residual. Nothing is lost, and nothing is sent.
            for own, means in layout.residuals:
                chunk = len(means)
                own[self.rank * chunk : (self.rank + 1) * chunk].add_(means, alpha=self.world_size)
            layout.means.zero_()
        self._lay_out(choices)
        for old, new, errors in zip(before, self._layouts, self.errors, strict=True):
            kept = [held.clone() for held in old.held.values()]
            errors.zero_()
            copy([*new.held.values()], kept)
        for i, (choice, filled) in enumerate(zip(choices, self._values.tolist(), strict=True)):
            if choice.kind == "rank":
                fill(self.q_of(i), int(filled), seed=i)
        self._values.copy_(torch.tensor([c.value for c in choices], dtype=torch.float64, device="cpu"))

    def _follow(self) -> None:
        """Uses the allocation of a checkpoint. A new start has none."""
        values = self._values.tolist()
        if not any(values):
            return self._switch(self.decider.uniform)
        found: list[Choice] = []
        for layer, value in enumerate(values):
            offered = [c for c in self.decider.choices if c.value == value]
            if not offered:
                raise UserError(
                    f"the checkpoint sends layer {layer} in a way ({value:g}) that compression.like="
                    f"{self.decider.name!r} does not offer: resume with the settings that wrote it"
                )
            found.append(offered[0])
        travel = [len(layout.bucket.values) == layout.values_sent for layout in self._layouts]
        if found != list(self.chosen) or not all(travel):
            self._lay_out(found)

    def q_of(self, layer: int) -> Tensor:
        """Returns the layer's Q, [columns, the chosen rank]."""
        return self._q[layer].view(self.layers[layer].columns, -1)[:, : int(self.chosen[layer].value)]

    def _lay_out(self, choices: Sequence[Choice]) -> None:
        """Sends in these ways from now on."""
        self.chosen = choices
        self._layouts = [Layout(i, self) for i in range(len(self.buckets))]
