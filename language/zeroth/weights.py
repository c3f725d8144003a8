"""The tensors that are trained, and the random direction z: perturbed copies and updates, a chunk at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core.errors import UserError
from core.flat import check_inputs, is_dtensor
from training.sampling import mix

from .exchange import ZerothConfig
from .replay import Update

CHUNK = 1 << 20  # elements, drawn from one generator: a slice that begins at a multiple of it needs no others


class Noise:
    """z, of the standard normal distribution, for every (step, tensor, chunk): any worker can draw it, in any order.

    device: of the generators, one kind on all workers; CUDA devices of one model draw the same numbers.
    """

    def __init__(self, seed: int, device: torch.device):
        self.seed, self.device = seed, device
        self._generator = torch.Generator(device)

    def chunk(
        self, step: int, tensor: int, number: int, numel: int, out: torch.device, into: Tensor | None = None
    ) -> Tensor:
        """float32 [numel] on `out`, in `into` if given: elements number * CHUNK to number * CHUNK + numel."""
        into = torch.empty(numel, dtype=torch.float32, device=out) if into is None else into
        self._generator.manual_seed(mix(self.seed, step, 0, tensor, number))  # 0: scalars that were saved hold with it
        if self.device == out:
            return into.normal_(generator=self._generator)
        return into.copy_(torch.randn(numel, generator=self._generator, dtype=torch.float32, device=self.device))


def kind_of(device: torch.device) -> str:
    """Devices of one kind draw the same numbers."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Weights:
    """names, params: what is trained, tied weights once. numbers: each one's index, by its id; its number in Noise."""

    def __init__(self, model: nn.Module, config: ZerothConfig):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self.numbers = {id(p): number for number, p in enumerate(self.params)}
        self.config = config
        for name, p in named:
            if is_dtensor(p):
                raise UserError(
                    f"{name} is a DTensor: zeroth-order training holds whole tensors; do not shard the model"
                )
            if not p.is_contiguous():
                raise UserError(f"{name} is not contiguous: give it contiguous memory before")
        check_inputs(self.params, self.params, ())
        device = self.params[0].device if config.rng == "device" else torch.device("cpu")
        self.noise = Noise(config.seed, device)

    @torch.no_grad()
    def perturb(self, index: int, w: Tensor, out: Tensor, step: int, sign: int) -> None:
        """out <- W + sign eps z, both of the parameter's shape; W stays as it is, so that nothing need be undone."""
        parts = zip(w.view(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
        for number, (part, moved) in enumerate(parts):
            z = self._z(step, index, number, part, moved if moved.dtype == torch.float32 else None)
            torch.add(part, z.mul_(sign * self.config.eps), out=moved)

    @torch.no_grad()
    def update(self, index: int, w: Tensor, update: Update) -> None:
        """The step's update of tensor `index`, in place; never fused, so that all devices give the same bits."""
        if update.dropped:
            return
        decay = update.lr * self.config.weight_decay if w.ndim >= 2 else 0.0
        into = torch.empty(min(CHUNK, w.numel()), dtype=torch.float32, device=w.device)
        for number, part in enumerate(w.view(-1).split(CHUNK)):
            new = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            if decay:
                new.mul_(1 - decay)
            z = self._z(update.step, index, number, part, into[: part.numel()])
            new.sub_(z.mul_(update.lr * update.g))
            if new is not part:
                part.copy_(new)

    def _z(self, step: int, index: int, number: int, like: Tensor, into: Tensor | None) -> Tensor:
        """float32, in `into` if given, or float64 for such a tensor."""
        z = self.noise.chunk(step, index, number, like.numel(), like.device, into)
        return z.double() if like.dtype == torch.float64 else z


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of the tensors' bytes in order."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
