"""Other rules for L-GreCo's reducer, to compare it with: `wire.lgreco.rule` takes them as bench.rules.Accordion, ..."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.lgreco import Decider
from core.lgreco.choices import INT_BITS, Choice, Layer
from core.lgreco.config import LGrecoConfig

ETA = 0.5
SMALL = 10_000  # elements, LEGACY's threshold as released


def less_and_more(like: Choice) -> tuple[Choice, Choice]:
    """Accordion's two settings: half of `like`, and twice."""
    if like.kind == "int":
        below = [b for b in INT_BITS if b <= max(2, like.value / 2)]
        return Choice("int", below[-1]), Choice("int", min(8, 2 * like.value) if 2 * like.value in INT_BITS else 8)
    if like.kind == "rank":
        return Choice("rank", max(1, like.value // 2)), Choice("rank", 2 * like.value)
    return Choice("top", like.value / 2), Choice("top", min(0.49, 2 * like.value))


def calm(before: Tensor, now: Tensor, eta: float = ETA) -> Tensor:
    """Accordion's criterion (Agarwal et al., MLSys 2021): bool [layers], True where a layer can do with little, that is
    where the norm of its gradient has changed by less than eta of what it was. before, now: [layers]; a layer without a
    norm before, 0, counts as changed."""
    return (now - before).abs() < eta * before


class Accordion(Decider):
    """Half or twice the uniform setting, by how much a layer's norm has changed since the last decision; the uniform
    setting where a layer cannot take that."""

    def __init__(self, layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int):
        super().__init__(layers, like, config, world_size)
        self.memory = [torch.zeros(len(layers), dtype=torch.float64)]  # norms at the last decision, 0: there was none

    def more(self) -> Sequence[Choice]:
        return less_and_more(self.like)

    def pick(self, errors: Tensor, norms: Tensor, known: list[int]) -> list[int]:
        less, more = less_and_more(self.like)
        wanted = [less if c else more for c in calm(self.memory[0], norms).tolist()]
        self.memory[0][known] = norms[known]
        return self.indices(where_offered(self, wanted), known)


class Legacy(Decider):
    """LEGACY's rule of layer sizes (ICLR 2026), for good: layers of fewer than SMALL elements send more, ten times the
    density as released, of the other families what Accordion would give at most. Its phases of training are not here.
    """

    fixed = True

    def __init__(self, layers: Sequence[Layer], like: str, config: LGrecoConfig, world_size: int):
        super().__init__(layers, like, config, world_size)
        small = self.more()[0]
        wanted = [small if z.numel < SMALL else u for z, u in zip(layers, self.uniform, strict=True)]
        self.start = where_offered(self, wanted)

    def more(self) -> Sequence[Choice]:
        like = self.like
        return [Choice("top", min(0.49, 10 * like.value)) if like.kind == "top" else less_and_more(like)[1]]


def where_offered(decider: Decider, wanted: Sequence[Choice]) -> list[Choice]:
    """wanted, and the uniform setting where a layer cannot take that."""
    fits = decider.offered[torch.arange(len(wanted)), decider.indices(wanted, range(len(wanted)))].tolist()
    return [c if ok else u for c, ok, u in zip(wanted, fits, decider.uniform, strict=True)]
