"""Weights of other runs, and of other libraries' local files. Reading them runs no code, and downloads nothing."""

import argparse
import dataclasses
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from core.checkpoint import finished, load_newest, read_manifest, unlike, with_versions
from core.errors import UserError
from core.stored import numpy_makers, parse_json, reason, regular
from training.recipe import Recipe
from training.workers import rank

R = TypeVar("R", bound=Recipe)
Weights = dict[str, Tensor]
KEYS = ("state_dict_ema", "state_dict", "model_ema", "model")  # under which libraries store weights, preferred first


# -- a run ------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's config.json, or raises UserError."""
    file = folder / "config.json"
    try:
        config = parse_json(regular(file).read_text())
        config["recipe"]["method"]
        if not isinstance(workers := config["world_size"], int) or workers < 1:
            raise ValueError(f"world_size={workers!r} is no number of workers")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: {reason(error)}; give the folder of a run (--out, or runs/RECIPE-...)") from None
    return config


def read_recipe(folder: Path, kind: type[R]) -> R:
    """Returns the recipe with which a run was started."""
    stored = read_config(folder)["recipe"]
    if unknown := sorted(stored.keys() - {f.name for f in dataclasses.fields(kind)}):
        made = f"recipe {stored.get('name')}, whose setting {unknown[0]} this command does not know"
        raise UserError(f"{folder} is a run of {made}: use its own task's command")
    try:
        return _rebuilt(kind(), stored)
    except TypeError as error:
        raise UserError(f"{folder / 'config.json'} is damaged ({error}): restore it") from None


def _rebuilt(default: Any, stored: Any) -> Any:
    """Returns `default` with the stored values. JSON has no paths and no tuples. Another type is a TypeError."""
    if not isinstance(stored, dict):
        raise TypeError(f"{stored!r:.60} in place of settings")
    hints, changes = typing.get_type_hints(type(default)), dict[str, Any]()
    for name in {f.name for f in dataclasses.fields(default)} & stored.keys():
        value, before = stored[name], getattr(default, name)
        if dataclasses.is_dataclass(before):
            value = _rebuilt(before, value)
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and Path in (hints[name], *typing.get_args(hints[name])):
            value = Path(value)
        if not _fits(value, hints[name]):
            raise TypeError(f"{name}={value!r:.60}")
        changes[name] = value
    return dataclasses.replace(default, **changes)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value has the type of a setting."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in args)
    if kind is typing.Literal:
        return value in args
    if kind is tuple:
        if not isinstance(value, tuple):
            return False
        of_each = args[:1] * len(value) if args[-1:] == (...,) else args
        return len(value) == len(of_each) and all(map(_fits, value, of_each))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, kind or hint)


def run_weights(folder: Path, like: nn.Module) -> Weights:
    """Returns the model in the newest checkpoint of a run, as worker 0 has it. Every worker must call it.

    Args:
        folder: The run folder.
        like: A model whose parameters have the same names.

    Raises:
        UserError: If there is no checkpoint.
    """
    checkpoints = folder / "checkpoints"
    if not (names := finished(checkpoints)):
        raise UserError(f"{folder} holds no checkpoint of a run: give the folder of one that has ended, or saved")
    recipe = read_config(folder)["recipe"]
    if _of_layout(newest := checkpoints / names[0]):
        from training.layouts.resharded import read_model  # imported here, because torch's pipelines take a second

        try:
            return read_model(newest)
        except UserError:
            raise
        except Exception as error:  # torch.load and DCP raise many kinds of errors
            raise UserError(f"{newest} cannot be read ({reason(error)}): give another run") from None
    if recipe.get("ema") is not None:
        weights = _part(checkpoints, 0, "ema")
        return {name.removeprefix("module."): t for name, t in weights.items() if name != "n_averaged"}
    if recipe.get("zero") not in (2, 3):
        return _part(checkpoints, 0, "model")
    shards = [_part(checkpoints, number, "model") for number in range(_part(checkpoints, 0, "node"))]
    split = {name for name, _ in like.named_parameters(remove_duplicate=False)}  # FSDP2 shards the first dimension
    return {name: torch.cat([s[name] for s in shards]) if name in split else t for name, t in shards[0].items()}


def _of_layout(checkpoint: Path) -> bool:
    """Returns whether a run with a layout has written it. False for a damaged manifest, which load_newest refuses."""
    try:
        return "layout" in read_manifest(checkpoint)
    except (OSError, ValueError, TypeError):
        return False


