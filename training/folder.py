"""The run folder: what a run was made of, what it measured, and its summary."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from core.errors import UserError
from training import summary as summaries
from training.counters import Stopwatch
from training.provenance import commit, version
from training.recipe import Recipe

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PACKAGES = ("torch", "torchvision", "timm", "numpy", "transformers", "onedl-mmsegmentation")


class RunFolder:
    """Rank 0 writes config.json, metrics.jsonl, TensorBoard's events and summary.json; the other workers write nothing.

    clock: gives every line its seconds of training. Attributes: path; writer, TensorBoard's, on rank 0 alone.
    """

    writer: SummaryWriter

    def __init__(self, path: Path, rank: int, clock: Stopwatch):
        self.path, self.clock = path, clock
        self._writes = rank == 0

    def open(self, recipe: Recipe, world_size: int, device: torch.device) -> None:
        """Makes the folder. Every worker must call it; all raise UserError when the folder holds another run."""
        refusal = ""
        if self._writes:
            if (self.path / "metrics.jsonl").exists() and not recipe.resume:
                refusal = f"{self.path} holds a run: add --resume to continue it, or choose another --out"
            else:
                try:
                    self._make(describe(recipe, world_size, device))
                except OSError as error:
                    refusal = f"{self.path} cannot be written ({error.strerror}): choose another --out"
        if dist.is_initialized():
            box = [refusal]
            dist.broadcast_object_list(box, src=0)
            refusal = box[0]
        if refusal:
            raise UserError(refusal)

    def _make(self, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(config, indent=2, default=str))
        self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.writer = SummaryWriter(str(self.path))

    def close(self) -> None:
        """Writes what is still in memory."""
        if self._writes:
            self.writer.close()
            self._metrics.close()

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        """Writes one line of metrics.jsonl, and TensorBoard's scalars."""
        if not self._writes:
            return
        values = {name: float(value) for name, value in scalars.items()}
        self._write_line(step, values)
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def note(self, step: int, name: str, text: str) -> None:
        """Writes a line of text to the screen, to metrics.jsonl and to TensorBoard."""
        if not self._writes:
            return
        tqdm.write(f"step {step}: {text}", file=sys.stderr)
        self._write_line(step, {name: text})
        self.writer.add_text(name, text, step)

    def _write_line(self, step: int, values: dict[str, Any]) -> None:
        line = {"step": step, "seconds": round(self.clock.seconds, 3), **values}
        self._metrics.write(json.dumps(line) + "\n")

    def summarise(self, recipe: Recipe, summary: dict[str, float]) -> None:
        """Writes summary.json, prints it, and gives TensorBoard the recipe beside it, for comparing runs."""
        if not self._writes:
            return
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2))
        settings = summaries.hparams(dataclasses.asdict(recipe))
        self.writer.add_hparams(settings, {f"summary/{k}": v for k, v in summary.items()}, run_name=".")
        print(f"{recipe.name} {recipe.method}: {self.path}\n{summaries.table(summary)}", flush=True)


# -- how the run was made -----------------------------------------------------------------------------------------


def describe(recipe: Recipe, world_size: int, device: torch.device) -> dict[str, Any]:
    """What config.json holds: the recipe, the command, the commit, the versions."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "command": sys.argv,
        "commit": commit(),
        "versions": {p: v for p in PACKAGES if (v := version(p))},
    }
