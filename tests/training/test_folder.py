"""The run folder: who may write to it, what a resumed run may change, and what its files hold."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import training.folder.settings as of_run
from core import UserError
from core.testing import _context
from tests.runs import Plain as Toy
from tests.runs import rows
from training.counters import Stopwatch
from training.folder.run_folder import RunFolder
from training.optim import OptimConfig


def start(recipe: Toy, step: int = 0, *lines: int, total: int = 100) -> RunFolder:
    """Begins after `step` of `total`, logs lines at some steps, and leaves the folder open."""
    folder = RunFolder(recipe.folder, 0, Stopwatch())
    folder.open(recipe, 1, torch.device("cpu"))
    folder.begin(step, total)
    for at in lines:
        folder.log(at, {"loss": float(at)})
    return folder


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder)]


def test_a_resumed_run_forgets_what_was_logged_after_its_checkpoint(tmp_path: Path):
    recipe = Toy(out=tmp_path)
    start(recipe, 0, 1, 2, 3, 4).close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # killed here
    (tmp_path / "summary.json").write_text("{}")
    start(replace(recipe, resume=True), 2, 3, 4).close()
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert not (tmp_path / "summary.json").exists(), "it told of the run before"
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [event.step for event in events] == [1, 2, 3, 4]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    start(replace(recipe, resume=True), 2, 3).close()
    assert steps(tmp_path) == [1, 3]


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_resumed_run_with_other_settings_is_refused_and_leaves_the_folder_alone(tmp_path: Path):
    recipe = Toy(out=tmp_path)
    start(recipe, 0, 1).close()
    before = (tmp_path / "config.json").read_bytes()
    other = replace(recipe, resume=True, method="ddp", seed=1, optim=OptimConfig(lr=0.5), log_every=3)
    with pytest.raises(UserError) as caught:
        start(other)
    said = f"{tmp_path} holds another run (method: co2 -> ddp, optim.lr: 0.1 -> 0.5, seed: 0 -> 1): resume with its"
    assert str(caught.value).startswith(said) and (tmp_path / "config.json").read_bytes() == before


@dataclass(frozen=True)
class Text(Toy):
    """A recipe whose epochs are steps."""

    epoch_steps: int | None = None


@pytest.mark.parametrize("length", [{"epochs": 90}, {"epochs": 5}, {"epoch_steps": 100}])
def test_another_length_is_refused_for_the_learning_rate_has_followed_the_first(length: dict[str, int], tmp_path: Path):
    recipe = Text(out=tmp_path)
    start(recipe, 0, 1).close()
    before = (tmp_path / "config.json").read_bytes()
    said = r"of another length \((epochs: 10|epoch_steps: None) -> \d+\), which .*: resume .* --extend .* --out"
    with pytest.raises(UserError, match=said):
        start(replace(recipe, resume=True, **length))
    assert (tmp_path / "config.json").read_bytes() == before
    start(replace(recipe, resume=True, extend=True, **length), 1).close()
    start(replace(recipe, resume=True, **length), 2).close()  # by now its length
    now = config(tmp_path)
    assert now["recipe"]["extend"] and now["history"][-1]["changed"] == []


def test_a_resumed_run_may_go_on_for_longer_and_says_since_when(tmp_path: Path):
    recipe = Toy(out=tmp_path)
    start(recipe, 0, 1, 2, 3).close()
    first = config(tmp_path)
    longer = replace(recipe, resume=True, epochs=20, extend=True, log_every=3, gpu_gb=80.0, recompute=True)
    start(longer, 2).close()
    start(longer, 3).close()
    now = config(tmp_path)
    assert now["recipe"]["epochs"] == 20 and now["command"] == first["command"]
    one, two = now["history"]
    changed = {"epochs: 10 -> 20", "log_every: 10 -> 3", "gpu_gb: None -> 80.0", "recompute: False -> True"}
    assert set(one.pop("changed")) == changed | {"resume: False -> True", "extend: False -> True"}
    assert two.pop("changed") == [] and (one.pop("step"), two.pop("step")) == (2, 3)
    assert one == two == {"command": sys.argv, "commit": first["commit"], "world_size": 1}


class Bare(Toy):
    """A recipe of a task without BatchNorm."""

    batch_norm = False


@pytest.mark.parametrize(("kind", "dropout", "free"), [(Toy, 0.0, False), (Bare, 0.0, True), (Bare, 0.1, False)])
def test_micro_batches_may_change_where_they_do_not_change_the_numbers(
    kind: Any, dropout: float, free: bool, tmp_path: Path
):
    text = dataclass(frozen=True)(type("Made", (kind,), {"__annotations__": {"dropout": float}, "dropout": dropout}))
    recipe = text(out=tmp_path)
    start(recipe, 0, 1).close()
    if free:
        start(replace(recipe, resume=True, accumulate=2), 1).close()
    else:
        with pytest.raises(UserError, match=r"another run \(accumulate: 1 -> 2\)"):
            start(replace(recipe, resume=True, accumulate=2), 1)


def test_a_run_shorter_than_what_was_done_is_refused_and_leaves_the_folder_alone(tmp_path: Path):
    recipe = Toy(out=tmp_path)
    start(recipe, 0, 1, 2, 3).close()
    (tmp_path / "summary.json").write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(UserError, match=r"has done 3 steps, and a run of this length has 2: give more --epochs"):
        start(replace(recipe, resume=True, extend=True, epochs=1), 3, total=2)
    assert {file: file.read_bytes() for file in before} == before


def test_a_field_or_a_default_that_has_changed_since_is_no_other_run_but_for_the_runs_own_method(tmp_path: Path):
    recipe = Toy(out=tmp_path, resume=True)
    start(recipe, 0, 1).close()
    older = config(tmp_path)
    del older["recipe"]["precision"], older["recipe"]["co2"]["merge"]
    (tmp_path / "config.json").write_text(json.dumps(older))
    with pytest.raises(UserError, match=r"holds another run \(precision: float32 -> bfloat16\)"):
        start(replace(recipe, precision="bfloat16"))
    start(recipe, 1, 2).close()
    assert config(tmp_path)["history"][-1]["changed"] == []
    recipe = Toy(out=tmp_path, resume=True)
    start(recipe, 0, 1).close()
    older = config(tmp_path)
    older["recipe"]["slowmo"]["outer_lr"] = older["recipe"]["co2"]["outer_lr"] = 0.2
    (tmp_path / "config.json").write_text(json.dumps(older))
    with pytest.raises(UserError, match=r"holds another run \(co2.outer_lr: 0.2 -> 1.0\)"):
        start(recipe)
    older["recipe"]["co2"]["outer_lr"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(older))
    start(recipe, 1, 2).close()
    assert config(tmp_path)["history"][-1]["changed"] == ["slowmo.outer_lr: 0.2 -> 1.0"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"recipe": 3}', "{}"])
def test_a_damaged_config_is_one_line(content: str, tmp_path: Path):
    start(Toy(out=tmp_path), 0, 1).close()
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="config.json is damaged .*: restore it, or remove it and resume with the"):
        start(Toy(out=tmp_path, resume=True))
    (tmp_path / "config.json").unlink()
    start(Toy(out=tmp_path, resume=True), 1, 2).close()
    assert steps(tmp_path) == [1, 2] and config(tmp_path)["recipe"]["seed"] == 0


@pytest.mark.parametrize("name", [".lock", "config.json", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["a FIFO", "a device", "a folder"])
def test_what_is_no_file_in_a_files_place_is_one_line_at_once(name: str, kind: str, tmp_path: Path):
    start(Toy(out=tmp_path), 0, 1).close()
    (file := tmp_path / name).unlink()
    {"a FIFO": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero"), "a folder": Path.mkdir}[kind](file)
    with pytest.raises(UserError, match=f"^{file} is no regular file: remove it, or put the file back$"):
        start(Toy(out=tmp_path, resume=True))


def test_config_and_summary_are_on_the_disk_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a power cut, which a rename may survive and the content not."""
    flushed, fsync, replaced = [], os.fsync, os.replace

    def replace_(fresh: Path, file: Path) -> None:
        assert str(fresh) in flushed, "its content first"
        replaced(fresh, file)
        named.append(file.name)

    named: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda number: (fsync(number), flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    )
    monkeypatch.setattr(os, "replace", replace_)
    folder = start(Toy(out=tmp_path))
    folder.summarise(Toy(out=tmp_path), {"steps": 3})
    folder.close()
    assert {"config.json", "summary.json"} <= {*named}


