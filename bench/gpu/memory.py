"""Correctness: bytes, against what a dry run says."""

from __future__ import annotations

import gc
from typing import Any

import torch

from bench.gpu.checks import Scope, check, one_rank
from bench.gpu.problem import METHODS, move, problem
from core import CO2Config, ShardedCO2, make_method

SLACK = 1.1


def held(scope: Scope, name: str) -> tuple[Any, Any, int, int]:
    """A problem of some size and its method after some rounds, the parameters' bytes, and those beyond them."""
    p = problem(scope.device, width=scope(4096, 96), layers=6)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    method = METHODS[name](p)
    for step in range(9):
        move(p.params, step)
        method.step()
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
        method.finish()
        method.close()
    assert added <= SLACK, f"adds {added:.2f} copies of the parameters to the {beyond / size:.2f} that it holds"
    return {"holds": beyond / size, "adds": added}


@check("correctness", cases=("paper", "recommended"), cuda=True)
def a_method_holds_what_the_dry_run_says(scope: Scope, case: str) -> dict[str, float]:
    """Of the tiny GPT-2's recipe, one worker; both in copies of the parameters."""
    from dataclasses import replace

    from language.recipes import gpt2_pydoc_small
    from language.train import fake_step, make_model
    from training.memory import estimate, size_of

    small = replace(gpt2_pydoc_small(), batch_size=2)
    settings = small.co2 if case == "paper" else replace(CO2Config.recommended(1), tau=small.co2.tau)
    recipe = replace(small, co2=settings, recommended=case != "paper")
    said = estimate(recipe, lambda: make_model(recipe, pad=1), fake_step, 1).method
    with one_rank(scope):
        model = make_model(recipe, pad=1).to(scope.device)
        params = [p for p in model.parameters() if p.requires_grad]
        before = torch.cuda.memory_allocated()
        _, method = make_method("co2", model, co2=recipe.co2)
        for step in range(6 * 6):
            move(params, step)
            method.step()
        torch.cuda.synchronize()
        found = torch.cuda.memory_allocated() - before
        method.finish()
        method.close()
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
    for step in range(6):
        move(p.params, step)
        method.step()
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
