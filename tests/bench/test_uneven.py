"""Workers at unlike speeds: the clock by hand, the training against what it must equal, the command."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from core.adaptive.pace import BySpeed

from bench.search.__main__ import parse
from bench.search.engine import Plan, train
from bench.search.task import Inner, Task
from bench.simulator.events import SSP, Rule, Work, Workers, simulate
from bench.uneven import __main__ as command
from bench.uneven.__main__ import Rows, Uneven, markdown
from bench.uneven.train import Crew, Way, train_by_speed, train_ssp, ways
from core.errors import UserError
from tests.bench.test_search_ranks import draw
from tests.problems import small_net

SLOW = Work(2, step=1.0, slow=(3.0,))  # worker 0 takes 3 s a step, worker 1 takes 1


# -- the clock, by hand -----------------------------------------------------------------------------------------


def starts(staleness: int, work: Work, clocks: int) -> list[list[float]]:
    """When each worker begins each clock of one step."""
    state, found = Workers(work, Rule(staleness=staleness)), []
    for _ in range(clocks):
        found.append(state.clock.tolist())
        state.round(SSP, 1)
    return np.array(found).T.tolist()


@pytest.mark.parametrize(
    ("staleness", "fast"),
    [(0, [0, 3, 6, 9, 12, 15, 18]), (1, [0, 1, 3, 6, 9, 12, 15]), (3, [0, 1, 2, 3, 4, 6, 9])],
)
def test_a_fast_worker_is_at_most_so_many_clocks_ahead(staleness: int, fast: list[float]):
    """It begins clock c when the slow one's clock c - 1 - staleness, which ends at 3 (c - staleness), is there."""
    assert starts(staleness, SLOW, 7) == [[0, 3, 6, 9, 12, 15, 18], fast]


def test_an_update_is_there_when_the_link_has_carried_it_and_all_before_it():
    """2 s each over the link of steps of 1 s: the link falls behind, and staleness 1 waits for it."""
    work = Work(1, step=1.0, allreduce=2.0)
    assert starts(0, work, 4) == [[0, 3, 6, 9]]  # 1 + 2
    assert starts(1, work, 5) == [[0, 1, 3, 5, 7]]  # sent at 1, 2, 4: there at 3, 5, 7
    outcome = simulate(SSP, work, 1, 10, rule=Rule(staleness=1))
    assert (outcome.seconds, outcome.exposed_seconds) == pytest.approx((19, 9))  # 1, and 9 x (1 + 1 of waiting) - 0


def test_without_staleness_it_is_local_and_with_one_clock_of_it_co2():
    work = Work(3, step=1.0, spread=0.2, allreduce=3.0, slow=(2.0,))
    ssp, local = simulate(SSP, work, 4, 20), simulate("local", work, 4, 20)
    assert (ssp.seconds, ssp.exposed_seconds) == pytest.approx((local.seconds, local.exposed_seconds), rel=1e-12)
    hidden = Work(3, step=1.0, allreduce=3.0)
    ssp, co2 = simulate(SSP, hidden, 4, 20, rule=Rule(staleness=1)), simulate("co2", hidden, 4, 20)
    assert (ssp.seconds, ssp.exposed_seconds) == (co2.seconds, co2.exposed_seconds) == (80, 0)


def test_ddp_and_local_go_as_fast_as_the_slowest():
    assert simulate("ddp", SLOW, 1, 5).seconds == 15
    local = simulate("local", replace(SLOW, allreduce=2.0), 4, 5)
    assert (local.seconds, local.exposed_seconds) == (5 * (12 + 2), 5 * (2 + 10) / 2)


def test_by_speed_the_slow_one_takes_its_part_once_the_times_are_known():
    """tau 6: two rounds of 6 steps; then 2 steps of 3 s beside 6 of 1 s, and nobody waits but for the first lead."""
    state, rule = Workers(SLOW, Rule(by_speed=True)), Rule(by_speed=True)
    parts = []
    for _ in range(4):
        parts.append(state.parts(6).tolist())
        state.round("co2", 6)
    assert parts == [[6, 6], [6, 6], [2, 6], [2, 6]]
    assert state.clock.tolist() == [36 + 12, 42]  # the fast one waited until 36 for the slow one's second round
    warm = simulate("co2", SLOW, 6, 30, warmup=10, rule=rule)
    assert (warm.seconds, warm.steps) == pytest.approx((20 * 6, 20 * 4))
    by_speed = BySpeed(0, 2)
    by_speed.load_state_dict({"seconds": [[3.0], [1.0]], "told": 0.0}, of_others=False)
    assert by_speed.steps(6) == 2


def test_a_mean_with_a_delay_is_awaited_in_mid_round():
    """3 s under the 2 steps before the merge: 1 s shows in every round but the first."""
    work = Work(2, step=1.0, allreduce=3.0)
    outcome = simulate("co2", work, 4, 10, rule=Rule(delay=2))
    assert (outcome.seconds, outcome.exposed_seconds, outcome.steps) == (49, 9, 40)
    assert simulate("co2", work, 4, 10, rule=Rule(delay=3)).seconds == 40


def test_steps_stall_by_chance():
    always = simulate("local", Work(2, step=1.0, stall_chance=1.0, stall=2.0), 4, 5)
    assert always.seconds == 5 * 4 * 3
    seldom = simulate("local", Work(1, step=1.0, stall_chance=0.02, stall=10.0), 24, 4000)
    assert seldom.step_seconds == pytest.approx(1.2, rel=0.01)
    for wrong in ({"slow": (1.0, 1.0, 1.0)}, {"slow": (0.0,)}, {"stall_chance": 1.1}, {"stall": -1.0}):
        with pytest.raises(UserError):
            replace(SLOW, **wrong)