def _part(checkpoints: Path, number: int, part: str) -> Any:
    found = load_newest(checkpoints, rank=number, part=part)
    assert found is not None
    return found[0]


# -- files ------------------------------------------------------------------------------------------------------------


def _harmless() -> list[Any]:
    """Returns classes and functions that checkpoints of training code hold in addition to weights.

    Calling them runs no code from the file.
    """
    return [argparse.Namespace, PosixPath, *numpy_makers()]


def file_weights(path: Path, option: str, map_location: Any = "cpu") -> Weights:
    """Returns the weights in a file of timm, mmseg or torch: *.safetensors, or what torch.save wrote.

    Args:
        path: The file, which nobody should trust.
        option: The option that names it, for messages.
        map_location: See torch.load.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # imported here, because pointcloud can do without the package

            return load_file(path)
        with torch.serialization.safe_globals(_harmless()):
            found = torch.load(path, map_location, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises many kinds of errors
        if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"{option}={path}: holds {match[1]}, which may run code when it is read: if you trust its source, "
                'keep only its weights, torch.save(torch.load(FILE, weights_only=False)["state_dict"], NEW)'
            ) from None
        need = "give *.safetensors, or what torch.save wrote, or fetch it again"
        raise UserError(f"{option}={path}: is no readable file of weights ({reason(error)}): {need}") from None
    for key in KEYS:
        found = found.get(key, found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise UserError(f"{option}={path}: holds no weights by name; give the file of a model's state_dict")
    return {str(key).removeprefix("module."): value for key, value in found.items()}


def read_weights(path: Path, model: nn.Module, option: str = "init_from") -> Weights:
    """Returns the weights of a run folder, a file, or a folder of timm or transformers, by the model's names.

    `option` names the path in messages.
    """
    if not path.exists():
        raise UserError(f"{option}={path}: does not exist: give a run folder, or a file or folder of a library")
    if (path / "checkpoints").is_dir():
        return run_weights(path, model)
    if path.is_file():
        return file_weights(path, option)
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{option}={path}: holds no checkpoint of a run, and no *.safetensors: give another folder")
    if hasattr(model, "save_pretrained"):  # our RoBERTa is a subclass of transformers'
        kind: Any = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
        try:
            found, info = kind.from_pretrained(
                path, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
        except Exception as error:  # transformers raises many kinds of errors
            raise UserError(f"{option}={path}: cannot be read ({reason(error)}): copy it again") from None
        if missing := sorted(info["missing_keys"]):  # which are random now
            what = f"has no {missing[0]}, and lacks {len(missing)} tensors in all"
            raise UserError(f"{option}={path}: {what}: give a folder of a {kind.__name__}")
        return found.float().state_dict()
    return file_weights(next(path.glob("*.safetensors")), option)


def load_weights(
    model: nn.Module, path: Path, option: str = "init_from", *, heads: Sequence[str] = (), rows: int = 0
) -> None:
    """Loads weights that read_weights finds. Every worker must call it.

    Args:
        model: The model, before it is sharded.
        path: A run folder, a file, or a library's folder.
        option: The option that names it, for messages.
        heads: Names of layers that stay random if the other model had another number of classes.
        rows: Size of the vocabulary. Embeddings may have more rows, which stay random.

    Raises:
        UserError: If the weights are of another model.
    """
    theirs, mine = read_weights(path.expanduser(), model, option), model.state_dict()
    random = list[str]()
    for name, here in mine.items():
        there = theirs.get(name)
        if there is None:  # a tied weight, which files store once
            same = [other for other, t in mine.items() if other in theirs and t.data_ptr() == here.data_ptr()]
            theirs |= {name: theirs[same[0]]} if same and here.numel() else {}
        elif there.shape != here.shape and name.rpartition(".")[0] in heads:
            theirs[name] = here
            random.append(name)
        elif rows and len(there) == rows < len(here) and there.shape[1:] == here.shape[1:]:
            theirs[name] = torch.cat([there.to(here), here[rows:]])
    if differs := unlike(theirs, mine):
        raise UserError(f"{option}={path} is of another model: {differs}; start with the settings of its model")
    if random and rank() == 0:
        print(f"{option}: random, because their sizes differ: {', '.join(random)}", file=sys.stderr, flush=True)
    model.load_state_dict(with_versions(theirs, mine))
