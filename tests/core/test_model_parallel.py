"""A model in parts: tensor parallelism, a pipeline's stages, elements that several ranks hold, and what counts once."""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from core import CO2, CO2Config, make_method
from core.buckets import local_shard
from core.groups import holding_of
from core.nodes import node_mesh
from core.testing.reference import Reference
from tests.on_ranks import alike, on_ranks, shared_out, total_world_size
from tests.problems import (
    LR,
    Settings,
    SlowLink,
    assert_traces_equal,
    batch,
    descent_of,
    flat,
    loss,
    refusal,
    sgd_step,
    trace_of,
    train_reference,
    train_with,
)

TAU, STEPS = 3, 11  # 3 rounds and an incomplete one
CONFIGS = [CO2Config(TAU, outer_momentum=0.4, gap=g, clip=c) for g, c in [("elementwise", None), ("norm", 0.02)]]
WAYS: list[dict[str, bool]] = [{}, {"shard": True}, {"offload": True}, {"shard": True, "offload": True}]
CASES = list(product(CONFIGS, WAYS))
CORNERS = [CASES[i] for i in (0, 5, 2, 7)]  # each way, each setting twice


def whole_net() -> nn.Sequential:
    """5 hidden units, which two ranks cannot share evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


def tensor_parallel(mesh: Any, replicated: bool) -> nn.Module:
    """replicated: the layers behind are DTensors, too, else plain."""
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(use_local_output=not replicated)}
    net = parallelize_module(whole_net(), mesh["shard"], plan)
    for layer in (net[3], net[4]) if replicated else ():  # pyright: ignore[reportIndexIssue]
        distribute_module(layer, mesh["shard"])
    return net


def learn(net: nn.Module, node: int, step: int) -> None:
    net.zero_grad()
    loss(lambda x: y.full_tensor() if isinstance(y := net(x), DTensor) else y, batch(node, step)).backward()
    with torch.no_grad():
        for p in net.parameters():
            assert p.grad is not None
            p.sub_(LR * p.grad)


def gathered(net: nn.Module) -> Tensor:
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()])


def reference(config: CO2Config) -> list[Tensor]:
    net, c = whole_net(), config
    ref = Reference(flat(net.parameters()).expand(2, -1).clone(), TAU, c.outer_lr, c.outer_momentum, c.gap, c.clip)
    ref.run(descent_of(net), LR, STEPS)
    rounds = ref.outer[1:]
    ref.finish()
    return [*rounds, ref.x[0].clone()]


@pytest.mark.parametrize(
    ("replicated", "cases"),
    [
        pytest.param(False, CASES, marks=pytest.mark.slow, id="plain"),
        pytest.param(True, CASES, marks=pytest.mark.slow, id="replicated"),
        pytest.param(True, CORNERS, id="corners"),
    ],
)
@on_ranks(4, timeout=150)
def test_tensor_parallelism_equals_the_reference(rank: int, replicated: bool, cases: list[Any]):
    """What both ranks of a node hold counts once in norms and in the number of elements."""
    mesh = node_mesh("cpu", 2)
    for (config, how), theirs in zip(cases, shared_out(lambda of: reference(of[0]), cases), strict=True):
        net = tensor_parallel(mesh, replicated)
        wrapped, co2 = make_method("co2", net, co2=config, mesh=mesh, **how)
        assert wrapped is net
        trace = trace_of(co2, lambda step, n=net: learn(n, rank // 2, step), lambda n=net: gathered(n), STEPS)
        assert_traces_equal(trace, theirs)


def stage(i: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Of other shapes and numbers of tensors in each; dtype: of the linear layers in the second."""
    torch.manual_seed(i)
    if i == 0:
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    return nn.Sequential(nn.Linear(6, 3).to(dtype), nn.BatchNorm1d(3).double())


def state(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]


def advance(i: int, module: nn.Module, node: int, step: int) -> None:
    """The parameters by the problem's gradient; BatchNorm sees data of its own."""
    norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm1d))
    norm(batch(node, step + 100 * i)[0][:, : norm.num_features])
    sgd_step(module.parameters(), node, step)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "cases"),
    [
        pytest.param(torch.float64, 1e-9, CASES, marks=pytest.mark.slow, id="float64"),
        pytest.param(torch.float32, 1e-6, CASES, marks=pytest.mark.slow, id="float32"),
        pytest.param(torch.float64, 1e-9, CORNERS, id="corners"),
    ],
)
@on_ranks(4, timeout=150)
def test_stages_of_a_pipeline_equal_the_whole_model(rank: int, dtype: torch.dtype, tolerance: float, cases: list[Any]):
    """Of the stage, and of that part of the whole model; the second node stops two steps early. In float32 the scalars
    travel with a first bucket of another dtype in one stage than in the other."""
    mesh, (node, i) = node_mesh("cpu", 2), divmod(rank, 2)
    for config, how in cases:
        traces = []
        for own in ([i], [0, 1]):
            stages = {k: stage(k, dtype) for k in own}
            parts = nn.ModuleList(stages.values())
            options: dict[str, Any] = {"mesh": mesh, "shards": True} | how
            options = {"group": mesh.get_group("replicate")} if len(own) == 2 else options
            co2 = CO2(parts.parameters(), config, buffers=parts.buffers(), **options)

            def go(step: int, stages: dict[int, nn.Module] = stages) -> None:
                for k, part in stages.items():
                    advance(k, part, node, step)

            traces.append(trace_of(co2, go, lambda part=stages[i]: flat(state(part)), STEPS - 2 * node))
        assert_traces_equal(*traces, tolerance)


