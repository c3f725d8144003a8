"""CO2 and the other methods in the training loops that people write: each must train exactly as in the plain one.

Where two loops do the same operations in the same order, they are compared bit for bit; where one adds the same numbers
in another order, float64 leaves them equal up to the last digits, and 1e-9 is allowed. A loop that ought to train
otherwise is compared, too: it must differ, or the comparison would see nothing.
"""

import contextlib
import copy
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core import CO2, CO2Config, CollectiveError, CompressionConfig, make_method
from core.baselines import LocalSGD, OverlapLocalSGD
from core.integrations.optimizer import attach
from core.nodes import node_mesh
from core.testing import run_distributed
from tests import problems
from tests.on_ranks import alike, on_ranks
from tests.problems import flat, sgd_step, take_steps

TAU, STEPS = 3, 11  # the last round is not full
CONFIG = CO2Config(tau=TAU, outer_momentum=0.4, outer_lr=0.9, clip=0.05)
NAMES = ("co2", "local", "slowmo", "overlap_local")
SLOW_LINK = problems.SlowLink(0.04)  # one can look at what is under way
batch = partial(problems.batch, size=8)
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=1e-2)


def net(seed: int = 0, frozen: bool = False) -> nn.Sequential:
    """A net with BatchNorm, so that a forward pass in training mode leaves traces. frozen: its first layer is."""
    torch.manual_seed(seed)
    first = nn.Linear(6, 5).requires_grad_(not frozen)
    return nn.Sequential(first, nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


class Parts(NamedTuple):
    """What a loop is made of, in the order in which a checkpoint is loaded."""

    model: nn.Module
    optimizer: Any
    method: Any


def build(name: str, model: Any, *, optimizer: Any = None, given: Any = None, **options: Any) -> Parts:
    """given: the module that the method gets, where that is not the model itself."""
    optimizer = optimizer or sgd(model.parameters())
    options = {"co2": CONFIG, "lr": lambda: optimizer.param_groups[0]["lr"]} | options
    return Parts(model, optimizer, make_method(name, given or model, **options)[1])


def everything(model: nn.Module) -> Tensor:
    return problems.flat([*model.parameters(), *model.buffers()])


def train(parts: Parts, rank: int, look: Callable[[Parts, int], None] = lambda *_: None) -> Tensor:
    """The plain loop. Returns all parameters and buffers after every step and after finish(), [steps + 1, n]."""
    model, optimizer, method = parts
    trace = []
    for step in range(STEPS):
        problems.loss(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
        look(parts, step)
        trace.append(everything(model))
    method.finish()
    method.close()
    return torch.stack([*trace, everything(model)])


def check(traces: dict[str, Tensor], differ: tuple[str, ...] = (), tolerance: float = 0.0) -> None:
    """The first trace is the plain loop's: those named in `differ` must be visibly different, all others equal."""
    plain = next(iter(traces.values()))
    for name, trace in traces.items():
        apart = (trace - plain[-len(trace) :]).abs().max().item()  # a resumed run has the last steps only
        assert apart > 1e-4 if name in differ else apart <= tolerance, f"{name}: {apart} from the plain loop"


def note(seen: set[str], method: Any, step: int) -> None:
    """Notes where in a round an all-reduce was found that had been launched and had not landed."""
    if method.allreduce.in_flight and not method.allreduce.done():
        seen.add("mid-round" if (step + 1) % TAU else "boundary")


@on_ranks(2)
def test_evaluations_only_read(rank: int):
    """After every step. They only read, so bit for bit; in training mode they would move BatchNorm's statistics."""

    def evaluate(seen: set[str], mode: bool, parts: Parts, step: int) -> None:
        note(seen, parts.method, step)
        parts.model.train(mode)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                parts.model(batch(7, step)[0])
        parts.model.train()

    for name in NAMES:
        traces, seen = {"plain": train(build(name, net()), rank)}, set()
        for loop, mode in (("evaluated", False), ("without eval()", True)):
            traces[loop] = train(build(name, net(), link=SLOW_LINK), rank, look=partial(evaluate, seen, mode))
        check(traces, differ=("without eval()",))
        assert seen == ({"boundary", "mid-round"} if name in ("co2", "overlap_local") else set()), name


@on_ranks(2)
def test_construction_in_any_order(rank: int):
    """The optimiser made before or after the method, and frozen parameters given to both or to neither."""
    for name in NAMES:
        late = net(rank)  # the first worker's weights become everybody's
        method = make_method(name, late, co2=CONFIG, lr=lambda: 0.3)[1]
        thawed = {"plain": train(build(name, net()), rank), "optimiser first": train(build(name, net(rank)), rank)}
        check(thawed | {"method first": train(Parts(late, sgd(late.parameters()), method), rank)})
        lean, both = net(frozen=True), net(frozen=True)
        traces = {"neither": train(build(name, lean, optimizer=sgd(lean[1:].parameters()), given=lean[1:]), rank)}
        check(traces | {"both": train(build(name, both), rank), "thawed": thawed["plain"]}, differ=("thawed",))
        assert torch.equal(everything(both[0]), everything(net()[0])), "the frozen layer has moved"


def tied_net(how: str) -> nn.Sequential:
    """A layer used twice, or two that share their parameters, or two that only start alike."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    if how == "tied":
        last.weight, last.bias = first.weight, first.bias
    return nn.Sequential(first, nn.Tanh(), {"twice": first, "tied": last, "alike": copy.deepcopy(first)}[how])


@on_ranks(2)
def test_a_tied_weight_is_one_tensor(rank: int):
    """A tied weight is one tensor, given once by parameters() or twice in a list: bit for bit as one layer's."""
    traces = {how: train(build("co2", tied_net(how)), rank)[:, :42] for how in ("twice", "tied", "alike")}
    model = tied_net("tied")
    method = CO2([*model[0].parameters(), *model[2].parameters()], CONFIG)
    check(traces | {"in a list": train(Parts(model, sgd(model.parameters()), method), rank)}, differ=("alike",))
    assert model[0].weight is model[2].weight


@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_model_trains_as_a_plain_one(rank: int):
    """Both backends run the operations that were traced, so bit for bit, whichever module CO2 was given."""
    traces = {"plain": train(build("co2", net()), rank)}
    for backend, original in (("eager", True), ("aot_eager", False)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model: Any = torch.compile(net(), backend=backend)
        traces[backend] = train(build("co2", model, given=model._orig_mod if original else model), rank)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "compiled nothing, or again at a boundary"
    check(traces)


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 108), nn.Unflatten(1, (3, 6, 6)), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh()
    return nn.Sequential(*layers, nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()


def strides(model: nn.Module) -> list[tuple[int, ...]]:
    return [p.stride() for p in model.parameters()]


@pytest.mark.slow
@on_ranks(2)
def test_a_model_may_be_converted_to_channels_last(rank: int):
    """Convolutions add in another order there. A model is converted before the method is made, or mid-round."""
    convert = partial(nn.Module.to, memory_format=torch.channels_last)
    contiguous, expected = strides(conv_net()), strides(convert(conv_net()))
    assert contiguous != expected

    def look(at: int, parts: Parts, step: int) -> None:
        if step == at:
            convert(parts.model)
        assert strides(parts.model) == (contiguous if step < at else expected), step

    for name in NAMES:
        traces = {"contiguous": train(build(name, conv_net()), rank)}
        traces["before"] = train(build(name, convert(conv_net())), rank, look=partial(look, -1))
        traces["mid-round"] = train(build(name, conv_net()), rank, look=partial(look, 4))
        check(traces, tolerance=1e-9)


PAPERS = CO2Config(tau=TAU, outer_momentum=0.5)
KEEP = replace(CO2Config.recommended(), tau=TAU)
NARROW = replace(KEEP, delay=2, compression=CompressionConfig("int4"))
LATE = replace(KEEP, delay=2)  # merged so many steps after the boundary, where workers therefore differ
METHODS: dict[str, Callable[..., Any]] = {
    "the paper's": lambda params: CO2(params, PAPERS),
    "as recommended": lambda params: CO2(params, KEEP),
    "merged later": lambda params: CO2(params, LATE),
    "shared by all": lambda params: CO2(params, PAPERS, shard=True),
    "local": lambda params: LocalSGD(params, TAU),
    "overlap": lambda params: OverlapLocalSGD(params, TAU),
}
LEFT_ALONE = ("the paper's", "local")  # an evaluation does not change how these train


@on_ranks(2)
def test_a_boundary_is_where_a_round_has_closed_and_a_model_is_called_one_where_it_is(rank: int):
    """Also in mid-round: what averaged_model() and sync_for_eval() say, beside the models that they say it of."""
    for name, make in METHODS.items():
        params, seen, settled = problems.odd_parameters(), [], []
        with make(params) as method:
            assert method.at_boundary
            for step in range(STEPS):
                sgd_step(params, rank, step)
                closes = step % TAU == TAU - 1
                assert (method.step(), method.at_boundary) == (closes, closes), (name, step)
                if name in LEFT_ALONE:
                    with method.averaged_model() as equal:
                        seen.append((equal, flat(params)))
                settled.append((method.sync_for_eval(), flat(params)))
        if name in LEFT_ALONE:
            with method.averaged_model() as equal:
                seen.append((equal, flat(params)))
        assert all(told is alike(model) for told, model in seen + settled), name
        at_boundaries = [told for told, _ in settled[TAU - 1 :: TAU]]
        assert all(at_boundaries) is (name not in ("merged later", "overlap"))
        assert alike(flat(params)) and method.allreduce.group is None


MEETING: dict[str, Callable[..., Any]] = {  # whose evaluation is a collective
    "fragments": lambda params, average: CO2(params, replace(KEEP, delay="auto", fragments=2)),
    "EMA": lambda params, average: CO2(params, PAPERS, average=average),
    "EMA, local": lambda params, average: LocalSGD(params, TAU, average=average),
    "EMA, overlap": lambda params, average: OverlapLocalSGD(params, TAU, average=average),
}


@pytest.mark.parametrize("tells", [False, True], ids=["", "last=True"])
@on_ranks(2)
def test_the_worker_with_more_batches_evaluates_only_where_the_other_does(rank: int, tells: bool):
    """The other one is in finish() then. After it, both train on, and the other one has more batches."""
    for name, make in MEETING.items():
        params, average = problems.odd_parameters(), [torch.zeros(3)]
        method = make(params, average)
        for more in (rank, 1 - rank):
            common, seen = 2 * TAU, []
            for step in range(steps := common + more * (4 * TAU + 1)):
                sgd_step(params, rank, step)
                average[0].add_(1.0)
                method.step(last=tells and step == steps - 1)
                if method.at_boundary:
                    with method.averaged_model() as equal:
                        seen.append(equal)
            assert seen[:2] == [True, True] and True not in seen[2:], (name, seen)
            told_before = tells or "local" in name  # otherwise one evaluation asks, and hears it
            assert len(seen) == 2 + (bool(more) and not told_before), (name, seen)
            method.finish()
            assert method.at_boundary and method.sync_for_eval() and alike(flat(params)), name
        method.close()


def test_without_a_process_group_too():
    model = problems.small_net()
    with CO2(model.parameters(), PAPERS) as co2:
        take_steps(co2, model.parameters(), 0, range(STEPS))
        assert not co2.at_boundary and not co2.sync_for_eval()
    assert co2.at_boundary and co2.sync_for_eval()


@on_ranks(2)
def test_a_block_may_finish_and_close_by_itself(rank: int):
    for make in (METHODS["the paper's"], METHODS["shared by all"], METHODS["overlap"]):
        params = problems.odd_parameters()
        with make(params) as method:
            take_steps(method, params, rank, range(STEPS))
            method.finish()
            method.close()
        assert alike(flat(params))
    net = problems.small_net()
    with make_method("ddp", net)[1] as method:
        method.finish()
        method.close()


class Mistaken(Exception):
    """The user's own error."""


BROKEN = {
    "in nodes": lambda params: CO2(params, PAPERS, mesh=node_mesh("cpu", 2)),
    "in nodes that vote": lambda params: CO2(params, KEEP, mesh=node_mesh("cpu", 2)),
}


def broken_off(rank: int, world_size: int, name: str, raises_at: int) -> dict[str, Any]:
    """The last worker's loop fails, and its process lives on."""
    params = problems.odd_parameters()
    found: dict[str, Any] = {}
    began = time.monotonic()
    try:
        with (BROKEN | METHODS)[name](params) as method:
            for step in range(STEPS):
                if step == raises_at and rank == world_size - 1:
                    raise Mistaken
                sgd_step(params, rank // 2 if name in BROKEN else rank, step)
                method.step()
    except (Mistaken, CollectiveError) as error:
        found = {"error": type(error).__name__, "text": str(error)}
    found["seconds"] = time.monotonic() - began
    dist.barrier()  # over the default group, which is the user's
    return found


@pytest.mark.parametrize(
    ("name", "raises_at", "workers"),
    [
        pytest.param("the paper's", 4, 2, marks=pytest.mark.slow),
        ("the paper's", 1, 4),
        ("as recommended", 5, 2),
        pytest.param("in nodes", 4, 4, marks=pytest.mark.slow),
        pytest.param("in nodes", 9, 4, marks=pytest.mark.slow),
        pytest.param("in nodes that vote", 4, 4, marks=pytest.mark.slow),
        ("in nodes that vote", 6, 4),
    ],
)
def test_an_exception_in_the_block_keeps_nobody_waiting(name: str, raises_at: int, workers: int):
    """Before the first reduction, while one is in flight, in a node's vote, and when others are in finish(). Others end
    long before the timeout of 600 s."""
    *others, last = run_distributed(broken_off, workers, name, raises_at)
    assert last["error"] == "Mistaken" and last["seconds"] < 10
    for other in others:
        assert other["error"] == "CollectiveError" and other["seconds"] < 20, other
        assert name in BROKEN or f"no answer from rank {workers - 1}" in other["text"], other


def dies_in_its_node(rank: int, world_size: int) -> str:
    """The last rank's process ends, and DDP inside its node notices first."""
    model, mesh = problems.small_net(), node_mesh("cpu", 2)
    ddp, optimizer = (
        DistributedDataParallel(model, process_group=mesh.get_group(1)),
        torch.optim.SGD(model.parameters()),
    )
    try:
        with CO2(model.parameters(), KEEP, mesh=mesh) as method:
            for step in range(STEPS):
                if (rank, step) == (world_size - 1, 4):
                    os._exit(1)
                problems.loss(ddp, problems.batch(rank, step)).backward()
                optimizer.step(), optimizer.zero_grad(), method.step()
    except CollectiveError as error:
        return str(error)
    return ""


def test_a_collective_inside_a_node_names_the_lost_rank():
    others = run_distributed(dies_in_its_node, 4, expect_death=(3,))[:3]
    assert all(others) and "rank 2: a collective in the with block failed; no answer from rank 3" in others[2], others


@on_ranks(2)
def test_who_has_left_cannot_go_on_with_the_same_object(rank: int):
    with pytest.raises(Mistaken), CO2(problems.odd_parameters(), PAPERS) as co2:
        raise Mistaken
    with pytest.raises(CollectiveError) as caught:
        for _ in range(TAU):
            co2.step()
    said = "this worker has left the other workers after an exception: make a new object to train on"
    assert str(caught.value) == said


@on_ranks(2)
def test_methods_whose_every_step_is_a_round(rank: int):
    """DDP, and training without gradients: every step is a boundary of one model."""
    net, data = problems.small_net(), problems.batch(rank, 0)
    model, ddp = make_method("ddp", net, lr=lambda: 0.1)
    with ddp:
        problems.loss(model, data).backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)
        assert ddp.step() is ddp.at_boundary is ddp.sync_for_eval() is True and alike(flat(net.parameters()))
    if find_spec("transformers"):  # make test-lowest has none
        from language.zeroth import ZerothOrder

        with ZerothOrder(nn.Sequential(nn.Linear(6, 3)).double(), lr=0.1) as zo:
            zo.step(lambda m: problems.loss(m, data), 4)
            assert zo.at_boundary is zo.sync_for_eval() is True and alike(flat(zo.model.parameters()))


def backward(net: Any, rank: int, step: int, parts: int = 1) -> None:
    """parts: micro-batches, whose gradients are summed."""
    for part in range(parts):
        problems.loss(net, problems.batch(rank, parts * step + part)).backward()


@on_ranks(2)
def test_it_equals_a_plain_loop_bit_for_bit(rank: int):
    """The parameters after each step and at the end: attached, in a block, and with finish() and close()."""
    for config, parts in ((PAPERS, 2), (NARROW, 1)):
        ends = []
        for how in ("attached", "block", "by hand"):
            net, trace = problems.small_net(), []
            optimizer = torch.optim.AdamW(net.parameters(), 0.05)
            make = partial(attach, optimizer) if how == "attached" else CO2
            given = make(net.parameters(), config, buffers=net.buffers())
            with contextlib.nullcontext(given) if how == "by hand" else given as co2:
                for step in range(STEPS):
                    optimizer.zero_grad()
                    backward(net, rank, step, parts)
                    optimizer.step()
                    if how != "attached":
                        co2.step()
                    trace.append(flat(net.parameters()))
                if how == "by hand":
                    co2.finish()
                    co2.close()
            optimizer.step()  # nothing hangs on it any more
            trace.append(flat(co2.state["outer_iterate"]))
            ends.append(torch.stack([t[: sum(p.numel() for p in net.parameters())] for t in trace]))
        assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
        same = [alike(row) for row in ends[0]]  # workers differ within a round, with keep at a boundary, too
        assert same[-1] and not same[0] and same[TAU - 1] is (config == PAPERS)


@on_ranks(2)
def test_a_grad_scaler_that_may_leave_steps_out_is_refused_in_one_line_and_one_switched_off_is_none(rank: int):
    """The first worker's gradients overflow."""
    for enabled in (True, False):
        net = problems.small_net(torch.float32)
        optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=enabled)

        def train_attached(scaler: Any = scaler, optimizer: Any = optimizer, net: Any = net) -> None:
            with attach(optimizer, net.parameters(), PAPERS):
                for step in range(STEPS):
                    scale = float("inf") if scaler.is_enabled() and step == 0 and rank == 0 else 1.0
                    loss = problems.loss(net, problems.batch(rank, step, dtype=torch.float32))
                    scaler.scale(loss * scale).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()

        if enabled:
            text = problems.refusal(train_attached)
            assert text.startswith("attach() with a GradScaler: torch calls no hook")
            assert "call co2.step() after scaler.update()" in text
        else:
            train_attached()


@on_ranks(4)
def test_with_a_mesh_it_is_sharded(rank: int):
    net = problems.small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with attach(optimizer, net.parameters(), PAPERS, mesh=node_mesh("cpu", 2)) as co2:
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(net, rank // 2, step)  # the workers of a node take one batch
            optimizer.step()
        assert type(co2).__name__ == "CO2" and co2.local_steps == STEPS % TAU
    assert alike(flat(net.parameters()))


def test_an_error_in_the_block_leaves_no_hook():
    net = problems.small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(KeyError), attach(optimizer, net.parameters(), PAPERS) as co2:
        raise KeyError
    optimizer.step()
    assert co2.local_steps == 0
