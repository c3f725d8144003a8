"""Going on from a state, bit for bit: in new objects, by way of DCP, and by resync() from loaded weights."""

import contextlib
import copy
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from core import CO2, CO2Config, CompressionConfig, UserError, make_method
from core.baselines import LocalSGD, SlowMo
from core.baselines.table import METHODS
from core.checkpoint import runs as checkpoint
from core.checkpoint.runs import Snapshot
from core.nodes import node_mesh
from core.state import of_rank, under_rank
from core.testing import run_distributed
from tests import problems
from tests.on_ranks import alike, on_ranks
from tests.problems import Settings, flat, refusal, take_steps

SAVE_AT, STEPS = 6, 13
BASE = Settings(tau=3, outer_lr=0.4, outer_momentum=0.5, clip=0.1)
MERGES: list[dict[str, Any]] = [  # or what else meets a mean, such as Nesterov's momentum
    {"merge": "keep_local", "delay": 2},
    {"delay": 0, "gap": "none"},
    {"merge": "keep_local"},
    {"merge": "keep_local", "delay": 1, "compression": "int8"},
    {"nesterov": True},
    {"nesterov": True, "delay": 0, "gap": "none"},
    {"nesterov": True, "gap": "elementwise", "merge": "keep_local", "delay": 2, "compression": "int4"},
    {"nesterov": True, "gap": "norm", "merge": "keep_local", "delay": 1},
]
RUNS = [("co2", replace(BASE, gap=gap)) for gap in ("elementwise", "norm", "none")]
RUNS += [("co2", s) for s in (replace(BASE, **{"gap": "none"} | changes) for changes in MERGES)]
RUNS += [(name, BASE) for name in ("local", "slowmo", "diloco", "overlap_local")]
RUNS += [(name, replace(BASE, compression="int4")) for name in ("local", "overlap_local")]
CASES = [*((*run, SAVE_AT) for run in RUNS), *((*run, at) for run in (RUNS[0], *RUNS[-5:]) for at in (1, 8))]


def net(seed: int) -> nn.Module:
    """With BatchNorm, so that buffers are in flight too."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def build(name: str, seed: int, s: Settings) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = net(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    co2 = s.co2 if name == "co2" else CO2Config(s.tau, compression=s.co2.compression)
    _, method = make_method(name, model, co2=co2, lr=lambda: optimizer.param_groups[0]["lr"])
    return model, optimizer, method


def go(model: nn.Module, optimizer: torch.optim.Optimizer, method: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.2 / (1 + step)
        problems.loss(model, problems.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()


@pytest.mark.parametrize(("kind", "config"), [(CO2, CO2Config(2)), (partial(CO2, shard=True), CO2Config(2))])
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


@on_ranks(2)
def test_what_another_workers_error_feedback_held_back_is_not_ones_own(rank: int):
    """All go on from what the first one held, as from a checkpoint that holds no other."""
    params = [nn.Parameter(torch.zeros(300))]
    co2 = CO2(params, CO2Config(tau=1, merge="keep_local", gap="none", delay=0, compression=CompressionConfig("int4")))
    for step in range(3):
        params[0].data += torch.randn(300, generator=torch.Generator().manual_seed(2 * step + rank))
        co2.step()
    states: list[Any] = [None] * 2
    dist.all_gather_object(states, co2.state_dict())
    before = co2.reducer.state["error_feedback"][0].norm().item()
    co2.load_state_dict(states[0])
    assert before > 0 and co2.reducer.state["error_feedback"][0].norm().item() == (0 if rank else before)


def everything(model: nn.Module) -> Tensor:
    return flat([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    "cases", [[*CASES[::3], *CASES[5::8]], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"]
)
@on_ranks(2)
def test_a_resumed_run_is_bit_identical(rank: int, cases: list[Any], tmp_path: Path):
    """Saved at a boundary with an all-reduce in flight, before the first one, and in mid-round."""
    for name, s, at in cases:
        model, optimizer, method = build(name, 0, s)
        go(model, optimizer, method, rank, range(at))
        hides = name in ("co2", "overlap_local") and s.delay != 0
        assert method.allreduce.in_flight is (hides and at > 1), (name, s, at)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "method": method.state_dict()}
        torch.save(state, tmp_path / f"{rank}.pt")
        go(model, optimizer, method, rank, range(at, STEPS))

        resumed = build(name, 1, s)  # starts from other values
        for part, saved in zip(resumed, torch.load(tmp_path / f"{rank}.pt", weights_only=True).values(), strict=True):
            part.load_state_dict(saved)
        go(*resumed, rank, range(at, STEPS))
        for _ in range(2):  # before and after finish()
            assert torch.equal(everything(model), everything(resumed[0])), (name, s, at)
            method.finish(), resumed[2].finish()
        assert method.rounds == resumed[2].rounds


def params(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(n)) for n in sizes]


def saved_by(method: Any) -> dict[str, Any]:
    for _ in range(3):
        method.step()
    return method.state_dict()


CO2_2 = CO2Config(tau=2)
INT8 = CO2Config(tau=2, compression=CompressionConfig("int8"))
MISFITS = {
    "other sizes": (lambda: CO2(params(3, 4), CO2_2), lambda: CO2(params(3, 5), CO2_2)),
    "fewer dtypes": (
        lambda: CO2(params(3), CO2_2),
        lambda: CO2([*params(3), nn.Parameter(torch.zeros(1).double())], CO2_2),
    ),
    "of slowmo": (lambda: SlowMo(params(3), 2), lambda: CO2(params(3), CO2_2)),
    "of local": (lambda: LocalSGD(params(3), 2), lambda: SlowMo(params(3), 2)),
    "of another momentum": (lambda: CO2(params(3), CO2_2), lambda: CO2(params(3), replace(CO2_2, nesterov=True))),
    "of int8": (lambda: CO2(params(3), INT8), lambda: CO2(params(3), CO2_2)),
    "of float32": (lambda: CO2(params(3), CO2_2), lambda: CO2(params(3), INT8)),
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


@pytest.mark.parametrize("build", [lambda: LocalSGD(params(3), 2), lambda: CO2(params(3), CO2Config(tau=2))])
def test_empty_parts_may_be_missing(build: Any):
    """torch.distributed.checkpoint's tools drop empty dicts."""
    writer, reader = build(), build()
    own = of_rank(saved_by(writer))
    whole = {key: value for key, value in own.items() if value != {}}
    assert len(whole) < len(own)
    reader.load_state_dict(under_rank(whole))
    assert str(reader.state_dict()) == str(writer.state_dict())


