"""Checkpoints: whole ones of one attempt are loaded, by all workers alike, and damaged ones are refused by name."""

import errno
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import CO2Config, UserError
from core.checkpoint import runs as checkpoint
from core.checkpoint import stored
from core.testing import _context
from tests.damages import DAMAGES as OF_FILES
from tests.damages import Hostile, changed, forbid, names, signed
from tests.on_ranks import on_ranks
from tests.problems import refusal
from tests.runs import Loop, Toy
from training.loop.run import Run


def save(folder: Path, *steps: int, rank: int = 0, world_size: int = 1, attempt: str = "1-a", **state: Any) -> None:
    for step in steps:
        saver = checkpoint.Saver(folder, rank, world_size, attempt)
        held = {"step": step, "tensor": torch.full((1000,), float(step)), "rank": torch.full((10,), rank)} | state
        saver.start(step, stored.on_host(held))
        saver.close()


def load(folder: Path, rank: int = 0, world_size: int = 1) -> Any:
    """The step that is loaded; None for none."""
    found = checkpoint.load_newest(folder, rank=rank, needs={"tensor": torch.Tensor, "rank": torch.Tensor})
    if found is None:
        return None
    state, workers = found
    assert torch.equal(state["tensor"], torch.full((1000,), float(state["step"])))
    assert torch.equal(state["rank"], torch.full((10,), rank % workers))
    return state["step"]


