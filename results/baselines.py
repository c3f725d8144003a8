"""Trivial baselines of the stand-ins in results/tables, which ignore the input or repeat it.

A model has learned something if it is better. dropped.md names the commit whose command computes them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STORE = Path(__file__).parent / "tables/baselines.json"
MARGIN = 0.1  # of the baseline; chosen before most of the runs


def load() -> list[dict[str, Any]]:
    """The stored rows."""
    return json.loads(STORE.read_text())


def of(recipe: str, metric: str) -> dict[str, float]:
    """The stored baselines of a stand-in, by name, the simplest first.

    Args:
        recipe: The recipe's name. The part before its last word names its data and objective.
        metric: The key in summary.json.
    """
    same = [row for row in load() if row["metric"] == metric and same_data(row["recipe"], recipe)]
    return {row["baseline"]: row["value"] for row in same}


def same_data(one: str, other: str) -> bool:
    """Whether two small recipes share data and objective: the first words of their names."""
    masked = "mae" in one.split("_")
    return masked == ("mae" in other.split("_")) and key_of(one) == key_of(other)


def key_of(recipe: str) -> str:
    """The data of a small recipe's name, with the kind of objective of a text model."""
    family, _, rest = recipe.partition("_")
    if family in ("gpt2", "transnormer", "roberta"):
        return ("masked " if family == "roberta" else "") + rest.partition("_")[0]
    return family


def beats(values: Sequence[float], metric: str, baseline: float) -> bool:
    """Whether the values are better than the baseline by MARGIN or more on average."""
    mean = sum(values) / len(values)
    if metric in ("test_top1", "val_mIoU"):
        return mean >= (1 + MARGIN) * baseline
    return mean <= (1 - MARGIN) * baseline
