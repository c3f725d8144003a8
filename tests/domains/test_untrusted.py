"""Readers of JSON, given files that none of our programs writes: each says so in a line, or goes on without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
from bench.loss.__main__ import Rows
from core import UserError
from core.checkpoints import checkpoint
from language import pretrained, zo_replay
from language.data import load_corpus
from language.prepare import read_documents
from language.prompts import read_lines
from language.zeroth import ScalarLog
from results import collect
from training import folder
from training.recipe import Recipe

DEEP = 900  # Python's own parser still reads it; what walks over it then may not
TEXTS = {
    "too deep a list": "[" * 100_000,
    "too deep an object": '{"a":' * 100_000,
    "deep": "[" * DEEP + "]" * DEEP,
    "a deep recipe": '{"recipe": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}",
    "a deep text": '{"text": ' + "[" * DEEP + "]" * DEEP + "}",
    "half a surrogate": '{"text": "\\ud800", "prompt": "\\ud800", "answer": "a", "recipe": {"\\udfff": 1}}',
    "no UTF-8": b"\xff\xfe{}",
    "no JSON": "{",
    "a number": "3",
    "a large number": "1" * 5000,
    "no float": '{"recipe": {}, "world_size": 1N, "step": 1N, "seconds": 1N}'.replace("N", "0" * 400),
    "infinity": '{"recipe": {}, "world_size": Infinity, "step": Infinity, "seconds": 1e999}',
    "texts for numbers": '{"recipe": {}, "world_size": "a", "step": "3", "seconds": "3"}',
    "lists": '{"recipe": [], "world_size": [], "step": [], "seconds": {}, "rests": {}, "workers": []}',
    "nothing": "",
    "null": "null",
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
def test_rows_of_a_search_are_refused_by_their_line(tmp_path: Path, kind: str):
    whole = text(tmp_path / "rows.jsonl", TEXTS[kind] if isinstance(TEXTS[kind], bytes) else TEXTS[kind] + "\n")
    if kind not in ("nothing", "no UTF-8"):
        with pytest.raises(UserError, match="line 1 is no row of this command"):
            Rows(whole)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_run_folder_of_such_files_is_told_of(tmp_path: Path, kind: str):
    """By --collect and --status, and by a run that goes on."""
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        text(tmp_path / name, TEXTS[kind])
    assert isinstance(collect.read_run(tmp_path), str)
    assert collect.hours(tmp_path) == 0.0 and collect.warm_rate(tmp_path) is None
    made_of = {"recipe": {}, "command": [], "commit": "", "world_size": 1}
    if kind not in ("infinity", "texts for numbers"):  # of which a resumed run reads nothing
        assert "config.json is damaged" in folder.resumed(tmp_path / "config.json", made_of, Recipe)[1]
    folder._cut(tmp_path / "metrics.jsonl", 10)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_lines_of_other_types_are_left_out_and_the_others_kept(tmp_path: Path):
    good = [json.dumps({"step": step, "seconds": 1.0 * step, "loss": float("nan")}) + "\n" for step in (1, 2, 3, 40)]
    bad = [content + "\n" for content in TEXTS.values() if isinstance(content, str)]
    (tmp_path / "metrics.jsonl").write_text("".join([*bad, *good[:2], *bad, *good[2:]]))
    assert collect.logged_times(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (40, 40.0)]
    folder._cut(tmp_path / "metrics.jsonl", 10)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(good[:3])


@pytest.mark.parametrize("kind", TEXTS)
def test_a_checkpoint_with_such_a_manifest_is_refused(tmp_path: Path, kind: str):
    text(tmp_path / checkpoint.MANIFEST, TEXTS[kind])
    state, workers, problem = checkpoint._read(tmp_path, 0)
    assert state is None and workers == 0 and problem and "\n" not in problem