def test_a_checkpoint_that_does_not_fit_leaves_the_format_alone():
    config = CO2Config(tau=2, compression=CompressionConfig("auto"))
    writer, reader = CO2(params(3), config), CO2(params(4), config)
    state = of_rank(saved_by(writer)) | {"reducer": "int4"}
    with pytest.raises(UserError, match="elements, here it has"):
        reader.load_state_dict(under_rank(state))
    assert reader.reducer.kind == "float32", "what one worker alone takes"


def test_a_checkpoint_of_an_older_version_is_refused_in_one_line():
    co2 = CO2(params(3), CO2_2)
    old = of_rank(saved_by(co2))
    del old["places"]
    said = refusal(co2.load_state_dict, under_rank(old))
    assert said.startswith("the checkpoint's state has no 'places', so an older version wrote it: resume ")


@pytest.mark.parametrize(("compression", "to"), [("auto", "float32"), ("float32", "auto")])
def test_a_run_may_go_on_with_its_format_chosen_or_given_where_nothing_is_held_back(compression: Any, to: Any):
    first, then = (
        CO2(params(3), CO2Config(tau=2, compression=CompressionConfig(compression)))
        for compression in (compression, to)
    )
    then.load_state_dict(saved_by(first))
    for _ in range(2):
        then.step()
    then.finish()


def of_four(state: dict[str, Any]) -> dict[str, Any]:
    """As four workers with one worker's mean would have written it; two of them had been left out in another round."""
    theirs = torch.tensor([0.0, 1.0, 2.0])
    return state | {"workers": 4, "flats": [torch.cat([4 * flat, theirs]) for flat in state["flats"]]}


@pytest.mark.parametrize(
    "changes", [{"tau": 2}, {"tau": "auto", "tau_max": 2}, {"tau": 2, "compression": CompressionConfig("int8")}]
)
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
            if config.compression.format != "float32":  # means land, whatever their number
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
    assert "excluded" in writer.scalars.sizes
    state["flats"][0][-1:] = 1.0
    reader.load_state_dict(under_rank(state | {"workers": 4, "places": 4}))
    assert reader.scalars["excluded"].item() == 0.0
    assert reader.step() and reader.stats.excluded == 0


