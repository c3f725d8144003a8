"""Checkpoints: whole ones of one attempt are loaded, by all workers alike, and damaged ones are refused by name."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import UserError
from core.testing import run_distributed
from training import checkpoint


def save(folder: Path, *steps: int, rank: int = 0, world_size: int = 1, attempt: str = "a", **state: Any) -> None:
    for step in steps:
        held = {"step": step, "tensor": torch.full((1000,), float(step))} | state
        checkpoint.save(folder, step, held, rank=rank, world_size=world_size, attempt=attempt)


def load(folder: Path, rank: int = 0, world_size: int = 1) -> Any:
    """The step that is loaded; None for none."""
    state = checkpoint.load(folder, rank=rank, world_size=world_size)
    return state and state["step"]


def test_the_last_two_are_kept_and_what_was_not_finished_is_ignored(tmp_path: Path):
    save(tmp_path, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step000000002", "step000000003"]
    (tmp_path / "step000000003").rename(tmp_path / "step000000003.tmp-a")  # killed before that
    (tmp_path / "stepfoo").mkdir()  # somebody else's
    assert load(tmp_path) == 2
    save(tmp_path, 3, attempt="b")
    assert load(tmp_path) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step000000002", "step000000003", "stepfoo"]
    assert load(tmp_path / "nothing") is None


def test_another_number_of_workers_is_refused(tmp_path: Path):
    save(tmp_path, 1)
    with pytest.raises(UserError, match="step000000001 was written by 1 workers, this run has 2: resume with as many"):
        load(tmp_path, world_size=2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "truncated": ("rank0of1.pt", lambda path: os.truncate(path, path.stat().st_size // 2), "damaged, its checksum"),
    "empty": ("rank0of1.pt", lambda path: os.truncate(path, 0), "damaged, its checksum differs"),
    "garbage": ("rank0of1.pt", lambda path: path.write_bytes(b"garbage" * 99), "damaged, its checksum differs"),
    "a flipped bit": ("rank0of1.pt", flip, "damaged, its checksum differs"),
    "a key less": ("rank0of1.pt", lambda path: torch.save({"step": 2}, path), "damaged, its checksum differs"),
    "no part": ("rank0of1.pt", Path.unlink, "rank0of1.pt is missing"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json is missing"),
    "no such manifest": ("manifest.json", lambda path: path.write_text("[]"), "cannot be read"),
    "half a manifest": ("manifest.json", lambda path: os.truncate(path, 20), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_refused_by_name_for_the_one_before(damage: str, tmp_path: Path, capsys: Any):
    name, spoil, reason = DAMAGES[damage]
    save(tmp_path, 1, 2)
    spoil(tmp_path / "step000000002" / name)
    assert load(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"warning: {tmp_path}/step000000002 is refused (rank 0: " in said
    assert reason in said and said.endswith("; going on from step000000001\n")
    spoil(tmp_path / "step000000001" / name)
    with pytest.raises(UserError, match="no other checkpoint is left; start afresh with another --out"):
        load(tmp_path)


def on_all(rank: int, world_size: int, folder: str) -> list[Any]:
    """What is loaded where rank 1's part is damaged, and where rank 1 does not see the newest."""
    views = [Path(folder, "spoilt"), Path(folder, "ahead" if rank == 0 else "behind")]
    save(views[0], 1, 2, rank=rank, world_size=world_size)
    for view in (Path(folder, "ahead"), Path(folder, "behind")):
        save(view, 1, 2, rank=rank, world_size=world_size)
    if rank == 1:
        flip(views[0] / "step000000002" / "rank1of2.pt")
        (views[1] / "step000000002").rename(views[1] / "later")
    dist.barrier()
    return [load(view, rank, world_size) for view in views]


def test_all_workers_take_the_newest_that_all_can_load(tmp_path: Path):
    assert run_distributed(on_all, 2, str(tmp_path)) == [[1, 1], [1, 1]]


def killed(rank: int, world_size: int, folder: str, attempt: str, who: int) -> None:
    """Worker `who` is killed while it writes the second checkpoint."""
    place = {"rank": rank, "world_size": world_size, "attempt": attempt, "by": attempt}
    if attempt == "a":
        save(Path(folder), 1, **place)
    if rank == who:
        torch.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):  # the other's connection breaks
        save(Path(folder), 2, **place)


def attempts(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    state = checkpoint.load(Path(folder), rank=rank, world_size=world_size)
    assert state is not None
    return state["step"], state["by"]


def test_a_checkpoint_is_of_one_attempt(tmp_path: Path):
    for attempt, who in (("a", 0), ("b", 1)):
        run_distributed(killed, 2, str(tmp_path), attempt, who, expect_death=(0, 1))
    assert run_distributed(attempts, 2, str(tmp_path)) == [(1, "a")] * 2


def on_a_full_disk(rank: int, world_size: int, folder: str) -> str:
    save(Path(folder), 1, rank=rank, world_size=world_size)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    with pytest.raises(UserError) as caught:
        save(Path(folder), 2, rank=rank, world_size=world_size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(caught.value)


def test_a_full_disk_is_one_line_on_all_workers_and_leaves_the_checkpoint_before(tmp_path: Path):
    zero, one = run_distributed(on_a_full_disk, 2, str(tmp_path))
    assert zero == one and "\n" not in one
    assert "rank1of2.pt cannot be written (File too large): make room or name another --out" in one
    assert [p.name for p in tmp_path.iterdir()] == ["step000000001"]
