"""What a run folder says of how it was made: the recipe, the command, the commit, the versions."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from training.recipe import Recipe

PACKAGES = ("torch", "torchvision", "timm", "numpy", "transformers", "onedl-mmsegmentation")


def describe(recipe: Recipe, world_size: int, device: torch.device) -> dict[str, Any]:
    """For config.json."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "command": sys.argv,
        "commit": commit(),
        "versions": {p: v for p in PACKAGES if (v := version(p))},
    }


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of this checkout, with a mark when it has changes; empty outside one."""
    root = Path(__file__).parent
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10)
        return head.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