def test_a_failed_start_does_not_block_its_folder(tmp_path: Path):
    start(Toy(out=tmp_path)).close()  # nothing was logged or saved
    start(Toy(out=tmp_path, seed=1), 0, 1).close()
    assert config(tmp_path)["recipe"]["seed"] == 1
    with pytest.raises(UserError, match="holds a run: add --resume"):
        start(Toy(out=tmp_path))


def hold(folder: Path, pipe: Any) -> None:
    opened = start(Toy(out=folder), 0, 1)
    pipe.send("holds it")
    pipe.recv()
    opened.close()


def test_two_runs_do_not_write_to_one_folder_and_a_dead_one_does_not_block_it(tmp_path: Path):
    ours, theirs = _context().Pipe()
    holder = _context().Process(target=hold, args=(tmp_path, theirs), daemon=True)
    holder.start()
    assert ours.recv() == "holds it"
    with pytest.raises(UserError, match=f"{tmp_path} is in use by process {holder.pid} on .*: wait for its end, "):
        start(Toy(out=tmp_path, resume=True))
    (tmp_path / ".lock").write_text("")  # as an NFS client may see it before the holder's name
    with pytest.raises(UserError, match=f"{tmp_path} is in use by another process: wait"):
        start(Toy(out=tmp_path, resume=True))
    assert steps(tmp_path) == [1]
    holder.kill()
    holder.join()
    start(Toy(out=tmp_path, resume=True), 1, 2).close()
    assert steps(tmp_path) == [1, 2]


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    start(Toy(out=tmp_path), 0, 1).close()
    assert "warning: " in (said := capsys.readouterr().err) and "start no second run there" in said