def test_shared_state_goes_on_after_the_end_with_another_number():
    writer, reader = CO2(params(3), CO2Config(tau=2)), CO2(params(3), CO2Config(tau=2))
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
        co2 = CO2(p, CO2Config(tau=2, gap=gap), hooks=[snapshot := Snapshot()])
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
    co2 = CO2(params(3), CO2_2, hooks=[snapshot := Snapshot()])
    given: list[str] = []
    saved_by(co2)
    snapshot.ask(lambda _: given.append("first"))
    snapshot.ask(lambda _: given.append("second"))
    assert given == ["first"]
    snapshot.hand_over()
    assert given == ["first", "second"]


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


KEEP = CO2Config(
    tau=3,
    outer_momentum=0.0,
    gap="none",
    clip=None,
    merge="keep_local",
    delay=2,
    compression=CompressionConfig("int4"),
    outlier=3.0,
)
WRITTEN: dict[str, Any] = {
    "the paper's": lambda params: CO2(params, CO2Config(tau=3, outer_lr=0.4)),
    "as recommended": lambda params: CO2(params, KEEP),
    "shared by all": lambda params: CO2(params, CO2Config(tau=3, outer_lr=0.4), shard=True),
    "shared in a node": lambda params: CO2(params, CO2Config(tau=3), mesh=node_mesh("cpu", 2)),
}


def descend(model: nn.Module, method: Any, rank: int, steps: range) -> None:
    """Plain gradient descent."""
    for step in steps:
        grads = torch.autograd.grad(problems.loss(model, problems.batch(rank, step)), [*model.parameters()])
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(g, alpha=0.3 / (1 + step))
        method.step()


def gone_on(rank: int, world_size: int, folder: str, saves: bool) -> tuple[int, Tensor]:
    model = problems.small_net(seed=rank)
    co2 = CO2(model.parameters(), KEEP)
    if saves:
        descend(model, co2, rank, range(SAVE_AT))
        dcp.save({"co2": co2.state_dict(), f"model{rank}": model.state_dict()}, checkpoint_id=folder)
        if rank == 0:
            dcp_to_torch_save(folder, f"{folder}/whole.pt")
        return co2.rounds, flat(co2.state["snapshot"])
    state = torch.load(f"{folder}/whole.pt", weights_only=True)
    model.load_state_dict(state[f"model{rank % 2}"])
    co2.load_state_dict(state["co2"])
    snapshot = flat(co2.state["snapshot"])
    descend(model, co2, rank, range(SAVE_AT, STEPS))
    co2.finish()
    return co2.rounds, snapshot


def test_another_number_of_workers_goes_on_from_one_dict(tmp_path: Path):
    saved = run_distributed(gone_on, 2, str(tmp_path), True)
    assert not torch.equal(saved[0][1], saved[1][1])
    for rank, (rounds, snapshot) in enumerate(run_distributed(gone_on, 3, str(tmp_path), False)):
        assert rounds > saved[0][0] and torch.equal(snapshot, saved[rank % 2][1])


def test_a_state_without_a_rank_is_refused_in_one_line():
    co2 = CO2(problems.small_net().parameters())
    (own,) = co2.state_dict().values()
    assert "no key with a worker's rank" in refusal(co2.load_state_dict, own)


@on_ranks(2)
def test_a_run_goes_on_from_one_dict_by_its_parameters_names(rank: int, tmp_path: Path):
    """The lines of docs/checkpoints.md, bit for bit. (A new optimiser's own state_dict() asks DCP for no state, and
    gets none.)"""
    for name, make in WRITTEN.items():
        ends, mine, folder = [], f"rank{rank}", str(tmp_path / name)
        for resumes in (False, True):
            model = problems.small_net(seed=rank)
            co2, optimizer = make(model.parameters()), torch.optim.AdamW(model.parameters(), 0.05)
            if resumes:
                state = {"co2": co2.state_dict(), mine: get_state_dict(model, optimizer)}
                dcp.load(state, checkpoint_id=folder)
                of_model, of_optimizer = state[mine]
                set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
                co2.load_state_dict(state["co2"])
            for step in range(SAVE_AT + 1 if resumes else 0, STEPS):
                if step == SAVE_AT + 1 and not resumes:  # in mid-round
                    dcp.save({"co2": co2.state_dict(), mine: get_state_dict(model, optimizer)}, checkpoint_id=folder)
                optimizer.zero_grad()
                problems.loss(model, problems.batch(rank, step)).backward()
                for p in model.parameters() if "node" in name else ():
                    dist.all_reduce(p.grad)
                optimizer.step()
                co2.step()
            co2.finish()
            co2.close()
            ends.append(flat(model.parameters()))
        assert torch.equal(*ends), name