@pytest.mark.slow
@on_ranks(4, timeout=200)
def test_a_resumed_run_goes_on_bit_for_bit(rank: int):
    """Straight, and after a resume between two boundaries, and at one."""
    mesh = node_mesh("cpu", 2)
    node, i = divmod(rank, 2)
    kinds: list[tuple[Callable[[], nn.Module], Callable[..., None], list[str]]] = [
        (lambda: tensor_parallel(mesh, False), learn, []),
        (lambda: tensor_parallel(mesh, True), learn, ["shard"]),
        (lambda: stage(i), partial(advance, i), ["shards"]),
        (lambda: stage(i), partial(advance, i), ["shards", "offload"]),
    ]
    for build, go, names in kinds:
        how: dict[str, Any] = dict.fromkeys(names, True)
        ends: list[Tensor] = []
        for at in (0, 2 * TAU + 1, 2 * TAU):
            net, co2 = build(), None
            for step in range(STEPS):
                if step in (0, at):
                    old, net, saved = net, build(), co2.state_dict() if co2 else None
                    co2 = CO2(net.parameters(), CONFIGS[0], mesh=mesh, buffers=net.buffers(), **how)
                    for new, value in zip(state(net), state(old), strict=True):
                        local_shard(new).detach().copy_(local_shard(value).detach())
                    if saved:
                        co2.load_state_dict(saved)
                go(net, node, step)
                assert co2 is not None
                co2.step()
            assert co2 is not None
            co2.finish()
            co2.close()
            ends.append(flat([local_shard(t) for t in state(net)]))
        assert all(torch.equal(ends[0], end) for end in ends[1:])


TIED_STEPS = 9  # 4 rounds and an incomplete one
TIED = [Settings(tau=2, outer_momentum=0.4, gap=g, clip=c) for g, c in [("elementwise", None), ("norm", 0.02)]]
SIZES = [700, 2, 3, 90, 4]
PARTS = {2: [[0, 1, 2], [3, 4, 0]], 3: [[0, 1], [2, 3], [4, 0]]}  # 0 is tied, and lies elsewhere in the last stage


def values() -> list[Tensor]:
    """The whole model's parameters."""
    return list(torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(0), dtype=torch.float64).split(SIZES))


@pytest.mark.parametrize(
    ("islands", "stages", "replicas", "workers"),
    [(2, 2, 1, 4), pytest.param(2, 2, 2, 8, marks=pytest.mark.slow), pytest.param(3, 3, 1, 9, marks=pytest.mark.slow)],
)
@on_ranks(timeout=120)
def test_what_several_stages_hold_counts_once_and_stays_equal(rank, islands, stages, replicas, workers):
    """replicas: ranks of each stage of an island."""
    n = stages * replicas
    island, place = divmod(rank, n)
    stage, first = place // replicas, rank - place
    ranks = [range(first + i * replicas, first + (i + 1) * replicas) for i in range(stages)]
    tied = {0: slice(SIZES[0]), stages - 1: slice(-SIZES[0], None)}.get(stage, slice(0))
    for case in TIED:
        params = {i: nn.Parameter(values()[i].clone()) for i in PARTS[stages][stage]}
        holders = {p: ranks[stage] if i else [*ranks[0], *ranks[-1]] for i, p in params.items()}
        params = list(params.values())
        co2 = CO2(params, case.co2, mesh=node_mesh("cpu", n), shards=holders)
        trace = train_with(co2, params, island, TIED_STEPS)
        whole = train_reference(case, islands, TIED_STEPS, flat(values()))
        assert_traces_equal(trace, [torch.cat([t.split(SIZES)[i] for i in PARTS[stages][stage]]) for t in whole])
        of_first = total_world_size(trace)[0]
        assert all(torch.equal(a[tied], b[: len(a[tied])]) for a, b in zip(trace, of_first, strict=True))


