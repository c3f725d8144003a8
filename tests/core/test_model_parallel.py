"""Tensor parallelism and a pipeline's stages on a 2 x 2 mesh: equal to the whole model on two workers."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench.loss.__main__ import vmap_gradient
from core import CO2, CO2Config, ShardedCO2, make_method
from core.flat import local_shard
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from tests.problems import LR, assert_traces_equal, batch, flat, loss, node_step, odd_parameters, sgd_step, trace_of
from tests.reference import Reference

TAU, STEPS = 3, 17  # 5 rounds and an incomplete one
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


def split_layers(rank: int, world_size: int, replicated: bool, cases: list[Any]) -> list[list[Tensor]]:
    mesh, traces = node_mesh("cpu", 2), []
    for config, how in cases:
        net = tensor_parallel(mesh, replicated)
        wrapped, co2 = make_method("co2", net, co2=config, mesh=mesh, **how)
        assert wrapped is net
        traces.append(trace_of(co2, lambda step, n=net: learn(n, rank // 2, step), lambda n=net: gathered(n), STEPS))
    return traces


def reference(config: CO2Config) -> list[Tensor]:
    net, c = whole_net(), config
    template = {name: p.detach() for name, p in net.named_parameters()}
    gradient = vmap_gradient(
        lambda params, *data: loss(lambda x: torch.func.functional_call(net, params, x), data), template
    )
    ref = Reference(flat(net.parameters()).expand(2, -1).clone(), TAU, c.outer_lr, c.outer_momentum, c.gap, c.clip)

    def of_all(rows: Tensor, step: int) -> Tensor:
        return gradient(
            rows, tuple(torch.stack(parts) for parts in zip(*(batch(w, step) for w in (0, 1)), strict=True))
        )

    ref.run(of_all, LR, STEPS)
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
def test_tensor_parallelism_equals_the_reference(replicated: bool, cases: list[Any]):
    """What both ranks of a node hold counts once in norms and in the number of elements."""
    expected = [reference(config) for config, _ in cases]
    for traces in run_distributed(split_layers, 4, replicated, cases, timeout=150):
        for trace, theirs in zip(traces, expected, strict=True):
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


def pipeline(
    rank: int, world_size: int, dtype: torch.dtype, cases: list[Any]
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """(of the stage, of that part of the whole model) for each case; the second node stops two steps early."""
    mesh, pairs = node_mesh("cpu", 2), []
    node, i = divmod(rank, 2)
    for config, how in cases:
        traces = []
        for own in ([i], [0, 1]):
            stages = {k: stage(k, dtype) for k in own}
            parts = nn.ModuleList(stages.values())
            options: dict[str, Any] = {"mesh": mesh, "shards": True} | how
            kind = CO2 if len(own) == 2 else ShardedCO2
            options = {"group": mesh.get_group("replicate")} if kind is CO2 else options
            co2 = kind(parts.parameters(), config, buffers=parts.buffers(), **options)

            def go(step: int, stages: dict[int, nn.Module] = stages) -> None:
                for k, part in stages.items():
                    advance(k, part, node, step)

            traces.append(trace_of(co2, go, lambda part=stages[i]: flat(state(part)), STEPS - 2 * node))
        pairs.append((traces[0], traces[1]))
    return pairs


@pytest.mark.parametrize(
    ("dtype", "tolerance", "cases"),
    [
        pytest.param(torch.float64, 1e-9, CASES, marks=pytest.mark.slow, id="float64"),
        pytest.param(torch.float32, 1e-6, CASES, marks=pytest.mark.slow, id="float32"),
        pytest.param(torch.float64, 1e-9, CORNERS, id="corners"),
    ],
)
def test_stages_of_a_pipeline_equal_the_whole_model(dtype: torch.dtype, tolerance: float, cases: list[Any]):
    """In float32 the scalars travel with a first bucket of another dtype in one stage than in the other."""
    for pairs in run_distributed(pipeline, 4, dtype, cases, timeout=150):
        for ours, whole in pairs:
            assert_traces_equal(ours, whole, tolerance)


def whole_parameters() -> nn.Module:
    return nn.ParameterList(odd_parameters())


def in_a_node(net: nn.Module, node: int, step: int) -> None:
    node_step(list(net.parameters()), [2 * node, 2 * node + 1], step)


def resumed(rank: int, world_size: int) -> list[list[Tensor]]:
    """Of each kind of model the ends: straight, and after a resume at a boundary, and between two."""
    mesh, ends = node_mesh("cpu", 2), []
    node, i = divmod(rank, 2)
    kinds: list[tuple[Callable[[], nn.Module], Callable[..., None], list[str]]] = [
        (lambda: tensor_parallel(mesh, False), learn, []),
        (lambda: tensor_parallel(mesh, True), learn, ["shard"]),
        (lambda: stage(i), partial(advance, i), ["shards"]),
        (lambda: stage(i), partial(advance, i), ["shards", "offload"]),
        *((whole_parameters, in_a_node, names) for names in ([], ["shard"], ["offload"])),
    ]
    for build, go, names in kinds:
        how: dict[str, Any] = dict.fromkeys(names, True)
        ends.append([])
        for at in (0, 3 * TAU, 4 * TAU + 1):
            net, co2 = build(), None
            for step in range(STEPS):
                if step in (0, at):
                    old, net, saved = net, build(), co2.state_dict() if co2 else None
                    co2 = ShardedCO2(net.parameters(), CONFIGS[0], mesh=mesh, buffers=net.buffers(), **how)
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
            ends[-1].append(flat([local_shard(t) for t in state(net)]))
    return ends


def test_a_resumed_run_goes_on_bit_for_bit():
    for ends in run_distributed(resumed, 4, timeout=200):
        for straight, *again in ends:
            assert all(torch.equal(end, straight) for end in again)
