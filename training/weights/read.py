"""Weights of other runs, and of other libraries' local files. Reading them runs no code, and downloads nothing."""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from core.checkpoint.runs import finished, load_newest, unlike, with_versions
from core.checkpoint.stored import parse_json, plain_values, reason, regular
from core.errors import UserError
from training.data.files import printable
from training.folder.run_folder import write_whole
from training.recipe import Recipe
from training.start.errors import explained
from training.start.workers import rank

R = TypeVar("R", bound=Recipe)
# under which libraries store weights, preferred first
KEYS = ("state_dict_ema", "state_dict", "model_ema", "model", "model_state_dict", "ema_state_dict")
KEYS += ("params_ema", "params", "module", "ema", "weights")  # of BasicSR, DeepSpeed and other scripts
# what torch.compile, FSDP and checkpoint_wrapper add inside names
INSIDE = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
COUNTERS = ("n_averaged", "steps")  # of torch's and mmengine's averaged models, next to their `module.`
COUNTED = "num_batches_tracked"  # BatchNorm's buffer, which other libraries' files lack
NAMES = "names.json"  # file in a run folder


class Weights(dict[str, Tensor]):
    """A model's tensors by name.

    Attributes:
        names: Names of the outputs, such as classes or tokens, in their order. Empty if the source has none.
        statistics: Mean and standard deviation of each channel by which images are normalized, or None if the source
            has none.
    """

    names: Sequence[str] = ()
    statistics: tuple[Sequence[float], Sequence[float]] | None = None


# -- names of classes and tokens --------------------------------------------------------------------------------------


def misnamed(theirs: Sequence[str], mine: Sequence[str], places: tuple[str, str] = ("there", "here")) -> str:
    """Describes the first output that has two names, at `places`, or returns "".

    A model's outputs have numbers, so it is useless on data that number the same names differently. Numbers in shards
    say nothing about names of folders.
    """
    if all(map(_number, theirs)) != all(map(_number, mine)):
        return ""
    for i, (a, b) in enumerate(zip(theirs, map(printable, mine), strict=False)):
        if a and b and a != b:
            return f"output {i} is {a!r} {places[0]}, {b!r} {places[1]}"
    return ""


def _number(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def keep_names(run: Any, names: Iterable[str]) -> None:
    """Writes the names of a model's outputs to the run's folder, in their order.

    Raises UserError if the run resumes with data that number them differently.
    """
    folder, mine = run.folder.path, [printable(name) for name in names]
    if finished(run.folder.checkpoints):
        if wrong := misnamed(read_names(folder), mine):
            raise UserError(f"{folder} was trained with other data, {wrong}: restore the data, or choose another --out")
    elif run.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / NAMES, json.dumps(mine) + "\n")


def read_names(folder: Path) -> list[str]:
    """Returns the names in a run's folder, or an empty list if it has none, as of a task without classes."""
    file = folder / NAMES
    if not file.exists():
        return []
    with explained(f"{file}: is damaged", "restore it, or remove it if the data are the same"):
        names = parse_json(file.read_text())
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of names")
        return names


# -- a run ------------------------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's config.json, or raises UserError."""
    file = folder / "config.json"
    with explained(f"{file} cannot be read", "give the folder of a run (--out, or runs/RECIPE-...)"):
        config = parse_json(regular(file).read_text())
        config["recipe"]["method"]
        if not isinstance(workers := config["world_size"], int) or workers < 1:
            raise ValueError(f"world_size={workers!r} is no number of workers")
        return config


