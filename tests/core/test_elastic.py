"""Workers that come and go: the survivors stay equal, lose at most the reduction in flight, and never stop."""

import itertools
import json
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.chaos.crew import Crew
from core import CO2, CO2Config, CompressionConfig, testing
from core.elastic import ElasticLoop, elastic_co2
from core.elastic.allreduce import ElasticAllReduce, Script
from core.elastic.members import Members
from core.tau import NUMBERS, AdaptiveTau, TauTuner
from tests import problems
from tests.on_ranks import on_ranks
from tests.problems import flat, sgd_step

TIMEOUT = 20.0
STEPS, WAITS_AT = 24, 15


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(folder, settings, deaths, comes="", pace=0.0, steps=STEPS, waits_at=WAITS_AT) -> None:
    """One worker of the problem; `deaths`: name -> (where, when). Writes its trace, by round, at the end.

    comes: a worker that is started later, and waits until the others are at step `waits_at`. There they wait once until
    it is about to join.
    """
    worker = Worker(settings)
    where, when = deaths.get(worker.name, ("", 0))
    hook(worker.allreduce, where, when)
    if worker.name == comes:
        while not Path(folder, "reached").exists():
            time.sleep(0.01)
        Path(folder, "came").touch()
    worker.joined = worker.method.join(lambda: worker.begin(Path(folder, "start.pt")))
    while worker.step < steps:
        time.sleep(pace)
        while comes and worker.step == waits_at and not Path(folder, "came").exists():
            Path(folder, "reached").touch()
            time.sleep(0.05)
        worker.take_step(where, when)
        if where == "saved" and worker.method.local_steps == 0 and worker.method.rounds == when:
            torch.save(worker.give(worker.method), Path(folder, "saved.pt"))
    worker.method.finish()
    Path(folder, f"{worker.name}.tmp").write_text(json.dumps(worker.found()))
    Path(folder, f"{worker.name}.tmp").rename(Path(folder, f"{worker.name}.json"))
    worker.method.end()


def state_of(method: CO2, params: list[nn.Parameter], step: int) -> dict[str, Any]:
    return {"method": method.state_dict(), "params": [p.detach().clone() for p in params], "step": step}


@torch.no_grad()
def restore(state: dict[str, Any], method: CO2, params: list[nn.Parameter]) -> int:
    """Goes on from what state_of has returned; the step."""
    method.load_state_dict(state["method"])
    for p, value in zip(params, state["params"], strict=True):
        p.copy_(value)
    return state["step"]


class Worker(Script):
    """What one worker trains, and what it saw of its rounds."""

    def __init__(self, settings: dict[str, Any]):
        self.name, self.rank = os.environ["CO2_WORKER"], int(os.environ["RANK"])
        self.step, self.joined = 0, False
        self.params = problems.odd_parameters()
        taus = settings.pop("taus", [])  # of the first rounds
        schedule = (lambda number: {"tau": taus[min(number, len(taus) - 1)]}) if taus else None
        self.members, config = Members.from_env(TIMEOUT), CO2Config(**settings)
        options: Any = {"members": self.members, "script": self, "timeout": TIMEOUT, "schedule": schedule}
        self.method = method = elastic_co2(self.params, config, **options)
        self.allreduce = method.allreduce
        self._wait, method._wait_allreduce = method._wait_allreduce, self._waited  # pyright: ignore[reportAttributeAccessIssue]
        self.sizes: list[Any] = []
        self.counted: dict[int, int] = {}  # round -> workers, 0 if it was lost; so on
        self.excluded: dict[int, int] = {}
        self.closed: dict[int, int] = {}  # its step
        self.taus: dict[int, Any] = {}  # tau and fragments of the next round
        if settings.get("tau") == "auto":
            say_times(method.hook(AdaptiveTau).tuner, self.rank)
        self.trace: dict[int, Any] = {}  # the outer iterate

    def give(self, method: Any) -> dict[str, Any]:
        return state_of(method, self.params, self.step)

    def take(self, method: Any, state: dict[str, Any]) -> None:
        self.step = restore(state, method, self.params)

    def tell(self) -> dict[str, Any]:
        return {"step": self.step}

    def on_change(self, reports: Any) -> None:
        self.sizes.append([self.step, self.members.names])

    def take_step(self, where: str, when: int) -> None:
        """One local step; in phase `where`, at step or round `when`, it dies or becomes not a number."""
        step, self.step = self.step, self.step + 1
        sgd_step(self.params, self.rank, step)
        if where == "slow" and step < when:
            time.sleep(0.6)
        if where == "local" and step == when:
            die()
        if where == "stops" and step == when:
            os.kill(os.getpid(), signal.SIGSTOP)
        if where == "spoilt" and step == when:
            self.params[0].data.fill_(float("nan"))
        if self.method.step():
            self.trace[self.method.rounds] = flat(self.method.state["outer_iterate"]).tolist()
            self.closed[self.method.rounds] = self.step
            self.taus[self.method.rounds] = self.method.tau, len(self.method.fragments)
            if where == "boundary" and self.method.rounds == when:
                die()

    def found(self) -> dict[str, Any]:
        """What is written at the end, as JSON holds it."""
        kept = ("name", "joined", "trace", "closed", "taus", "sizes", "counted", "excluded")
        return {"x": flat(self.params).tolist()} | {key: getattr(self, key) for key in kept}

    def begin(self, saved: Path) -> None:
        """The first worker's start: from a checkpoint, where there is one."""
        if saved.exists():
            self.take(self.method, torch.load(saved))

    def _waited(self, *, finished: bool) -> Any:
        result = self._wait(finished=finished)
        self.counted[self.method.rounds] = 0 if self.allreduce.is_lost else self.allreduce.world_size
        self.excluded[self.method.rounds] = self.method.stats.excluded
        return result


