"""A run's results for people: a small table with units, and the settings in one level for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.recipe import flat

# how a result's name ends -> (factor, unit) of what is shown
UNITS = {
    "steps_per_second": (1, "steps/s"),
    "seconds": (1, "s"),
    "share": (100, "%"),
    "top1": (100, "%"),
    "top5": (100, "%"),
    "mIoU": (1, "%"),
    "bytes_sent": (1e-6, "MB"),
    "link_mbit": (1, "Mbit/s"),
}


def table(summary: Mapping[str, float]) -> str:
    """A line for each result: its name, its value, its unit; summary.json keeps the values as they are."""
    lines = []
    for name, value in summary.items():
        factor, unit = next((shown for ending, shown in UNITS.items() if name.endswith(ending)), (1, ""))
        number = f"{value * factor:,.0f}" if isinstance(value, int) and factor == 1 else f"{value * factor:,.4g}"
        lines.append(f"  {name.replace('_', ' '):24}{number:>12} {unit}".rstrip())
    return "\n".join(lines)


def hparams(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as TensorBoard takes them: numbers, truth values and texts."""
    return {key: v if isinstance(v, (bool, int, float, str)) else str(v) for key, v in flat(recipe).items()}
