"""The tasks' recipes refuse what no run could use."""

from dataclasses import replace
from typing import Any

import pytest

from core import UserError
from language.recipes import gpt2_pydoc_small
from segmentation.recipes import RECIPES
from vision.recipes import digits_small


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [
        (digits_small(), "label_smoothing", 2.0),
        (digits_small(), "mixup", -3.0),
        (digits_small(), "random_erasing", 1.5),
        (digits_small(), "drop_path", 2.0),
        (digits_small(), "loader_workers", -1),
        (gpt2_pydoc_small(), "dropout", 2.0),
        (gpt2_pydoc_small(), "vocab_size", 900_000_000),
        (gpt2_pydoc_small(), "context", 900_000_000),
        (RECIPES["digits_small"], "loader_workers", -1),
    ],
)
def test_values_out_of_range_are_refused(recipe: Any, name: str, value: Any):
    with pytest.raises(UserError, match=f"{name}={value}: give a number from"):
        replace(recipe, **{name: value})
