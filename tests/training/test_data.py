"""What tasks share: the folder of data sets, the cache, samples' keys, which of them a worker sees, counters."""

import errno
import json
import multiprocessing
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import record_function

from core import RoundStats, UserError
from language.finetune_recipes import RECIPES as FINETUNE
from tests.imports import ROOT
from tests.scripts import Mistakes
from training.counters import Period, Stopwatch
from training.data.files import build_whole, cached, data_root
from training.data.samples import (
    epoch_batches,
    eval_keys,
    generator,
    load_batches,
    mix,
    per_worker,
    seeded,
    steps_per_epoch,
    train_keys,
)
from training.folder.rounds import RoundLog
from training.recipe import Recipe, parse
from training.start.errors import explained
from training.start.script import from_home, parse_options
from vision.recipes import RECIPES

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


# -- which samples a worker sees --------------------------------------------------------------------------------------


def shares(world_size: int, epoch: int = 0, seed: int = 0) -> torch.Tensor:
    """[steps, batch] of all workers side by side."""
    parts = [epoch_batches(103, 12, seed=seed, epoch=epoch, rank=r, world_size=world_size) for r in range(world_size)]
    return torch.cat(parts, dim=1)


def test_a_key_gives_always_the_same_number_and_generator_and_others_give_others():
    assert mix(0, 1, 2) == 8427206145701047172, "runs that are resumed go on with the same data"
    assert len({mix(0, i) for i in range(1000)} | {mix(i, 0) for i in range(1, 1000)}) == 1999
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0)]
    draws = {torch.rand(3, generator=generator(*key)).sum().item() for key in keys}
    assert len(draws) == len(keys)
    assert torch.equal(torch.rand(3, generator=generator(5, 6)), torch.rand(3, generator=generator(5, 6)))


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own_whatever_the_workers():
    seen = shares(4).flatten()
    assert len(seen) == 96 and len(seen.unique()) == 96 and seen.min() >= 0 and seen.max() < 103
    assert torch.equal(shares(1), shares(3)) and torch.equal(shares(1), shares(4))
    assert not torch.equal(shares(2), shares(2, epoch=1)) and not torch.equal(shares(2), shares(2, seed=1))
    assert not torch.equal(shares(2, epoch=1), shares(2, seed=1)), "neighbouring keys must not coincide"


def test_a_batch_that_does_not_divide_or_is_larger_than_the_data_is_refused():
    for batch, workers in ((10, 4), (0, 2), (-4, 2)):
        with pytest.raises(UserError, match=f"batch_size={batch} .* multiple of {workers}"):
            per_worker(batch, workers)
    assert steps_per_epoch(100, 30) == 3
    with pytest.raises(UserError, match="batch_size=200 .* exceeds the 100 training samples"):
        steps_per_epoch(100, 200)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_loading_processes_outlive_the_signals_that_stop_a_run(number: signal.Signals):
    """Slurm sends them to all processes of a job; the worker still takes the batches of its last rounds."""
    others = multiprocessing.active_children()
    batches = load_batches(torch.arange(40), iter([[i] for i in range(40)]), 2)  # type: ignore[arg-type]
    seen = [next(batches).item() for _ in range(2)]  # one of each process
    loading = [process for process in multiprocessing.active_children() if process not in others]
    assert len(loading) == 2
    for process in loading:
        os.kill(process.pid, number)
    assert seen + [batch.item() for batch in batches] == list(range(40))