def say_times(tuner: TauTuner, rank: int) -> None:
    """Lets a worker say that its steps take 10 ms, and its all-reduces 20 ms times its rank + 1."""
    measure = tuner.write_times

    def write_times(*args: Any) -> None:
        measure(*args)
        mine = args[-1].view(-1, NUMBERS)[rank]
        if mine[:2].all():
            mine.copy_(torch.tensor([0.01, 0.02 * (rank + 1), 0.0]))

    tuner.write_times = write_times


def hook(flight: ElasticAllReduce, where: str, when: int) -> None:
    """Dies in a phase of reduction number `when`, or at "step N", once that collective of it has begun."""
    inner, phases = flight.in_phases, {"sent": 0, "summed": 1}

    def in_phases(stages: Any) -> Any:
        steps = inner(stages)
        for number in itertools.count():  # the steps of the sum, and the agreement on it
            due = flight.launched == when
            if due and phases.get(where) == number:
                die()
            if (stage := next(steps, None)) is None:
                return
            if due and where == f"step {number}":
                die()
            yield stage

    flight.in_phases = in_phases  # pyright: ignore[reportAttributeAccessIssue]


def run(tmp_path: Path, workers: int, settings: dict[str, Any], deaths: dict[str, Any], restarts: int = 0, **more: Any):
    crew = Crew(testing._context(), train, (str(tmp_path), settings, deaths, *more.values()), workers, restarts)
    status = crew.run()
    assert not crew.timed_out, "some worker hangs"
    ends = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    return status, ends


def check_equal(ends: dict[str, Any]) -> None:
    """All that came to the end hold the same parameters, and held the same outer iterates on the way, at one step."""
    first = next(iter(ends.values()))
    for end in ends.values():
        assert end["x"] == first["x"]
        for number in end["trace"].keys() & first["trace"].keys():
            assert end["trace"][number] == first["trace"][number], number
            assert end["closed"][number] == first["closed"][number], number
            assert end["taus"][number] == first["taus"][number], number


