"""Mixed precision: autocast, 16-bit parameters, masters, and a GradScaler that skips steps on some workers only."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, ShardedCO2
from core.testing import run_distributed
from tests import problems
from tests.problems import batch, flat, loss

CONFIG = CO2Config(tau=3, outer_momentum=0.3, clip=None)


def with_autocast(rank: int, world_size: int, on: bool) -> tuple[Tensor, list[torch.dtype]]:
    net = problems.small_net(torch.float32)
    co2, optimizer = CO2(net.parameters(), CONFIG), torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(30):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            value = loss(net, batch(rank, step, dtype=torch.float32))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        co2.step()
    co2.finish()
    return flat(net.parameters()), [f.dtype for f in co2._x]


def test_autocast_keeps_float32_parameters_and_state():
    (a, dtypes), (b, _) = run_distributed(with_autocast, 2, True)
    plain, _ = run_distributed(with_autocast, 2, False)[0]
    assert torch.equal(a, b) and dtypes == [torch.float32]
    assert not torch.equal(a, plain)
    torch.testing.assert_close(a, plain, rtol=0.02, atol=0.02)


def skipping(rank: int, world_size: int, scaled: bool) -> dict[str, Any]:
    """Rank 1's gradients overflow at steps 4, 5 and 9: its scaler skips those optimiser steps."""
    net = problems.small_net(torch.float32)
    co2, optimizer = CO2(net.parameters(), CONFIG), torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    ends, skipped, closed, hooked = [], 0, [], list[int]()
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for step in range(18):
        overflow = rank == 1 and step in (4, 5, 9)
        if scaled or not overflow:
            value = loss(net, batch(rank, step, dtype=torch.float32)) * (float("inf") if overflow else 1.0)
            scaler.scale(value).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        optimizer.zero_grad()
        if co2.step():
            closed.append(step)
            ends.append(flat(net.parameters()))
    co2.finish()
    ends.append(flat(net.parameters()))
    return {"ends": ends, "skipped": skipped, "closed": closed, "hooked": len(hooked)}


def test_a_skipped_step_does_not_desynchronise_rounds():
    """A skipped optimiser step is a local step without a change: as if that worker had no gradient there."""
    one, two = run_distributed(skipping, 2, True)
    plain, _ = run_distributed(skipping, 2, False)
    assert (one["skipped"], two["skipped"]) == (0, 3)
    assert (one["hooked"], two["hooked"]) == (18, 15), "torch calls an optimiser's hooks only where it has stepped"
    assert one["closed"] == two["closed"] == [2, 5, 8, 11, 14, 17]
    for a, b, c in zip(one["ends"], two["ends"], plain["ends"], strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)


def masters(rank: int, world_size: int, keep: bool, shard: bool) -> tuple[Tensor, Tensor]:
    """An optimiser that keeps float32 masters of a bfloat16 model, its steps far below bfloat16's precision."""
    model = [nn.Parameter(torch.ones(40, dtype=torch.bfloat16))]
    kept = [nn.Parameter(p.detach().float()) for p in model]
    config = CO2Config(tau=2, outer_momentum=0.0, clip=None, gap="norm")
    kind = partial(ShardedCO2, shard=True) if shard else CO2
    co2 = kind(kept, config, model_params=model) if keep else kind(model, config)
    for _ in range(40):
        with torch.no_grad():
            for p, m in zip(model, kept, strict=True):
                if keep:
                    p.copy_(m.sub_(2.0**-11 * (1 + rank)))
                else:
                    p.sub_(2.0**-11 * (1 + rank))
        co2.step()
    co2.finish()
    return flat(kept), flat(model)


@pytest.mark.parametrize("shard", [False, True])
def test_masters_are_what_is_averaged_and_the_model_follows(shard: bool):
    for kept, model in run_distributed(masters, 2, True, shard):
        assert (model == kept.to(torch.bfloat16).double()).all()
        assert (kept < 0.985).all()  # 40 steps of 1.5 x 2^-11, shortened by the penalty
    for _, model in run_distributed(masters, 2, False, shard):
        assert (model == 1.0).all()  # without masters every step rounds to nothing


def started(rank: int, world_size: int) -> float:
    model, masters = ([nn.Parameter(torch.full((2,), float(rank), dtype=d))] for d in (torch.bfloat16, torch.float32))
    CO2(masters, model_params=model)
    return model[0][0].item()


def test_the_model_follows_its_masters_from_the_start():
    assert run_distributed(started, 2) == [0.0, 0.0]
