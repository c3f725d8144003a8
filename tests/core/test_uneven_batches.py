"""Workers with different numbers of batches end together."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, LocalSGD, OverlapLocalSGD, ShardedCO2, UserError, make_method
from core.testing import run_distributed
from tests import problems
from tests.core.test_rounds import LOCAL_METHODS
from tests.problems import flat, sgd_step


def uneven(rank: int, world_size: int, name: str) -> dict[str, Any]:
    params = problems.odd_parameters()
    _, method = make_method(name, nn.ParameterList(params), co2=CO2Config(tau=3))
    for step in range((4, 11, 6)[rank]):
        sgd_step(params, rank, step)
        method.step()
    method.finish()
    first = flat(params)
    for step in range(5):  # and once more: training may go on after finish()
        sgd_step(params, rank, step)
        method.step()
    method.finish()
    method.close()
    return {"first": first, "second": flat(params)}


@pytest.mark.parametrize("name", LOCAL_METHODS)
def test_uneven_workers_end_cleanly_with_equal_parameters(name: str):
    results = run_distributed(uneven, 3, name)
    for when in ("first", "second"):
        assert all(torch.equal(r[when], results[0][when]) for r in results)
        assert torch.isfinite(results[0][when]).all()
    assert not torch.equal(results[0]["first"], flat(problems.odd_parameters()))
    assert not torch.equal(results[0]["first"], results[0]["second"])


def finish_again(rank: int, world_size: int, name: str) -> bool:
    params = problems.odd_parameters()
    _, method = make_method(name, nn.ParameterList(params), co2=CO2Config(tau=2))
    for step in range(5):
        sgd_step(params, rank, step)
        method.step()
    method.finish()
    before = flat(params)
    method.finish()
    return torch.equal(before, flat(params))


@pytest.mark.parametrize("name", ["co2", "local", "slowmo"])
def test_finish_without_a_step_since_changes_nothing(name: str):
    assert run_distributed(finish_again, 2, name) == [True, True]


HIDDEN = {
    "co2": CO2Config(tau=3),
    "keep": CO2Config(tau=3, merge="keep", delay=2, gap="none"),
    "mix": CO2Config(tau=3, merge="mix", delay="auto"),
    "mixed at the boundary": CO2Config(tau=3, merge="mix"),
}
ENDS: dict[str, Any] = {name: lambda p, c=c: CO2(p, c) for name, c in HIDDEN.items()} | {
    "shard": lambda p: ShardedCO2(p, CO2Config(tau=3), shard=True),
    "no delay": lambda p: CO2(p, CO2Config(tau=3, gap="none", delay=0)),
    "local": lambda p: LocalSGD(p, 3),
    "overlap_local": lambda p: OverlapLocalSGD(p, 3),
}


def last_steps(rank: int, world_size: int) -> dict[str, list[tuple[Tensor, int]]]:
    """The end without and with step(last=True): after as many steps on all, after fewer on rank 0, and once more."""
    found: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in ENDS}
    for name, build in ENDS.items():
        for says in (False, True):
            params = problems.odd_parameters()
            method = build(params)
            for steps in (6, 6 + 3 * rank, 5, 3):
                for step in range(steps):
                    sgd_step(params, rank, step)
                    if name == "mix":
                        method.flight.settle()  # so that a mean is merged after the same step
                    method.step(last=says and step == steps - 1)
                method.finish()
                found[name].append((flat(params), method.rounds))
    return found


def test_a_last_step_saves_an_all_reduce_and_changes_nothing():
    zero, one = run_distributed(last_steps, 2)
    for name in ENDS:
        for i in range(4):
            (usual, rounds), (ended, fewer) = zero[name][i], zero[name][4 + i]
            assert torch.equal(ended, one[name][4 + i][0]), f"{name}: workers differ after finish() {i}"
            if name != "overlap_local":  # whose every boundary pulls, one without a step, too
                torch.testing.assert_close(ended, usual, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            # after 6 steps, after 6 to 9, not after 5, after 3
            assert rounds - fewer == (1, 2, 2, 3)[i], (name, i, rounds, fewer)


def test_a_step_after_the_last_needs_finish_between():
    co2 = CO2([nn.Parameter(torch.ones(3))], CO2Config(tau=1))
    co2.step(last=True)
    with pytest.raises(UserError, match=r"call finish\(\)"):
        co2.step()
    co2.finish()
    co2.step()
