"""Correctness: bytes, against what a dry run says; and in a loop of one's own: autocast, GradScaler, compile, FSDP2,
layers that pass through the device."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.gpu.checks import Scope, check, one_rank, sync
from bench.gpu.equal import METHODS, RECOMMENDED, end, go, near, problem
from core import CO2, CO2Config, ShardedCO2, make_method
from core.robust.guard import Guard, forget

SLACK = 1.1


def held(scope: Scope, name: str) -> tuple[Any, Any, int, int]:
    """A problem of some size and its method after some rounds, the parameters' bytes, and those beyond them."""
    p = problem(scope.device, width=scope(4096, 96), layers=6)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    method = METHODS[name](p)
    go(p.params, method, range(9))
    torch.cuda.synchronize()
    return p, method, sum(t.nbytes for t in p.params), torch.cuda.memory_allocated() - before


@check("correctness", cases=("co2", "recommended", "int4", "sharded"), cuda=True)
def a_checkpoint_takes_no_copy_on_the_device(scope: Scope, case: str) -> dict[str, float]:
    """The peak while state_dict() is made, in copies of the parameters: at most one flat tensor's."""
    with one_rank(scope):
        p, method, size, beyond = held(scope, case)
        now = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        state = method.state_dict()
        torch.cuda.synchronize()
        added = (torch.cuda.max_memory_allocated() - now) / size
        del state
        end(method)
    assert added <= SLACK, f"adds {added:.2f} copies of the parameters to the {beyond / size:.2f} that it holds"
    return {"holds": beyond / size, "adds": added}


@check("correctness", cases=("paper", "recommended"), cuda=True)
def a_method_holds_what_the_dry_run_says(scope: Scope, case: str) -> dict[str, float]:
    """Of the tiny GPT-2's recipe, one worker; both in copies of the parameters."""
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model
    from training.memory import held, size_of

    small = replace(gpt2_pydoc_small(), batch_size=2)
    settings = small.co2 if case == "paper" else replace(CO2Config.recommended(1), tau=small.co2.tau)
    recipe = replace(small, co2=settings, recommended=case != "paper")
    with torch.device("meta"):
        said = held(recipe, make_model(recipe, pad=1), 1, 1)
    with one_rank(scope):
        model = make_model(recipe, pad=1).to(scope.device)
        params = [p for p in model.parameters() if p.requires_grad]
        before = torch.cuda.memory_allocated()
        _, method = make_method("co2", model, co2=recipe.co2)
        go(params, method, range(6 * 6))
        torch.cuda.synchronize()
        found = torch.cuda.memory_allocated() - before
        end(method)
    size = size_of(params)
    assert found <= SLACK * said, f"holds {found / size:.2f} copies, the dry run says {said / size:.2f}"
    return {"holds": found / size, "dry run": said / size}


@check("correctness", cuda=True)
def offloaded_state_takes_the_hosts_memory_as_asked(scope: Scope) -> dict[str, float]:
    """Nothing on the device, and of pinned memory what is needed, not the next power of two."""
    p = problem(scope.device, width=scope(4200, 64), layers=1)
    size = sum(t.nbytes for t in p.params)
    torch.cuda.synchronize()
    on_device, on_host = torch.cuda.memory_allocated(), pinned()
    method = ShardedCO2(p.params, CO2Config(tau=2), offload=True)
    go(p.params, method, range(6))
    torch.cuda.synchronize()
    taken = (torch.cuda.memory_allocated() - on_device) / size, (pinned() - on_host) / size
    flats = [b.flat for b in method.buckets]
    method.finish()
    assert taken[0] < 0.01, f"{taken[0]:.2f} copies on the device"
    assert all(f.is_pinned() for f in flats), "what is sent is not pinned"
    assert taken[1] < 2 * SLACK, f"{taken[1]:.2f} copies of pinned memory, where 2 are needed"
    return {"copies on the device": taken[0], "pinned copies of torch's": taken[1]}


def pinned() -> int:
    """Bytes that torch's own allocator of pinned memory has taken of the host."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    found = torch.cuda.host_memory_stats()
    return next((int(found[k]) for k in ("allocated_bytes.current", "allocated_bytes.all.current") if k in found), 0)


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
        end(method)
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
    end(method)
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
    end(method)
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
