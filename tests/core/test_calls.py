"""How far a reader of one round has to go: calls and changes of file in a run of the paper's settings alone."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import CO2Config
from core.co2 import CO2
from core.testing import run_distributed
from tests.calls import Calls, calls_of
from tests.problems import sgd_step, small_net

TAU, ROUNDS = 4, 3
CHANGES, FILES = 40, 10  # most of a boundary
CALLS = 6  # most of a step that closes nothing


def one_round(rank: int, world_size: int) -> list[Calls]:
    """What each step of a round makes, its last one the boundary; a reduction lands and the next one is launched."""
    params = list(small_net().parameters())
    co2 = CO2(params, CO2Config(tau=TAU))
    counted: list[Calls] = []
    for step in range(ROUNDS * TAU):
        sgd_step(params, rank, step)
        time.sleep(0.02 * world_size)  # what is in flight has landed by the round's last step
        if step < (ROUNDS - 1) * TAU:
            co2.step()
        else:
            counted.append(calls_of(co2.step))
    co2.finish()
    return counted


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "two workers"])
def calls(request: pytest.FixtureRequest) -> list[Calls]:
    """Of one worker without a process group, or of the first of two."""
    return one_round(0, 1) if request.param == 1 else run_distributed(one_round, 2)[0]


def test_a_boundary_changes_file_seldom_and_visits_few(calls: list[Calls]):
    assert calls[-1].changes <= CHANGES, calls[-1]
    assert len(calls[-1].files) <= FILES, calls[-1]


def test_a_step_that_closes_nothing_makes_few_calls(calls: list[Calls]):
    for step in calls[:-1]:
        assert len(step.made) <= CALLS, step


def test_the_last_step_of_the_round_is_the_boundary(calls: list[Calls]):
    """Else the limits would be kept by an action that does nothing."""
    assert min(len(step.made) for step in calls[:-1]) > 0
    functions = [function.rpartition(".")[2] for _, function in calls[-1].made]
    assert "close_round" in functions and "launch" in functions
    assert not any("close_round" in function for step in calls[:-1] for _, function in step.made)


def counted() -> Iterator[int]:
    yield 1
    yield 2


def test_what_counts_as_a_call():
    """Each of these is one: a function of another file, a generator with all its values, a function that asks for a
    comprehension and a lambda."""
    here = Path(__file__).parents[1]
    calls = calls_of(lambda: (sgd_step([], 0, 0), list(counted()), sgd_step([], 0, 0)), here)
    assert [function for _, function in calls.made] == ["sgd_step", "counted", "sgd_step"]
    assert (calls.changes, calls.files) == (2, {"problems.py", "core/test_calls.py"})
