"""Readers of JSON and arrays, given files that none of our programs writes: one line, or they go on without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import training.folder.run_folder as folder
import training.folder.settings as settings
from core import UserError
from language import pretrained, zo_replay
from language.data import load_corpus
from language.prepare import read_documents
from language.prompts import read_lines
from language.zeroth import ScalarLog
from pointcloud.data import PointClouds, load_source
from results import collect
from segmentation.data import build_dataset
from training.recipe import Recipe

DEEP = 900  # Python's own parser still reads it; what walks over it then may not
TEXTS = {
    "too deep a list": "[" * 100_000,
    "deep": "[" * DEEP + "]" * DEEP,
    "a deep recipe": '{"recipe": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}",
    "half a surrogate": '{"text": "\\ud800", "prompt": "\\ud800", "answer": "a", "recipe": {"\\udfff": 1}}',
    "no UTF-8": b"\xff\xfe{}",
    "no JSON": "{",
    "a large number": "1" * 5000,
    "no float": '{"recipe": {}, "world_size": 1N, "step": 1N, "seconds": 1N}'.replace("N", "0" * 400),
    "infinity": '{"recipe": {}, "world_size": Infinity, "step": Infinity, "seconds": 1e999}',
    "texts for numbers": '{"recipe": {}, "world_size": "a", "step": "3", "seconds": "3"}',
    "lists": '{"recipe": [], "world_size": [], "step": [], "seconds": {}, "rests": {}, "workers": []}',
    "nothing": "",
    "an object": "{}",
}


def text(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


REFUSES: dict[str, Callable[[Path, Any], Any]] = {  # UserError, whatever stands there
    "prompts": lambda at, found: read_lines(text(at / "train.jsonl", found)),
    "documents": lambda at, found: list(read_documents(text(at / "a.jsonl", found))),
    "meta.json": lambda at, found: load_corpus(text(at / "meta.json", found).parent),
    "config.json": lambda at, found: pretrained.open_config(text(at / "config.json", found).parent),
    "replay": lambda at, found: zo_replay.read(text(at / "run.json", found).parent, at),
    "scalars": lambda at, found: ScalarLog.load(text(at / "scalars", found)),
}


@pytest.mark.parametrize("reader", REFUSES)
@pytest.mark.parametrize("kind", TEXTS)
def test_no_such_json_is_more_than_a_line(tmp_path: Path, reader: str, kind: str):
    with pytest.raises(UserError, match=str(tmp_path)) as said:
        REFUSES[reader](tmp_path, TEXTS[kind])
    assert len(str(said.value)) < 600


@pytest.mark.parametrize("kind", TEXTS)
def test_a_run_folder_of_such_files_is_told_of(tmp_path: Path, kind: str):
    """By --collect and --status, and by a run that goes on."""
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        text(tmp_path / name, TEXTS[kind])
    assert isinstance(collect.read_run(tmp_path), str)
    assert collect.hours(tmp_path) == 0.0 and collect.warm_rate(tmp_path) is None
    made_of = {"recipe": {}, "command": [], "commit": "", "world_size": 1}
    if kind not in ("infinity", "texts for numbers"):  # of which a resumed run reads nothing
        with pytest.raises(UserError, match="config.json is damaged"):
            settings.resumed(tmp_path / "config.json", made_of, Recipe)
    folder._cut(tmp_path / "metrics.jsonl", 10)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_lines_of_other_types_are_left_out_and_the_others_kept(tmp_path: Path):
    good = [json.dumps({"step": step, "seconds": 1.0 * step, "loss": float("nan")}) + "\n" for step in (1, 2, 3, 40)]
    bad = [content + "\n" for content in TEXTS.values() if isinstance(content, str)]
    (tmp_path / "metrics.jsonl").write_text("".join([*bad, *good[:2], *bad, *good[2:]]))
    assert collect.logged(tmp_path, "seconds") == [(1, 1.0), (2, 2.0), (3, 3.0), (40, 40.0)]
    folder._cut(tmp_path / "metrics.jsonl", 10)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(good[:3])


# -- arrays -----------------------------------------------------------------------------------------------------------

ARRAYS: list[tuple[str, str, str, Callable[[np.ndarray], Any]]] = [
    ("modelnet10", "x_train", "nan", lambda a: np.full_like(a, np.nan)),
    ("modelnet10", "x_train", "of no clouds", lambda a: a[:0]),
    ("modelnet10", "x_train", "flat", lambda a: a.ravel()),
    ("modelnet10", "x_train", "whole numbers", lambda a: a.astype(np.int64)),
    ("modelnet10", "x_train", "objects", lambda a: np.array([None, {}], dtype=object)),
    ("modelnet10", "x_test", "a point", lambda a: np.zeros_like(a)),
    ("camvid", "x_train", "float", lambda a: a.astype(np.float32)),
    ("camvid", "x_train", "of no images", lambda a: a[:0]),
    ("camvid", "y_train", "out of range", lambda a: a + 100),
    ("camvid", "y_train", "of another size", lambda a: a[:, :90]),
    ("camvid", "y_val", "objects", lambda a: np.array([None] * 4, dtype=object)),
    ("camvid", "y_train", "float", lambda a: np.full_like(a, 4.5, np.float32)),
]


def clouds(split: str) -> list[Any]:
    source = load_source("modelnet10", split)
    return [PointClouds(source, 64)[0, 0, i] for i in range(len(source))]


def scenes(split: str) -> list[Any]:
    found = build_dataset("camvid", split)
    return [found[i] for i in range(len(found))]


@pytest.mark.parametrize(("name", "key", "label", "change"), ARRAYS, ids=[" ".join(case[:3]) for case in ARRAYS])
def test_arrays_of_something_else_are_refused_in_one_line(tmp_path, monkeypatch, name, key, label, change):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    rng, splits = np.random.default_rng(0), ("train", "val", "test")
    arrays: dict[str, np.ndarray] = {}
    for split in splits:
        if name == "modelnet10":
            arrays[f"x_{split}"] = rng.standard_normal((4, 1024, 3)).astype(np.float16)
            continue
        arrays[f"x_{split}"] = rng.integers(0, 256, (4, 180, 240, 3), np.uint8)
        arrays[f"y_{split}"] = rng.integers(0, 12, (4, 180, 240), np.uint8)
    file, read = ("modelnet10_1024_fp16.npz", clouds) if name == "modelnet10" else ("camvid_240x180.npz", scenes)
    np.savez(tmp_path / file, **arrays)
    assert len(read(key[2:])) == 4
    np.savez(tmp_path / file, **arrays | {key: change(arrays[key])})
    with pytest.raises(UserError, match=file) as said:
        read(key[2:])
    assert "\n" not in str(said.value)
