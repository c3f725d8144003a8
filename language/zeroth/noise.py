"""Random directions that every worker can draw for itself, in any order and in pieces."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 20  # elements, drawn from one generator: a slice that begins at a multiple of it needs no others
_MASK = (1 << 64) - 1


def seed_of(*key: int) -> int:
    """A generator's: 63 bits that depend on all numbers of `key`, such as (seed, step, direction, tensor, chunk)."""
    seed = 0
    for number in key:  # splitmix64, so that neighbouring keys give unrelated numbers
        seed = (seed + number + 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed & 0x7FFFFFFFFFFFFFFF


class Noise:
    """z, of the standard normal distribution, for every (step, direction, tensor, chunk).

    device: where generators are: of one kind on all workers. On a CPU the numbers are the same for any number of
    threads; on CUDA devices they are the same on devices of one model.
    """

    def __init__(self, seed: int, device: torch.device):
        self.seed, self.device = seed, device
        self._generator = torch.Generator(device)

    def chunk(
        self,
        step: int,
        direction: int,
        tensor: int,
        number: int,
        numel: int,
        out: torch.device,
        into: Tensor | None = None,
    ) -> Tensor:
        """float32 [numel] on `out`: elements number * CHUNK to number * CHUNK + numel of the tensor.

        numel: CHUNK, or what is left of the tensor in its last chunk. into: memory for it, which is returned; None:
        fresh memory, which takes the longer the larger it is.
        """
        into = torch.empty(numel, dtype=torch.float32, device=out) if into is None else into
        self._generator.manual_seed(seed_of(self.seed, step, direction, tensor, number))
        if self.device == out:
            return into.normal_(generator=self._generator)
        return into.copy_(torch.randn(numel, generator=self._generator, dtype=torch.float32, device=self.device))


def kind_of(device: torch.device) -> str:
    """Devices of one kind draw the same numbers."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
