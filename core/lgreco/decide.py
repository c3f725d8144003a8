"""From the error curves to each layer's choice, and what there is to say about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .allocate import accordion, allocate, total
from .choices import (
    RAW,
    SMALL,
    Choice,
    Layer,
    for_small_layers,
    less_and_more,
    may_take,
    message_bytes,
    offered,
    parse,
    sent_bytes,
    uniform,
)
from .config import LGrecoConfig


@dataclass(frozen=True)
class Allocation:
    """One decision: for each layer its choice, the bytes that a worker sends for it in a reduction, and its error, the
    workers' mean. number: of the reduction before it. seconds: what the curves took, and the programme."""

    number: int
    reason: str
    layers: Sequence[Layer]
    choices: Sequence[Choice]
    bytes: Sequence[float]
    errors: Sequence[float]
    uniform_bytes: float
    budget: float
    seconds: tuple[float, float] = (0.0, 0.0)

    def table(self, names: Sequence[str] = ()) -> str:
        """Markdown. names: of the layers, else their numbers."""
        lines = ["| layer | shape | sent as | bytes | error |", "|---|---|---|---|---|"]
        rows = zip(self.layers, self.choices, self.bytes, self.errors, strict=True)
        for i, (layer, choice, size, error) in enumerate(rows):
            shape = " x ".join(map(str, layer.shape)) or "1"
            lines.append(f"| {names[i] if names else i} | {shape} | {choice} | {size:.0f} | {error:.3g} |")
        return "\n".join(lines)

    @property
    def bits(self) -> list[float]:
        """How many bits a message holds for each element, by layer."""
        return [8 * message_bytes(layer, c) / layer.numel for layer, c in zip(self.layers, self.choices, strict=True)]


class Decider:
    """choices: all that any layer may take. uniform: what each gets where all get the same; start: before the first
    decision. before: norms of the layers at the last decision, float64 [layers], 0 where there was none; for Accordion.
    """

    def __init__(self, layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int):
        self.layers, self.config, self.name = layers, config, like
        choice = parse(like)
        self.uniform = [uniform(layer, choice) for layer in layers]
        if all(choice == RAW for choice in self.uniform):
            raise UserError(f"wire.like={like!r} would save nothing in any parameter of this model: give less")
        self._less, self._more = less_and_more(choice)
        small = for_small_layers(choice)
        extra = [self._less, self._more] if "accordion" in config.rule else [small] if config.rule == "legacy" else []
        most = max(min(layer.rows, layer.columns) for layer in layers)
        all_of_them = offered(choice, config.family, config.lowest_rank, config.highest_rank, most)
        self.choices = list(dict.fromkeys([*all_of_them, *extra]))
        self.offered = torch.tensor(
            [may_take(layer, self.choices, choice, config.family, world_size) for layer in layers]
        )
        self.sizes = torch.tensor([[sent_bytes(z, c, world_size) for c in self.choices] for z in layers]).double()
        self.before = torch.zeros(len(layers), dtype=torch.float64)
        self.start = self.uniform
        if config.rule == "legacy":
            few = [layer.numel < SMALL for layer in layers]
            self.start = self._where_offered([small if f else u for f, u in zip(few, self.uniform, strict=True)])

    def decide(self, curves: Tensor, norms: Tensor, now: Sequence[Choice], number: int) -> Allocation:
        """curves: float64 [layers, choices], of the workers' mean; a layer in whose row one of them is not finite keeps
        what it has. norms: [layers], of what the workers want to send."""
        power = 2 if self.config.error == "squared" else 1
        table = torch.where(self.offered, curves, float("inf")) ** power
        known = torch.where(self.offered, table, 0.0).isfinite().all(1)
        reference = self._reference(norms)
        new = list(now)
        rows = known.nonzero().flatten().tolist()
        if rows:
            indices = [self.choices.index(reference[i]) for i in rows]
            share = self.config.share**power
            best = indices
            if self.config.rule != "accordion":
                best = allocate(table[rows], self.sizes[rows], indices, share=share)
            for i, choice in zip(rows, best, strict=True):
                new[i] = self.choices[choice]
        self.before.copy_(torch.where(known, norms, self.before))
        return self._told(new, now, reference, curves, known, number)

    def _reference(self, norms: Tensor) -> list[Choice]:
        """The choices whose errors make the budget; of Accordion alone the result."""
        if "accordion" not in self.config.rule:
            return self.uniform
        little = accordion(self.before, norms).tolist()
        return self._where_offered([self._less if calm else self._more for calm in little])

    def _where_offered(self, wanted: list[Choice]) -> list[Choice]:
        """wanted, and the uniform setting where a layer cannot take that."""
        fits = [bool(self.offered[i, self.choices.index(c)]) for i, c in enumerate(wanted)]
        return [c if ok else u for c, ok, u in zip(wanted, fits, self.uniform, strict=True)]

    def _told(
        self,
        new: list[Choice],
        now: Sequence[Choice],
        reference: list[Choice],
        curves: Tensor,
        known: Tensor,
        number: int,
    ) -> Allocation:
        at = [self.choices.index(c) for c in new]
        sizes, errors = (t[torch.arange(len(at)), at].tolist() for t in (self.sizes, curves))
        uniform_bytes = total(self.sizes, [self.choices.index(c) for c in self.uniform])
        rows = known.nonzero().flatten()
        budget = self.config.share * total(curves[rows], [self.choices.index(reference[i]) for i in rows.tolist()])
        changed = sum(a != b for a, b in zip(new, now, strict=True))
        reason = (
            f"{sum(sizes) / 1e6:.3g} MB a reduction, uniform {self.name} {uniform_bytes / 1e6:.3g} MB; "
            f"{changed} of {len(new)} layers change"
        )
        if lost := [i for i, ok in enumerate(known.tolist()) if not ok]:
            reason += f"; layers {', '.join(map(str, lost))} are not finite and keep what they have"
        return Allocation(number, reason, self.layers, new, sizes, errors, uniform_bytes, budget)
