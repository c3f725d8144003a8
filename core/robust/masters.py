"""float32 masters of a 16-bit model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import UserError
from ..flat import copy, local_shard
from ..rounds import Rider, Rounds


class Masters(Rider):
    """Where a method averages the float32 masters that an optimiser keeps of a 16-bit model, that model follows them.

    model_params: its parameters, in the order of their masters.
    """

    def __init__(self, model_params: Iterable[Tensor]):
        self.model_params = [local_shard(p) for p in model_params]

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        given, masters = [p.shape for p in self.model_params], [p.shape for p in method.params]
        if given != masters:
            raise UserError(
                f"{len(given)} model_params for {len(masters)} parameters: give one of each shape, in their order"
            )
        self.moved(at_boundary=True)

    @torch.no_grad()
    def moved(self, *, at_boundary: bool) -> None:
        copy(self.model_params, self.method.params)
