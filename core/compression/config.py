"""How averages are compressed: the setting, and the Reducer that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import Tensor

from ..buckets import Scalars
from ..comm import Reducer
from ..errors import UserError
from ..groups import backend_for
from .formats import BLOCK, BLOCK_BYTES, UNIFORM_FORMATS, NarrowFormat, UniformFormat
from .lgreco.choices import LGrecoConfig, parse

Format = UniformFormat | Literal["lgreco", "auto"]
FORMATS: tuple[str, ...] = (*UNIFORM_FORMATS, "lgreco", "auto")


@dataclass(frozen=True)
class CompressionConfig:
    """How averages are compressed for the network."""

    format: Format = "float32"
    """float32 is a plain all-reduce (float64 for float64 parameters). bfloat16, int8 and int4 round to fewer bytes.
    lgreco chooses a compression for each layer during training. auto is int4, or float32 if its rounds need be no
    longer, which is tested if int4's measured time allows it. Error feedback adds the rounding errors to the next
    round's message, at the cost of a copy of the parameters."""
    like: str = ""
    """With lgreco: the uniform setting whose error it must not exceed, such as int4, top0.01 or rank4. intB has B bits,
    topD keeps the share D of each layer's largest elements, and rankR has rank R."""
    lgreco: LGrecoConfig = field(default_factory=LGrecoConfig)
    """With lgreco: how it chooses."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"compression.format={self.format!r}: choose one of {', '.join(FORMATS)}")
        if self.format == "lgreco":
            parse(self.like)
        elif self.like or self.lgreco != LGrecoConfig():
            given = f"compression.like={self.like!r}" if self.like else f"compression.lgreco={self.lgreco}"
            raise UserError(
                f"{given} belongs to compression.format lgreco, not {self.format}: leave it out, or set that format"
            )

    def check(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Raises UserError for tensors and backends that a compression does not support."""
        if self.format == "float32":
            return
        asked, remedy = f"compression.format={self.format!r}", "use compression.format float32"
        devices = sorted({str(t.device) for t in params})
        if len(devices) > 1:
            raise UserError(
                f"{asked} with parameters on {', '.join(devices)}: give parameters on one device, or {remedy}"
            )
        if not params or not dist.is_initialized():
            return
        kind, backend = params[0].device.type, backend_for(group, params[0].device)
        if backend not in ("gloo", "nccl"):
            raise UserError(
                f"{asked} over {backend} backend for {kind} tensors: only gloo and nccl are supported, or {remedy}"
            )

    @property
    def block(self) -> int:
        """How many elements the format rounds together: 1 for none."""
        return 1 if self.format == "float32" else BLOCK

    def check_given(self) -> None:
        """Raises UserError for auto, for a method that chooses nothing from measured times."""
        if self.format == "auto":
            raise UserError(
                "compression.format='auto' is CO2's own choice, from measured times: give another method a format"
            )

    @property
    def choices(self) -> dict[str, float]:
        """The formats to choose from -> bytes per element, in ascending order.

        lgreco counts as float32 until it has chosen. auto offers only int4 and float32: int4 with error feedback had no
        higher loss (results/loss.md), and each further format would cost rounds for its test.
        """
        formats = ("int4", "float32") if self.format == "auto" else (self.format,)
        return {compression: BLOCK_BYTES.get(compression, 4 * BLOCK) / BLOCK for compression in formats}

    def reducer(
        self, buckets: Sequence[Any], scalars: Scalars, rank: int, world_size: int, *, owned: bool = False
    ) -> Reducer:
        """Makes the Reducer of a method's all-reduces, for buckets or their parts.

        With `owned`, each worker gets only the average of the part that it owns.
        """
        given = buckets, scalars, rank, world_size
        plain = Reducer(*given, owned=owned)
        if self.format == "float32":
            return plain
        if self.format == "lgreco":
            from .lgreco.reducer import LGreco

            return LGreco(*given, self.like, self.lgreco)
        from .quantized import OwnedQuantized, Quantized

        make, first = OwnedQuantized if owned else Quantized, [*self.choices][0 if world_size > 1 else -1]
        return make(*given, cast(NarrowFormat, first), plain=plain if self.format == "auto" else None)