def test_the_last_two_are_kept_and_what_was_not_finished_is_ignored(tmp_path: Path):
    save(tmp_path, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step000000002", "step000000003"]
    (tmp_path / "step000000003").rename(tmp_path / "step000000003.tmp-a")  # killed before that
    (tmp_path / "stepfoo").mkdir()  # somebody else's
    assert load(tmp_path) == 2
    save(tmp_path, 3, attempt="2-b")
    assert load(tmp_path) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step000000002", "step000000003", "stepfoo"]
    assert load(tmp_path / "nothing") is None


def test_a_manifest_says_how_long_it_took_since_the_round_closed(tmp_path: Path):
    saver = checkpoint.Saver(tmp_path, 0, 1, "a")
    saver.start(1, {"step": 1}, begun=time.monotonic() - 7)
    saver.close()
    text = (tmp_path / "step000000001" / "manifest.json").read_text()
    assert 7 <= json.loads(text)["seconds"] < 60 and '\n "seconds": ' in text, "slurm/launch.sh looks for such a line"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    where = content.find(torch.full((100,), 2.0).numpy().tobytes())  # within `tensor`; else in the middle
    content[where if where >= 0 else len(content) // 2] ^= 1
    path.write_bytes(content)


def in_its_place(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    return lambda path: (path.unlink(), make(path))[1]


FILE = "rank0.pt"
FIFO, DEVICE = in_its_place(os.mkfifo), in_its_place(lambda path: path.symlink_to("/dev/zero"))


def forged(write: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A file that somebody has written, with its right checksum."""
    return lambda path: (write(path), signed(path))[1]


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated": (FILE, OF_FILES["cut"], f"{FILE} is damaged, its size differs"),
    "a flipped bit": (FILE, flip, f"{FILE} is damaged, its checksum differs"),
    "no file": (FILE, Path.unlink, f"{FILE} is missing"),
    "another digest": ("manifest.json", names(lambda of: {FILE: of[FILE] | {"sha256": "0"}}), f"{FILE} is damaged"),
    "no digest": ("manifest.json", names(lambda of: {FILE: {}}), "it cannot be read, KeyError: 'bytes'"),
    "garbage": (FILE, forged(lambda path: path.write_bytes(b"garbage" * 999)), f"{FILE} cannot be read"),
    "hostile": (FILE, forged(lambda path: torch.save(Hostile(path.with_name("ran")), path)), f"{FILE} cannot be read"),
    "no dict": (FILE, forged(lambda path: torch.save([1], path)), "it cannot be read, "),
    "no such worker": (FILE, changed(lambda state: state["elsewhere"].update({"['step']": 7})), "rank7.pt"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json is missing"),
    "a worker more": ("manifest.json", names(lambda of: of | {"rank1.pt": of[FILE]}), "rank1.pt is missing"),
    "a FIFO": (FILE, FIFO, f"{FILE} is no regular file"),
    "a device": (FILE, DEVICE, f"{FILE} is no regular file"),
    "a word for a step": (FILE, changed(lambda state: state.update(step="x")), "it holds step 'x', unlike its name"),
    "no step": (FILE, changed(lambda state: state.pop("step")), "cannot be read, KeyError: 'step'"),
    "a part less": (FILE, changed(lambda state: state.pop("rank")), "it holds no rank: resume with what wrote it"),
    "of an older version": (
        "manifest.json",
        names(lambda of: {"rank0.json": "0" * 64}),
        "it is of an older version: resume with the version that wrote it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_refused_by_name_for_the_one_before(damage: str, tmp_path: Path, capfd: Any):
    name, spoil, reason = DAMAGES[damage]
    save(tmp_path, 1, 2)
    spoil(tmp_path / "step000000002" / name)
    assert load(tmp_path) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"warning: {tmp_path}/step000000002 is refused (rank 0: " in said, said
    assert reason in said and said.endswith("; going on from step000000001\n")
    spoil(tmp_path / "step000000001" / name)
    with pytest.raises(
        UserError, match="no other checkpoint is left; restore its files, or start afresh with another folder"
    ):
        load(tmp_path)
    assert not list(tmp_path.rglob("ran"))


def test_a_file_that_is_only_unreadable_is_no_reason_to_start_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1, 2)

    def denied(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr(stored, "file_digest", denied)
        load(tmp_path)
    assert f"{FILE} cannot be read, though it may be whole: the system answered 'Permission denied'" in str(
        caught.value
    )
    assert str(caught.value).endswith("no other checkpoint is left; make it readable and resume")
    assert load(tmp_path) == 2
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"read \(Permission denied\): change its perm"):
        forbid(tmp_path, patch)
        load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file cannot be read \(Not a directory\): change its permissions, or"):
        load(tmp_path / "file")


def test_a_manifest_is_on_the_disk_before_its_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed, fsync, rename = list[str](), os.fsync, Path.rename

    def renamed(path: Path, target: Path) -> Path:
        assert {Path(name).name for name in flushed if Path(name).parent == path} == {"manifest.json", FILE}
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", lambda n: (fsync(n), flushed.append(os.readlink(f"/proc/self/fd/{n}"))))
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, 1)
    assert load(tmp_path) == 1


def test_an_old_job_that_is_woken_leaves_the_checkpoints_of_a_later_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is woken before it writes, after it has written its files, and when it is about to remove some."""
    save(tmp_path, 1, 2, attempt="1-a")
    write = stored.write

    def woken(folder: Path, *rest: Any) -> Any:
        entry = write(folder, *rest)
        if folder.name.endswith("1-a"):
            save(tmp_path, 3, attempt="2-b")
        return entry

    taken = "step000000003 is of another start of this run, which has taken this one's place: nothing is written; end"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=taken):
        patch.setattr(stored, "write", woken)
        save(tmp_path, 4, attempt="1-a")
    for step in (3, 4):  # of the same step, and a later one
        with pytest.raises(UserError, match=taken):
            save(tmp_path, step, attempt="1-a")
    (tmp_path / "step000000005.tmp-2-b").mkdir()
    with pytest.raises(UserError, match=taken):
        checkpoint.tidy(tmp_path, 9, 1, "1-a")
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["step000000002", "step000000003", "step000000005.tmp-2-b"] and load(tmp_path) == 3
    assert checkpoint.new_attempt(tmp_path).startswith("3-")
    save(tmp_path, 2, attempt="3-c")  # which has gone on from before
    assert [p.name for p in tmp_path.iterdir()] == ["step000000002"]


@on_ranks(2)
def test_all_workers_take_the_newest_that_all_can_load(rank: int, tmp_path: Path):
    """Where what rank 1 wrote is damaged, and where rank 1 does not see the newest."""
    views = [tmp_path / "spoilt", tmp_path / ("ahead" if rank == 0 else "behind")]
    for name in ("spoilt", "ahead", "behind"):
        save(tmp_path / name, 1, 2, rank=rank, world_size=2)
    if rank == 1:
        os.truncate(views[0] / "step000000002" / "rank1.pt", 100)
        (views[1] / "step000000002").rename(views[1] / "later")
    dist.barrier()
    assert [load(view, rank, 2) for view in views] == [1, 1]


@on_ranks(2)
def test_a_model_that_is_not_finite_is_not_written_and_costs_no_other(rank: int, tmp_path: Path):
    """At steps 2 and 3 a number of rank 1's model is NaN, once in a tensor of no dimensions."""
    sys.stderr = said = io.StringIO()
    saver, written = checkpoint.Saver(tmp_path, rank, 2, "a"), []
    nan = torch.tensor(float("nan") if rank == 1 else 0.0)
    for step, spoilt in enumerate([{}, {"w": nan.expand(3)}, {"w": nan}, {}], 1):
        model: dict[str, Any] = {"v": torch.ones(3), "n": torch.tensor(2), "kind": "any"} | spoilt
        saver.start(step, stored.on_host({"model": model}))
        written.append(saver.wait())
    saver.close()
    sys.stderr = sys.__stderr__
    assert written == [True, False, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step000000001", "step000000004"]
    told = [f"warning: step {step}: the model of rank 1 is not finite" for step in (2, 3)]
    assert rank or [line.split(": no")[0] for line in said.getvalue().splitlines()] == told


@on_ranks(4)
def test_what_workers_share_is_written_once(rank: int, tmp_path: Path):
    """By hand: x is equal on all four workers, y on two and two, z differs."""
    held = {"x": torch.ones(3), "y": torch.full((3,), float(rank // 2)), "z": torch.full((3,), float(rank))}
    save(tmp_path, 1, rank=rank, world_size=4, **held)
    dist.barrier()
    files = [torch.load(tmp_path / "step000000001" / f"rank{rank}.pt", weights_only=True) for rank in range(4)]
    mine = [[name for name in "xyz" if file[name] is not None] for file in files]
    assert mine == [["x", "y", "z"], ["z"], ["y", "z"], ["z"]]
    assert {path: owner for path, owner in files[3]["elsewhere"].items() if path in ("['x']", "['y']", "['z']")} == {
        "['x']": 0,
        "['y']": 2,
    }


@on_ranks(2)
def test_a_full_disk_is_one_line_on_all_workers_and_leaves_the_checkpoint_before(rank: int, tmp_path: Path):
    save(tmp_path, 1, rank=rank, world_size=2)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    said = refusal(save, tmp_path, 2, rank=rank, world_size=2, own=torch.full((1000,), float(rank)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "step000000002 cannot be written (rank 1: File too large): make room or choose another folder" in said
    assert [p.name for p in tmp_path.iterdir()] == ["step000000001"]


OFTEN: dict[str, Any] = {"co2": CO2Config(tau=2), "checkpoint_every": "4steps", "recommended": False}


def train(folder: Path, resume: bool, until: int = 12) -> int:
    """A train script: the step that it began at."""
    with Run(Toy(out=folder, resume=resume, **OFTEN)) as run:
        loop = Loop(run, nn.Linear(4, 1), 12)
        for _ in range(loop.start, until):
            if loop.step(loop.wrapped(torch.ones(1, 4)).square().mean()).checkpoint:
                run.save()
    return loop.start


@pytest.mark.parametrize("part", ["method", "totals"])
def test_a_train_script_goes_on_from_the_one_before_if_a_part_is_missing(part: str, tmp_path: Path, capfd: Any):
    train(tmp_path, False, 9)
    changed(lambda state: state.pop(part))(tmp_path / "checkpoints/step000000008/rank0.pt")
    assert train(tmp_path, True, 4) == 4
    assert f"step000000008 is refused (rank 0: it holds no {part}: resume with what wrote it)" in capfd.readouterr().err


def old_job(folder: Path, pipe: Any) -> None:
    """A train script that is stopped before step 9 and woken later."""
    with pytest.raises(UserError) as caught, Run(Toy(out=folder, **OFTEN)) as run:
        loop = Loop(run, nn.Linear(4, 1), 12)
        for step in range(12):
            if step == 8:
                pipe.send("asleep")
                pipe.recv()
            if loop.step(loop.wrapped(torch.ones(1, 4)).square().mean()).checkpoint:
                run.save()
        run.end({})
    pipe.send(str(caught.value))


def test_a_woken_train_script_leaves_the_checkpoints_of_the_run_in_its_place_alone(tmp_path: Path):
    """After its lock file was removed, as the message advises where its machine is gone."""
    ours, theirs = _context().Pipe()
    job = _context().Process(target=old_job, args=(tmp_path, theirs), daemon=True)
    job.start()
    assert ours.recv() == "asleep"
    (tmp_path / ".lock").unlink()
    assert train(tmp_path, True) in (4, 8)
    before = {path: path.read_bytes() for path in tmp_path.glob("checkpoints/*/*")}
    ours.send("wake up")
    assert "is of another start of this run, which has taken this one's place: nothing is written" in ours.recv()
    job.join()
    assert {path: path.read_bytes() for path in tmp_path.glob("checkpoints/*/*")} == before
