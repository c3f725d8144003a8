"""The layout of a model on its devices, as a name such as "tp2.pp2.dp2" or "tp2.pp4.dp1.v2.mb8.fsdp.co2x2".

The axes of a name:

- tp: tensor parallelism (Shoeybi et al., 2019).
- pp: stages of a pipeline, each with v chunks of layers that are not adjacent (Narayanan et al., 2021).
- dp: data parallelism at every step, with a ZeRO stage (Rajbhandari et al., 2020).
- co2x: islands of tp * pp * dp devices, with CO2 between them.

Ranks count tp first, then dp, pp and islands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.errors import UserError

AXES = {"tp": "tp", "pp": "pp", "dp": "dp", "v": "v", "mb": "microbatches", "zero": "zero", "co2x": "islands"}
EXAMPLE = "such as tp2.pp2.dp2, tp2.dp4.fsdp or pp4.v2.mb8.co2x2"


class Place(NamedTuple):
    """A rank's index on each axis."""

    island: int
    stage: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes.

    Attributes:
        tp, pp, dp: Ranks of an island.
        v: Chunks of a stage.
        microbatches: Micro-batches of a step. 0 means as many as stages.
        zero: ZeRO's stage over dp. Stages 2 and 3 use FSDP2.
        islands: The number of islands.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    v: int = 1
    microbatches: int = 0
    zero: int = 0
    islands: int = 1

    @classmethod
    def parse(cls, name: str) -> Layout:
        """Reads a name, with axes in any order. Axes of size 1 may be omitted. Raises UserError if it is invalid."""
        sizes: dict[str, int] = {}
        for part in name.replace("fsdp", "zero3").split("."):
            found = re.fullmatch(r"(tp|pp|dp|v|mb|zero|co2x)(\d{1,7})", part)
            if found is None:
                raise UserError(f"layout={name!r}: {part!r} is no axis; join tp, pp, dp, v, mb, zero, co2x, {EXAMPLE}")
            if (axis := AXES[found[1]]) in sizes:
                raise UserError(f"layout={name!r} has {found[1]} twice: give it once, {EXAMPLE}")
            sizes[axis] = int(found[2])
        layout = cls(**sizes)
        if zeros := [axis for axis, n in sizes.items() if n < 1 and axis != "zero"]:
            raise UserError(f"layout={name!r}: {zeros[0]} is 0: give 1 or more")
        layout.check()
        return layout

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"dp{self.dp}"]
        parts += [f"v{self.v}"] if self.v > 1 else []
        parts += [f"mb{self.microbatches}"] if self.microbatches else []
        parts += ["fsdp" if self.zero == 3 else f"zero{self.zero}"] if self.zero else []
        parts += [f"co2x{self.islands}"] if self.islands > 1 else []
        return ".".join(parts)

    @property
    def island_size(self) -> int:
        """Devices of an island, which holds dp copies of the model."""
        return self.tp * self.pp * self.dp

    @property
    def devices(self) -> int:
        return self.island_size * self.islands

    @property
    def data_workers(self) -> int:
        """The number of workers over which a global batch is split."""
        return self.dp * self.islands

    @property
    def parts(self) -> int:
        """Micro-batches of a data-parallel worker's batch."""
        return self.microbatches or self.pp

    @property
    def method(self) -> str:
        """The method: co2 between islands, or ddp with a gradient average at every step."""
        return "co2" if self.islands > 1 else "ddp"

    @property
    def is_cut(self) -> bool:
        """Whether a device holds only a part of the model's layers."""
        return self.tp * self.pp > 1

    def place(self, rank: int) -> Place:
        """The place of a rank."""
        rest, tensor = divmod(rank, self.tp)
        rest, data = divmod(rest, self.dp)
        return Place(rest // self.pp, rest % self.pp, data, tensor)

    def rank(self, place: Place) -> int:
        """The rank at a place."""
        return ((place.island * self.pp + place.stage) * self.dp + place.data) * self.tp + place.tensor

    def layers_of(self, stage: int, layers: int) -> list[range]:
        """The layers of a stage's v chunks. Chunk i of all pp * v chunks belongs to stage i modulo pp."""
        size = layers // (self.pp * self.v)
        return [range(i * size, (i + 1) * size) for i in range(stage, self.pp * self.v, self.pp)]

    def check(self) -> None:
        """Raises UserError if torch's schedules cannot run the pipeline, or ZeRO has no such stage."""
        if self.zero > 3:
            self._refuse(f"zero{self.zero}", "there are the ZeRO stages 1, 2 and 3 (fsdp)")
        if self.parts < self.pp:
            self._refuse(f"{self.parts} micro-batches", f"fewer than {self.pp} stages: give mb{self.pp} or more")
        if self.v > 1 and self.pp == 1:
            self._refuse(f"v{self.v} without stages", "interleaved parts need pp2 or more: leave v out")
        if self.v > 1 and self.parts % self.pp:
            near = max(1, round(self.parts / self.pp)) * self.pp
            self._refuse(f"v{self.v} with mb{self.parts}", f"needs a multiple of pp={self.pp}: give mb{near}")

    def check_runs(self) -> None:
        """Raises UserError for a layout that the planner costs but training does not support."""
        if self.devices == 1:
            self._refuse("one process", "nothing is laid out: leave layout out")
        if self.zero and self.dp == 1:
            name = "fsdp" if self.zero == 3 else f"zero{self.zero}"
            self._refuse(name, "dp is 1, nothing to share out: leave it out")
        if self.zero == 1 and self.tp > 1:
            remedy = "torch's ZeroRedundancyOptimizer takes no DTensors: give fsdp or zero2, or leave zero1 out"
            self._refuse("zero1 with tp", remedy)

    def check_devices(self, started: int) -> None:
        """Raises UserError if another number of processes was started."""
        if self.devices != started:
            word = "process was" if started == 1 else "processes were"
            remedy = f"{started} {word} started: start {self.devices} with torchrun"
            self._refuse(f"it takes {self.devices} processes", remedy)

    def check_model(self, *, layers: int, heads: int, key_heads: int, vocabulary: int) -> None:
        """Raises UserError if the model cannot be split like this. key_heads: heads of keys and values."""
        counts = {"attention heads": heads, "heads of keys": key_heads, "tokens of the vocabulary": vocabulary}
        for what, n in counts.items():
            if n % self.tp:
                self._refuse(f"tp={self.tp} does not divide {n} {what}", f"give tp {_divisors(n, self.tp)}")
        if layers % (self.pp * self.v):
            per = f"pp * v = {self.pp * self.v}" if self.v > 1 else f"pp={self.pp}"
            most = _divisors(layers, self.pp * self.v)
            self._refuse(f"{per} does not divide {layers} layers", f"give {per.partition('=')[0].strip()} {most}")

    def check_recipe(self, recipe: Any) -> None:
        """Raises UserError for settings of a run that conflict with a layout, or repeat its name."""
        self.check_runs()
        if recipe.method != self.method:
            remedy = "leave --method out, or give co2x2 or more for CO2 between islands"
            self._refuse(f"it is of method {self.method}, given is {recipe.method!r}", remedy)
        off = dict.fromkeys(("shard", "offload", "elastic"), False)
        recipe.leave_out(f"does not go with layout={self}", per_node=1, zero=0, accumulate=1, **off)
        if recipe.dry_run:
            self._refuse("dry_run does not know it", "python -m training.plan estimates its memory")
        self.check_batch(recipe.batch_size)

    def check_batch(self, batch_size: int) -> None:
        """Raises UserError if a global batch cannot be split evenly."""
        unit = self.data_workers * self.parts
        if batch_size < 1 or batch_size % unit:
            near = max(1, round(batch_size / unit)) * unit
            raise UserError(
                f"batch_size={batch_size} (global) with layout={self}, {self.data_workers} x {self.parts} "
                f"micro-batches: choose a multiple of {unit}, such as {near}"
            )

    def _refuse(self, what: str, remedy: str) -> None:
        raise UserError(f"layout={self}: {what}: {remedy}")


def _divisors(n: int, near: int) -> str:
    """The nearest divisors of n at or below, and above a number, as text."""
    below = max(k for k in range(1, near + 1) if n % k == 0)
    above = next((k for k in range(near + 1, n + 1) if n % k == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"
