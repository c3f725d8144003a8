"""A run's settings as config.json holds them, and which of them may change when the run resumes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from core.baselines.table import REGISTRY
from core.checkpoint.stored import parse_json
from core.errors import UserError
from training.recipe import Recipe, flat
from training.start.errors import explained

PACKAGES = ("torch", "torchvision", "timm", "numpy", "transformers", "onedl-mmsegmentation")

# Settings that a resumed run may change, because they do not change its numbers.
FREE = {
    "out", "resume", "extend", "dry_run", "device", "timeout", "link_mbit", "trace", "eval_every", "checkpoint_every",
    "light_checkpoints", "log_every", "recompute", "gpu_gb", "loader_workers", "eval_tokens",
    "wikitext2", "eval_samples", "init_from", "tracker",
}  # fmt: skip
LENGTH = {"epochs", "epoch_steps"}  # set the run's length and its learning rate; --extend allows a change


def describe(recipe: Recipe, world_size: int, device: torch.device) -> dict[str, Any]:
    """Returns the content of config.json: the recipe, the command, the commit and the versions."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "command": sys.argv,
        "commit": commit(),
        "versions": {p: v for p in PACKAGES if (v := version(p))},
    }


def settings(recipe: Any) -> dict[str, Any]:
    """Returns the fields of a recipe, or of config.json's recipe, by their command-line names, as JSON values."""
    nested = dataclasses.asdict(recipe) if dataclasses.is_dataclass(recipe) else recipe
    return flat(json.loads(json.dumps(nested, default=str)))


def with_defaults(old: dict[str, Any], kind: type[Recipe]) -> dict[str, Any]:
    """Returns the settings of a file with the defaults of fields that are newer than the file."""
    return settings(kind()) | old


def of_other_methods(method: str) -> set[str]:
    """Returns the groups of settings that have no effect on a run with this method."""
    return {entry.settings.key for entry in REGISTRY.values() if entry.settings and entry.name != method}


def resumed(file: Path, config: dict[str, Any], kind: type[Recipe], *, saved: bool = True) -> dict[str, Any]:
    """Returns the new content of config.json for a run that resumes.

    Without a saved checkpoint, the run begins again, so init_from must stay. UserError if it cannot resume.
    """
    with explained(f"{file} is damaged", "restore it, or remove it and resume with the settings of this run"):
        old = parse_json(file.read_text())
        config["recipe"]["extend"] = bool(config["recipe"].get("extend") or old["recipe"].get("extend"))  # stays set
        was, now = with_defaults(settings(old["recipe"]), kind), settings(config["recipe"])
        changed = [f"{key}: {was[key]} -> {now[key]}" for key in was if key in now and was[key] != now[key]]
        history = [*old.get("history", [])]
    free = (FREE if saved else FREE - {"init_from"}) | (LENGTH if config["recipe"]["extend"] else set())
    if not kind.batch_norm and not config["recipe"].get("dropout"):
        free |= {"accumulate"}  # otherwise statistics and masks of other micro-batches change the numbers
    if old["recipe"].get("layout") and config["recipe"].get("layout"):
        free |= {"layout"}  # a run may resume from another layout, but not from a run without one
    unread = of_other_methods(config["recipe"]["method"])
    names = {change: change.partition(":")[0] for change in changed}
    if refused := [c for c in changed if names[c] not in free and names[c].split(".")[0] not in unread]:
        what = ", ".join(refused)
        if {names[change] for change in refused} <= LENGTH:
            raise UserError(
                f"{file.parent} is a run of another length ({what}), which its learning rate has followed: resume with "
                "that length, add --extend to stretch the schedule from here on, or choose another --out"
            )
        raise UserError(f"{file.parent} holds another run ({what}): resume with its settings, or choose another --out")
    line = {key: config[key] for key in ("command", "commit", "world_size")} | {"changed": changed}
    return old | {"recipe": config["recipe"], "history": [*history, line]}


@functools.cache  # takes 10 ms per package
def version(package: str) -> str:
    """Returns the installed version, or "" if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Returns the commit of this checkout, marked if its code has changes, or "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, timeout=10)
        but_results = [*git, "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)results"]  # measurements write there
        changed = subprocess.run(but_results, capture_output=True, timeout=10).returncode == 1
        return head.stdout.strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""
