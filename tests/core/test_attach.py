"""attach(): CO2 on an optimiser's own step, equal to a plain loop."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from core import CO2, CO2Config, UserError, WireConfig
from core.integrations.optimizer import attach
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from tests import problems
from tests.problems import flat

STEPS, TAU = 11, 3
PAPERS = CO2Config(tau=TAU, outer_momentum=0.5)
KEEP = replace(CO2Config.recommended(2), tau=TAU, delay=2, wire=WireConfig("int4"))


def backward(net: Any, rank: int, step: int, parts: int = 1) -> None:
    """parts: micro-batches, whose gradients are summed."""
    for part in range(parts):
        problems.loss(net, problems.batch(rank, parts * step + part)).backward()


def trained(rank: int, world_size: int, config: CO2Config, parts: int) -> list[Tensor]:
    """The parameters after each step and at the end, attached and in a plain loop."""
    ends = []
    for attached in (True, False):
        net, trace = problems.small_net(), []
        optimizer = torch.optim.AdamW(net.parameters(), 0.05)
        make = partial(attach, optimizer) if attached else CO2
        with make(net.parameters(), config, buffers=net.buffers()) as co2:
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(net, rank, step, parts)
                optimizer.step()
                if not attached:
                    co2.step()
                trace.append(flat(net.parameters()))
        optimizer.step()  # nothing hangs on it any more
        trace.append(flat(co2.state["outer_iterate"]))
        ends.append(torch.stack([t[: sum(p.numel() for p in net.parameters())] for t in trace]))
    return ends


@pytest.mark.parametrize(("workers", "config", "parts"), [(1, PAPERS, 1), (2, PAPERS, 2), (2, KEEP, 1), (4, PAPERS, 1)])
def test_it_equals_a_plain_loop_bit_for_bit(workers: int, config: CO2Config, parts: int):
    results = run_distributed(trained, workers, config, parts)
    for attached, plain in results:
        assert torch.equal(attached, plain)
    if workers > 1:  # workers differ within a round, with keep at a boundary, too
        alike = [torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True)]
        assert alike[-1] and not alike[0] and alike[TAU - 1] is (config is PAPERS)


def scaled(rank: int, world_size: int, enabled: bool) -> str:
    """The first worker's gradients overflow at step 2."""
    net = problems.small_net(torch.float32)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("cpu", enabled=enabled)
    try:
        with attach(optimizer, net.parameters(), PAPERS):
            for step in range(STEPS):
                scale = float("inf") if enabled and step == 0 and rank == 0 else 1.0
                loss = problems.loss(net, problems.batch(rank, step, dtype=torch.float32))
                scaler.scale(loss * scale).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    except UserError as error:
        return str(error)
    return ""


def test_a_grad_scaler_that_may_leave_steps_out_is_refused_in_one_line():
    for text in run_distributed(scaled, 2, True):
        assert text.startswith("attach() with a GradScaler: torch calls no hook") and "\n" not in text
        assert "call co2.step() behind scaler.update()" in text


def test_a_grad_scaler_that_is_switched_off_is_none():
    assert run_distributed(scaled, 2, False) == ["", ""]


def over_a_mesh(rank: int, world_size: int) -> Tensor:
    net = problems.small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with attach(optimizer, net.parameters(), PAPERS, mesh=node_mesh("cpu", 2)) as co2:
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(net, rank // 2, step)  # the workers of a node take one batch
            optimizer.step()
        assert type(co2).__name__ == "ShardedCO2" and co2.local_steps == STEPS % TAU
    return flat(net.parameters())


def test_with_a_mesh_it_is_sharded():
    ends = run_distributed(over_a_mesh, 4)
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_what_is_no_optimiser_is_refused():
    net = problems.small_net()
    attached: Any = attach(net, net.parameters())  # pyright: ignore
    with pytest.raises(UserError, match="optimizer: a Sequential is given: give a torch optimiser"), attached:
        pass


def test_an_error_in_the_block_leaves_no_hook():
    net = problems.small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(KeyError), attach(optimizer, net.parameters(), PAPERS) as co2:
        raise KeyError
    optimizer.step()
    assert co2.local_steps == 0