PAPER = {"tau": 3}
KEEP = {"tau": 3, "merge": "keep_local", "gap": "none", "delay": "auto", "outer_momentum": 0.0}
INT4 = {"compression": CompressionConfig("int4")}
PARTS = KEEP | {"fragments": 3, "delay": 1}  # all-reduce number 3 n + 1 is of the first part
LGRECO = {"compression": CompressionConfig("lgreco", like="int4")}
LOCAL_SGD = PAPER | INT4 | {"delay": 0, "gap": "none", "clip": None, "outer_momentum": 0.0}
SLOW = pytest.mark.slow
DEATHS = [
    ("0.0", "boundary", 3, PAPER),
    ("0.0", "summed", 4, PAPER),
    ("1.0", "local", 13, KEEP),
    ("0.0", "summed", 3, KEEP),
    ("0.0", "step 2", 3, KEEP | INT4 | {"delay": "boundary"}),  # the all-to-all
    ("1.0", "step 4", 4, PAPER | INT4),  # the agreement
    ("0.0", "step 1", 8, PARTS),  # of the second part
    ("1.0", "summed", 9, PARTS | INT4),
    ("1.0", "local", 13, PARTS | {"delay": "auto"}),
    ("1.0", "summed", 6, KEEP | LGRECO),
    *(pytest.param("1.0", f"step {n}", 3, settings | INT4, marks=SLOW) for n in range(5) for settings in (PAPER, KEEP)),
    *(pytest.param("0.0", f"step {n}", 4, LOCAL_SGD, marks=SLOW) for n in range(5)),
]


@pytest.mark.parametrize(
    "settings",
    [PAPER, KEEP | {"delay": 1}, PARTS, PAPER | INT4, LOCAL_SGD, PARTS | INT4, PAPER | LGRECO],
    ids=["paper", "keep", "fragments", "paper, int4", "local_sgd, int4", "fragments, int4", "L-GreCo"],
)
def test_without_a_loss_it_is_the_plain_method(tmp_path: Path, settings: dict[str, Any]):
    """Bit for bit, also in the buffers' part."""
    _, ends = run(tmp_path, 2, settings, {})
    plain = testing.run_distributed(train_plainly, 2, settings, tmp_path / "none")
    assert set(ends) == {"0.0", "1.0"}
    assert {tuple(end["x"]) for end in ends.values()} == {tuple(x) for x, _ in plain}


@pytest.mark.parametrize(("who", "where", "when", "settings"), DEATHS)
def test_the_survivors_go_on_and_stay_equal(tmp_path: Path, who: str, where: str, when: int, settings: dict[str, Any]):
    status, ends = run(tmp_path, 3, settings, {who: (where, when)})
    assert status == 0 and set(ends) == {"0.0", "1.0", "2.0"} - {who}
    check_equal(ends)
    for end in ends.values():
        assert [len(names) for _, names in end["sizes"]] == [3, 2]


@pytest.mark.slow
def test_a_slow_survivor_is_waited_for(tmp_path: Path):
    """Worker 1 loses the reduction some steps before worker 2 would start it."""
    status, ends = run(tmp_path, 3, PAPER, {"0.0": ("sent", 3), "2.0": ("slow", 12)})
    assert status == 0 and [[len(names) for _, names in end["sizes"]] for end in ends.values()] == [[3, 2]] * 2
    check_equal(ends)


@pytest.mark.parametrize(
    "settings",
    [
        LOCAL_SGD,
        PAPER | {"taus": [3, 5] * 20},
        PARTS,
        KEEP | LGRECO,
        *(pytest.param(s, marks=SLOW) for s in (PAPER, PARTS | INT4)),
    ],
    ids=["local_sgd, int4", "schedule", "fragments", "L-GreCo", "paper", "fragments, int4"],
)
def test_one_that_comes_back_joins(tmp_path: Path, settings: dict[str, Any]):
    """Under a schedule the newcomer knows of what tau the round was that it joins, and of what the next one is."""
    status, ends = run(tmp_path, 3, settings, {"0.0": ("local", 10)}, restarts=1, comes="0.1", pace=0.05, steps=60)
    assert status == 0 and set(ends) == {"0.1", "1.0", "2.0"}
    assert ends["0.1"]["joined"] and len(ends["1.0"]["sizes"][-1][1]) == 3
    check_equal(ends)