LOCAL = [m for m in METHODS if m != "ddp"]
CONFIG = CO2Config(tau=2, outer_momentum=0.4, clip=0.3)


def load(params: list[nn.Parameter], value: float) -> None:
    """Other weights, of which only the first worker's should count."""
    with torch.no_grad():
        for p in params:
            p.fill_(value)


def go_on(method: Any, params: list[nn.Parameter], rank: int) -> Tensor:
    take_steps(method, params, rank, range(7))
    method.finish()
    return flat(params)


@on_ranks(2)
def test_after_resync_training_goes_on_as_in_a_fresh_object(rank: int):
    """From loaded weights after five other steps, and in a fresh object."""
    kinds = {name: lambda model, name=name: make_method(name, model, co2=CONFIG)[1] for name in LOCAL}
    kinds["int8"] = lambda model: make_method("co2", model, co2=INT8)[1]
    kinds["shard"] = lambda model: CO2(list(model.parameters()), CONFIG, shard=True)
    for name, build in kinds.items():
        pair = []
        for early in (5, 0):
            params = problems.odd_parameters()
            method = build(nn.ParameterList(params)) if early else None
            take_steps(method, params, rank, range(early))
            load(params, 0.5 + rank)
            method = method or build(nn.ParameterList(params))
            if early:
                method.resync()
            pair.append(go_on(method, params, rank))
        assert torch.equal(*pair) and alike(*pair), name


@on_ranks(2)
def test_a_node_of_unequal_values_is_refused_at_the_first_boundary_and_of_shapes_before_any_is_sent(rank: int):
    mesh, params = node_mesh("cpu", 2), [nn.Parameter(torch.ones(3))]
    co2 = CO2(params, CO2Config(tau=1), mesh=mesh)
    with torch.no_grad():
        params[0].sub_(0.1 * rank)  # without a synchronisation of gradients
    said = refusal(co2.step)
    assert "synchronize gradients in every step" in said and "mesh.get_group(1)" in said
    said = refusal(CO2, [nn.Parameter(torch.ones(3 + rank))], CO2Config(tau=1), mesh=mesh)
    assert "workers differ" in said and "(3,)" in said and "(4,)" in said


