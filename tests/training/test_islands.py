"""Elastic workers of two ranks: an island comes and goes as a whole, and all ranks stay equal."""

import gc
import json
import signal
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.chaos.crew import Crew, group
from core import CO2Config, CompressionConfig, UserError, testing
from core.elastic import island
from core.elastic.members import Members
from tests.runs import logged, summary
from tests.training.elastic_toy import STEPS, Toy, toy
from training.checks import check_start
from training.launch import per_node


def elastic(folder: Path, *args: Any, restarts: int = 0, kind: type | None = None, **more: Any) -> dict[str, Any]:
    """Runs two islands of two ranks. What each rank that came to the end held."""
    target = (kind or Target)(more | {"comes": restarts > 0 and args[0] is not None})
    crew = Crew(testing._context(), target, (str(folder), True, *args), 4, restarts, late=150, island=2)
    assert crew.run() == 0 and not crew.timed_out
    return ends(folder, apart="co2" in more)


@dataclass
class Target:
    more: dict[str, Any]

    def __call__(self, *args: Any) -> None:
        toy(*args, **self.more)


def ends(folder: Path, apart: bool = False) -> dict[str, Any]:
    """What each rank held. apart: whether islands may differ at boundaries, which the ranks of one may not."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for name, end in found.items():
        first = next(e for n, e in found.items() if not apart or n.partition(".")[0] == name.partition(".")[0])
        assert end["held"] == [*found.values()][0]["held"]
        for step in end["trace"].keys() & first["trace"].keys():
            assert end["trace"][step] == first["trace"][step], step
    return found


def test_without_a_loss_it_is_a_run_with_nodes(tmp_path: Path):
    """Up to rounding, on the same samples. The averages of BatchNorm's buffers are a fixed run's."""
    ours, other = elastic(tmp_path), tmp_path / "fixed"
    assert sorted(ours) == ["0.0of0", "0.0of1", "1.0of2", "1.0of3"]
    other.mkdir()
    assert group(testing._context(), toy, (str(other), False), 4) == (0, False)
    for file, end in sorted(ours.items()):
        theirs = json.loads((other / f"of{file[-1]}.json").read_text())
        assert end["seen"] == theirs["seen"]
        for mine, its in zip(end["held"], theirs["held"], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("format", "fragments"), [pytest.param("float32", 1, marks=pytest.mark.slow), ("int4", 3)])
def test_the_ranks_of_an_island_merge_together(tmp_path: Path, format: Any, fragments: int):
    """On arrival, of which only the leader knows. `ends` compares the ranks of each island at each boundary."""
    late: Any = {"gap": "none", "outer_momentum": 0.0, "merge": "keep_local", "delay": "auto", "fragments": fragments}
    co2 = CO2Config(3, compression=CompressionConfig(format), **late)
    assert sorted(elastic(tmp_path, co2=co2)) == ["0.0of0", "0.0of1", "1.0of2", "1.0of3"]


def test_the_islands_group_outlives_ddp():
    """DDP's reducer would destroy it with the GIL held, while its thread waits for the GIL: seldom, and for ever."""
    island.connect(Members(dist.HashStore(), "0.0"), torch.device("cpu"))
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is not None


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "lost", "left"),
    [
        (("step 3", KILL, 9), "1", ["0.0of0", "0.0of1", "1.1of2", "1.1of3"]),
        (("step 0", KILL, 8), "0", ["0.1of0", "0.1of1", "1.0of2", "1.0of3"]),
        (("evaluation 1", KILL, 6), "0", ["0.1of0", "0.1of1", "1.0of2", "1.0of3"]),
        (("step 3", STOP, 9), "1", ["0.0of0", "0.0of1", "1.1of2", "1.1of3"]),
    ],
    ids=["follower", "leader", "evaluation", "stopped"],
)
def test_an_island_goes_and_comes_back_as_a_whole(
    tmp_path: Path, harm: Any, lost: str, left: list[str], capsys: pytest.CaptureFixture
):
    more = {"timeout": 10.0} if harm[1] == STOP else {}
    found = elastic(tmp_path, harm, restarts=1, **more)
    assert sorted(found) == left
    notes = logged(tmp_path / "run", "workers")
    assert notes == [f"1 workers: {lost}.0 lost", f"2 workers: {lost}.1 came"]
    told = capsys.readouterr().err
    assert told.count("restarting it") == 1 and told.count("silent for too long") == (harm[1] == STOP)
    assert summary(tmp_path / "run")["steps"] == STEPS


def test_what_it_does_not_go_with_is_refused_in_one_line():
    check_start(replace(Toy(elastic=True), co2=replace(CO2Config.recommended(), tau=2)), 4)
    with pytest.raises(UserError, match="^per_node=3 does not divide the 4 ranks"):
        Crew(testing._context(), toy, (), 4, island=3)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("", 1), ("--per_node 2 --elastic", 2), ("--per-node=2", 2), ("--per_node 0", 0), ("--per_node x", 1)],
)
def test_the_launcher_reads_how_many_ranks_a_worker_has(words: str, ranks: int):
    assert per_node(words.split()) == ranks