@pytest.mark.parametrize("settings", [PAPER, KEEP | {"fragments": "auto"}], ids=["paper", "fragments"])
def test_all_choose_the_same_tau_from_the_times_of_those_who_are_there(tmp_path: Path, settings: dict[str, Any]):
    """Worker 0's all-reduces are the shortest, which count: without it, the others need more steps."""
    deaths = {"0.0": ("local", 10)}
    auto = settings | {"tau": "auto", "tau_max": 12}
    status, ends = run(tmp_path, 3, auto, deaths, restarts=1, comes="0.1", pace=0.02, steps=170, waits_at=60)
    assert status == 0 and set(ends) == {"0.1", "1.0", "2.0"} and ends["0.1"]["joined"]
    check_equal(ends)
    calibrated, few, many, again = [tau for (tau, _), _ in itertools.groupby(ends["1.0"]["taus"].values())]
    assert calibrated == 2 < few == again < many
    assert {few, many} <= {tau for tau, _ in ends["0.1"]["taus"].values()}, "it decides with the others"
    parts = {count for _, count in ends["1.0"]["taus"].values()}
    assert parts == ({1, 2, 3} if "fragments" in settings else {1})


def train_plainly(rank, world_size, settings, saved, saves_at=0) -> tuple[list[float], Any]:
    """One of workers that neither come nor go, from a checkpoint where there is one: its parameters at the end, and its
    state after round `saves_at`."""
    params, state = problems.odd_parameters(), None
    method = CO2(params, CO2Config(**settings))
    begins = restore(torch.load(saved), method, params) if saved.exists() else 0
    for step in range(begins, STEPS):
        sgd_step(params, rank, step)
        if method.step() and method.rounds == saves_at:
            state = state_of(method, params, step + 1)
    method.finish()
    method.close()
    return flat(params).tolist(), state


@pytest.mark.parametrize("started", [2, 3])
def test_an_elastic_checkpoint_goes_on_plainly(tmp_path: Path, started: int):
    """Two workers' with a mean in flight, also where a third one was lost before: bit for bit."""
    _, ends = run(tmp_path, started, PAPER, {"0.0": ("saved", 3), "2.0": ("local", 1)})
    check_equal(ends)
    ours = testing.run_distributed(train_plainly, 2, PAPER, tmp_path / "saved.pt")
    assert [x for x, _ in ours] == [ends["0.0"]["x"]] * 2


