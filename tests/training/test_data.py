"""What tasks share: the folder of data sets and one sentence where something is not in it, the cache, samples' keys."""

import errno
import multiprocessing
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core import UserError
from training.data import build_whole, cached, data_root, eval_keys, train_keys

# what is not there -> (what opens it, and with what; the folder below that of all data; the recipe that needs no data)
OPENED: dict[str, tuple[str, tuple[Any, ...], str, str]] = {
    "CIFAR-10": ("vision.data.load", ("cifar10",), "", "digits_small"),
    "ImageNet": ("vision.data.load", ("imagenet",), "/imagenet", "digits_small"),
    "CamVid": ("segmentation.data.build_dataset", ("camvid", "train"), "", "digits_small"),
    "ADE20K": ("segmentation.data.build_dataset", ("ade20k", "train"), "/ade/ADEChallengeData2016", "digits_small"),
    "data set shapenet": ("pointcloud.data.load_source", ("shapenet", "train"), "", "surfaces_small"),
    "data set shapenet55": ("pointcloud.data.load_source", ("shapenet55", "train"), "", "surfaces_small"),
    "data set modelnet10": ("pointcloud.data.load_source", ("modelnet10", "train"), "", "surfaces_small"),
    "openwebtext token files": ("language.data.open_corpus", ("openwebtext", 9), "/openwebtext", "gpt2_pydoc_small"),
    "wikibooks token files": ("language.data.open_corpus", ("wikibooks", 9), "/wikibooks", "gpt2_pydoc_small"),
    "WikiText-2": ("language.data.open_wikitext2", (SimpleNamespace(tokenizer="any"),), "", "gpt2_pydoc_small"),
    "Gutenberg books": ("language.data.open_corpus", ("gutenberg", 9), "", "gpt2_pydoc_small"),
}


@pytest.mark.parametrize("given", [None, "", "~/sets", "/nowhere/sets"])
@pytest.mark.parametrize("what", OPENED)
def test_what_is_missing_is_told_in_one_sentence(what: str, given: str | None, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CO2_DATA", raising=False)
    if given is not None:
        monkeypatch.setenv("CO2_DATA", given)
    root = {"~/sets": f"{tmp_path}/sets", "/nowhere/sets": "/nowhere/sets"}.get(given or "", "data")
    assert str(data_root()) == root
    opener, arguments, below, stand_in = OPENED[what]
    unset = "" if given else " (CO2_DATA is not set)"
    with pytest.raises(UserError) as caught:
        pkgutil.resolve_name(opener)(*arguments)
    begin, end = re.escape(f"no {what} in {root}{below}{unset}: expected "), f"or train {stand_in}, which needs no data"
    assert re.fullmatch(f"{begin}.*; set CO2_DATA to the folder that holds .*, {end}", str(caught.value))


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CO2_CACHE", "~/cache")
    return tmp_path / "cache"


def build(target: Path) -> None:
    with open(target.parent / "builds.log", "a") as log:
        log.write("built\n")
    (target / "content").write_text("whole")


def open_cached(_: int) -> str:
    return (cached("thing", build) / "content").read_text()


def test_workers_that_start_at_once_build_the_cache_once(cache: Path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(open_cached, range(8)) == ["whole"] * 8
    assert (cache / "builds.log").read_text() == "built\n"


def test_without_a_name_the_cache_is_in_the_home_folder(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CO2_CACHE")
    assert cached("thing", build) == cache.parent / ".cache/co2/thing"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("no such text"), "no such text"),
        (OSError(errno.ENOSPC, "No space left"), r"cannot be written \(No space.*set CO2_CACHE to another folder"),
    ],
)
def test_a_build_that_fails_leaves_no_folder(cache: Path, error: Exception, message: str):
    def fail(target: Path) -> None:
        (target / "half").write_text("half")
        raise error

    with pytest.raises(UserError, match=message):
        cached("thing", fail)
    assert [path.name for path in cache.iterdir()] == [".thing.lock"]


def test_what_cannot_be_read_is_not_the_caches_mistake_and_what_cannot_be_written_is(cache, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="absent"):
        cached("thing", lambda _: (tmp_path / "absent").read_text())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file cannot be written \(File exists\): set CO2_CACHE"):
        cached("thing", build)


def test_another_host_may_be_first(cache: Path):
    def late(target: Path) -> None:
        (target / "content").write_text("late")
        build_whole(cache / "thing", lambda first: (first / "content").write_text("first"))

    assert (cached("thing", late) / "content").read_text() == "first"


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keys_name_every_sample_of_an_epoch_once_over_all_workers():
    recipe = SimpleNamespace(seed=7, batch_size=4)
    parts = [list(train_keys(recipe, 10, rank, 2, 1, 4)) for rank in (0, 1)]
    assert [batch for batch, _ in parts[1]] == [(7, 0, 1, 1), (7, 1, 0, 1), (7, 1, 1, 1)]
    assert all(key[:2] == batch[:2] for part in parts for batch, keys in part for key in keys)
    second = [i for part in parts for batch, keys in part if batch[1] == 1 for *_, i in keys]
    assert len(set(second)) == 8 and set(second) <= set(range(10))
    whole = [keys for _, keys in train_keys(recipe, 10, 0, 1, 1, 4)]
    assert [sum((part[step][1] for part in parts), []) for step in range(3)] == whole


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_held_out_sample_is_one_workers(workers: int):
    found = [list(eval_keys(7, 2, rank, workers)) for rank in range(workers)]
    assert all(1 <= len(batch) <= 2 for batches in found for batch in batches)
    keys = sorted(key for batches in found for batch in batches for key in batch)
    assert keys == [(0, 0, i) for i in range(7)]
