"""On a GPU without a process group: kernels, codecs, memory, streams.

tests/core has more of the kernels: test_triton, test_outer.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.loss.__main__ import captured, vmap_gradient
from core import CO2, CO2Config, make_method
from core.compression import formats
from tests.gpu.problem import (
    DEVICE,
    METHODS,
    Problem,
    Stack,
    distance,
    end,
    go,
    move,
    one_rank,
    problem,
    same,
    synchronisations,
    train,
)

pytestmark = pytest.mark.gpu

# -- the boundary's kernel ----------------------------------------------------------------------------------------


def test_channels_last_and_transposed_parameters_keep_their_strides():
    p = problem()
    strides, places = [t.stride() for t in p.params], [t.data_ptr() for t in p.params]
    method = CO2(p.params, CO2Config(tau=2))
    go(p.params, method, range(6))
    method.finish()
    assert strides == [t.stride() for t in p.params] and places == [t.data_ptr() for t in p.params]
    p.params[0].data = nn.Parameter(p.params[0].detach().clone(memory_format=torch.contiguous_format)).data
    move(p.params, 0)
    assert method.step() is False and method.step(), "a parameter whose storage was replaced stops the rounds"
    end(method)


# -- compression --------------------------------------------------------------------------------------------------


def blocks() -> Tensor:
    """float32 [n]: ordinary blocks, one of zeros, of tiny, of huge and of mixed numbers, and one with a NaN last."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(64, formats.BLOCK, generator=random)
    x[1], x[2, ::2] = 0.0, 0.0
    x[3] *= 1e-30
    x[4] *= 1e30
    x[5, 0] = 1e4
    x[-1, 7] = float("nan")
    return x.view(-1)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "int8", "int4", "int2"])
def test_the_plain_codec_gives_the_hosts_bytes(name: Any):
    x, sound = blocks(), slice(0, 63 * formats.BLOCK)
    ours, theirs = formats.encode(x.to(DEVICE), name), formats.encode(x, name)
    assert not (ours.cpu() != theirs)[: formats.nbytes(name, 63 * formats.BLOCK)].any()
    found = formats.decode(ours, name).cpu()
    assert torch.equal(found[sound], formats.decode(theirs, name)[sound])
    assert not found[-formats.BLOCK :].isfinite().all(), "a NaN has become a number"
    lost = x.to(DEVICE, copy=True)
    formats.encode(lost.clone(), name, lost=lost)
    assert torch.equal(lost.cpu()[sound], (x - found)[sound])


# -- what lies in the host's memory -------------------------------------------------------------------------------


def offloaded(p: Problem) -> CO2:
    return CO2(p.params, CO2Config(tau=4), offload=True, buffers=p.buffers)


def test_offloaded_state_trains_as_on_the_device_and_makes_no_synchronising_call():
    assert distance(train(offloaded), train(METHODS["co2"])) < 2e-5
    p = problem()
    method = offloaded(p)
    go(p.params, method, range(8))
    with synchronisations() as found:
        go(p.params, method, range(8))
    end(method)
    assert not found


def pinned() -> int:
    """Bytes that torch's own allocator of pinned memory has taken of the host."""
    found = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return next((int(found[k]) for k in ("allocated_bytes.current", "allocated_bytes.all.current") if k in found), 0)


def test_offloaded_state_takes_the_hosts_memory_as_asked():
    """Nothing on the device, and of pinned memory what is needed, not the next power of two."""
    p = problem(width=4200, layers=1)
    size = sum(t.nbytes for t in p.params)
    torch.cuda.synchronize()
    on_device, on_host = torch.cuda.memory_allocated(), pinned()
    method = CO2(p.params, CO2Config(tau=2), offload=True)
    go(p.params, method, range(6))
    torch.cuda.synchronize()
    taken = (torch.cuda.memory_allocated() - on_device) / size, (pinned() - on_host) / size
    flats = [b.flat for b in method.buckets]
    end(method)
    assert all(f.is_pinned() for f in flats), "what is sent is not pinned"
    assert taken[0] < 0.01, f"{taken[0]:.2f} copies on the device"
    assert taken[1] < 2.2, f"{taken[1]:.2f} copies of pinned memory, where 2 are needed"


def test_blocks_that_pass_through_the_device_train_as_on_it():
    """BlockStream, with the model on the host, against the model on the device, bit for bit."""
    from language.zeroth import ZerothConfig, ZerothOrder
    from language.zeroth.blocks import BlockStream

    def run(streamed: bool) -> list[Tensor]:
        model = Stack() if streamed else Stack().to(DEVICE)
        forward = functools.partial(BlockStream, blocks=model.blocks, device=torch.device(DEVICE, 0))
        how: dict[str, Any] = {"make_forward": forward} if streamed else {}
        order = ZerothOrder(model, ZerothConfig(eps=1e-3), lr=1e-3, **how)
        random = torch.Generator().manual_seed(1)
        for _ in range(20):
            x = torch.randn(32, 64, generator=random).to(DEVICE)
            y = torch.randint(10, (32,), generator=random).to(DEVICE)
            order.step(lambda net, x=x, y=y: nn.functional.cross_entropy(net(x), y), 32)
        order.finish()
        return [p.detach().cpu() for p in model.parameters()]

    assert same(run(True), run(False))


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["paper", "recommended"])
def test_a_method_holds_what_the_dry_run_says(name: str):
    """Of the tiny GPT-2's recipe, one worker."""
    pytest.importorskip("tyro", reason="recipes need tyro: carry its wheel")
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model
    from training.checks import held, size_of

    small = replace(gpt2_pydoc_small(), batch_size=2)
    settings = small.co2 if name == "paper" else replace(CO2Config.recommended(), tau=small.co2.tau)
    recipe = replace(small, co2=settings, recommended=name != "paper")
    with torch.device("meta"):
        said = held(recipe, make_model(recipe, pad=1), 1, 1)
    with one_rank():
        model = make_model(recipe, pad=1).to(DEVICE)
        params = [p for p in model.parameters() if p.requires_grad]
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        _, method = make_method("co2", model, co2=recipe.co2)
        go(params, method, range(6 * 6))
        torch.cuda.synchronize()
        found = torch.cuda.memory_allocated() - before
        end(method)
    size = size_of(params)
    assert found <= 1.1 * said, f"holds {found / size:.2f} copies, the dry run says {said / size:.2f}"


# -- bench.loss --------------------------------------------------------------------------------------------------


def test_a_captured_gradient_is_the_plain_one():
    """bench.loss replays a CUDA graph, for new values and for another shape."""
    vmapped = vmap_gradient(lambda params, x: (params["w"] * x).sin().sum(), {"w": torch.zeros(5)})
    replay = captured(vmapped)
    for shape in ((4, 5), (4, 5), (2, 5)):
        x, batch = torch.randn(shape, device=DEVICE), (torch.randn(shape, device=DEVICE),)
        assert torch.equal(replay(x, batch), vmapped(x, batch)) and vmapped(x, batch).any()
