"""Elastic workers of two ranks: an island comes and goes as a whole, and all ranks stay equal."""

import gc
import json
import os
import signal
import time
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.chaos.crew import Crew, group
from core import CO2, CO2Config, CompressionConfig, UserError, testing
from core.baselines import table as methods
from core.elastic.island import Island
from core.elastic.members import Members
from tests.runs import Loop, logged, summary
from training.checks import check_start
from training.data.samples import generator, worker_batches
from training.elastic import repeated
from training.launch import _per_node
from training.loop.run import Run
from training.optim import OptimConfig
from training.recipe import Recipe

STEPS, SAMPLES, EPOCH = 48, 96, 6


@dataclass(frozen=True)
class Toy(Recipe):
    co2: CO2Config = CO2Config(tau=2)
    optim: OptimConfig = OptimConfig(lr=0.02)
    batch_size: int = 16
    log_every: int = 1
    per_node: int = 2
    timeout: float = 60.0
    device: str = "cpu"  # pyright: ignore


def across(params: Any, config: CO2Config, mesh: Any, shard: bool, offload: bool, **args: Any) -> CO2:
    """What a fixed run has instead of CO2, whose rounding is another: each rank holds all of the outer state."""
    return CO2(params, config, **args | {"group": mesh.get_group(0)})


def toy(folder: str, how: str, harm: tuple[str, int, int] | None = None, comes: bool = False, **more: Any) -> None:
    """A rank's run, `how`: elastic, fixed or across.

    harm: the first process of this RANK sends itself the signal after the step. comes: its island comes back.
    """
    if how == "across":
        methods.CO2 = across  # pyright: ignore
    recipe = Toy(name="toy", out=Path(folder, "run"), elastic=how == "elastic", **more)
    name, place = os.environ.get("CO2_WORKER", ""), os.environ["RANK"]
    where, number, after = harm or ("", 0, 0)

    def harmed(here: str) -> None:
        if where == f"{here} {place}" and name.endswith(".0") and run.step >= after:
            os.kill(os.getpid(), number)

    def batches(recipe: Toy, rank: int, world_size: int, start: int, total: int) -> Any:
        place = {"seed": 0, "rank": rank, "world_size": world_size, "start": start, "total": total}
        for _, _, index in worker_batches(SAMPLES, recipe.batch_size, **place):
            yield torch.stack([torch.randn(4, generator=generator(i)) for i in index.tolist()]).to(run.device)

    @repeated
    def evaluate() -> float:
        harmed("evaluation")
        total, count = run.sum(sum(p.sum().item() for p in loop.model.parameters()), 1.0)
        run.folder.log(run.step, {"mean": total / count})
        return total / count

    trace, seen = {}, list[Any]()
    with Run(recipe) as run:
        torch.manual_seed(int(os.environ["RANK"]))  # rank 0's parameters go to all
        if name.endswith(".1"):
            Path(folder, "came").touch()
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        loop = Loop(run, model, STEPS, EPOCH, SAMPLES)
        for x in run.batches(batches):
            harmed("step")
            while comes and run.step == 14 and not Path(folder, "came").exists():
                time.sleep(0.05)
            if comes and 14 < run.step < 40 and run.world_size < 4:
                time.sleep(0.5)  # until the island has joined
            due = loop.step((loop.wrapped(x) - x.sum(1, keepdim=True)).square().mean(), last=run.at_last_step)
            seen.append((run.step, x.flatten().tolist()))
            if loop.method.at_boundary:
                trace[run.step] = [v for p in model.parameters() for v in p.flatten().tolist()]
            if due.evaluation:
                evaluate()
            if due.checkpoint:
                run.save()
            if due.stop:
                return run.stop()
        loop.method.finish()
        held = [[v for t in kind for v in t.flatten().tolist()] for kind in (model.parameters(), model.buffers())]
        run.end({"mean": evaluate()})
    Path(folder, f"{name}of{place}.json").write_text(json.dumps({"held": held, "trace": trace, "seen": seen}))


def elastic(folder: Path, *args: Any, restarts: int = 0, kind: type | None = None, **more: Any) -> dict[str, Any]:
    """Runs two islands of two ranks. What each rank that came to the end held."""
    target = (kind or Target)(more | {"comes": restarts > 0 and args[0] is not None})
    crew = Crew(testing._context(), target, (str(folder), "elastic", *args), 4, restarts, late=150, island=2)
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


@pytest.mark.parametrize("how", ["across", pytest.param("fixed", marks=pytest.mark.slow)])
def test_without_a_loss_it_is_a_run_with_nodes(tmp_path: Path, how: str):
    """Bit for bit in the same formulas, on the same samples. The averages of BatchNorm's buffers are a fixed run's."""
    ours, other = elastic(tmp_path), tmp_path / how
    assert sorted(ours) == ["0.0of0", "0.0of1", "1.0of2", "1.0of3"]
    other.mkdir()
    assert group(testing._context(), toy, (str(other), how), 4) == (0, False)
    for file, end in sorted(ours.items()):
        theirs = json.loads((other / f"of{file[-1]}.json").read_text())
        assert end["seen"] == theirs["seen"]
        if how == "across":
            assert end["trace"] == theirs["trace"] and end["held"][0] == theirs["held"][0]
        else:
            for mine, its in zip(end["held"], theirs["held"], strict=True):
                torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("format", [pytest.param("float32", marks=pytest.mark.slow), "int4"])
def test_the_ranks_of_an_island_merge_together(tmp_path: Path, format: Any):
    """On arrival, of which only the leader knows. `ends` compares the ranks of each island at each boundary."""
    compression = CompressionConfig(format)
    co2 = CO2Config(3, gap="none", outer_momentum=0.0, merge="keep_local", delay="auto", compression=compression)
    assert sorted(elastic(tmp_path, co2=co2)) == ["0.0of0", "0.0of1", "1.0of2", "1.0of3"]


def test_the_islands_group_outlives_ddp(monkeypatch: pytest.MonkeyPatch):
    """DDP's reducer would destroy it with the GIL held, while its thread waits for the GIL: seldom, and for ever."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    island = Island.__new__(Island)
    island.size, island.rank, island.members = 1, 0, Members(dist.HashStore(), "0.0")
    island.connect(torch.device("cpu"))
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


@pytest.mark.slow
def test_the_last_island_goes_on_alone(tmp_path: Path):
    found = elastic(tmp_path, ("step 2", KILL, 9))
    assert sorted(found) == ["0.0of0", "0.0of1"]
    assert logged(tmp_path / "run", "workers") == ["1 workers: 1.0 lost"]


def test_what_it_does_not_go_with_is_refused_in_one_line():
    for given in ({"zero": 1}, {"shard": True}, {"offload": True}):
        with pytest.raises(UserError, match="^elastic does not go with"):
            replace(Toy(elastic=True), **given)
    check_start(replace(Toy(elastic=True), co2=replace(CO2Config.recommended(), tau=2)), 4)
    with pytest.raises(UserError, match="^per_node=3 does not divide the 4 ranks"):
        Crew(testing._context(), toy, (), 4, island=3)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [("", 1), ("--per_node 2 --elastic", 2), ("--per-node=2", 2), ("--per_node 0", 4), ("--per_node x", 1)],
)
def test_the_launcher_reads_how_many_ranks_a_worker_has(words: str, ranks: int):
    assert _per_node(words.split(), 4) == ranks