def read_recipe(folder: Path, kind: type[R]) -> R:
    """Returns the recipe with which a run was started. UserError if another task or an older version wrote it."""
    config = read_config(folder)
    stored, task = config["recipe"], kind.__module__.partition(".")[0]
    wrote = f"commit {config['commit'].removesuffix('-dirty')}" if config.get("commit") else "the commit that wrote it"
    if unknown := sorted(stored.keys() - {f.name for f in dataclasses.fields(kind)}):
        made = f"{folder} is a run of recipe {stored.get('name')} with {unknown[0]}={stored[unknown[0]]!r:.60}"
        if Path(next(iter(config.get("command") or [""]))).parent.name != task:
            raise UserError(f"{made}, a setting that {task} does not have: use its own task's command")
        raise UserError(f"{made}, a setting that is gone: check out {wrote} to read it")
    try:
        return rebuilt(kind(), stored)
    except UserError as error:
        raise UserError(
            f"{folder / 'config.json'}: this version refuses its settings ({error}): check out {wrote} to read it, "
            "or restore the file if it is damaged"
        ) from None
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise UserError(f"{folder / 'config.json'} is damaged ({error}): restore it") from None


def rebuilt(default: Any, stored: Any) -> Any:
    """Returns the dataclass `default` with values that were stored as JSON, which has no paths and no tuples."""
    if not isinstance(stored, dict):
        raise TypeError(f"{stored!r:.60} in place of settings")
    hints, changes = typing.get_type_hints(type(default)), dict[str, Any]()
    for name in {f.name for f in dataclasses.fields(default)} & stored.keys():
        value, before = stored[name], getattr(default, name)
        if dataclasses.is_dataclass(before):
            value = rebuilt(before, value)
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, str) and Path in (hints[name], *typing.get_args(hints[name])):
            value = Path(value)
        changes[name] = value
    return dataclasses.replace(default, **changes)


def run_weights(folder: Path, like: nn.Module) -> dict[str, Tensor]:
    """Returns the model in the newest checkpoint of a run, as worker 0 has it. Every worker must call it.

    The parameters of `like` have the same names. UserError if there is no checkpoint.
    """
    checkpoints = folder / "checkpoints"
    if not (names := finished(checkpoints)):
        raise UserError(f"{folder} holds no checkpoint of a run: give the folder of one that has ended, or saved")
    recipe = read_config(folder)["recipe"]
    if recipe.get("layout"):
        from training.layouts.resharded import read_model  # imported here, because torch's pipelines take a second

        with explained(f"{checkpoints / names[0]} cannot be read", "give another run"):
            return read_model(checkpoints / names[0])
    if recipe.get("ema") is not None:
        weights = _part(checkpoints, 0, "ema")
        return {name.removeprefix("module."): t for name, t in weights.items() if name != "n_averaged"}
    if recipe.get("zero") not in (2, 3):
        return _part(checkpoints, 0, "model")
    shards = [_part(checkpoints, number, "model") for number in range(_part(checkpoints, 0, "node"))]
    split = {name for name, _ in like.named_parameters(remove_duplicate=False)}  # FSDP2 shards the first dimension
    return {name: torch.cat([s[name] for s in shards]) if name in split else t for name, t in shards[0].items()}


def _part(checkpoints: Path, number: int, part: str) -> Any:
    found = load_newest(checkpoints, rank=number, part=part)
    assert found is not None
    return found[0]


# -- files ------------------------------------------------------------------------------------------------------------


