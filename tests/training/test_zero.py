"""ZeRO inside nodes of two, CO2 across two nodes: each stage equals the unsharded run, and the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core import CO2Config, UserError, make_method
from core.groups import node_mesh
from core.reference import Reference, vmap_gradient
from core.testing import run_distributed
from tests import problems
from tests.problems import batch, flat, loss
from training.workers import make_mesh
from training.zero import gathered, shard_model, shard_optimizer

TAU, ROUNDS, LR = 3, 20, 0.2
CONFIG = CO2Config(tau=TAU, outer_momentum=0.4, outer_lr=0.9, clip=0.3)
INNERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def whole(model: nn.Module) -> Tensor:
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def build(stage: Any, inner: str, mesh: Any) -> tuple[nn.Module, nn.Module, Any, torch.optim.Optimizer]:
    model = shard_model(problems.small_net(), mesh, stage)
    lr = LR if inner == "sgd" else 0.01
    optimizer = shard_optimizer(INNERS[inner](model.parameters(), lr=lr), mesh, stage)
    return model, *make_method("co2", model, co2=CONFIG, mesh=mesh), optimizer


def train(rank: int, world_size: int, stage: Any, inner: str, shard: bool) -> list[Tensor]:
    mesh = node_mesh("cpu", 2)
    model = shard_model(problems.small_net(), mesh, stage)
    lr = LR if inner == "sgd" else 0.01
    optimizer = shard_optimizer(INNERS[inner](model.parameters(), lr=lr), mesh, stage)
    wrapped, method = make_method("co2", model, co2=CONFIG, mesh=mesh, shard=shard)
    trace = []
    for step in range(TAU * ROUNDS):
        loss(wrapped, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if method.step():
            trace.append(whole(model))
    method.finish()
    return [*trace, whole(model)]


def reference() -> list[Tensor]:
    """Two nodes, each with the mean gradient of its two workers."""
    net = problems.small_net()
    template = {name: p.detach() for name, p in net.named_parameters()}
    of_all = vmap_gradient(
        lambda params, *data: loss(lambda x: torch.func.functional_call(net, params, x), data), template
    )
    c = CONFIG
    ref = Reference(flat(net.parameters()).expand(2, -1).clone(), c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip)

    def gradient(rows: Tensor, step: int) -> Tensor:
        data = [torch.stack(parts) for parts in zip(*(batch(w, step) for w in range(4)), strict=True)]
        return of_all(rows.repeat_interleave(2, 0), tuple(data)).view(2, 2, -1).mean(1)

    ref.run(gradient, LR, TAU * ROUNDS)
    rounds = ref.outer[1:]
    ref.finish()
    return [*rounds, ref.x[0].clone()]


@pytest.mark.parametrize("shard", [False, True], ids=["node", "all"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_equals_the_reference_for_twenty_rounds(stage: int, shard: bool):
    expected = reference()
    for trace in run_distributed(train, 4, stage, "sgd", shard, timeout=150):
        assert len(trace) == len(expected) == ROUNDS + 1
        for ours, theirs in zip(trace, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_each_stage_equals_the_unsharded_run_with_an_optimiser_that_keeps_state():
    unsharded = run_distributed(train, 4, 0, "adamw", False, timeout=150)[0]
    for stage in (1, 2, 3):
        for ours, theirs in zip(run_distributed(train, 4, stage, "adamw", False)[3], unsharded, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def held(rank: int, world_size: int, stage: Any) -> dict[str, int]:
    """Elements that this worker holds after some steps."""
    model, wrapped, method, optimizer = build(stage, "adamw", node_mesh("cpu", 2))
    for step in range(4):
        loss(wrapped, batch(rank, step)).backward()
        optimizer.step()
        method.step()
    state = optimizer.state_dict()["state"].values()
    moments = [s["exp_avg"] for s in state]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in moments]
    params = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    return {
        "parameters": sum(p.numel() for p in params),
        "gradients": sum((g.to_local() if isinstance(g, DTensor) else g).numel() for g in grads if g is not None),
        "optimiser": sum(t.numel() for t in local),
        "outer": sum(len(x) for x in method._x),
    }


@pytest.mark.parametrize(
    ("stage", "halved"),
    [(0, {"outer"}), (1, {"outer", "optimiser"}), (2, {"outer", "optimiser", "gradients", "parameters"})],
)
def test_what_each_stage_shards(stage: int, halved: set[str]):
    """With FSDP2 the parameters at rest are shards in stage 2 too; it keeps them gathered from forward to backward."""
    n = sum(p.numel() for p in problems.small_net().parameters())
    for seen in zip(*(d.items() for d in run_distributed(held, 4, stage)[:2]), strict=True):
        name, total = seen[0][0], sum(value for _, value in seen)
        if name in halved:
            assert n <= total <= n + 2, (name, total)  # padding
        else:
            assert total == 2 * n, (name, total)


def resumed(rank: int, world_size: int, stage: Any, path: str) -> tuple[Tensor, Tensor]:
    mesh, ends = node_mesh("cpu", 2), []
    for stop in (7, None):
        model, wrapped, method, optimizer = build(stage, "adamw", mesh)
        for step in range(18):
            loss(wrapped, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            method.step()
            if step == stop:
                states = [part.state_dict() for part in (model, optimizer, method)]
                torch.save(states, f"{path}/{rank}")
                method.background.wait()
                method.close()
                model, wrapped, method, optimizer = build(stage, "adamw", mesh)
                states = torch.load(f"{path}/{rank}", weights_only=True)
                for part, state in zip((model, optimizer, method), states, strict=True):
                    part.load_state_dict(state)
        method.finish()
        ends.append(whole(model))
        method.close()
    return ends[0], ends[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_worker_resumes_from_its_own_file(stage: int, tmp_path):
    for again, straight in run_distributed(resumed, 4, stage, str(tmp_path)):
        assert torch.equal(again, straight)


def evaluation(rank: int, world_size: int, stage: Any) -> tuple[int, Tensor]:
    model, wrapped, method, optimizer = build(stage, "sgd", node_mesh("cpu", 2))
    with gathered(model, stage):
        for step in range(rank):  # uneven: a forward that communicated would hang
            model(batch(rank, step)[0])
    loss(wrapped, batch(rank, 0)).backward()
    optimizer.step()
    method.step()
    method.finish()
    return rank, whole(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluations_may_be_uneven(stage: int):
    results = run_distributed(evaluation, 4, stage)
    assert all(torch.equal(end, results[0][1]) for _, end in results)


def other_methods(rank: int, world_size: int, stage: Any) -> list[Tensor]:
    ends = []
    for name in ("local", "slowmo", "overlap_local"):
        mesh = node_mesh("cpu", 2)
        model = shard_model(problems.small_net(), mesh, stage)
        wrapped, method = make_method(name, model, co2=CONFIG, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(8):
            loss(wrapped, batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            method.step()
        method.finish()
        ends.append(whole(model))
    return ends


def test_the_baselines_run_across_nodes_too():
    plain, sharded = (run_distributed(other_methods, 4, stage, timeout=100) for stage in (0, 3))
    for rank in range(4):
        for a, b, first in zip(plain[rank], sharded[rank], plain[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(a, first, rtol=1e-9, atol=1e-9)


def test_a_stage_without_workers_to_shard_over_is_refused():
    with pytest.raises(UserError, match="zero=2 with 1 worker"):
        make_mesh(torch.device("cpu"), 1, 2)


def synchronous(rank: int, world_size: int, stage: Any) -> tuple[Tensor, float]:
    mesh = node_mesh("cpu", 2)
    model = shard_model(problems.small_net(), mesh, stage, everywhere=True)
    wrapped, method = make_method("ddp", model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(8):
        loss(wrapped, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
    method.finish()
    return whole(model), float(method.stats.exposed_seconds)


def test_ddp_with_shards_synchronises_all_nodes():
    (plain, measured), *_ = run_distributed(synchronous, 4, 0)
    for stage in (2, 3):
        for end, exposed in run_distributed(synchronous, 4, stage):
            torch.testing.assert_close(end, plain, rtol=1e-9, atol=1e-9)
            assert measured >= 0 and exposed != exposed  # nan: not measured


def without_a_mesh(rank: int, world_size: int) -> None:
    make_method("co2", shard_model(problems.small_net(), node_mesh("cpu", 2), 3))


def test_shards_without_a_mesh_are_refused():
    with pytest.raises(RuntimeError, match="DTensors as parameters need ShardedCO2"):
        run_distributed(without_a_mesh, 2)
