"""The tensors that are trained: their perturbed copies and their updates, a chunk at a time."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from core.checks import check_inputs
from core.errors import UserError
from core.flat import is_dtensor
from .config import ZerothConfig
from .noise import CHUNK, Noise
from .replay import Update

MOSTLY = 0.5  # of the elements: where rounding swallows more, a warning says so


class Weights:
    """names, params: what is trained, tied weights once. An index into them is the tensor's number in Noise; numbers
    has it by the parameter's id.

    warns: whether this worker says where rounding to 16 bits swallows a perturbation or an update.
    """

    def __init__(self, model: nn.Module, config: ZerothConfig, *, warns: bool = True):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self.numbers = {id(p): number for number, p in enumerate(self.params)}
        self.config = config
        self._check()
        device = self.params[0].device if config.rng == "device" else torch.device("cpu")
        self.noise = Noise(config.seed, device)
        # of a change of 16-bit weights: the elements that it left as they were, below half their spacing, and all
        self._swallowed: dict[str, tuple[float | Tensor, int]] = (
            {"perturbation": (0, 0), "update": (0, 0)} if warns else {}
        )

    def _check(self) -> None:
        for name, p in zip(self.names, self.params, strict=True):
            if is_dtensor(p):
                raise UserError(
                    f"{name} is a DTensor: zeroth-order training holds whole tensors; do not shard the model"
                )
            if not p.is_contiguous():
                raise UserError(f"{name} is not contiguous: give it contiguous memory before")
        check_inputs(self.params, self.params, ())

    @torch.no_grad()
    def perturb(self, index: int, w: Tensor, out: Tensor, step: int, direction: int, sign: int) -> None:
        """out <- W + sign eps z, both of the parameter's shape; W stays as it is, so that nothing need be undone."""
        parts = zip(w.view(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
        for number, (part, moved) in enumerate(parts):
            z = self._z(step, direction, index, number, part, moved if moved.dtype == torch.float32 else None)
            torch.add(part, z.mul_(sign * self.config.eps), out=moved)
            if is_16_bit(part):
                self._count("perturbation", part, moved)

    @torch.no_grad()
    def update(self, index: int, w: Tensor, update: Update) -> None:
        """The step's update of tensor `index`, in place.

        Products and differences are rounded one by one, never fused, so that all devices and any number of threads give
        the same bits.
        """
        if update.dropped:
            return
        decay = update.lr * self.config.weight_decay if w.ndim >= 2 else 0.0
        into = torch.empty(min(CHUNK, w.numel()), dtype=torch.float32, device=w.device)
        for number, part in enumerate(w.view(-1).split(CHUNK)):
            new = part.float() if is_16_bit(part) else part
            if decay:
                new.mul_(1 - decay)
            for direction, g in enumerate(update.g):
                z = self._z(update.step, direction, index, number, part, into[: part.numel()])
                new.sub_(z.mul_(update.lr * g / len(update.g)))
            if new is not part:
                rounded = new.to(part.dtype)
                self._count("update", part, rounded)
                part.copy_(rounded)

    def _z(self, step: int, direction: int, index: int, number: int, like: Tensor, into: Tensor | None) -> Tensor:
        """float32, in `into` if given, or float64 for such a tensor."""
        z = self.noise.chunk(step, direction, index, number, like.numel(), like.device, into)
        return z.double() if like.dtype == torch.float64 else z

    def _count(self, what: str, before: Tensor, after: Tensor) -> None:
        if what in self._swallowed:
            unchanged, elements = self._swallowed[what]
            self._swallowed[what] = unchanged + (before == after).sum(), elements + before.numel()

    def leave_warning(self) -> None:
        """Another worker warns from here on."""
        self._swallowed.clear()

    def warn(self) -> None:
        """After a step: warns once where most of the first perturbation, or of the first update, was swallowed."""
        for what, (unchanged, elements) in list(self._swallowed.items()):
            if not elements:
                continue
            del self._swallowed[what]
            if (share := float(unchanged) / elements) > MOSTLY:
                remedy = f"eps={self.config.eps:g}" if what == "perturbation" else "lr"
                warnings.warn(
                    f"rounding to 16 bits swallows the {what} of {share:.0%} of the elements: raise {remedy}, or "
                    "train float32 weights",
                    stacklevel=2,
                )


def is_16_bit(t: Tensor) -> bool:
    return t.dtype in (torch.float16, torch.bfloat16)


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of the tensors' bytes in order."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