def file_weights(path: Path, option: str) -> Weights:
    """Returns the weights in a file of timm, mmseg or torch: *.safetensors, or what torch.save wrote.

    Nobody should trust the file. `option` names it in messages.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # imported here, because pointcloud can do without the package

            return _unwrapped(load_file(path))
        with plain_values(argparse.Namespace):  # which training code saves, too
            found = torch.load(path, "cpu", weights_only=True)
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
    if (tensors := _tensors(found)) is None:
        kind = type(found).__name__
        keys = ", ".join(f"{key!r:.40}" for key in list(found)[:4]) if isinstance(found, Mapping) else ""
        holds = f"only {keys}" if keys else f"a {kind}"
        raise UserError(f"{option}={path}: holds no weights by name, but {holds}; give a model's state_dict")
    weights = _unwrapped(tensors)
    weights.names = classes_of(found)
    return weights


def classes_of(checkpoint: Mapping[str, Any]) -> list[str]:
    """Returns the classes in a checkpoint of mmseg, whose older versions called them CLASSES, or an empty list."""
    meta = checkpoint.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    data = meta.get("dataset_meta")
    return _strings(data.get("classes") if isinstance(data, Mapping) else meta.get("CLASSES"))


def _tensors(found: Any, levels: int = 4) -> Mapping[str, Tensor] | None:
    """Returns the tensors by name in the first of KEYS that has some, or None."""
    if not isinstance(found, Mapping):
        return None
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if 2 * len(tensors) > len(found) and not any(isinstance(value, Mapping) for value in found.values()):
        return tensors  # next to them, a version or an empty entry may stand
    inside = (_tensors(found[key], levels - 1) for key in KEYS if levels and key in found)
    return next((tensors for tensors in inside if tensors is not None), None)


def _strings(value: Any) -> list[str]:
    named = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    return [printable(name) for name in value] if named else []


def _unwrapped(tensors: Mapping[str, Tensor]) -> Weights:
    """Returns the tensors without what wrappers add, such as DistributedDataParallel, torch.compile, AveragedModel."""
    found = Weights({INSIDE.sub("", str(name)): value for name, value in tensors.items()})
    while (names := found.keys() - set(COUNTERS)) and all(name.startswith("module.") for name in names):
        found = Weights({name.removeprefix("module."): t for name, t in found.items() if name not in COUNTERS})
    return found


def _renamed(theirs: Weights, mine: Mapping[str, Tensor], where: str) -> Weights:
    """Returns the tensors by the model's names: without a prefix, such as Lightning's `model.`, and with its counters.

    Raises:
        UserError: If the model's names are there with several prefixes.
    """
    names = {name for name in mine if not name.endswith(COUNTED)}
    prefixes = Counter[str]()
    for name in theirs:
        starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
        prefixes.update(name[:start] for start in starts if name[start:] in names)
    found = [prefix for prefix, count in prefixes.items() if 2 * count > len(names)]
    if len(found) > 1 and theirs.keys() - mine.keys():
        each = ", ".join(f"{prefix}{min(names)}" for prefix in sorted(found))
        raise UserError(f"{where}: holds several models, such as {each}: keep one of them in a file")
    prefix = "" if "" in found or not found else found[0]
    # single numbers outside the prefix are counters, as AveragedModel and EMA packages have them
    held = {name: t for name, t in theirs.items() if name.startswith(prefix) or t.numel() > 1}
    made = Weights({name.removeprefix(prefix): t for name, t in held.items()})
    made.names, made.statistics = theirs.names, theirs.statistics
    for name in (made.keys() ^ mine.keys()) & {n for n in made.keys() | mine.keys() if n.endswith(COUNTED)}:
        made.pop(name, None)
        made |= {name: mine[name]} if name in mine else {}
    return made


def read_weights(path: Path, model: nn.Module, option: str = "init_from") -> Weights:
    """Returns the weights of a run folder, a file, or a folder of timm or transformers, by the model's names.

    `option` names the path in messages.
    """
    if not path.exists():
        raise UserError(f"{option}={path}: does not exist: give a run folder, or a file or folder of a library")
    if (path / "checkpoints").is_dir():
        found = Weights(run_weights(path, model))
        found.names = read_names(path)
        return found
    if path.is_file():
        return file_weights(path, option)
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{option}={path}: holds no checkpoint of a run, and no *.safetensors: give another folder")
    if hasattr(model, "save_pretrained"):  # our RoBERTa is a subclass of transformers'
        kind: Any = next(c for c in type(model).__mro__ if c.__module__.startswith("transformers."))
        with explained(f"{option}={path}: cannot be read", "copy it again"):
            found, info = kind.from_pretrained(
                path, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
        if missing := sorted(info["missing_keys"]):  # which are random now
            what = f"has no {missing[0]}, and lacks {len(missing)} tensors in all"
            raise UserError(f"{option}={path}: {what}: give a folder of a {kind.__name__}")
        found = Weights(found.float().state_dict())
        found.names = _tokens(path, option)
        return found
    found = file_weights(next(path.glob("*.safetensors")), option)
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):  # timm's, or another library's
        config = parse_json((path / "config.json").read_text())
        found.names = _strings(config.get("label_names"))
        data = config["pretrained_cfg"]
        found.statistics = [*map(float, data["mean"])], [*map(float, data["std"])]
    return found


def _tokens(folder: Path, option: str) -> list[str]:
    """Returns the tokens of a folder of transformers by their ids, or an empty list if it has no tokenizer."""
    from tokenizers import Tokenizer  # imported here, because vision and pointcloud can do without the package

    files = [file for name in ("tokenizer.json", "vocab.json") if (file := folder / name).is_file()]
    if not files:
        return []
    with explained(f"{option}={folder}: {files[0].name} cannot be read", "copy it again"):
        whole = files[0].name == "tokenizer.json"
        ids = Tokenizer.from_file(str(files[0])).get_vocab() if whole else parse_json(files[0].read_text())
        named = {id: printable(token) for token, id in ids.items()}
        if max(named) > 1 << 24:
            raise ValueError(f"a token has the id {max(named)}")
        return [named.get(id, "") for id in range(1 + max(named))]


def load_weights(
    model: nn.Module, path: Path, option: str = "init_from", *, heads: Sequence[str] = (), rows: int = 0
) -> None:
    """Loads weights that read_weights finds. Every worker must call it.

    Args:
        model: The model, before it is sharded. Its attributes `names` and `statistics`, if it has them, are Weights's.
        path: A run folder, a file, or a library's folder.
        option: The option that names it, for messages.
        heads: Names of layers that stay random if the other model had other classes, or another number of them.
        rows: Size of the vocabulary. Embeddings may have more rows, which stay random.

    Raises:
        UserError: If the weights are of another model.
    """
    mine, where = model.state_dict(), f"{option}={path}"
    theirs = _renamed(read_weights(path.expanduser(), model, option), mine, where)
    if (wrong := misnamed(theirs.names, getattr(model, "names", ()))) and not heads:
        raise UserError(f"{where} was trained with other data, {wrong}: give that data, or other weights")
    there, here = theirs.statistics, getattr(model, "statistics", None)
    if there and here and (np.shape(there) != np.shape(here) or not np.allclose(there, here, atol=1e-3)):
        said = f"{where} was trained with images of mean and std {there}, which are {here} here"
        if not heads:
            raise UserError(f"{said}: give weights of the same normalization")
        if rank() == 0:
            print(f"warning: {said}: with ImageNet, add --timm_data for timm's own", file=sys.stderr, flush=True)
    random, why = list[str](), wrong or "their sizes differ"
    for name, here in mine.items():
        there = theirs.get(name)
        if there is None:  # a tied weight, which files store once
            same = [other for other, t in mine.items() if other in theirs and t.data_ptr() == here.data_ptr()]
            theirs |= {name: theirs[same[0]]} if same and here.numel() else {}
        elif (wrong or there.shape != here.shape) and name.rpartition(".")[0] in heads:
            theirs[name] = here
            random.append(name)
        elif rows and len(there) == rows < len(here) and there.shape[1:] == here.shape[1:]:
            theirs[name] = torch.cat([there.to(here), here[rows:]])
    if differs := unlike(theirs, mine):
        raise UserError(f"{where} is of another model: {differs}; start with the settings of its model")
    if random and rank() == 0:
        print(f"{option}: random, because {why}: {', '.join(random)}", file=sys.stderr, flush=True)
    model.load_state_dict(with_versions(theirs, mine))
