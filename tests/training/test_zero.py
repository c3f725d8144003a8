"""ZeRO inside nodes of two, CO2 across two nodes: each stage equals the unsharded run, and the reference."""

import functools
import time
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core import CO2Config, UserError, make_method
from core.buckets import local_shard
from core.nodes import node_mesh
from core.testing import run_distributed
from core.testing.reference import Reference
from tests import problems
from tests.problems import batch, flat, loss
from training.layouts.zero import gathered, shard_model, shard_optimizer
from training.start.workers import make_mesh

TAU, ROUNDS, LR = 3, 20, 0.2
CONFIG = CO2Config(tau=TAU, outer_momentum=0.4, outer_lr=0.9, clip=0.3)
INNERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
CORNERS = [(0, False), (1, True), (2, False), (3, True)]
EVERY_CASE = list(product((0, 1, 2, 3), (False, True)))
FEW = 3  # rounds


@functools.cache  # of each process
def mesh() -> Any:
    return node_mesh("cpu", 2)


def on_four(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the quick tests below look at, by one start of the processes."""
    return {
        "corners": train_all(rank, world_size, CORNERS, FEW),
        "held": [held_in(rank, stage) for stage in (0, 1, 2)],
        "resumed": [resumed(rank, stage, folder) for stage in (1, 3)],
        "no mesh": without_a_mesh(),
    }


def more_on_four(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the slow ones look at."""
    return {
        "evaluations": [evaluation(rank, stage) for stage in (2, 3)],
        "baselines": [of_other_methods(rank, stage) for stage in (0, 3)],
        "ddp": [synchronous(rank, stage) for stage in (0, 2, 3)],
        "16 bits": [gathered_in_16_bits(rank, stage) for stage in (2, 3)],
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By worker, two nodes of two."""
    return run_distributed(on_four, 4, str(tmp_path_factory.mktemp("zero")), timeout=400)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(more_on_four, 4, str(tmp_path_factory.mktemp("zero")), timeout=400)


def whole(model: nn.Module) -> Tensor:
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def build(stage: Any, inner: str, shard: bool = False) -> tuple[nn.Module, nn.Module, Any, torch.optim.Optimizer]:
    model = shard_model(problems.small_net(), mesh(), stage)
    lr = LR if inner == "sgd" else 0.01
    optimizer = shard_optimizer(INNERS[inner](model.parameters(), lr=lr), mesh(), stage)
    return model, *make_method("co2", model, co2=CONFIG, mesh=mesh(), shard=shard), optimizer


def steps(rank: int, built: tuple[Any, ...], numbers: Iterable[int]) -> Iterator[bool]:
    """Takes steps; whether each has closed a round."""
    _, wrapped, method, optimizer = built
    for step in numbers:
        loss(wrapped, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield method.step()


def train_all(rank: int, world_size: int, cases: list[tuple[int, bool]], rounds: int) -> list[list[Tensor]]:
    """cases: a stage, and whether the outer state is shared out over all."""
    return [train(rank, stage, shard, rounds) for stage, shard in cases]


def train(rank: int, stage: Any, shard: bool, rounds: int) -> list[Tensor]:
    model, _, method, _ = built = build(stage, "sgd", shard)
    trace = [whole(model) for closed in steps(rank, built, range(TAU * rounds)) if closed]
    method.finish()
    method.close()
    return [*trace, whole(model)]


def reference(rounds: int) -> list[Tensor]:
    """Two nodes, each with the mean gradient of its two workers."""
    net, c = problems.small_net(), CONFIG
    ref = Reference(flat(net.parameters()).expand(2, -1).clone(), c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip)
    ref.run(problems.descent_of(net, 2), LR, TAU * rounds)
    closed = ref.outer[1:]
    ref.finish()
    return [*closed, ref.x[0].clone()]


def check_reference(results: list[list[list[Tensor]]], cases: list[tuple[int, bool]], rounds: int) -> None:
    expected = reference(rounds)
    for traces in results:
        for (stage, shard), trace in zip(cases, traces, strict=True):
            assert len(trace) == len(expected) == rounds + 1
            for ours, theirs in zip(trace, expected, strict=True):
                where = f"stage {stage}, shard={shard}"
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}")


def test_each_stage_equals_the_reference(found: list[dict[str, Any]]):
    """With the outer state shared out inside the node, and over all."""
    check_reference([of["corners"] for of in found], CORNERS, FEW)


@pytest.mark.slow
def test_each_stage_equals_the_reference_for_twenty_rounds():
    check_reference(run_distributed(train_all, 4, EVERY_CASE, ROUNDS, timeout=240), EVERY_CASE, ROUNDS)


def held_in(rank: int, stage: Any) -> dict[str, int]:
    """Elements that this worker holds after some steps."""
    model, wrapped, method, optimizer = build(stage, "adamw")
    for step in range(4):
        loss(wrapped, batch(rank, step)).backward()
        optimizer.step()
        method.step()
    state = optimizer.state_dict()["state"].values()
    held = {
        "parameters": [*model.parameters()],
        "gradients": [p.grad for p in model.parameters() if p.grad is not None],
        "optimiser": [s["exp_avg"] for s in state],
        "outer": method.state["outer_iterate"],
    }
    method.allreduce.wait()
    method.close()
    return {name: sum(local_shard(t).numel() for t in tensors) for name, tensors in held.items()}


def test_what_each_stage_shards(found: list[dict[str, Any]]):
    """With FSDP2 the parameters at rest are shards in stage 2 too; it keeps them gathered from forward to backward."""
    n = sum(p.numel() for p in problems.small_net().parameters())
    halved = [{"outer"}, {"outer", "optimiser"}, {"outer", "optimiser", "gradients", "parameters"}]
    for stage, (one, other) in enumerate(zip(found[0]["held"], found[1]["held"], strict=True)):
        for name in one:
            total = one[name] + other[name]
            if name in halved[stage]:
                assert n <= total <= n + 2, (stage, name, total)  # padding
            else:
                assert total == 2 * n, (stage, name, total)


def resumed(rank: int, stage: Any, path: str) -> tuple[Tensor, Tensor]:
    ends = []
    for stop in (5, None):
        model, _, method, optimizer = built = build(stage, "adamw")
        if stop:
            [*steps(rank, built, range(stop))]
            states = [part.state_dict() for part in (model, optimizer, method)]
            torch.save(states, f"{path}/{rank}")
            method.allreduce.wait()
            method.close()
            model, _, method, optimizer = built = build(stage, "adamw")
            states = torch.load(f"{path}/{rank}", weights_only=True)
            for part, state in zip((model, optimizer, method), states, strict=True):
                part.load_state_dict(state)
        [*steps(rank, built, range(stop or 0, 11))]  # two rounds after it was resumed
        method.finish()
        ends.append(whole(model))
        method.close()
    return ends[0], ends[1]


def test_every_worker_resumes_from_its_own_file(found: list[dict[str, Any]]):
    for of in found:
        for again, straight in of["resumed"]:
            assert torch.equal(again, straight)


def stalled(rank: int, world_size: int, folder: str) -> float:
    """Rank 1 keeps away from a collective of its node; the seconds that rank 0 waits for it."""
    mesh = make_mesh(torch.device("cpu"), 2, 0, timeout=1.0)
    done, start = Path(folder, "done"), time.monotonic()
    while rank == 1 and not done.exists() and time.monotonic() - start < 40:
        time.sleep(0.1)
    if rank == 0:
        with pytest.raises(RuntimeError):
            torch.distributed.all_reduce(torch.ones(1), group=mesh.get_group("shard"))
        done.touch()
    return time.monotonic() - start


def test_a_nodes_workers_wait_no_longer_than_the_timeout(tmp_path: Path):
    seconds = run_distributed(stalled, 2, str(tmp_path), expect_death=(0, 1))[0]
    assert 0.5 < seconds < 20


def evaluation(rank: int, stage: Any) -> Tensor:
    model, wrapped, method, optimizer = build(stage, "sgd")
    with gathered(model, stage):
        for step in range(rank):  # uneven: a forward that communicated would hang
            model(batch(rank, step)[0])
    loss(wrapped, batch(rank, 0)).backward()
    optimizer.step()
    method.step()
    method.finish()
    return whole(model)


@pytest.mark.slow
def test_evaluations_may_be_uneven(more: list[dict[str, Any]]):
    for of in more:
        assert all(map(torch.equal, of["evaluations"], more[0]["evaluations"]))


def end_of(rank: int, name: str, model: nn.Module, config: CO2Config = CONFIG) -> tuple[Tensor, Any]:
    """The parameters after eight steps, and the method."""
    wrapped, method = make_method(name, model, co2=config, mesh=mesh())
    [*steps(rank, (model, wrapped, method, torch.optim.SGD(model.parameters(), lr=LR)), range(8))]
    method.finish()
    return whole(model), method


def of_other_methods(rank: int, stage: Any, config: CO2Config = CONFIG) -> list[Tensor]:
    names = ("local", "slowmo", "overlap_local")
    return [end_of(rank, name, shard_model(problems.small_net(), mesh(), stage), config)[0] for name in names]


@pytest.mark.slow
def test_the_baselines_run_across_nodes_too(more: list[dict[str, Any]]):
    for of in more:
        for a, b, first in zip(*of["baselines"], more[0]["baselines"][0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(a, first, rtol=1e-9, atol=1e-9)


def test_shards_without_a_mesh_are_refused(found: list[dict[str, Any]]):
    assert "shard it inside nodes and give CO2 mesh=" in found[0]["no mesh"]


def synchronous(rank: int, stage: Any) -> tuple[Tensor, float]:
    """The end, and the exposed seconds."""
    end, method = end_of(rank, "ddp", shard_model(problems.small_net(), mesh(), stage, everywhere=True))
    return end, float(method.stats.exposed_seconds)


@pytest.mark.slow
def test_ddp_with_shards_synchronises_all_nodes(more: list[dict[str, Any]]):
    plain, measured = more[0]["ddp"][0]
    for of in more:
        for end, exposed in of["ddp"][1:]:
            torch.testing.assert_close(end, plain, rtol=1e-9, atol=1e-9)
            assert measured >= 0 and exposed != exposed  # nan: not measured


def without_a_mesh() -> str:
    with pytest.raises(UserError) as caught:
        make_method("co2", shard_model(problems.small_net(), mesh(), 3))
    return str(caught.value)


def gathered_in_16_bits(rank: int, stage: Any) -> tuple[str, str, bool]:
    """What a layer computes with, what its shard is kept in, and whether its gradient is, too."""
    model: Any = shard_model(problems.small_net(torch.float32), mesh(), stage, compute=torch.bfloat16)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda layer, *_: seen.append(layer.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch(rank, 0, dtype=torch.float32)[0])
    out.float().sum().backward()
    weight = model[0].weight
    return str(seen[0]), str(weight.dtype), weight.grad is not None and weight.grad.dtype == weight.dtype


@pytest.mark.slow
def test_parameters_are_gathered_in_16_bits_and_kept_in_32(more: list[dict[str, Any]]):
    for of in more:
        assert of["16 bits"] == [("torch.bfloat16", "torch.float32", True)] * 2
