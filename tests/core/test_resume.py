"""Saving at a boundary, all-reduce in flight, and going on in new objects: bit for bit as without the break."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import core.co2
from core import CO2, CO2Config, LocalSGD, ShardedCO2, SlowMo, UserError, WireConfig, make_method
from core.checkpoints.saved import Saved, of_rank, under_rank
from core.checkpoints.snapshot import Snapshot
from core.config import OuterConfig
from core.groups import of_all
from core.methods import DelayedCO2, DelayedConfig
from core.testing import run_distributed
from tests import problems
from tests.problems import Settings, flat, refusal

SAVE_AT, STEPS = 6, 13
BASE = Settings(tau=3, outer_lr=0.4, outer_momentum=0.5, clip=0.1)
MERGES: list[dict[str, Any]] = [  # or what else meets a mean, such as Nesterov's momentum
    {"merge": "mix"},
    {"merge": "mix", "delay": 1},
    {"merge": "keep", "delay": 2},
    {"delay": 0, "gap": "none"},
    {"merge": "keep"},
    {"merge": "mix", "delay": 1, "wire": "int8"},
    {"nesterov": True},
    {"nesterov": True, "delay": 0, "gap": "none"},
]
RUNS = [("co2", replace(BASE, gap=gap)) for gap in ("elementwise", "norm", "none")]
RUNS += [(s.method, s) for s in (replace(BASE, **{"gap": "none"} | changes) for changes in MERGES)]
RUNS += [(name, BASE) for name in ("local", "slowmo", "overlap_local")]


class Net(nn.Module):
    """With BatchNorm, so that buffers are in flight too."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build(name: str, seed: int, s: Settings) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = Net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    options: dict[str, Any] = {"delayed": s.delayed} if name == "delayed" else {}
    _, method = make_method(name, model, co2=s.co2, lr=lambda: optimizer.param_groups[0]["lr"], **options)
    return model, optimizer, method