def test_a_batch_that_a_loading_process_cannot_hand_over_is_an_error_and_no_wait():
    def waits(*_: Any) -> None:
        raise TimeoutError

    batches = load_batches(torch.arange(2), iter([[0]]), 1, collate=lambda _: lambda: 0)  # type: ignore[arg-type]
    before = signal.signal(signal.SIGALRM, waits)
    signal.alarm(30)
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker .*exited unexpectedly"):
            next(batches)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_evaluations_keep_their_loading_processes():
    def evaluate(count: int = 9, workers: int = 2) -> tuple[list[int], set[int | None]]:
        batches = load_batches(torch.arange(9), iter([[i] for i in range(count)]), workers, keeper=keeper)  # type: ignore[arg-type]
        found = [batch.item() for batch in batches]
        return found, {process.pid for process in multiprocessing.active_children()} - others

    keeper, others = SimpleNamespace(), {process.pid for process in multiprocessing.active_children()}
    first, processes = evaluate()
    assert first == list(range(9)) and len(processes) == 2
    assert next(load_batches(torch.arange(9), iter([[i] for i in range(9)]), 2, keeper=keeper)) == 0  # and left early
    assert evaluate() == (first, processes)
    again, fresh = evaluate(count=5)
    assert again == first[:5] and fresh.isdisjoint(processes), "other workers share the set otherwise"
    assert evaluate(workers=0)[0] == first


class Drawn:
    """What a sample's transform draws from the three global generators."""

    def __getitem__(self, seed: int) -> tuple[float, float, float]:
        with seeded(seed):
            return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_samples_random_numbers_are_the_same_in_any_process():
    keys = [[2**40 + 1, 7], [7, 5]]
    here, there = ([batch for batch in load_batches(Drawn(), iter(keys), n)] for n in (0, 1))  # type: ignore[arg-type]
    assert [[x.tolist() for x in batch] for batch in here] == [[x.tolist() for x in batch] for batch in there]
    before = torch.get_rng_state(), random.getstate()
    Drawn()[3]
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


