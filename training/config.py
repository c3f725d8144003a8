"""config.json: what a run is made of, and whether a resumed run is still made of it."""

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

from core.checkpoints.untrusted import parse_json
from core.methods import REGISTRY
from training.recipe import Recipe, flat

PACKAGES = ("torch", "torchvision", "timm", "numpy", "transformers", "onedl-mmsegmentation")

# What a resumed run may change, for it does not change the run's numbers.
FREE = {
    "out", "resume", "extend", "dry_run", "device", "timeout", "link_mbit", "trace", "eval_every", "checkpoint_every",
    "save_minutes", "log_every", "accumulate", "recompute", "gpu_gb", "loader_workers", "eval_tokens",
    "wikitext2", "eval_samples", "emd_points", "init_from",
}  # fmt: skip
LENGTH = {"epochs", "epoch_steps"}  # of the run, which its learning rate follows: free with --extend


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


def settings(recipe: Any) -> dict[str, Any]:
    """The fields of a recipe, or of what describe() holds of one, by the command line's names and as JSON has them."""
    nested = dataclasses.asdict(recipe) if dataclasses.is_dataclass(recipe) else recipe
    return flat(json.loads(json.dumps(nested, default=str)))


def with_defaults(old: dict[str, Any], kind: type[Recipe]) -> dict[str, Any]:
    """The settings of a file that may be older than some fields: such a run had their defaults."""
    return settings(kind()) | old


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Which settings changed, as "optim.lr: 0.05 -> 0.5"; those that only one of the two knows are left out."""
    return [f"{key}: {old[key]} -> {new[key]}" for key in old if key in new and old[key] != new[key]]


def of_other_methods(method: str) -> set[str]:
    """The groups of settings that say nothing of a run with this one."""
    return {entry.settings.key for entry in REGISTRY.values() if entry.settings and entry.name != method}


def resumed(file: Path, config: dict[str, Any], kind: type[Recipe]) -> tuple[dict[str, Any], str]:
    """The content of config.json after a run of `config` resumes it, with a line more of history; or why it cannot."""
    try:
        old = parse_json(file.read_text())
        config["recipe"]["extend"] = bool(config["recipe"].get("extend") or old["recipe"].get("extend"))  # from now on
        changed = differences(with_defaults(settings(old["recipe"]), kind), settings(config["recipe"]))
        history = [*old.get("history", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{file} is damaged ({error!r}): restore it, or choose another --out"
    free = FREE | (LENGTH if config["recipe"]["extend"] else set())
    if old["recipe"].get("layout") and config["recipe"].get("layout"):
        free |= {"layout"}  # from a checkpoint of one another goes on, but no run without
    unread = of_other_methods(config["recipe"]["method"])
    names = {change: change.partition(":")[0] for change in changed}
    if refused := [c for c in changed if names[c] not in free and names[c].split(".")[0] not in unread]:
        what = ", ".join(refused)
        if {names[change] for change in refused} <= LENGTH:
            return {}, (
                f"{file.parent} is a run of another length ({what}), which its learning rate has followed: resume with "
                "that length, add --extend to stretch the schedule from here on, or choose another --out"
            )
        return {}, f"{file.parent} holds another run ({what}): resume with its settings, or choose another --out"
    line = {key: config[key] for key in ("command", "commit", "world_size")} | {"changed": changed}
    return old | {"recipe": config["recipe"], "history": [*history, line]}, ""


@functools.cache  # 10 ms each
def version(package: str) -> str:
    """The installed version; empty for a package that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of this checkout, with a mark when its code has changes; empty outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        head = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, timeout=10)
        but_results = [*git, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)results"]  # which measurements write
        changed = subprocess.run(but_results, capture_output=True, timeout=10).returncode == 1
        return head.stdout.strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""
