"""How the mean over the workers crosses the network: the settings, and the reducer that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..flat import Bucket, Scalars
from ..flight import Reducer
from ..groups import backend_for
from ..lgreco.choices import parse
from ..lgreco.config import LGrecoConfig
from ..lgreco.reducer import LGreco
from ..wires.formats import BLOCK, BLOCK_BYTES, Wire
from ..wires.quantized import Quantized

Format = Wire | Literal["lgreco", "auto"]
FORMATS: tuple[str, ...] = (*get_args(Wire), "lgreco", "auto")


@dataclass(frozen=True)
class WireConfig:
    """How the pseudo-gradient crosses the network."""

    format: Format = "float32"
    """float32 (float64 for float64 parameters, a plain all-reduce); rounded to bfloat16, float16, int8, int4 or int2;
    lgreco, every layer in a way of its own, chosen anew while training goes on; or auto:
    int4, or float32 where means are as fresh over it, as measured while training."""
    error_feedback: bool = True
    """With a narrow format: the rounding errors are added to the next round's message, for a copy of the parameters."""
    like: str = ""
    """Of lgreco: the uniform setting that it stays as close to the exact mean as: intB with B bits, topD, the largest
    D of each layer's elements, or rankR, such as int4, top0.01, rank4."""
    lgreco: LGrecoConfig = field(default_factory=LGrecoConfig)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"wire.format={self.format!r}: choose one of {', '.join(FORMATS)}")
        if self.format == "lgreco":
            parse(self.like)
            if not self.error_feedback:
                raise UserError("wire.error_feedback=False: wire.format lgreco always feeds back; leave it out")
        elif self.like or self.lgreco != LGrecoConfig():
            given = f"wire.like={self.like!r}" if self.like else f"wire.lgreco={self.lgreco}"
            raise UserError(f"{given} is of wire.format lgreco, not {self.format}: leave it out, or set that")

    def check(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Refuses tensors and backends with which a narrow format was never run."""
        if self.format == "float32":
            return
        asked, remedy = f"wire.format={self.format!r}", "use wire.format float32"
        devices = sorted({str(t.device) for t in params})
        if len(devices) > 1:
            raise UserError(
                f"{asked} with parameters on {', '.join(devices)}: they have to lie on one device, or {remedy}"
            )
        if not params or not dist.is_initialized():
            return
        kind, backend = params[0].device.type, backend_for(group, params[0].device)
        if backend not in ("gloo", "nccl"):
            raise UserError(f"{asked} over {backend} backend for {kind} tensors: only gloo and nccl do, or {remedy}")

    def check_given(self) -> None:
        """For a method that chooses nothing from measured times."""
        if self.format == "auto":
            raise UserError("wire.format='auto' is CO2's own choice, from measured times: give another method a format")

    @property
    def choices(self) -> dict[str, float]:
        """The formats to choose from, the narrowest first -> bytes an element; of lgreco, unknown before it chooses,
        float32's. auto knows int4 alone beside float32: with error feedback it cost no loss (results/loss.md), and a
        trial takes rounds."""
        known = ("int4", "float32") if self.format == "auto" else (self.format,)
        return {wire: BLOCK_BYTES.get(wire, 4 * BLOCK) / BLOCK for wire in known}

    def reducer(self, buckets: Sequence[Bucket], scalars: Scalars, rank: int, world_size: int) -> Reducer:
        """The sender of the buckets in this format, which is not float32."""
        workers = rank, world_size
        if self.format == "lgreco":
            return LGreco(buckets, scalars, *workers, self.like, self.lgreco)
        assert self.format not in ("float32", "auto")
        return Quantized(buckets, scalars, *workers, self.format, self.error_feedback)