def test_weights_to_start_from_must_stay_until_a_checkpoint_replaces_them(tmp_path: Path):
    start(Toy(out=tmp_path, init_from=Path("w")), 0, 1).close()
    with pytest.raises(UserError, match="another run .init_from: w -> None"):
        start(Toy(out=tmp_path, resume=True))
    (tmp_path / "checkpoints/step000000001").mkdir(parents=True)
    start(Toy(out=tmp_path, resume=True)).close()


@pytest.mark.parametrize("name", ["/proc/nope", "file/below", "x" * 300, "zero\0byte"])
def test_a_folder_that_cannot_be_is_one_line(name: str, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .*: choose another --out"):
        start(Toy(out=tmp_path / name))


def test_a_summary_holds_numbers_or_null(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = start(Toy(out=tmp_path))
    folder.summarise(Toy(out=tmp_path), {"loss": float("nan"), "norm": float("inf"), "steps": 3})
    folder.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": None, "norm": None, "steps": 3}
    assert capsys.readouterr().err == "warning: no finite number, null in summary.json: loss, norm\n"


def test_a_commit_is_dirty_where_code_is_and_not_where_results_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for name in ("training/folder/run_folder.py", "results/page.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("before\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(of_run, "__file__", str(tmp_path / "training/folder/run_folder.py"))
    clean = of_run.commit()
    assert clean and "dirty" not in clean
    (tmp_path / "results/page.md").write_text("measured\n")
    assert of_run.commit() == clean
    (tmp_path / "training/folder/run_folder.py").write_text("changed\n")
    assert of_run.commit() == f"{clean}-dirty"
    monkeypatch.setattr(of_run, "__file__", "/no/such/settings.py")
    assert of_run.commit() == ""
