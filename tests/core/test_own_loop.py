"""save() and load(): a loop of one's own is killed and goes on, bit for bit."""

import atexit
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CO2, CO2Config, CompressionConfig, UserError, load, save
from core.baselines import LocalSGD, OverlapLocalSGD
from core.checkpoint import runs as checkpoint
from core.errors import CollectiveError
from core.guards import failure as peers
from core.guards.usage import UsageChecks
from core.guards.workers import forget
from core.testing import _context, run_distributed
from tests import problems
from tests.damages import changed
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import flat, refusal

TAU, STEPS = 3, 10
PAPERS = CO2Config.paper(TAU)
KEEP = replace(CO2Config.recommended(), tau=TAU, delay=2, compression=CompressionConfig("int4"))  # what no time decides
METHODS: dict[str, Callable[..., Any]] = {
    "the paper's": lambda params, model: CO2(params, PAPERS, buffers=model.buffers()),
    "as recommended": lambda params, model: CO2(params, KEEP, buffers=model.buffers()),
    "shared by all": lambda params, model: CO2(params, PAPERS, shard=True, buffers=model.buffers()),
    "overlap": lambda params, model: OverlapLocalSGD(params, TAU),
}


def net(seed: int) -> nn.Module:
    """With BatchNorm's buffers and dropout, which draws from torch's generator."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


class Loop:
    """What a script of one's own makes before its first step; go() trains from `step` on."""

    def __init__(self, rank: int, name: str = "the paper's", seed: int = 0):
        self.rank, self.model, self.step = rank, net(seed), 0
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.co2 = METHODS[name](self.model.parameters(), self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(100 * seed + rank)

    def state(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.co2

    def save(self, folder: str, **more: Any) -> bool:
        return save(folder, *self.state(), step=self.step, others={"schedule": self.schedule}, **more)

    def load(self, folder: str) -> int | None:
        found = load(folder, *self.state(), others={"schedule": self.schedule})
        self.step = found or 0
        return found

    def go(self, until: int) -> None:
        while self.step < until:
            self.step += 1
            self.optimizer.zero_grad()
            data = problems.batch(self.rank, self.step, dtype=torch.float32)
            problems.loss(self.model, data).backward()
            self.optimizer.step()
            self.schedule.step()
            self.co2.step()

    def end(self) -> Any:
        self.co2.finish()
        self.co2.close()
        return flat([*self.model.parameters(), *self.model.buffers()])


def goes_on_from_new_objects(rank: int, folder: Path, name: str, at: int) -> Tensor:
    """A run that saves and goes on ends where one of new objects does that goes on from there; its parameters when it
    saved."""
    first = Loop(rank, name)
    first.go(at)
    assert first.save(str(folder))
    then = flat(first.model.parameters())
    first.go(STEPS)
    end = first.end()
    second = Loop(rank, name, seed=1)
    assert second.load(str(folder)) == at
    second.go(STEPS)
    assert torch.equal(end, second.end())
    return then


@on_ranks(2)
def test_a_light_checkpoint_equals_a_full_one_of_zero_residuals_and_rank_0s_moments(rank: int, tmp_path: Path):
    first, light, full = (Loop(rank, "as recommended", seed) for seed in range(3))
    first.go(7)
    assert first.save(str(tmp_path / "light"), light=True)
    fed_back = [f for name, flats in first.co2.reducer.state.items() if "error_feedback" in name for f in flats]
    moments = [t for held in first.optimizer.state.values() for t in held.values()]
    own = [t.clone() for t in moments]
    assert any(f.any() for f in fed_back)
    for t in fed_back:
        t.zero_()
    for t in moments:
        dist.broadcast(t, 0)
    assert all(map(torch.equal, own, moments)) == (rank == 0)
    assert first.save(str(tmp_path / "full"))
    ends = []
    for loop, name in ((light, "light"), (full, "full")):
        assert loop.load(str(tmp_path / name)) == 7
        assert torch.equal(flat(loop.model.parameters()), flat(first.model.parameters()))
        loop.go(STEPS)
        ends.append(loop.end())
    assert torch.equal(*ends) and not torch.equal(ends[0], flat([*first.model.parameters(), *first.model.buffers()]))
    first.end()


FEW = [("the paper's", 6), ("as recommended", 6), *((name, 7) for name in METHODS)]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("workers", "cases"),
    [
        (2, FEW),
        (4, [("the paper's", 7)]),
        pytest.param(2, [("shared by all", 6), ("overlap", 6)], marks=SLOW),
        pytest.param(1, [("the paper's", 7)], marks=SLOW),
    ],
)
@on_ranks()
def test_a_run_goes_on_bit_for_bit_at_a_boundary_and_in_mid_round(
    rank: int, workers: int, cases: list[tuple[str, int]], tmp_path: Path
):
    for name, at in cases:
        differ = goes_on_from_new_objects(rank, tmp_path / f"{name} {at}", name, at)
        if workers > 1 and (at == 7 or name == "as recommended"):
            assert not alike(differ), "else one worker's parameters would do for all"


def test_without_a_process_group(tmp_path: Path):
    goes_on_from_new_objects(0, tmp_path, "the paper's", 7)
    assert Loop(0).load(str(tmp_path / "nothing")) is None


def killed(rank: int, world_size: int, folder: str, place: str) -> None:
    loop = Loop(rank)
    loop.go(4)
    loop.save(folder)
    loop.go(7)
    module, name, who = PLACES[place]
    if rank == who:
        setattr(module, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError):  # the other's connection breaks
        loop.save(folder)


PLACES: dict[str, tuple[Any, str, int]] = {
    "a file is written": (torch, "save", 1),
    "all are written": (checkpoint, "publish", 0),
    "the new one has its name": (checkpoint, "tidy", 0),
}


def goes_on(rank: int, world_size: int, folder: str) -> tuple[int | None, Any, Any]:
    loop, whole = Loop(rank), Loop(rank)
    whole.go(STEPS)
    end = whole.end()
    step = loop.load(folder)
    loop.go(STEPS)
    return step, loop.end(), end


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_is_killed_while_it_saves_leaves_the_last_good_one(place: str, tmp_path: Path):
    run_distributed(killed, 2, str(tmp_path), place, expect_death=(0, 1))
    for step, again, undisturbed in run_distributed(goes_on, 2, str(tmp_path)):
        assert step == (7 if "name" in place else 4) and torch.equal(again, undisturbed)


@on_ranks(2)
def test_so_many_are_kept(rank: int, tmp_path: Path):
    loop = Loop(rank)
    for until, keep, left in ((1, 2, ["01"]), (2, 2, ["01", "02"]), (3, 2, ["02", "03"]), (4, 1, ["04"])):
        loop.go(until)
        loop.save(str(tmp_path), keep=keep)
        assert sorted(p.name[-2:] for p in tmp_path.iterdir()) == left
        dist.barrier()
    loop.end()


def as_before(rank: int, world_size: int, folder: str, name: str) -> str:
    loop = Loop(rank, name)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            loop.load(folder)
        except UserError as error:
            return str(error)
    told = [str(w.message) for w in caught if "workers wrote" in str(w.message)]
    loop.go(STEPS)
    loop.end()
    return "".join(told)


def saved_once(rank: int, world_size: int, folder: str, name: str) -> None:
    loop = Loop(rank, name)
    loop.go(4)
    loop.save(folder)
    loop.end()


def test_another_number_of_workers_goes_on_with_one_line_or_is_refused_in_one(tmp_path: Path):
    for name, told in {
        "the paper's": "2 workers wrote the checkpoint of step 4, 1 go on: each takes what the worker of its rank mod",
        "shared by all": "the checkpoint is of 2 workers, here there are 1, and each held a part",
    }.items():
        folder = str(tmp_path / name[:3])
        run_distributed(saved_once, 2, folder, name)
        (line,) = run_distributed(as_before, 1, folder, name)
        assert told in line and "\n" not in line, line


def test_what_does_not_fit_is_one_line(tmp_path: Path):
    saved_once(0, 1, str(tmp_path), "the paper's")
    kinds: dict[str, tuple[Callable[[Loop], Any], str]] = {
        "model": (lambda n: setattr(n, "model", problems.small_net()), "is of another model: 0.bias is [8] there, [5]"),
        "optimizer": (
            lambda n: setattr(n, "optimizer", torch.optim.SGD(n.model.parameters())),
            "AdamW, here it is SGD",
        ),
        "groups": (
            lambda n: setattr(n, "optimizer", torch.optim.AdamW([n.model[0].weight])),
            "has an optimizer of [6] parameters per group, here it has [1]",
        ),
        "others": (lambda n: setattr(n, "load", lambda f: load(f, *n.state())), "has others=['schedule'], here it"),
        "method": (
            lambda n: setattr(n, "co2", OverlapLocalSGD(n.model.parameters(), TAU)),
            "the checkpoint is of CO2, not OverlapLocalSGD",
        ),
    }
    for what, (change, told) in kinds.items():
        loop = Loop(0)
        change(loop)
        said = refusal(loop.load, str(tmp_path))
        assert told in said and said.startswith(f"{tmp_path}: "), (what, said)


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": "4"}, {"step": 10**9}, {"step": 4, "keep": 0}])
def test_steps_and_numbers_that_are_none(wrong: dict[str, Any], tmp_path: Path):
    name = [*wrong][-1]
    with pytest.raises(UserError, match=f"{name}={wrong[name]!r}: give the number of"):
        save(tmp_path, *Loop(0).state(), **wrong)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written .*: make room or choose another folder"):
        Loop(0).save(str(tmp_path / "file" / "folder"))


@on_ranks(2)
def test_a_folder_that_not_all_workers_share_is_one_line(rank: int, tmp_path: Path):
    said = refusal(Loop(rank).save, str(tmp_path / f"node{rank}"))
    assert "rank1.pt is missing: the folder must be one that all" in said and total_world_size(said) == [said] * 2
    assert not checkpoint.finished(tmp_path / f"node{rank}")
    said = refusal(Loop(rank).load, str(tmp_path / f"node{rank}"))
    assert said == f"load(): {tmp_path}/node0 on rank 0 and {tmp_path}/node1 on rank 1: give all workers one folder"


def test_a_kill_between_the_names_of_two_of_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loop = Loop(0)
    loop.go(4)
    loop.save(str(tmp_path), keep=1)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target.name == "step000000004":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        loop.save(str(tmp_path), keep=1)
    assert Loop(0).load(str(tmp_path)) == 4


def test_parameters_in_another_order_are_refused(tmp_path: Path):
    """Their outer state would go to other parameters."""
    one = Loop(0)
    one.go(4)
    one.save(str(tmp_path))
    model = net(0)
    *most, last = model.parameters()
    said = refusal(CO2([last, *most], PAPERS, buffers=model.buffers()).load_state_dict, one.co2.state_dict())
    assert "have other shapes, or another order: give the parameters in the order" in said
    other = Loop(0)  # two of its parameters are of one shape
    params = [*other.model.parameters()]
    first, second = (i for i, p in enumerate(params) if p.shape == (8,) and i > 1)
    params[first], params[second] = params[second], params[first]
    other.co2 = CO2(params, PAPERS, buffers=other.model.buffers())
    with pytest.raises(UserError, match="step 4 holds the method's parameters in another order"):
        other.load(str(tmp_path))


def test_elastic_workers_have_their_own_way_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loop = Loop(0)
    monkeypatch.setattr(loop.co2.allreduce, "is_elastic", True, raising=False)
    for call, name in ((loop.save, "save()"), (loop.load, "load()")):
        assert refusal(call, str(tmp_path)).startswith(f"{name} needs all workers, and elastic workers leave and join")


def test_what_happens_after_close_is_no_concern_of_a_method():
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    others = [nn.Parameter(torch.ones(2))]

    def train(co2: CO2, params: list[nn.Parameter], steps: int) -> None:
        for _ in range(steps):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            co2.step()

    with CO2(model.parameters(), PAPERS) as before:
        train(before, [*model.parameters()], 2 * TAU)
    model.load_state_dict(net(1).state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CO2(model.parameters(), PAPERS) as again:
            train(again, [*model.parameters()], 2 * TAU)
    optimizer.add_param_group({"params": others})
    rest = [*model[3].parameters()]
    with pytest.warns(UserWarning, match="trains 5 parameters that no method averages"):  # 2 + 2 + 1, of others, too
        train(CO2(rest, PAPERS), rest, 2 * TAU)


def test_a_model_that_moves_to_another_device_is_refused():
    model = net(0)
    co2 = CO2(model.parameters(), PAPERS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    start = co2.hook(UsageChecks)._start
    start[-1] = (*start[-1][:2], torch.device("cuda:0"))  # as if the last one had been there
    for p in model.parameters():
        p.data = p.data.clone()
    said = refusal(optimizer.step)
    assert said.startswith("a parameter moved from cuda:0 to cpu after CO2 was made: call model.to(device) before")


class Counting(torch.optim.SGD):
    """With state that belongs to no parameter, as MADGRAD has."""

    def step(self, closure: Any = None) -> None:
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1  # pyright: ignore[reportArgumentType]
        super().step(closure)


def test_an_optimizers_state_of_no_parameter_is_restored_and_forgotten(tmp_path: Path):
    one, other = Loop(0), Loop(0, seed=1)
    for loop in (one, other):
        loop.optimizer = Counting(loop.model.parameters(), 0.05, momentum=0.9)
        loop.schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    one.go(4)
    one.save(str(tmp_path))
    one.go(STEPS)  # before load() sets the generator for dropout
    assert other.load(str(tmp_path)) == 4 and other.optimizer.state["k"] == 4
    other.go(STEPS)
    assert torch.equal(flat(one.model.parameters()), flat(other.model.parameters()))
    forget(one.optimizer)(torch.tensor(True))
    assert one.optimizer.state["k"] == 0


def test_an_optimiser_of_more_than_the_model_is_refused(tmp_path: Path):
    loop = Loop(0)
    loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UserError, match="the optimizer has 1 parameters that the model lacks"):
        loop.save(str(tmp_path))


CALLS: dict[str, tuple[int, Callable[[Loop, str], Any]]] = {  # local steps before, and the call
    "save()": (3, lambda loop, folder: loop.save(folder)),
    "load()": (3, lambda loop, folder: loop.load(folder)),
    "resync()": (3, lambda loop, folder: loop.co2.resync()),
    "state_dict()": (3, lambda loop, folder: loop.co2.state_dict()),
    "averaged_model()": (4, lambda loop, folder: loop.co2.averaged_model().__enter__()),
    "sync_for_eval()": (4, lambda loop, folder: loop.co2.sync_for_eval()),
}


def on_rank_0(rank: int, world_size: int, call: str, other: str, folder: str) -> str:
    """What rank 0 is told, which makes the call alone. The other worker goes on to another one."""
    peers.FIRST_QUESTION = 0.5
    loop = Loop(rank)
    loop.co2.close()
    config = replace(KEEP, tau=4, delay="auto", fragments=2, compression=CompressionConfig())
    loop.co2 = CO2(loop.model.parameters(), config, average=[torch.zeros(2)])
    loop.go(CALLS[call][0])
    try:
        if rank == 0:
            CALLS[call][1](loop, folder)
        elif "barrier" in other:
            dist.barrier()
        elif other == "step()":
            loop.go(STEPS)
        loop.end()
    except (UserError, RuntimeError) as error:
        loop.co2.leave()
        return str(error)
    return ""


ELSEWHERE = [*zip(CALLS, ["step()", "finish()"] * 3, strict=True), ("averaged_model()", "finish()")]


@pytest.mark.parametrize(("call", "other"), [*ELSEWHERE, ("save()", "torch.distributed.barrier()")])
def test_a_call_on_rank_0_alone_is_one_line_that_names_both_calls(call: str, other: str, tmp_path: Path):
    told, _ = run_distributed(on_rank_0, 2, call, other, str(tmp_path), expect_death=(1,))
    where = f" (in {other})" * (f"(in {other})" in told or other != "step()")  # it may be between two steps
    assert told == f"rank 1{where} went on without {call}: every worker must call {call}, at the same step"
    assert not [*tmp_path.iterdir()]


@on_ranks(2)
def test_workers_at_other_places_are_refused_at_once(rank: int, tmp_path: Path):
    loop = Loop(rank)
    with pytest.raises(UserError, match=r"save\(\): step=7 on rank 0 and step=8 on rank 1: give the same"):
        save(tmp_path, *loop.state(), step=7 + rank)
    loop.go(TAU - rank)
    with pytest.raises(UserError, match=r"save\(\) after 1 rounds on rank 0 and 0 on rank 1: .* skipped batch"):
        save(tmp_path, *loop.state(), step=7)
    loop.co2.leave()
    assert not [*tmp_path.iterdir()]


@on_ranks(2)
def test_workers_in_two_calls_are_both_told_which(rank: int, tmp_path: Path):
    loop = Loop(rank, "as recommended")
    with pytest.raises(UserError) as told:
        loop.save(str(tmp_path)) if rank else loop.co2.resync()
    calls = ["rank 0 calls resync() where rank 1 calls save()", "rank 1 calls save() where rank 0 calls resync()"]
    assert str(told.value) in [f"{each}: every worker must make the same calls" for each in calls]
    loop.co2.leave()


def one_finishes(rank: int, world_size: int, at_boundary: bool) -> str:
    """At a boundary, workers of Local-SGD are equal, so nothing warns of the missing finish()."""
    loop = Loop(rank)
    if at_boundary:
        loop.co2.close()
        loop.co2 = LocalSGD(loop.model.parameters(), TAU)
    loop.go(TAU if at_boundary else 4)
    if rank == 1:
        atexit._run_exitfuncs()  # what Python calls at the end
        os._exit(0)
    with pytest.raises(CollectiveError) as told:
        loop.end()
    return str(told.value)


@pytest.mark.parametrize("at_boundary", [False, True])
def test_finish_on_rank_0_alone_names_the_worker_that_ended_without_it(at_boundary: bool):
    told = run_distributed(one_finishes, 2, at_boundary, expect_death=(1,))[0]
    assert "failed; the script of rank 1 has ended: make the same calls on every worker, and finish() after" in told
    assert "resume" not in told


def test_a_scheduler_that_is_not_saved_is_told(tmp_path: Path):
    loop = Loop(0)
    with pytest.warns(UserWarning, match="save.. gets no learning-rate scheduler"):
        save(tmp_path, *loop.state(), step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.save(str(tmp_path))


@pytest.mark.slow
@on_ranks(3)
def test_who_comes_late_is_waited_for(rank: int, tmp_path: Path):
    """From slow steps, from an evaluation, and from a collective that others came late to."""
    peers.FIRST_QUESTION = 0.2
    loop, pair = Loop(rank), dist.new_group([1, 2])
    for until, slow in ((3, 1), (5, 0), (7, 2)):
        while loop.step < until:
            time.sleep(0.5 * (rank == slow == 1))
            loop.go(loop.step + 1)
        time.sleep(1.5 * (rank == slow != 1))
        if rank > 0 and slow == 2:
            dist.barrier(pair)
        assert loop.save(str(tmp_path))
    loop.end()


@on_ranks(3, expect_death=(1,))
def test_who_died_before_is_named(rank: int, tmp_path: Path):
    loop = Loop(rank)
    loop.go(4)
    loop.co2.allreduce.drain()  # who dies with an all-reduce in flight is noticed by that
    (tmp_path / f"ready{rank}").touch()
    while rank == 1 and len([*tmp_path.glob("ready*")]) < 3:
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(
        CollectiveError, match=r"^save\(\): not all workers came within .*; no answer from rank 1: look"
    ):
        loop.save(str(tmp_path))


def another_run(rank: int, world_size: int, folder: str, loads: bool, *steps: int) -> list[str]:
    """A process of its own that saves at these steps: what save() says to each."""
    loop, said = Loop(rank), list[str]()
    if loads:
        loop.load(folder)
    for step in steps:
        loop.go(step)
        try:
            loop.save(folder)
            said.append("")
        except UserError as error:
            said.append(str(error))
    loop.end()
    return said


def left(folder: Path) -> list[int]:
    return [int(name[4:]) for name in checkpoint.finished(folder)]


def test_another_runs_checkpoints_are_never_removed_by_one_that_has_not_loaded_them(tmp_path: Path):
    """It is refused at their steps and before, and keeps them where it is later."""
    folder = str(tmp_path)
    run_distributed(another_run, 2, folder, True, 4, 7)
    for told in run_distributed(another_run, 2, folder, False, 2, 7, 8, 9, 10):
        assert told[2:] == ["", "", ""]
        for line in told[:2]:
            assert line.startswith(
                f"{tmp_path}/step000000007 is a checkpoint that this process neither wrote nor loaded"
            )
            assert line.endswith("call load() before training, or choose another folder")
    assert left(tmp_path) == [10, 9, 7, 4]
    assert run_distributed(another_run, 2, folder, True, 10) == [[""]] * 2 and left(tmp_path) == [10, 9]


def test_a_run_that_goes_back_replaces_its_own_later_checkpoints(tmp_path: Path):
    """After its newest one was damaged, and in the process that wrote them."""
    run_distributed(another_run, 1, str(tmp_path), True, 4, 7)
    (tmp_path / "step000000007" / "rank0.pt").unlink()
    assert run_distributed(another_run, 1, str(tmp_path), True, 6) == [[""]] and left(tmp_path) == [6, 4]
    loop = Loop(0)
    loop.load(f"{tmp_path}/other/../other")
    for step in (8, 9, 3):
        loop.step = step
        loop.save(str(tmp_path / "other"))
    assert left(tmp_path / "other") == [3]


def sleeper(folder: str, pipe: Any, saves_first: bool) -> None:
    """A job that its scheduler takes for dead; it is woken later."""
    loop = Loop(0)
    loop.load(folder)
    loop.go(4)
    if saves_first:
        loop.save(folder)
    pipe.send("asleep")
    pipe.recv()
    loop.go(9)
    pipe.send(refusal(loop.save, folder))


@pytest.mark.parametrize("saves_first", [True, False])
def test_a_job_that_is_woken_after_another_took_its_place_writes_and_removes_nothing(saves_first: bool, tmp_path: Path):
    ours, theirs = _context().Pipe()
    job = _context().Process(target=sleeper, args=(str(tmp_path), theirs, saves_first), daemon=True)
    job.start()
    assert ours.recv() == "asleep"
    assert run_distributed(another_run, 1, str(tmp_path), True, 7, 9) == [["", ""]]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ours.send("wake up")
    assert f"{tmp_path}/step000000009 is of another start of this run, which has taken this one's place" in ours.recv()
    job.join()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lacks", ["method", "optimizer_kind", "others"])
def test_a_checkpoint_that_lacks_a_part_is_refused_for_the_one_before(lacks: str, tmp_path: Path, capfd: Any):
    loop = Loop(0)
    for until in (3, 6):
        loop.go(until)
        loop.save(str(tmp_path))
    changed(lambda state: state.pop(lacks))(tmp_path / "step000000006" / "rank0.pt")
    assert Loop(0).load(str(tmp_path)) == 3
    assert (
        f"step000000006 is refused (rank 0: it holds no {lacks}: resume with what wrote it)" in capfd.readouterr().err
    )
