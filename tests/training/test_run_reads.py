"""Behind a boundary a run reads only what a GPU has passed; a CPU stands in for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import core.stats
import training.run
from core.rounds import Rounds
from tests.runs import rows
from tests.training.test_run import train
from training.folder import RoundLog
from training.run import Run


def numbers(folder: Path) -> list[str]:
    """What a run has logged, without times."""
    timed = ("seconds", "hidden_share", "link_mbit")
    return sorted(str({name: v for name, v in row.items() if not name.endswith(timed)}) for row in rows(folder))


class StandIn:
    """A CPU in a GPU's place: notes what the host reads of a tensor, and waits for, in Run.after_step."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.step, self.within, self.reads, self.waits = 0, False, 0, 0
        stand_in, after_step, method_step = self, Run.after_step, Rounds.step

        class Event:
            def __init__(self) -> None:
                self.step = stand_in.step

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                stand_in.waits += 1
                assert not stand_in.within or self.step < stand_in.step, "the host waits for this very step"

            def elapsed_time(self, end: Any) -> float:
                return 0.0

        def logs(run: Run, closed: bool, **scalars: Any) -> Any:
            stand_in.within = True
            due = after_step(run, closed, **scalars)
            stand_in.within = False
            return due

        def steps(method: Rounds, **how: Any) -> bool:
            stand_in.step += 1
            return method_step(method, **how)

        def read(t: torch.Tensor) -> Any:
            stand_in.reads += stand_in.within
            return t.tolist()

        patch.setattr(Run, "after_step", logs)
        patch.setattr(Rounds, "step", steps)
        patch.setattr(torch.Tensor, "item", read)
        patch.setattr(torch.Tensor, "__float__", read)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(core.stats, "mark", lambda device, stream=None: Event())
        patch.setattr(core.stats, "read_blocks", lambda t: True, raising=False)
        patch.setattr(training.run, "RoundLog", lambda r, folder, _: RoundLog(r, folder, torch.device("cuda")))


def test_behind_a_boundary_the_host_reads_only_what_a_gpu_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train(tmp_path / "cpu", 10)
    with monkeypatch.context() as patch:
        stand_in = StandIn(patch)
        train(tmp_path / "gpu", 10)
    assert stand_in.reads == 0 and stand_in.waits and numbers(tmp_path / "gpu") == numbers(tmp_path / "cpu")
