"""bench.scaling: the stand-in's pacing, rows and plots, options; small real runs over a throttled link."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import scaling, standin
from bench.scaling import Job, Scaling, Setting, combine, measure_all, round_seconds, rounds_to_measure, wire_seconds
from bench.standin import BYTES, LAYERS, PARAMS, PATIENCE, Pacer, StandIn, digits, pace
from core import UserError
from core.comm import ring_bytes
from tests.bench.emulated import python


class Clock:
    """Time that passes only when told, and sleeps that overshoot."""

    def __init__(self, overshoot: float = 0.0):
        self.now, self.overshoot, self.slept = 100.0, overshoot, 0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.now += seconds + self.overshoot


def pacer(clock: Clock, step: float = 1.2, layers: int = 4) -> Pacer:
    return Pacer(step, layers, clock, clock.sleep)


# -- pacing -----------------------------------------------------------------------------------------------------


def test_sleeps_do_not_add_up_lateness_is_caught_up_a_stall_is_not_and_what_is_very_late_is_given_up():
    clock = Clock(overshoot=0.01)
    p = pacer(clock)
    for _ in range(10):
        p.wait(4)
        for _ in range(4):
            p.wait(2)
    assert clock.now - 100 == pytest.approx(10 * 1.2 + 0.01)
    clock = Clock()
    p = pacer(clock)  # a part takes 0.1
    clock.now += 0.25
    p.wait(1)  # due at 0.1, over at 0.25
    assert (p.passed_at, clock.slept) == (100.25, 0)
    p.wait(4)  # due at 0.5
    assert clock.now == pytest.approx(100.5)
    clock.now += 2.0
    p.stalled(2.0)
    p.wait(2)
    assert clock.now == pytest.approx(102.7)
    clock = Clock()
    p = pacer(clock)
    clock.now += 100.0
    p.wait(12)
    for _ in range(2 * PATIENCE):
        p.wait(12)
    assert clock.now == pytest.approx(200.0 + PATIENCE * 1.2)  # so many were caught up, the others took their time


def test_gradients_become_ready_one_layer_after_the_other_and_are_right():
    """A step of 1.2 s: forward ends at 0.4 s, then come the layers' gradients, the last layer's first."""
    clock = Clock()
    model, x = StandIn(pacer(clock, step=1.2, layers=LAYERS), 64), torch.randn(5, 64)
    ready = ready_at(clock, [layer.weight for layer in model.layers], lambda: model(x))  # pyright: ignore
    assert ready == [pytest.approx((LAYERS + 2 * (LAYERS - i)) / (3 * LAYERS) * 1.2) for i in range(LAYERS)]
    plain = torch.nn.Sequential(model.layers[0], *(m for layer in model.layers[1:] for m in (torch.nn.ReLU(), layer)))
    paced = [p.grad for p in model.parameters()]
    model.zero_grad()
    plain(x)[:, :10].square().sum().backward()
    torch.testing.assert_close(paced, [p.grad for p in model.parameters()])


def test_a_layer_takes_the_share_that_it_has_of_the_parameters():
    """Of 0.8 s: 8 and 24 of 32 parameters; ReLU in place, as in a ResNet."""
    clock = Clock()
    layers = (torch.nn.Linear(*size, bias=False) for size in ((2, 4), (4, 6)))
    model = torch.nn.Sequential(next(layers), torch.nn.ReLU(inplace=True), next(layers))
    pace(model, pacer(clock, step=1.2, layers=1))
    ready = ready_at(clock, list(model.parameters()), lambda: model(torch.randn(5, 2)))
    assert ready == pytest.approx([1.2, 0.4 + 0.75 * 0.8])


def ready_at(clock: Clock, weights: list[torch.nn.Parameter], forward: Callable[[], torch.Tensor]) -> list[float]:
    """When the gradient of each is ready, from the start of a step on."""
    ready: dict[int, float] = {}
    for i, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, i=i: ready.update({i: clock.now - 100}))
    forward().square().sum().backward()
    return [ready[i] for i in range(len(weights))]


def test_the_stand_in_has_the_stated_size_and_real_data():
    x, y = standin.digits()
    assert sum(p.numel() for p in StandIn(pacer(Clock())).parameters()) == PARAMS
    assert x.shape == (1797, standin.WIDTH) and x.min() >= 0 and x.max() == 1 and x[:, 64:].abs().sum() == 0
    assert sorted(y.unique().tolist()) == list(range(10))


class Method:
    """A method whose every second step closes a round that waited 5 s of the fake clock."""

    def __init__(self, clock: Clock):
        self.clock, self.steps, self.stats = clock, 0, SimpleNamespace(exposed_seconds=0.0)

    def step(self) -> bool:
        self.steps += 1
        if self.steps % 2:
            return False
        self.clock.now += 5.0
        self.stats.exposed_seconds = 5.0
        return True


def test_waiting_is_told_from_computing(monkeypatch: pytest.MonkeyPatch):
    clock, cpu = Clock(), iter(range(100))
    monkeypatch.setattr(standin, "time", SimpleNamespace(perf_counter=clock, thread_time=lambda: next(cpu) / 4))
    monkeypatch.setattr(standin, "LocalUpdateMethod", Method)
    p = Pacer(1.2, LAYERS, clock, clock.sleep)
    trainer = standin.Trainer(StandIn(p, width=64), Method(clock), p, standin.digits(64), batch=2, seed=0)  # pyright: ignore
    trainer.restart()
    steps = [trainer.step() for _ in range(4)]
    assert [s.closed for s in steps] == [False, True, False, True]
    assert [(s.wait, s.boundary) for s in steps] == [(0, 0), (5.0, 0.25), (0, 0), (5.0, 0.25)]
    assert [s.compute for s in steps] == pytest.approx([1.2, 1.2 - 0.25, 1.2 + 0.25, 1.2 - 0.25])
    assert clock.now - 100 == pytest.approx(4 * 1.2 + 2 * 5.0 + 0.25)  # the second boundary's CPU time is still owed


# -- theory and settings ----------------------------------------------------------------------------------------


def test_rounds_are_as_long_as_theory_says_and_settings_are_read():
    assert wire_seconds(1, None) == 0 and wire_seconds(4, 100.0) == pytest.approx(2 * 3 / 4 * 4 * PARAMS * 8 / 100e6)
    assert round_seconds(Setting("co2", 12), 12, 0.04, 0.6) == 0.6
    assert round_seconds(Setting("co2", 48), 48, 0.04, 0.6) == pytest.approx(1.92)
    assert round_seconds(Setting("slowmo", 12), 12, 0.04, 0.6) == pytest.approx(1.08)
    assert round_seconds(Setting("ddp", 1), 1, 0.04, 0.6) == pytest.approx(0.64)
    assert [rounds_to_measure(3.0, each) for each in (0.5, 0.7, 5.0)] == [6, 5, 2]
    assert len(scaling.Scaling().groups()) == 1 + 4 * 3 and Setting.parse("ddp") == Setting("ddp", 1)
    assert Setting.parse("co2:auto") == Setting("co2", "auto")
    assert Setting.parse("co2_recommended:auto") == Setting("co2_recommended", "auto")
    assert Setting.parse("slowmo:12") == Setting("slowmo", 12)


@pytest.mark.parametrize("text", ["co2", "co2:0", "co2:x", "ddp:3", "slowmo:auto", "c02:3", ""])
def test_a_wrong_setting_is_named(text: str):
    with pytest.raises(UserError, match=f"'{text}'"):
        Setting.parse(text)


def test_auto_settles_when_tau_rests(monkeypatch: pytest.MonkeyPatch):
    taus = iter([4] * 9 + [20] * 3 + [21] * 100)
    trainer: Any = SimpleNamespace(method=SimpleNamespace(tau=0))
    monkeypatch.setattr(scaling, "run_round", lambda t: setattr(t.method, "tau", next(taus)))
    scaling.settle(trainer)
    assert next(taus) == 21 and sum(1 for _ in taus) == 100 - scaling.SETTLED - 1


# -- what is made of the rows -----------------------------------------------------------------------------------


def test_ranks_become_one_row():
    def cell(speed: float, mean_step: float) -> dict[str, Any]:
        same = {"method": "co2", "tau": 3, "bytes_sent_per_worker": 7, "rounds": 2, "seconds": 2.0}
        each = {"step_seconds": 0.04, "step_spread": 0.001}
        each |= {"exposed_seconds": speed / 100, "exposed_share": speed / 200}
        more = {"allreduce_seconds": speed, "boundary_seconds": 0.002, "cpu_seconds": 1.5}
        return same | each | more | {"samples_per_second": speed, "mean_step_seconds": mean_step}

    ranks = [[cell(10, 0.040), cell(20, 0.040)], [cell(30, 0.0439), cell(40, 0.0441)]]
    first, second = scaling.combine(ranks, step_ms=40.0)
    assert (first["samples_per_second"], first["allreduce_seconds"], first["exposed_seconds"]) == (20, 20, 0.2)
    assert first["exposed_share"] == pytest.approx(0.1)
    assert (first["bytes_sent_per_worker"], first["cpu_cores_busy"]) == (7, 1.5)
    assert (first["late"], second["late"]) == (False, True)
    assert not {"cpu_seconds", "mean_step_seconds"} & set(first)


# -- real processes, over a link throttled in software and in network namespaces --------------------------------------


METHODS = ["ddp", "slowmo:3", "co2:3"]
ROW = {
    *("method", "tau_setting", "tau", "workers", "rate_mbit", "repeat", "compute", "steps", "seconds"),
    *("samples_per_second", "step_seconds", "step_spread", "rounds", "exposed_seconds", "exposed_share"),
    *("allreduce_seconds", "boundary_seconds", "bytes_sent_per_worker", "late", "cpu_cores_busy"),
}


def measure(folder: Path, *options: str) -> dict[str, Any]:
    """scaling.json of a run with 1 and 2 workers at 100 Mbit/s, two repeats, steps of 20 ms."""
    small = ["--rates", "100", "--repeats", "2", "--seconds", "0.3", "--step_ms", "20", "--out"]
    said = python("-m", "bench.scaling", *small, folder, *options, timeout=120)
    assert "| rate_mbit | workers | method | tau_setting | rows |" in said
    return json.loads((folder / "scaling.json").read_text())


def check(result: dict[str, Any]) -> None:
    """What must hold however noisy the machine is."""
    assert len(result["rows"]) == 2 * 2 * len(METHODS)
    assert (result["format"], result["model"]["params"], result["step_ms"]) == (1, PARAMS, 20.0)
    assert result["model"]["bytes"] == BYTES
    for row in result["rows"]:
        assert set(row) == ROW and row["rounds"] >= 2 and row["steps"] == row["rounds"] * row["tau"]
        assert row["seconds"] > 0.6 * row["steps"] * 0.02  # steps that were late before may be caught up here
        assert 0 <= row["exposed_share"] < 1
        assert row["exposed_share"] == pytest.approx(row["exposed_seconds"] / row["seconds"], abs=0.02)
        scalars = 4 * (8 + row["workers"]) if row["tau"] > 1 else 0  # so many travel with each all-reduce of a round
        assert row["bytes_sent_per_worker"] == row["rounds"] * ring_bytes(BYTES + scalars, row["workers"])
        if row["workers"] > 1:
            assert row["allreduce_seconds"] > 0.8 * ring_bytes(BYTES, 2) * 8 / 100e6
        else:
            assert row["rate_mbit"] is None
    interleaved = [(row["workers"], row["repeat"]) for row in result["rows"]]
    assert interleaved == sorted(interleaved)
    two = {(r["method"], r["repeat"]): r for r in result["rows"] if r["workers"] == 2}
    for repeat in range(2):  # an all-reduce takes 0.17 s, three steps 0.06 s: every method waits, co2 the least
        assert two["co2", repeat]["exposed_seconds"] > 0
        assert two["co2", repeat]["samples_per_second"] > two["ddp", repeat]["samples_per_second"]


def test_a_lone_worker_has_every_figure():
    """In this process; what two or more wait for each other is measured by the tests below."""
    job = Job(Scaling(methods=tuple(METHODS), repeats=1, seconds=0.05, step_ms=4.0), 1, None, digits())
    rows = combine([measure_all(job)], step_ms=4.0)
    assert sorted(row["method"] for row in rows) == ["co2", "ddp", "slowmo"]
    for row in rows:
        assert set(row) == ROW and row["rounds"] >= 2 and row["steps"] == row["rounds"] * row["tau"]
        assert (row["rate_mbit"], row["bytes_sent_per_worker"], row["workers"]) == (None, 0, 1)
        assert row["seconds"] > 0.6 * row["steps"] * 0.004 and 0 <= row["exposed_share"] < 1


@pytest.mark.slow
def test_a_small_run_writes_everything(tmp_path: Path):
    result = measure(tmp_path, "--throttle", "--workers", "1", "2", "--methods", *METHODS)
    check(result)
    assert (result["link"], result["verified_mbit"]) == ("throttled in software", {})
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.json"]


@pytest.mark.root
def test_a_small_run_in_namespaces(tmp_path: Path):
    result = measure(tmp_path, "--workers", "1", "2", "--methods", *METHODS, "overlap_local:auto")
    automatic = [r for r in result["rows"] if r["tau_setting"] == "auto" and r["workers"] == 2]
    assert len(automatic) == 2
    for row in automatic:  # 0.17 s under steps of 20 ms, with a quarter to spare
        assert 8 <= row["tau"] <= 30 and row["exposed_share"] < 0.3
    result["rows"] = [r for r in result["rows"] if r["tau_setting"] != "auto"]
    check(result)
    assert result["link"] == "namespaces + tbf" and result["verified_mbit"]["100"] == pytest.approx(100, rel=0.1)