LEFT_OPEN = """
import gc
from core import UserError
from training.data.samples import load_batches

class Broken:
    def __getitem__(self, index):
        if index:
            raise UserError("a broken file")
        return 0

batches = load_batches(Broken(), iter([[0], [1], *[[0]] * 9]), 2)
kept = next(batches) if ending != "broken" else None
gc.disable()
try:
    if ending == "broken":
        kept = list(batches)
except UserError as error:
    kept = error
if ending == "crash":
    raise RuntimeError("in the loop")
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["broken", "open", "crash"])
def test_no_loading_process_holds_up_the_end_of_its_worker(ending: str) -> None:
    command = [sys.executable, "-c", f"ending = {ending!r}\n{LEFT_OPEN}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == (ending == "crash"), ended.stderr
    assert "DataLoader" not in ended.stderr, "the end of the processes is no failure"


# -- when something is due, means, the clock, and the trace -----------------------------------------------------------


def test_every_fires_once_per_period_even_when_asked_late():
    every = Period(10)
    assert [step for step in range(1, 45) if step % 7 == 0 and every.due(step)] == [14, 21, 35, 42]
    assert not any(Period(0).due(step) for step in range(100))
    assert not Period(10, start=25).due(29) and Period(10, start=25).due(30)


def test_the_clock_stands_still_in_a_pause_and_goes_on_where_a_run_ended(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Stopwatch()
    assert clock.seconds == 0.0
    clock.start(7.0)
    now[0] += 2
    with clock.paused():
        now[0] += 50
        assert clock.seconds == 9.0
    now[0] += 3
    assert clock.seconds == 12.0


def closed_rounds(folder: Path, count: int) -> list[str]:
    """What the log of so many rounds notes, with a trace in the folder."""
    notes: list[str] = []
    of: Any = SimpleNamespace(path=folder, log=lambda *_: None, note=lambda step, name, text: notes.append(text))
    log = RoundLog(Recipe(trace=True), of, torch.device("cpu"))
    method: Any = SimpleNamespace(tau=3, stats=RoundStats(), compression=None)
    for i in range(count):
        with record_function(f"local step {i}"):
            torch.ones(3).sum()
        log.close_round(i, method)
    log.finish(count)
    return notes


def test_the_trace_covers_two_rounds_and_is_written_where_a_run_ends_early(tmp_path: Path):
    assert closed_rounds(tmp_path, 1) == ["no trace: the run has closed too few rounds"]
    for count, traced in ((6, {"local step 2", "local step 3"}), (3, {"local step 2"})):
        assert closed_rounds(tmp_path, count) == [f"trace in {tmp_path}/trace.json"]
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert {name for event in events if str(name := event.get("name")).startswith("local step")} == traced


# -- paths with ~, what is not installed, and numbers that JSON does not have -----------------------------------------


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_home_is_put_in_and_a_user_who_is_not_there_is_named(home: Path, monkeypatch: pytest.MonkeyPatch):
    user = f"~{os.environ.get('USER', 'root')}"
    wanted = {"~/run": home / "run", "~": home, "~/a/~b": home / "a/~b", user: Path(os.path.expanduser(user))}
    for typed, path in wanted.items():
        assert from_home(typed) == path and from_home(Path(typed)) == path
    assert from_home("a/~/b") == Path("a/~/b") and from_home("/x/~") == Path("/x/~")
    for typed in ("~nobodyhere", "~nobodyhere/run"):
        with pytest.raises(UserError, match=f"^{typed}: ~nobodyhere is no user here"):
            from_home(typed)
    monkeypatch.setenv("CO2_CACHE", "~nobodyhere/x")
    with pytest.raises(UserError, match="~nobodyhere is no user here"):
        cached("x", lambda folder: None)


def test_recipes_data_cache_and_commands_take_it(home: Path, monkeypatch: pytest.MonkeyPatch, mistake: Mistakes):
    assert parse(RECIPES, ["digits_small", "--out=~/run"]).out == home / "run"
    assert parse(RECIPES, ["digits_small", "--out", "~/run"]).folder == home / "run"
    found = parse(FINETUNE, ["prompts", "--model=~/m", "--data", "~/d", "--out=~/o"])
    assert (found.model, found.data, found.out) == (home / "m", home / "d", home / "o")
    monkeypatch.setenv("CO2_DATA", "~/data")
    monkeypatch.setenv("CO2_CACHE", "~/cache")
    assert data_root() == home / "data" and cached("x", lambda folder: None) == home / "cache" / "x"

    @dataclass(frozen=True)
    class Asked:
        out: Path
        plot: Path | None = None
        name: str = "~"
        texts: tuple[Path, ...] = ()

    typed = ["--out", "~/a", "--plot=~/b.png", "--texts", "~/c", "d"]
    assert parse_options(Asked, args=typed) == Asked(home / "a", home / "b.png", "~", (home / "c", Path("d")))

    def act(out: Path) -> Path:
        return out

    assert parse_options(act, args=["--out=~/a"]) == home / "a"
    (home / "cluster.json").write_text("[]")
    command = ["training.plan", "--cluster=~/cluster.json", "--model=gpt-125m", "--batch=8"]
    assert f"{home}/cluster.json is no report of the doctor (format 1)" in mistake(*command)


def test_a_librarys_error_is_one_line_and_a_lack_of_memory_stays_one():
    with pytest.raises(UserError, match=r"^x: bad \(KeyError: 'a'\): mend it$"), explained("x: bad", "mend it"):
        raise KeyError("a")
    for error in (UserError("own words"), MemoryError("no room")):
        with pytest.raises(type(error), match=f"^{error}$"), explained("x: bad", "mend it"):
            raise error


def test_what_is_not_installed_is_one_line():
    """As after `pip install .`, which brings torch and numpy alone."""
    code = (
        "import importlib.util, runpy, sys; real = importlib.util.find_spec\n"
        "_, gone, target = sys.argv; sys.path.insert(0, '.'); sys.argv = [target, '--help']\n"
        "importlib.util.find_spec = lambda n, *a: None if n in gone.split(',') else real(n, *a)\n"
        "runpy.run_path(target, run_name='__main__') if target.endswith('.py') else "
        "runpy.run_module(target, run_name='__main__')\n"
    )
    for gone, target, extra in (
        ("tyro", "reproduce.py", "tasks"),
        ("tyro,tqdm", "vision.train", "tasks"),
        ("timm", "vision.train", "tasks"),
        ("transformers", "language.prepare", "language"),
        ("mmseg", "segmentation.train", "segmentation"),
    ):
        done = subprocess.run([sys.executable, "-c", code, gone, target], cwd=ROOT, capture_output=True, text=True)
        line = f"error: {gone.replace(',', ' and ')} not installed: run pip install -e '.[{extra}]' in the repository\n"
        assert (done.returncode, done.stderr) == (2, line), target