def go(model: Net, optimizer: torch.optim.Optimizer, method: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.2 / (1 + step)
        problems.loss(model, problems.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()


@pytest.mark.parametrize(("kind", "config"), [(CO2, CO2Config(2)), (ShardedCO2, CO2Config(2))])
def test_what_was_loaded_may_be_loaded_again(kind: Any, config: CO2Config):
    """As where training is rolled back: a method keeps nothing of the caller's, which it would write to."""
    params = [nn.Parameter(torch.ones(5))]
    method = kind(params, config)

    def go_on(steps: int) -> None:
        for step in range(steps):
            params[0].data += 0.1 * (step + 1)
            method.step()

    go_on(3)
    state = method.state_dict()
    kept = copy.deepcopy(state)
    method.load_state_dict(state)
    go_on(6)
    method.finish()
    pairs = zip(tree_leaves(state), tree_leaves(kept), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def of_rank_0(rank: int, world_size: int) -> list[float]:
    """All go on from what the first one held, as from a checkpoint that holds no other: what error feedback then holds
    back, and what it held back before."""
    params = [nn.Parameter(torch.zeros(300))]
    co2 = CO2(params, CO2Config(tau=1, merge="keep", gap="none", delay=0, wire=WireConfig("int4")))
    for step in range(3):
        params[0].data += torch.randn(300, generator=torch.Generator().manual_seed(2 * step + rank))
        co2.step()
    states = of_all(co2.state_dict())
    before = co2.reducer.state["error_feedback"][0].norm().item()
    co2.load_state_dict(states[0])
    return [before, co2.reducer.state["error_feedback"][0].norm().item()]


def test_what_another_workers_error_feedback_held_back_is_not_ones_own():
    (before, after), (others, forgotten) = run_distributed(of_rank_0, 2)
    assert after == before > 0 and others > 0 and forgotten == 0


def everything(model: Net) -> Tensor:
    return flat([*model.parameters(), *model.buffers()])


def interrupted(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    return [interrupt(rank, name, s, folder) for name, s in RUNS]


def interrupt(rank: int, name: str, s: Settings, folder: str) -> dict[str, Any]:
    model, optimizer, method = build(name, 0, s)
    go(model, optimizer, method, rank, range(SAVE_AT))
    in_flight = method.flight.in_flight
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "method": method.state_dict()}
    torch.save(state, f"{folder}/{rank}.pt")
    go(model, optimizer, method, rank, range(SAVE_AT, STEPS))
    whole = [everything(model)]
    method.finish()

    resumed = build(name, 1, s)  # starts from other values
    state = torch.load(f"{folder}/{rank}.pt", weights_only=True)
    for part, saved in zip(resumed, state.values(), strict=True):
        part.load_state_dict(saved)
    go(*resumed, rank, range(SAVE_AT, STEPS))
    again = [everything(resumed[0])]
    resumed[2].finish()
    ends = torch.cat([*whole, everything(model)]), torch.cat([*again, everything(resumed[0])])
    return {"in_flight": in_flight, "ends": ends, "rounds": (method.rounds, resumed[2].rounds)}


def test_a_resumed_run_is_bit_identical(tmp_path: Path):
    for results in run_distributed(interrupted, 2, str(tmp_path)):
        for (name, s), result in zip(RUNS, results, strict=True):
            assert result["in_flight"] is (name in ("co2", "delayed", "overlap_local") and s.delay != 0)
            assert torch.equal(*result["ends"]), (name, s)
            assert result["rounds"][0] == result["rounds"][1]


def params(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(n)) for n in sizes]


def saved_by(method: Any) -> dict[str, Any]:
    for _ in range(3):
        method.step()
    return method.state_dict()


CO2_2 = CO2Config(tau=2)
MISFITS = {
    "other sizes": (lambda: CO2(params(3, 4), CO2_2), lambda: CO2(params(3, 5), CO2_2)),
    "fewer dtypes": (
        lambda: CO2(params(3), CO2_2),
        lambda: CO2([*params(3), nn.Parameter(torch.zeros(1).double())], CO2_2),
    ),
    "of slowmo": (lambda: SlowMo(params(3), 2), lambda: CO2(params(3), CO2_2)),
    "of local": (lambda: LocalSGD(params(3), 2), lambda: SlowMo(params(3), 2)),
    "of another momentum": (
        lambda: DelayedCO2(params(3), CO2_2),
        lambda: DelayedCO2(params(3), CO2_2, DelayedConfig(nesterov=True)),
    ),
    "without buffers": (lambda: CO2(params(3), CO2_2), lambda: CO2(params(3), CO2_2, buffers=[torch.zeros(2)])),
    "with buffers": (lambda: CO2(params(3), CO2_2, buffers=[torch.zeros(2)]), lambda: CO2(params(3), CO2_2)),
}


@pytest.mark.parametrize("which", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(which: str):
    writer, reader = (build() for build in MISFITS[which])
    state = saved_by(writer)
    before = of_rank(reader.state_dict())["state"]
    said = refusal(reader.load_state_dict, state)
    assert "checkpoint" in said and "resume with" in said
    for name, flats in of_rank(reader.state_dict())["state"].items():
        assert all(torch.equal(a, b) for a, b in zip(flats, before[name], strict=True))


class Bare(Saved, core.co2.CO2):
    """The paper's algorithm and no more, to be saved."""


@pytest.mark.parametrize("build", [lambda: LocalSGD(params(3), 2), lambda: Bare(params(3), OuterConfig(tau=2))])
def test_empty_parts_may_be_missing(build: Any):
    """torch.distributed.checkpoint's tools drop empty dicts."""
    writer, reader = build(), build()
    own = of_rank(saved_by(writer))
    whole = {key: value for key, value in own.items() if value != {}}
    assert len(whole) < len(own)
    reader.load_state_dict(under_rank(whole))
    assert str(reader.state_dict()) == str(writer.state_dict())


def test_a_checkpoint_that_does_not_fit_leaves_the_wire_alone():
    config = CO2Config(tau=2, wire=WireConfig("auto"))
    writer, reader = CO2(params(3), config), CO2(params(4), config)
    state = of_rank(saved_by(writer)) | {"reducer": "int4"}
    with pytest.raises(UserError, match="elements, here it has"):
        reader.load_state_dict(under_rank(state))
    assert reader.reducer.kind == "float32", "what one worker alone takes"


def as_before(own: dict[str, Any]) -> dict[str, Any]:
    """A worker's part of a checkpoint as versions wrote it that knew no riders and no reducers by name."""
    riders, kept = own["riders"], own["state"] | own["held_back"]
    old = {key: own[key] for key in ("method", "flats", "in_flight", "workers", "local_steps", "rounds")}
    return old | {"state": kept, "guard": riders["guard"], "tuner": None, "pace": None, "tau": 2, "sync_steps": 0}


@pytest.mark.parametrize("build", [CO2, partial(ShardedCO2, shard=True)])
def test_a_checkpoint_of_an_older_version_is_refused_in_one_line(build: Any):
    co2 = build(params(3), CO2_2)
    old = under_rank(as_before(of_rank(saved_by(co2))))
    said = refusal(co2.load_state_dict, old)
    assert said.startswith("the checkpoint's state has no 'places', as those of older versions: resume ")
    assert said.endswith("or start afresh")


@pytest.mark.parametrize(("wire", "to"), [("auto", "float32"), ("float32", "auto")])
def test_a_run_may_go_on_with_its_wire_chosen_or_given_where_nothing_is_held_back(wire: Any, to: Any):
    first, then = (CO2(params(3), CO2Config(tau=2, wire=WireConfig(wire))) for wire in (wire, to))
    then.load_state_dict(saved_by(first))
    for _ in range(2):
        then.step()
    then.finish()


def of_four(state: dict[str, Any]) -> dict[str, Any]:
    """As four workers with one worker's mean would have written it; two of them had been left out in another round."""
    theirs = torch.tensor([0.0, 1.0, 2.0])
    return state | {"workers": 4, "flats": [torch.cat([4 * flat, theirs]) for flat in state["flats"]]}


@pytest.mark.parametrize("changes", [{"tau": 2}, {"tau": "auto", "tau_max": 2}, {"tau": 2, "wire": WireConfig("int8")}])
def test_a_sum_in_flight_over_other_workers_lands_as_their_mean(changes: dict[str, Any]):
    config, ends = CO2Config(clip=None, **changes), []
    for change in (lambda state: state, of_four):
        p = params(3)
        co2 = CO2(p, config)
        with torch.no_grad():
            for _ in range(2):
                p[0].sub_(1.0)
                co2.step()
            state = of_rank(co2.state_dict())
            if config.wire.format != "float32":  # means land, whatever their number
                change = (lambda state: state | {"workers": 4}) if change is of_four else change
            resumed = CO2(q := params(3), config)
            resumed.load_state_dict(under_rank(change(state)))
            for _ in range(2):
                resumed.step()
        ends.append(q[0].clone())
    assert torch.equal(*ends)
    assert torch.allclose(ends[0], torch.full((3,), -2.0), atol=0.05), "a mean of 2 has landed"


def test_what_is_of_each_worker_is_left_behind_by_another_number():
    """Verdicts: one worker's would be heard as another's."""
    config = CO2Config(tau=2)
    writer, reader = CO2(params(3), config), CO2(params(3), config)
    state = of_rank(saved_by(writer))
    assert "left_out" in writer.scalars.sizes
    state["flats"][0][-1:] = 1.0
    reader.load_state_dict(under_rank(state | {"workers": 4, "places": 4}))
    assert reader.scalars["left_out"].item() == 0.0
    assert reader.step() and reader.stats.left_out == 0


def test_shared_state_goes_on_after_the_end_with_another_number():
    writer, reader = ShardedCO2(params(3), CO2Config(tau=2)), ShardedCO2(params(3), CO2Config(tau=2))
    writer.finish()
    state = of_rank(writer.state_dict())
    (gathered,) = state["flats"]
    state["flats"] = [torch.cat([gathered, torch.ones(3)])]  # three more workers' places
    reader.load_state_dict(under_rank(state | {"workers": 4}))
    assert torch.equal(reader.buckets[0].payload, gathered[:3])
    assert not reader.step() and reader.step()


def test_a_snapshot_is_the_state_of_its_boundary():
    """Whatever steps follow before it is handed over; without one to wait for it is given at once."""
    for gap in ("elementwise", "norm"):
        given: list[dict[str, Any]] = []
        p = params(3)
        co2 = CO2(p, CO2Config(tau=2, gap=gap), riders=[snapshot := Snapshot()])
        with torch.no_grad():
            for step in range(5):
                if step == 4:
                    then = co2.state_dict()
                    snapshot.ask(given.append)
                p[0].sub_(1.0 + step)
                co2.step()
            assert not given
            co2.step()
        assert len(given) == 1 and str(given[0]) == str(then), gap
        co2.finish()
        snapshot.ask(given.append)
        assert len(given) == 2 and str(given[1]) == str(co2.state_dict())


def test_a_second_snapshot_waits_for_the_first():
    co2 = CO2(params(3), CO2_2, riders=[snapshot := Snapshot()])
    given: list[str] = []
    saved_by(co2)
    snapshot.ask(lambda _: given.append("first"))
    snapshot.ask(lambda _: given.append("second"))
    assert given == ["first"]
    snapshot.hand_over()
    assert given == ["first", "second"]


def test_state_dict_is_a_copy():
    p = params(3)
    co2 = CO2(p, CO2_2)
    state = of_rank(saved_by(co2))
    kept = [f.clone() for fs in state["state"].values() for f in fs] + [f.clone() for f in state["flats"]]
    for _ in range(4):
        with torch.no_grad():
            p[0].add_(1.0)
        co2.step()
    now = [f for fs in state["state"].values() for f in fs] + list(state["flats"])
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))


def test_an_object_that_diverged_can_go_back_to_a_finished_checkpoint():
    p = params(3)
    co2 = CO2(p, CO2Config(tau=1))
    saved_by(co2)
    co2.finish()
    state = co2.state_dict()
    with torch.no_grad():
        p[0].fill_(float("nan"))
        co2.step()  # the difference that it leaves behind is not finite
        co2.load_state_dict(state)
        p[0].zero_()
        for _ in range(3):
            p[0].sub_(1.0)
            co2.step()
    assert torch.equal(p[0], torch.full((3,), -2.0)), "two differences of 1 have landed, the second halved"
