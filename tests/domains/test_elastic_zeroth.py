"""Zeroth-order workers that come and go: they stay equal, bit for bit, and newcomers replay the list of scalars."""

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench.chaos.crew import Crew
from core import UserError, testing
from core.elastic.members import Members, Over
from core.methods import ElasticZeroth, ZerothConfig
from language.zeroth import ScalarLog, ZerothOrder
from language.zeroth.exchange import Exchange
from language.zeroth.weights import digest
from tests.core.test_elastic import members
from tests.zeroth_net import Net, losses_of, rate, share

CONFIG = ZerothConfig(weight_decay=0.1)
TIMEOUT, WAITS_AT = 20.0, 10


def train(folder: str, deaths: dict[str, tuple[str, int]], comes: str, pace: float, steps: int) -> None:
    """One worker; `deaths`: name -> (where, at which step). Writes what it has at the end.

    comes: a worker that is started later; the others wait once until it is about to join.
    """
    name, model = os.environ["CO2_WORKER"], Net()
    where, when = deaths.get(name, ("", -1))
    at = [0]  # step
    method = ElasticZeroth(model, CONFIG, lr=lambda: rate(at[0]), members=members(), timeout=TIMEOUT)
    sizes: list[int] = []
    method.on_change = lambda reports: sizes.append(method.members.size)
    replayed: list[int] = []
    method.take = lambda state: (method.load_state_dict(state), replayed.append(method.rounds))  # pyright: ignore
    wait = Exchange.wait

    def dies(here: str) -> None:
        if where == here and method.rounds == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def waits(self: Exchange, step: int) -> list[list[float]]:
        dies("sent")
        return wait(self, step)

    Exchange.wait = waits
    if name == comes:
        Path(folder, "came").touch()
    try:
        joined = method.join()
    except Over:
        return
    places = []
    while method.rounds < steps:
        time.sleep(pace)
        while comes and method.rounds == WAITS_AT and not Path(folder, "came").exists():
            time.sleep(0.05)
        order, step = method.order, method.rounds
        at[0] = step
        places.append((step, order.data_rank, order.data_workers))
        x = share(step, order.data_rank, order.data_workers)

        def loss(model: Any, x: Tensor = x) -> Tensor:
            dies("measuring")
            return losses_of(model, x).mean()

        method.measure(loss, count=len(x))
        method.step()
        dies("boundary")
    method.finish()
    end = {"joined": joined, "sizes": sizes, "replayed": replayed, "places": places}
    method.order.save_scalars(Path(folder, f"{name}.log"))
    end["weights"] = digest(list(model.parameters()))
    Path(folder, f"{name}.tmp").write_text(json.dumps(end))
    Path(folder, f"{name}.tmp").rename(Path(folder, f"{name}.json"))
    method.sum_of_all(torch.zeros(1))
    method.members.end()
    method.close()


def run(tmp_path: Path, workers: int, deaths: dict[str, Any], comes: str = "", pace: float = 0.0, steps: int = 20):
    crew = Crew(testing._context(), train, (str(tmp_path), deaths, comes, pace, steps), workers, int(comes != ""))
    assert crew.run() == 0 and not crew.timed_out
    ends = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    logs = {path.stem: ScalarLog.load(path) for path in tmp_path.glob("*.log")}
    assert ends.keys() == logs.keys()
    log = next(iter(logs.values()))
    assert len(log) == steps
    ZerothOrder(model := Net(), CONFIG, lr=0.0).replay(log)
    for name, end in ends.items():
        assert logs[name].g.tobytes() == log.g.tobytes() and logs[name].lrs == log.lrs
        assert end["weights"] == digest(list(model.parameters())), "the list is the run, on every worker"
    return ends, [step for step, g in enumerate(log.g) if math.isnan(g)]


