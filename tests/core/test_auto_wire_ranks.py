"""The wire of tau auto on real processes: chosen alike by all, and kept in a checkpoint."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import core.adaptive.tau
from core import CO2, CO2Config, WireConfig
from core.adaptive.tau import Tuned
from core.checkpoints.saved import of_rank, under_rank
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from tests import problems
from tests.core.test_tau_ranks import AUTO, Timed, paced, tell_times
from tests.problems import flat, sgd_step


def choosing_a_wire(rank: int, world_size: int, mbit: float, feedback: bool = True) -> dict[str, Any]:
    """16 kB, or 2 kB in int4, by steps of 4 ms; the run goes on from a checkpoint in other objects."""
    core.adaptive.tau.COST = 1.0
    config = CO2Config(tau="auto", outer_momentum=0.0, wire=WireConfig("auto", error_feedback=feedback))
    params = [nn.Parameter(torch.linspace(-1, 1, 4000))]
    link = Timed(mbit)
    co2, sent = CO2(params, config, link=link), []
    tell_times(co2, link, 0.004)
    paced(co2, params, rank, 4, 0.0)
    fresh = of_rank(co2.state_dict())
    while len(sent) < 20:
        paced(co2, params, rank, co2.tau - co2.local_steps, 0.0)
        sent.append(co2.stats.bytes_sent)
    state = of_rank(co2.state_dict())
    resumed_params = [nn.Parameter(params[0].detach().clone())]
    resumed = CO2(resumed_params, config, link=ThrottledLink(mbit))
    resumed.load_state_dict(under_rank(state))
    steps = co2.tau
    for method, of in ((co2, params), (resumed, resumed_params)):
        for step in range(steps):
            sgd_step(of, rank, step)
            method.step()
    same = torch.equal(params[0], resumed_params[0])
    co2.finish(), resumed.finish()
    return {
        "first": fresh["reducer"],
        "same keys": shapes(state) == shapes(fresh),
        "wire": state["reducer"],
        "sent": (sent[0], sent[-1]),
        "held back": bool(co2.reducer._now.state),
        "decided": [d.wire for d in co2.rider(Tuned).tuner.decisions],
        "same": same,
        "end": flat(params),
    }


def shapes(state: dict[str, Any]) -> dict[str, list[torch.Size]]:
    return {name: [t.shape for t in flats] for name, flats in (state["state"] | state["held_back"]).items()}


@pytest.mark.parametrize(
    ("mbit", "wire", "decided"),
    [
        (0.4, "int4", ["int4"]),
        pytest.param(64.0, "float32", ["float32"], marks=pytest.mark.slow),
        (20.0, "int4", ["float32", "int4"]),
    ],
    ids=["slow", "fast", "between"],
)
def test_a_wire_is_chosen_with_tau_alike_on_all_workers_and_kept_in_a_checkpoint(
    mbit: float, wire: str, decided: list[str]
):
    """int4 to begin with; float32 where its mean comes within a step, and tried where its bytes let expect that."""
    one, two = run_distributed(choosing_a_wire, 2, mbit)
    assert torch.equal(one.pop("end"), two.pop("end")) and one == two
    assert (one["first"], one["wire"], one["same"]) == ("int4", wire, True), one["decided"]
    assert one["same keys"], "of a checkpoint and of a new object, into which DCP loads it"
    assert one["held back"] == (wire == "int4") and one["decided"][: len(decided)] == decided
    assert (one["sent"][1] > 2 * one["sent"][0]) == (wire == "float32")


def test_a_wire_is_left_where_nothing_is_held_back():
    one, _ = run_distributed(choosing_a_wire, 2, 64.0, False)
    assert (one["first"], one["wire"], one["held back"]) == ("int4", "float32", False)


def test_one_worker_keeps_the_calibration_tau():
    params = problems.odd_parameters()
    co2 = CO2(params, AUTO)
    assert set(paced(co2, params, 0, 30, 0.0)) == {2}


@pytest.mark.parametrize("bad", ["tau", "tau_max"])
def test_workers_must_agree_on_the_setting(bad: str):
    with pytest.raises(RuntimeError, match="workers differ"):
        run_distributed(disagreeing, 2, bad)


def disagreeing(rank: int, world_size: int, bad: str) -> None:
    configs = {"tau": (AUTO, replace(AUTO, tau=4)), "tau_max": (AUTO, replace(AUTO, tau_max=9))}
    CO2(problems.odd_parameters(), configs[bad][rank])
