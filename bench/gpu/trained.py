"""Correctness in a loop of one's own: autocast, GradScaler, compile, FSDP2, layers that pass through the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.gpu.checks import Scope, check, one_rank, sync
from bench.gpu.problem import RECOMMENDED, near
from core import CO2, CO2Config, ShardedCO2
from core.robust.guard import Guard, forget

CONFIGS = {"paper": CO2Config(tau=4), "recommended": RECOMMENDED}


def net(scope: Scope) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2)]
    found = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return found.to(scope.device, memory_format=torch.channels_last)


def batches(scope: Scope, count: int = 24) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    draws = [
        (torch.randn(8, 3, 16, 16, generator=random), torch.randint(10, (8,), generator=random)) for _ in range(count)
    ]
    return [(x.to(scope.device).contiguous(memory_format=torch.channels_last), y.to(scope.device)) for x, y in draws]


@check("correctness", cases=CONFIGS)
def autocast_and_grad_scaler(scope: Scope, case: str) -> str:
    """With a batch whose loss is infinite, whose step the scaler leaves out while the round goes on."""
    model = net(scope)
    strides = [p.stride() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=scope.cuda)
    with one_rank(scope):
        method = CO2(model.parameters(), CONFIGS[case], buffers=model.buffers())
        method.rider(Guard).on_left_out = forget(optimizer)
        scaler = torch.amp.GradScaler(scope.device, init_scale=2.0**10)
        closed, scales = [], []
        for step, (x, y) in enumerate(batches(scope)):
            with torch.autocast(scope.device, torch.float16 if scope.cuda else torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if step == 9 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            closed.append(method.step())
            scales.append(scaler.get_scale())
        method.finish()
        method.close()
    assert closed == [(i + 1) % 4 == 0 for i in range(len(closed))], "rounds close at other steps"
    assert scales[9] < scales[8], "the scaler has not left the step out"
    assert all(p.isfinite().all() for p in model.parameters()), "parameters are not finite"
    assert strides == [p.stride() for p in model.parameters()], "strides have changed"
    return f"loss {loss.item():.3f}, scale {scales[-1]:g}"


def fitted(scope: Scope, config: CO2Config, *, compiled: bool) -> list[Tensor]:
    model = net(scope)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    method = CO2(model.parameters(), config, buffers=model.buffers())
    forward: Any = torch.compile(model) if compiled else model
    for x, y in batches(scope):
        nn.functional.cross_entropy(forward(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
    method.finish()
    method.close()
    return [p.detach() for p in model.parameters()]


@check("correctness", cuda=True, limit=180.0)
def a_compiled_model_trains_as_it_is(scope: Scope) -> str:
    with one_rank(scope):
        ours = fitted(scope, CONFIGS["paper"], compiled=True)
        return near(ours, fitted(scope, CONFIGS["paper"], compiled=False), 2e-2)  # products in another order, TF32


class Stack(nn.Module):
    """Blocks in a list, which FSDP2 shards one by one."""

    def __init__(self, width: int = 64, count: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(count)
        )
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def sharded(scope: Scope, stage: int, recomputed: bool) -> list[Tensor]:
    """The parameters after some steps over a mesh of one process."""
    from training.backward import recompute
    from training.zero import shard_model

    model = Stack().to(scope.device)
    if recomputed:
        recompute(model.blocks)
    mesh = init_device_mesh(scope.device, (1, 1), mesh_dim_names=("replicate", "shard"))
    if stage:
        shard_model(model, mesh, stage)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    method = ShardedCO2(model.parameters(), CO2Config(tau=4), mesh=mesh)
    for x in torch.randn(18, 16, 64, generator=torch.Generator().manual_seed(1)).to(scope.device):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
    method.finish()
    method.close()
    return [getattr(p, "to_local", lambda p=p: p)().detach().cpu() for p in model.parameters()]


@check("correctness", cases=("stage 2", "stage 3", "stage 2, recomputed", "stage 3, recomputed"))
def fsdp2_over_one_rank(scope: Scope, case: str) -> str:
    """Sharded parameters, and with activations computed again in the backward pass, against the plain model."""
    with one_rank(scope):
        whole = sharded(scope, 0, False)
        return near(sharded(scope, int(case[6]), "recomputed" in case), whole, 1e-4)


@check("correctness", cuda=True)
def blocks_that_pass_through_the_device(scope: Scope) -> str:
    """BlockStream, with the model on the host, against the model on the device, bit for bit; noise of the host."""
    from core.zeroth import ZerothConfig, ZerothOrder
    from core.zeroth.blocks import BlockStream

    def run(streamed: bool) -> list[Tensor]:
        model = Stack() if streamed else Stack().to(scope.device)
        forward = functools.partial(BlockStream, blocks=model.blocks, device=torch.device(scope.device, 0))
        how: dict[str, Any] = {"make_forward": forward} if streamed else {}
        order = ZerothOrder(model, ZerothConfig(eps=1e-3, rng="host"), lr=1e-3, **how)
        random = torch.Generator().manual_seed(1)
        for _ in range(20):
            x = torch.randn(32, 64, generator=random).to(scope.device)
            y = torch.randint(10, (32,), generator=random).to(scope.device)
            order.step(lambda net, x=x, y=y: nn.functional.cross_entropy(net(x), y), 32)
        order.finish()
        sync(scope)
        return [p.detach().cpu() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False))), "they differ"
    return "bit for bit"