@pytest.mark.parametrize(
    ("workers", "who", "where"),
    [
        (3, "1.0", "sent"),
        (2, "0.0", "boundary"),
        pytest.param(4, "1.0", "sent", marks=pytest.mark.slow),
        pytest.param(3, "0.0", "measuring", marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_without_one_that_dies(tmp_path: Path, workers: int, who: str, where: str):
    ends, given_up = run(tmp_path, workers, {who: (where, 7)})
    assert set(ends) == {f"{i}.0" for i in range(workers)} - {who}
    assert set(given_up) <= {7, 8} and (where != "measuring" or given_up == [7])
    for end in ends.values():
        assert end["sizes"] == [workers, workers - 1]
    last = sorted(end["places"][-1][1:] for end in ends.values())
    expected = {4: [[0, 3], [1, 3], [2, 3]], 3: [[0, 1], [0, 1]], 2: [[0, 1]]}  # pairs where their number is even
    assert last == expected[workers]


def test_one_that_comes_back_replays_the_list_and_takes_part(tmp_path: Path):
    ends, given_up = run(tmp_path, 2, {"0.0": ("measuring", 5)}, comes="0.1", pace=0.1, steps=40)
    assert set(ends) == {"0.1", "1.0"} and given_up == [5]
    newcomer = ends["0.1"]
    assert newcomer["joined"] and 5 < newcomer["replayed"][0] < 40
    assert newcomer["places"][0][0] == newcomer["replayed"][0]
    assert ends["1.0"]["sizes"] == [2, 1, 2]


# -- what survivors tell each other ---------------------------------------------------------------------------------


def alone(name: str = "0.0", seed: int = 7) -> ElasticZeroth:
    model = Net()
    if seed != 7:
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.back.weight)
    return ElasticZeroth(model, CONFIG, lr=lambda: 0.1, members=Members(dist.HashStore(), name))


def take_steps(method: ElasticZeroth, steps: int) -> None:
    method.members.names = ["0.0", "1.0"]
    for step in range(method.rounds, steps):
        method._looked_at = math.inf  # there is no launcher to be asked
        method.measure(lambda m, step=step: losses_of(m, share(step, 0, 1)).mean(), count=3)
        method.step()


def through_json(reports: list[dict]) -> list[dict]:
    return json.loads(json.dumps(reports))


def test_a_step_that_one_survivor_knows_counts_and_one_that_it_has_begun_is_given_up():
    ahead, behind = alone("0.0"), alone("1.0")
    take_steps(behind, 3)
    take_steps(ahead, 4)
    ahead._begun = 5  # it measures the fifth step, when the other still waits for the fourth one's scalars
    ahead._requests.granted.add("stop")
    behind._begun, behind.order.steps = 4, 4
    known = through_json([ahead._report(), behind._report()])
    for method in (ahead, behind):
        method._come_level(known)
        assert method.order.steps == 5 and math.isnan(method.order.log.g[-1]) and method._requests.granted == {"stop"}
    assert ahead.order.log.g.tobytes() == behind.order.log.g.tobytes() and not math.isnan(ahead.order.log.g[3])
    weights = [digest(list(method.order.model.parameters())) for method in (ahead, behind)]
    assert weights[0] == weights[1]
    behind.rounds = 4  # its loop comes to the step that was given up
    found = behind.measure(lambda m: losses_of(m, share(4, 0, 1)).mean(), count=3)
    assert torch.isfinite(found) and len(behind.order.log) == 5, "it measures for the log alone"
    assert digest(list(behind.order.model.parameters())) == weights[0]


def test_what_a_newcomer_gets_are_scalars():
    method = alone()
    take_steps(method, 4)
    state = method.state_dict()
    assert state.keys() == {"initial", "log"} and len(state["log"]["g"]) == 4
    other = alone("1.1")
    other.load_state_dict(state)
    assert digest(list(other.order.model.parameters())) == digest(list(method.order.model.parameters()))
    assert other.rounds == 4
    with pytest.raises(UserError, match=r"worker 2\.1 has not the weights that the run began with"):
        alone("2.1", seed=8).load_state_dict(state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"pairs": True}, "zeroth.pairs=True"), ({"directions": 2}, "zeroth.directions=2"), ({"delay": 1}, "delay=1")],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"elastic does not go with .*{message}.*leave it out"):
        ElasticZeroth(Net(), ZerothConfig(**changes), lr=lambda: 0.1, members=Members(dist.HashStore(), "0.0"))
