"""The folder of data sets: one rule, and one sentence where something is not in it, for all tasks."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core import UserError
from training.data import data_root


def opens(module: str, function: str, *arguments: Any) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), function)(*arguments)


# what opens a data set -> (what it is called, the file below the folder, the recipe that needs no data)
OPENED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "CIFAR-10": (opens("vision.data", "load", "cifar10"), "", "digits_small"),
    "ImageNet": (opens("vision.data", "load", "imagenet"), "/imagenet", "digits_small"),
    "CamVid": (opens("segmentation.data", "build_dataset", "camvid", "train"), "", "digits_small"),
    "ADE20K": (
        opens("segmentation.data", "build_dataset", "ade20k", "train"),
        "/ade/ADEChallengeData2016",
        "digits_small",
    ),
    "data set shapenet": (opens("pointcloud.data", "load_source", "shapenet", "train"), "", "surfaces_small"),
    "data set shapenet55": (opens("pointcloud.data", "load_source", "shapenet55", "train"), "", "surfaces_small"),
    "data set modelnet10": (opens("pointcloud.data", "load_source", "modelnet10", "train"), "", "surfaces_small"),
    "openwebtext token files": (
        opens("language.corpora", "open_corpus", "openwebtext", 300),
        "/openwebtext",
        "gpt2_pydoc_small",
    ),
    "Gutenberg books": (opens("language.corpora", "open_corpus", "gutenberg", 300), "", "gpt2_pydoc_small"),
}


@pytest.mark.parametrize("given", [None, "", "~/sets", "/nowhere/sets"])
@pytest.mark.parametrize("what", OPENED)
def test_what_is_missing_is_told_in_one_sentence(
    what: str, given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CO2_DATA", raising=False)
    if given is not None:
        monkeypatch.setenv("CO2_DATA", given)
    root = {"~/sets": f"{tmp_path}/sets", "/nowhere/sets": "/nowhere/sets"}.get(given or "", "data")
    assert str(data_root()) == root
    open_it, below, stand_in = OPENED[what]
    unset = "" if given else " (CO2_DATA is not set)"
    with pytest.raises(UserError) as caught:
        open_it()
    begin, end = re.escape(f"no {what} in {root}{below}{unset}: expected "), f"or train {stand_in}, which needs no data"
    assert re.fullmatch(f"{begin}.*; set CO2_DATA to the folder that holds .*, {end}", str(caught.value))