@on_ranks(3)
def test_what_one_stage_sends_another_is_hidden_too(rank: int):
    """A reduction with sends from one stage to another is through while nobody waits for it."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    mesh = node_mesh("cpu", 3)  # the last of three holds nothing of what the first two share
    holders = {params[0]: [0, 1] if rank < 2 else [2], params[1]: [rank]}
    co2 = CO2(params, Settings(tau=1).co2, mesh=mesh, shards=holders)
    co2.step()
    began = time.monotonic()
    while not co2.allreduce.done() and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert co2.allreduce.done()
    co2.finish()


@on_ranks(2)
def test_holders_that_cannot_be_are_refused_in_one_line(rank: int):
    p = nn.Parameter(torch.ones(2))
    for holders in ([1 - rank], [rank, 7]):
        said = refusal(CO2, [p], mesh=node_mesh("cpu", 2), shards={p: holders})
        assert str(holders) in said and "give ranks of that group" in said


@on_ranks(4)
def test_copies_start_equal_and_must_stay_so(rank: int):
    """A node's ranks start with unequal copies; statistics are averaged over everybody; rounding makes copies differ by
    a little, which a boundary heals, and a step by much."""
    mesh = node_mesh("cpu", 2)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh["shard"], [Shard(0)]))
    bias, frozen = nn.Parameter(torch.full((2,), 1.0 + rank)), nn.Parameter(torch.full((2,), float(rank)), False)
    numbers = [torch.full((3,), float(rank)), distribute_tensor(torch.zeros(2), mesh["shard"], [Replicate()])]
    co2 = CO2([weight, bias, frozen], CO2Config(tau=1), mesh=mesh, buffers=numbers)
    assert [t.tolist() for t in (bias, frozen, numbers[0])] == [[1, 1], [0, 0], [0, 0, 0]]
    for t in numbers:
        local_shard(t).add_(rank)
    with torch.no_grad():
        bias.add_(2e-7 * rank)
    for _ in range(3):
        co2.step()
    assert alike(bias.detach()) and bias[0] > 1
    assert [local_shard(t).tolist() for t in numbers] == [[1.5] * 3, [1.5] * 2]
    co2.finish()
    with torch.no_grad():
        bias.fill_(3 + rank)
    co2.resync()
    assert bias.tolist() == [3, 3]
    fresh = CO2([weight, bias], CO2Config(tau=1), mesh=mesh)
    with torch.no_grad():
        bias.add_(rank)
    assert refusal(fresh.step).startswith("the unsharded parameters of one node's workers differ")


@on_ranks(2, timeout=30)
def test_resync_in_flight_is_no_part_of_what_runs_inside_the_node(rank: int):
    """One rank's reduction is through when the other's has still to come to its collectives inside the node."""
    weight = nn.Parameter(torch.ones(3))
    co2 = CO2([weight], CO2Config(tau=1), mesh=node_mesh("cpu", 2), link=SlowLink(0.3 * rank))
    co2.step()
    with torch.no_grad():
        weight.fill_(5.0 + rank)
    co2.resync()
    assert weight.tolist() == [5.0] * 3


@on_ranks(4)
def test_what_would_mix_parts_is_refused_in_one_line(rank: int):
    mesh = node_mesh("cpu", 2)
    sharded = distribute_tensor(torch.ones(4, 3), mesh["shard"], [Shard(0)])
    across = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Replicate()])
    sums = DTensor.from_local(torch.ones(3), mesh["shard"], [Partial()])
    plain = nn.Parameter(torch.ones(3 + rank % 2))
    for params, how, *parts in [
        ([plain], {"mesh": mesh}, "shards=True", "(3,)", "(4,)"),
        ([plain], {"shards": True}, "needs mesh="),
        ([nn.Parameter(across)], {"mesh": mesh}, "inner group is ["),
        ([nn.Parameter(sums)], {"mesh": mesh}, "Partial(sum)"),
        ([nn.Parameter(sharded)], {"mesh": mesh, "buffers": [sharded]}, "leave it out"),
    ]:
        said = refusal(CO2, params, CO2Config(), **how)
        assert all(part in said for part in parts), said


@on_ranks(4)
def test_how_many_ranks_hold_a_tensor(rank: int):
    """Of four ranks with one model: sharded twice, in one way of two, nowhere, over half of them, plain. With shards
    the half of them that shares a DTensor is a stage."""
    mesh, ranks = node_mesh("cpu", 2), list(range(4))
    places = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Replicate()]]
    tensors = [distribute_tensor(torch.ones(4, 4), mesh, p) for p in places]
    tensors += [distribute_tensor(torch.ones(4), mesh["shard"], [Shard(0)]), torch.ones(4)]
    found = [[holding_of(t, ranks, shards)[0] for t in tensors] for shards in (False, True)]
    assert found == [[1, 2, 4, 2, 4], [1, 2, 4, 1, 1]]
