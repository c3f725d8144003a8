"""Workers that come and go: the survivors stay equal, lose nothing that they have sent, and never stop."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.chaos.crew import Crew
from core import testing
from core.co2 import CO2Config
from core.elastic import ElasticCO2
from core.members import Members, Over
from tests import problems
from tests.problems import flat, sgd_step

TIMEOUT = 20.0
STEPS = 24


def members() -> Members:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    return Members(store, os.environ["CO2_WORKER"], timeout=TIMEOUT)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, settings: dict[str, Any], deaths: dict[str, Any], pace: float = 0.0, steps: int = STEPS) -> None:
    """One worker of elementwise problem; `deaths`: name -> (where, when). Writes its trace, by round, at the end."""
    name = os.environ["CO2_WORKER"]
    worker = int(os.environ["RANK"])
    where, when = deaths.get(name, ("", 0))
    params = problems.odd_parameters()
    method = ElasticCO2(params, CO2Config(**settings), members=members(), timeout=TIMEOUT)
    counter = {"step": 0}
    method.snapshot = lambda: {"method": method.state_dict(), "step": counter["step"]}
    method.background.tell = lambda: {"step": counter["step"]}
    sizes: list[Any] = []
    method.background.on_change = lambda reports: sizes.append([counter["step"], method.members.names])

    def restore(state: dict[str, Any]) -> None:
        method.load_state_dict(state["method"])
        counter["step"] = state["step"]

    method.restore = restore
    hook(method, where, when)
    try:
        joined = method.join()
    except Over:
        return
    trace: dict[int, Any] = {}
    while counter["step"] < steps:
        time.sleep(pace)
        step, counter["step"] = counter["step"], counter["step"] + 1
        sgd_step(params, worker, step)
        if where == "local" and step == when:
            die()
        if method.step():
            trace[method.rounds] = [flat(method.state["outer_iterate"]).tolist(), method.background.world_size]
            if where == "boundary" and method.rounds == when:
                die()
    method.finish()
    end = {"name": name, "joined": joined, "x": flat(params).tolist(), "trace": trace, "sizes": sizes}
    Path(folder, f"{name}.tmp").write_text(json.dumps(end))
    Path(folder, f"{name}.tmp").rename(Path(folder, f"{name}.json"))
    method.background.sum_of_all(torch.zeros(1))
    method.members.end()
    method.close()


def hook(method: ElasticCO2, where: str, when: int) -> None:
    """Dies in a phase of reduction number `when`."""
    background = method.background
    inner = method.stages

    def stages() -> Any:
        for i, stage in enumerate(inner()):
            if background.launched == when and where == ("sent", "summed")[min(i, 1)]:
                die()  # with the sum, or the agreement on it, not yet started here
            yield stage

    if where in ("sent", "summed"):
        method.stages = stages  # pyright: ignore[reportAttributeAccessIssue]


def run(tmp_path: Path, workers: int, settings: dict[str, Any], deaths: dict[str, Any], restarts: int = 0, **more: Any):
    crew = Crew(testing._context(), train, (str(tmp_path), settings, deaths, *more.values()), workers, restarts)
    status = crew.run()
    assert not crew.timed_out, "some worker hangs"
    ends = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    return status, ends


def check_equal(ends: dict[str, Any]) -> None:
    """All that came to the end hold the same parameters, and held the same outer iterates on the way."""
    first = next(iter(ends.values()))
    for end in ends.values():
        assert end["x"] == first["x"]
        for number in end["trace"].keys() & first["trace"].keys():
            assert end["trace"][number] == first["trace"][number], number


PAPER = {"tau": 3}
KEEP = {"tau": 3, "merge": "keep", "gap": "none", "delay": "auto", "outer_momentum": 0.0}


@pytest.mark.parametrize("settings", [PAPER, KEEP | {"delay": 1}], ids=["paper", "keep"])
def test_without_a_loss_it_is_the_plain_method(tmp_path: Path, settings: dict[str, Any]):
    status, ends = run(tmp_path, 2, settings, {})
    assert status == 0 and set(ends) == {"0.0", "1.0"}
    check_equal(ends)
    s = problems.Settings(**settings)
    expected = problems.train_reference(s, 2, STEPS, flat(problems.odd_parameters()))
    torch.testing.assert_close(torch.tensor(ends["0.0"]["x"], dtype=torch.float64), expected[-1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("who", "where", "when", "settings"),
    [
        ("2.0", "local", 10, PAPER),
        ("0.0", "boundary", 3, PAPER),
        ("1.0", "sent", 3, PAPER),
        ("0.0", "summed", 4, PAPER),
        ("1.0", "local", 13, KEEP),
        ("0.0", "summed", 3, KEEP),
    ],
)
def test_the_survivors_go_on_and_stay_equal(tmp_path: Path, who: str, where: str, when: int, settings: dict[str, Any]):
    status, ends = run(tmp_path, 3, settings, {who: (where, when)})
    assert status == 0 and set(ends) == {"0.0", "1.0", "2.0"} - {who}
    check_equal(ends)
    for end in ends.values():
        assert [len(names) for _, names in end["sizes"]] == [3, 2]


def test_one_that_comes_back_joins(tmp_path: Path):
    status, ends = run(tmp_path, 3, PAPER, {"0.0": ("local", 10)}, restarts=1, pace=0.05, steps=90)
    assert status == 0 and set(ends) == {"0.1", "1.0", "2.0"}
    assert ends["0.1"]["joined"] and len(ends["1.0"]["sizes"][-1][1]) == 3
    check_equal(ends)