def test_what_ends_in_time_counts():
    """Rounds of 4 steps and 2 s: three by 19 s; co2's fourth ends at 16 and has landed at 18."""
    work = Work(2, step=1.0, allreduce=2.0)
    assert Way("local", "local", 4).run(work, 19.0, 0).rounds == 3
    co2 = Way("co2", "co2", 4).run(work, 19.0, 0)
    assert (co2.rounds, co2.samples) == (4, 32)
    assert Way("co2", "co2", 4).run(work, 17.0, 0).rounds == 3
    ssp = Way(SSP, SSP, 1, Rule(staleness=1)).run(replace(SLOW, allreduce=0.5), 9.4, 0)
    assert ssp.within.sum(axis=0).tolist() == [2, 4], "the slow one's by 3.5, 6.5; the fast one's by 1.5, 2.5, 5, 8"
    with pytest.raises(UserError, match="closes no round"):
        Way("local", "local", 4).run(work, 5.0, 0)


# -- the training -----------------------------------------------------------------------------------------------

TASK = Task("tiny", "", small_net, torch.nn.functional.cross_entropy, draw, {}, Inner("sgd", 0.1), batch=4)


def plan_of(name: str, steps: int, tau: int, workers: int = 2) -> Plan:
    return Plan("tiny", parse(name)[0], 0.1, workers, 4, steps, tau, "iid", 0, "test")


def end_alike(plan: Plan) -> torch.Tensor:
    _, method = train(TASK, plan)
    method.finish()
    return method.x[0]


@pytest.mark.parametrize(("name", "tau"), [("ddp", 1), ("local", 3)])
def test_ssp_without_staleness_is_ddp_and_local(name: str, tau: int):
    plan = plan_of(name, 12, tau)
    clock = Way(SSP, SSP, tau).run(Work(2, step=1.0), 12.0, 0)
    torch.testing.assert_close(train_ssp(TASK, plan, clock, 12.0), end_alike(plan), rtol=1e-9, atol=1e-9)


def test_a_worker_sees_its_own_updates_and_those_that_have_arrived(monkeypatch: pytest.MonkeyPatch):
    """Worker 0's updates count 1, worker 1's 100; staleness 1."""
    seen: dict[int, list[int]] = {0: [], 1: []}

    def step(crew: Crew, who: list[int], numbers: list[int], lrs: list[float]) -> None:
        for i in who:
            seen[i].append(round(2 * float(crew.x[i, 0] - crew.stack.start(0)[0])))
            crew.x[i] += (1, 100)[i]

    monkeypatch.setattr(Crew, "step", step)
    clock = Way(SSP, SSP, 1, Rule(staleness=1)).run(replace(SLOW, allreduce=0.5), 9.4, 0)
    plan = plan_of("ddp", 10, 1)
    end = train_ssp(TASK, plan, clock, 9.4)
    # the fast one begins at 0, 1, 3.5 and 6.5, with all of its own and the slow one's that arrive at 3.5 and 6.5
    assert seen[1] == [0, 100, 201, 302]
    # the slow one begins at 0 and 3, with its own, on its way until 3.5, and the fast one's of 1.5 and 2.5
    assert seen[0] == [0, 201]
    assert round(2 * float(end[0] - Crew(TASK, plan).x[0, 0])) == 402


def test_a_worker_that_takes_fewer_steps_counts_by_them():
    """One round of local: the fast worker's two steps weigh 2, the slow one's first step 1."""
    plan = plan_of("local", 2, 2)
    crew = Crew(TASK, plan)
    crew.step([0, 1], [0, 0], [0.1, 0.1])
    crew.step([1], [1], [0.05])
    expected = (crew.x[0] + 2 * crew.x[1]) / 3
    torch.testing.assert_close(train_by_speed(TASK, plan, np.array([[1, 2]])), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["co2:beta=0", "co2:merge=keep,gap=none,beta=0,delay=2"])
def test_by_speed_among_equals_changes_nothing(name: str):
    plan = plan_of(name, 12, 4)
    torch.testing.assert_close(train_by_speed(TASK, plan, np.full((3, 2), 4)), end_alike(plan), rtol=1e-9, atol=1e-9)


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_runs_each_run_once_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "load_task", lambda name: TASK)
    made = iter(float(i) for i in range(1, 1000))
    monkeypatch.setattr(command, "run", lambda *args: next(made))
    o = Uneven(
        **{"task": "digits", "workers": 2, "tau": 4, "seconds": 40.0, "allreduce": (1.0,), "scenarios": ("half",)},
        **{"lr_factors": (1.0, 2.0), "seeds": (0, 1), "rows": tmp_path / "rows.jsonl"},
    )
    monkeypatch.setattr(command, "CROWDS", (1, 4))
    monkeypatch.setattr("bench.uneven.train.COUNTED", 20)
    o.check()
    text = markdown(o, Rows(o.rows))
    assert "| ddp | 1 |" in text and "3.500 ± 0.707" in text  # runs 1 and 2 tuned it, 3 and 4 are reported
    lines = o.rows.read_text().splitlines()
    assert len(lines) == len(ways(4, 1.0)) * (2 + 2)
    assert markdown(replace(o, report=True), Rows(o.rows)) == text and o.rows.read_text().splitlines() == lines
    assert "not run" in markdown(replace(o, report=True), Rows(tmp_path / "none.jsonl"))