def loop_from(folder: str, start: str) -> None:
    """One worker of an own script. The first worker writes the state of the run in its midst."""
    params = nn.ParameterList(problems.odd_parameters())
    optimizer = torch.optim.SGD(params, 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    more = {"others": {"schedule": schedule}, "first_state": torch.load(start) if start else None}
    loop = ElasticLoop(params, optimizer, CO2Config(**PAPER), steps=STEPS, timeout=TIMEOUT, **more)
    for step in loop:
        if step == 9 and loop.place == 0:
            torch.save(loop.state_dict(), Path(folder, "state"))
        for p in params:
            p.grad = torch.full_like(p, math.sin(3 * step + loop.place))
        optimizer.step(), schedule.step()
    torch.save([step, flat(params)], Path(folder, loop.members.name))


def test_a_loop_goes_on_from_a_state(tmp_path: Path):
    found = []
    for folder, start in ((tmp_path / "whole", ""), (tmp_path / "again", str(tmp_path / "whole/state"))):
        folder.mkdir()
        assert Crew(testing._context(), loop_from, (str(folder), start), 2).run() == 0
        found += [torch.load(folder / name) for name in ("0.0", "1.0")]
    assert all(step == STEPS - 1 and torch.equal(x, found[0][1]) for step, x in found)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_plain_checkpoint_goes_on_elastic(tmp_path: Path, workers: int):
    start = tmp_path / "start.pt"
    _, state = testing.run_distributed(train_plainly, 2, PAPER, start, 3)[0]
    torch.save(state, start)
    expected = testing.run_distributed(train_plainly, workers, PAPER, start)
    _, ends = run(tmp_path, workers, PAPER, {})
    assert len(ends) == workers and all(end["x"] == expected[0][0] for end in ends.values())


SIMPLE = {"tau": 3, "outer_lr": 0.5, "outer_momentum": 0.2, "gap": "none", "clip": None}
LATE = SIMPLE | {"merge": "keep_local", "delay": 1}


@pytest.mark.parametrize(
    ("where", "when", "sent", "settings"),
    [
        ("sent", 3, [2], SIMPLE),
        ("boundary", 3, [2, 3], SIMPLE),
        ("local", 10, [2, 3], SIMPLE),
        ("sent", 3, [2], LATE),
        ("boundary", 3, [2, 3], LATE),
    ],
)
def test_the_mean_is_over_those_that_have_sent(tmp_path: Path, where: str, when: int, sent: list[int], settings: Any):
    """The outer iterates equal a plain loop's, in which worker 2 counts in the rounds that the survivors name. `sent`
    has the possible numbers of such rounds, because the all-reduce under way at its death may arrive, or is lost."""
    _, ends = run(tmp_path, 3, settings, {"2.0": (where, when)})
    check_equal(ends)
    with_it, lost = rounds_of(ends["0.0"])
    assert (with_it, lost) == rounds_of(ends["1.0"])
    assert with_it in sent and lost in ([2] if with_it == 2 else [None, 3])
    check_trace(ends["0.0"]["trace"], by_hand(len(ends["0.0"]["trace"]), with_it, lost, settings=settings))


def test_one_that_is_not_finite_is_left_out_also_after_a_loss(tmp_path: Path):
    """Worker 2 is lost after three rounds; then worker 1 spoils the fifth, in which worker 0 alone counts."""
    status, ends = run(tmp_path, 3, SIMPLE, {"2.0": ("boundary", 3), "1.0": ("spoilt", 13)})
    assert status == 0 and set(ends) == {"0.0", "1.0"}
    check_equal(ends)
    for end in ends.values():
        assert {number for number, workers in end["excluded"].items() if workers} == {"5"}
        check_trace(end["trace"], by_hand(len(end["trace"]), *rounds_of(end), alone=4))


def test_the_only_worker_left_goes_on_from_the_outer_iterate(tmp_path: Path):
    """Worker 1 is lost after three rounds; then worker 0 spoils the fifth, in which no worker counts."""
    status, ends = run(tmp_path, 2, SIMPLE, {"1.0": ("boundary", 3), "0.0": ("spoilt", 13)})
    assert status == 0 and set(ends) == {"0.0"}
    assert {number for number, workers in ends["0.0"]["excluded"].items() if workers} == {"5"}
    assert torch.tensor([*ends["0.0"]["trace"].values(), ends["0.0"]["x"]]).isfinite().all()


def change_a_buffer(folder: str) -> None:
    """One worker whose buffer first changes before finish(). The third dies in the all-reduce that averages it."""
    name, rank, buffer = os.environ["CO2_WORKER"], int(os.environ["RANK"]), torch.zeros(1)
    params, members = problems.odd_parameters(), Members.from_env(TIMEOUT)
    method = elastic_co2(params, CO2Config(**PAPER), members=members, buffers=[buffer], timeout=TIMEOUT)
    hook(method.allreduce, "sent" if rank == 2 else "", 4)
    method.join()
    for step in range(6):
        sgd_step(params, rank, step)
        method.step()
    buffer.fill_(rank + 1.0)
    method.finish()
    Path(folder, name).write_text(f"{buffer.item()} of {method.allreduce.launched}")
    method.end()


def test_a_lost_average_of_late_buffers_is_made_again(tmp_path: Path):
    assert Crew(testing._context(), change_a_buffer, (str(tmp_path),), 3).run() == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(("0.0", "1.0"), "1.5 of 5")


def check_trace(trace: dict[str, list[float]], expected: list[torch.Tensor]) -> None:
    for number, x in enumerate(expected, start=1):
        ours = torch.tensor(trace[str(number)], dtype=torch.float64)
        torch.testing.assert_close(ours, x, rtol=1e-9, atol=1e-9)


def rounds_of(end: dict[str, Any]) -> tuple[int, int | None]:
    """In how many rounds three workers have counted, and which round was lost, from 0."""
    counted = {int(number): workers for number, workers in end["counted"].items()}
    lost = [number for number, workers in counted.items() if workers == 0]
    assert len(lost) < 2 and {*counted.values()} <= {0, 2, 3}
    since = min(counted) if counted else 0
    return sum(workers == 3 for workers in counted.values()), lost[0] - since if lost else None


def by_hand(
    rounds: int, with_third: int, lost: int | None, alone: int | None = None, settings: dict[str, Any] = SIMPLE
) -> list[torch.Tensor]:
    """x after each of the boundaries, where the third worker counts in the first `with_third` rounds, and in round
    `alone`, from 0, only the first. The average of round `lost` never arrives."""
    ref, workers = problems.reference(problems.Settings(**settings), 3, flat(problems.odd_parameters()))
    keeps = ref.merge == "keep_local"
    for t in range(rounds):
        # x and m stay where the lost average would arrive
        ref.alpha, ref.beta = (0.0, 1.0) if not keeps and t - 1 == lost else (0.5, 0.2)
        ref.weights = torch.tensor([1.0, float(t != alone), float(t < with_third)]) * (keeps or t != lost)
        for step in range(3 * t, 3 * t + 3):
            ref.x.sub_(problems.LR * problems.gradient(ref.x, workers, step))
            ref.local_step()
        if keeps and t == lost:  # the next difference has this round's progress, too
            ref.base += ref.in_flight.pop()[1]
            ref.outer.append(ref.z)
    return ref.outer[:] if keeps else ref.outer[1:]


@pytest.mark.slow
def test_one_that_stops_comes_back_under_a_new_name(tmp_path: Path):
    status, ends = run(tmp_path, 3, PAPER, {"1.0": ("stops", 10)}, restarts=1, comes="1.1", pace=0.05, steps=60)
    assert status == 0 and set(ends) == {"0.0", "1.1", "2.0"}
    check_equal(ends)


@pytest.mark.slow
def test_one_death_is_one_death(tmp_path: Path):
    """Ten times one of six is killed: the others go on within seconds, and none of them is left out."""
    workers, rng, kills, pauses, since = 6, random.Random(6), [], [], [0.0]
    crew: Crew

    def strike() -> None:
        now, coordinator = time.monotonic(), crew.coordinator
        assert coordinator is not None
        at, generation, others = kills[-1] if kills else (0.0, 0, [])
        if len(pauses) < len(kills) and coordinator.generation > generation:
            pauses.append(now - at)
            assert coordinator.members == others, (coordinator.generation, generation, coordinator.members, others)
        if len(pauses) < len(kills) or len(coordinator.members) < workers:
            since[0] = now + rng.uniform(1, 2)  # a worker that dies while all connect costs 2 s more
        elif now > since[0] and len(kills) < 10:
            slot = rng.randrange(workers)
            kills.append((now, coordinator.generation, [n for n in coordinator.members if n != crew.name(slot)]))
            crew.processes[slot].send_signal(signal.SIGKILL)

    args = (str(tmp_path), PAPER, {}, "", 0.04, 1500)
    crew = Crew(testing._context(), train, args, workers, restarts=99, late=400, watch=strike)
    assert crew.run() == 0 and not crew.timed_out
    assert len(pauses) == 10 and max(pauses) < 3
    check_equal({path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")})


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "settings"), [(1, PAPER), (4, PARTS | INT4)], ids=["paper", "fragments, int4"])
def test_a_storm(tmp_path: Path, seed: int, settings: dict[str, Any]):
    """Four workers, one or two of which are killed every few seconds, at any moment, and come back."""
    rng = random.Random(seed)
    storm = {"next": 0.0, "kills": 0}
    crew: Crew

    def strike() -> None:
        now = time.monotonic()
        alive = [process for process in crew.processes.values() if process.poll() is None]
        if crew.coordinator is None or not crew.coordinator.generation or len(alive) < 2 or storm["kills"] >= 15:
            return
        storm["next"] = storm["next"] or now + 3
        if now > storm["next"]:
            for process in rng.sample(alive, rng.choice([1, 1, 1, 2])):
                process.send_signal(signal.SIGKILL)
                storm["kills"] += 1
            storm["next"] = now + rng.uniform(0.5, 5)

    comes, pace, steps = "", 0.04, 1200
    args = (str(tmp_path), settings, {}, comes, pace, steps)
    crew = Crew(testing._context(), train, args, 4, restarts=99, late=400, watch=strike)
    assert crew.run() == 0 and not crew.timed_out
    ends = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert storm["kills"] >= 15 and ends
    check_equal(ends)


@on_ranks(2)
def test_a_process_group_that_the_script_made_is_refused(rank: int):  # noqa: ARG001
    members = Members(dist.HashStore(), "0.0")
    said = problems.refusal(elastic_co2, [nn.Parameter(torch.ones(2))], CO2Config.paper(2), members=members)
    assert said == "elastic workers make their process groups themselves: leave out init_process_group()"
