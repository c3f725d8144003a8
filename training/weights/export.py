"""Exports the model of a run to the formats of other libraries: `python -m TASK.export RUN OUT`.

The end of OUT's name chooses the format. Every task writes *.safetensors, *.pth and, by torch.export, *.pt2.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import tyro
from torch import Tensor, nn

from core.errors import UserError
from training.data.files import share
from training.recipe import Recipe
from training.start.errors import explained
from training.start.script import parse_options
from training.weights.read import Weights, load_weights, read_names, read_recipe, read_weights

R = TypeVar("R", bound=Recipe)


@dataclass(frozen=True)
class ExportOptions:
    """Writes the model of a run's newest checkpoint for other libraries."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    out: tyro.conf.Positional[Path]
    """A new file: *.safetensors, *.pth, or *.pt2 of torch.export. A name without an end is a folder."""


@dataclass(frozen=True)
class Exporter(Generic[R]):
    """A task's part.

    Attributes:
        kind: The task's recipe.
        build: Returns the model for a recipe and its weights.
        example: Returns a function of the model from tensor to tensor, and an input of two samples, for torch.export.
        folder: Writes the task's folder of a library, or None.
        beside: Returns what a *.pth file holds in addition to state_dict, and writes files next to it.
    """

    kind: type[R]
    build: Callable[[R, Callable[[nn.Module], Weights]], nn.Module]
    example: Callable[[R, nn.Module], tuple[Callable[[Tensor], Tensor], Tensor]]
    folder: Callable[[R, nn.Module, Path], None] | None = None
    beside: Callable[[R, nn.Module, Path], dict[str, Any]] | None = None


class Graph(nn.Module):
    """A function of a model, as the module that torch.export needs."""

    def __init__(self, model: nn.Module, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def export_run(task: Exporter[R], prog: str) -> None:
    """Runs the command."""
    given = parse_options(ExportOptions, prog=prog)
    recipe = read_recipe(given.run, task.kind)
    model = task.build(recipe, lambda like: read_weights(given.run, like, "run")).eval()
    load_weights(model, given.run, "run")
    model.names = read_names(given.run)  # pyright: ignore[reportAttributeAccessIssue]
    write(task, recipe, model, given.out)
    print(given.out)


def write(task: Exporter[R], recipe: R, model: nn.Module, out: Path) -> None:
    """Writes the model to `out`, in the format that its name says. Files appear when all are complete."""
    if out.exists():
        raise UserError(f"{out} is already there: give a new name")
    with explained(f"{out}: cannot be written", "make room, or give another place"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            fresh = Path(scratch, out.name)
            _write(task, recipe, model, fresh, out)
            share(fresh)
            made = sorted(Path(scratch).iterdir(), key=lambda path: path != fresh)  # `out` first
            for path in made:
                if (out.parent / path.name).exists():
                    raise UserError(f"{out.parent / path.name} is already there: give {out.name} another name")
            for path in made:
                path.rename(out.parent / path.name)


def _write(task: Exporter[R], recipe: R, model: nn.Module, fresh: Path, out: Path) -> None:
    if out.suffix == ".safetensors":
        from safetensors.torch import save_model  # which stores tied weights once

        save_model(model, str(fresh), metadata={"format": "pt"})
    elif out.suffix == ".pth":
        more = task.beside(recipe, model, fresh) if task.beside else {}
        with fresh.open("wb") as file:  # whose errors name the system's reason
            torch.save({"state_dict": model.state_dict()} | more, file)
    elif out.suffix == ".pt2":
        function, x = task.example(recipe, model)
        graph = Graph(model, function).eval()
        with explained(f"{out}: torch.export does not allow this model", "give *.pth"):
            made = torch.export.export(graph, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(made, buffer := io.BytesIO())  # torch's own writer aborts the process on a full disk
        fresh.write_bytes(buffer.getbuffer())
    elif not out.suffix and task.folder:
        fresh.mkdir()
        task.folder(recipe, model, fresh)
    else:
        folder = " or a folder's name without an end" if task.folder else ""
        raise UserError(f"{out}: give a name that ends in .safetensors, .pth or .pt2{folder}")