@on_ranks(4)
def test_a_model_left_in_ddp_is_noticed_once(rank: int):
    """In two rounds of a plain model, of one in DistributedDataParallel, put there before or after, of one that is
    there and not called, or only without gradients, and of one that is averaged inside nodes. Of runs before, in this
    process, there are two more: of another model, and of the plain one."""
    gone = dist.new_group()
    others = [DistributedDataParallel(nn.Linear(3, 2), process_group=gone)]
    for kind in ("plain", "before", "after", "not called", "evaluated", "inside nodes"):
        model = nn.Linear(3, 2)
        if kind == "plain":
            others.append(DistributedDataParallel(model, process_group=gone))
            dist.destroy_process_group(gone)
        mesh = node_mesh("cpu", 2) if kind == "inside nodes" else None
        wrapped = DistributedDataParallel(model) if kind in ("before", "not called", "evaluated") else model
        if mesh is not None:
            wrapped, method = make_method("co2", model, co2=CONFIG, mesh=mesh)
        else:
            method = CO2(model.parameters(), CONFIG)
        wrapped = DistributedDataParallel(model) if kind == "after" else wrapped
        called = model if kind in ("not called", "evaluated") else wrapped
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2 * CONFIG.tau):
                called(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                method.step()
                if kind == "evaluated":
                    with torch.no_grad():
                        wrapped(torch.ones(1, 3))
        method.finish()
        told = [str(w.message) for w in caught if "DistributedDataParallel" in str(w.message)]
        assert len(told) == (kind in ("before", "after")), (kind, told)
        for text in told:
            assert "DistributedDataParallel waits for 4 of these workers" in text and "call the plain model" in text
    assert len(others) == 2  # they were there


def apply_change(change: str, params: list[nn.Parameter], method: Any) -> None:
    if change in ("loaded", "resynced"):
        load(params, 1.5)
    if change == "resynced":
        method.resync()
    if change == "swapped":  # an evaluation of other weights, which come back
        kept = [p.detach().clone() for p in params]
        load(params, 7.0)
        with torch.no_grad():
            for p, own in zip(params, kept, strict=True):
                p.copy_(own)
    if change == "no memory of its own":
        params[0].data = params[0].data + 1.0


@on_ranks(1)
def test_weights_loaded_under_a_method_are_noticed_at_the_rounds_first_step(rank: int):
    """Once, and by those methods that would pull them back; one that keeps no start cannot tell a swap from a load."""
    for name in (*LOCAL, "shard", "keep_local"):
        params = [nn.Parameter(torch.full((3,), 0.5)), nn.Parameter(torch.ones(2))]
        if name == "shard":
            method: Any = CO2(params, CONFIG, shard=True)
        else:
            config = replace(CONFIG, merge="keep_local") if name == "keep_local" else CONFIG
            method = make_method("co2" if name == "keep_local" else name, nn.ParameterList(params), co2=config)[1]
        optimizer, found = torch.optim.SGD(params, 0.01), []
        for change in ("none", "swapped", "loaded", "in mid-round", "no memory of its own", "resynced", "none"):
            with warnings.catch_warnings(record=True, action="always") as caught:
                apply_change(change, params, method)
                for step in range(2):
                    for p in params:
                        p.grad = torch.ones_like(p)
                    optimizer.step()
                    if change == "in mid-round" and not step:
                        load(params, 2.0)
                    method.step()
            found += [len(caught)]
            assert all("call resync() on all workers" in str(w.message) for w in caught)
        method.finish()
        noticed = {"local": [0] * 7, "shard": [0, 1, 1, 0, 1, 0, 0]}  # the mean of whatever is there; no start
        assert found == noticed.get(name, [0, 0, 1, 0, 1, 0, 0]), name


INFERRED = (
    "step",
    "finish",
    "sync_for_eval",
    "averaged_model",
    "state_dict",
    "load_state_dict",
    "resync",
    "save",
    "load",
)


def trained_with(mode: Any, name: str, call: str, folder: Path) -> Tensor:
    """The parameters and buffers after steps between which one call is made in this mode.

    finish() is the first boundary, as before an evaluation, and makes what later ones use.
    """
    at = 0 if call == "finish" else 4
    model = nn.Sequential(net(0)[:2], nn.Linear(5, 3).double())
    torch.manual_seed(0)
    model[1].reset_parameters()
    more: dict[str, Any] = {"shard": True} if name == "shard" else {}
    module, method = make_method("co2" if name == "shard" else name, model, co2=replace(CONFIG, tau=2), **more)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    calls = {
        "averaged_model": lambda: method.averaged_model().__enter__() and None,
        "load_state_dict": lambda: method.load_state_dict(method.state_dict()),
        "save": lambda: checkpoint.save(folder, model, optimizer, method, step=4),
        "load": lambda: checkpoint.load(folder, model, optimizer, method),
    }
    torch.manual_seed(1)
    for step in range(7):
        module(torch.randn(4, 6).double()).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        with mode() if step == at and call == "step" else contextlib.nullcontext():
            method.step()
        if step == 4 and call == "load":
            checkpoint.save(folder, model, optimizer, method, step=4)
        if step == at and call != "step" and (call in calls or hasattr(method, call)):
            with mode():
                calls.get(call, getattr(method, call, None))()
    method.finish()
    method.close()
    return flat([*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())])


@pytest.mark.parametrize("name", ["co2", "local", "overlap_local", "ddp", "shard"])  # the others derive from these
def test_every_call_in_inference_mode_does_what_it_does_outside(name: str, tmp_path: Path):
    for call in INFERRED:
        modes = (contextlib.nullcontext, torch.inference_mode)
        ends = [trained_with(mode, name, call, tmp_path / f"{call}{i}") for i, mode in enumerate(modes)]
        assert torch.equal(*ends), call


@pytest.mark.parametrize("name", METHODS)
def test_a_method_made_in_inference_mode_is_refused(name: str):
    with torch.inference_mode(False):
        model = net(0)
    with torch.inference_mode():
        assert "made under torch.inference_mode()" in refusal(lambda: make_method(name, model, co2=CONFIG))
