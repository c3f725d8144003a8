"""What is wiped or restarted where a worker is left out: by a kernel that touches memory only then."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from core import CO2, CO2Config, flat
from core.assembly import kernels as offered
from core.robust import guard
from core.robust.guard import Guard
from tests.core.test_triton import built, compile_apart

SIZE = 3000
KEEP = CO2Config(tau=2, outer_momentum=0.0, gap="none", clip=None, merge="keep", delay=1)


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Contiguous, channels_last, transposed, empty and 0-d ones, of several programs, all NaN."""
    shapes = [(70_000,), (2, 3, 5, 7), (0,), (), (9, 4)]
    found = [torch.full(shape, float("nan"), dtype=dtype) for shape in shapes]
    return [*found[:1], found[1].to(memory_format=torch.channels_last), *found[2:4], found[4].t()]


@pytest.mark.triton
def test_the_kernel_sets_all_where_the_flag_holds_and_nothing_else():
    from core.triton.where import queue, where_kernel

    yes, no = torch.tensor(True), torch.tensor(False)
    for dtype in (torch.float64, torch.float32, torch.float16):
        held = tensors(dtype)
        assert queue(no, held) == [] and all(t.isnan().all() for t in held)
        assert queue(yes, held) == [] and all((t == 0).all() for t in held)
        source = [torch.randn(t.shape) for t in held]
        assert queue(no, held, source) == [1, 4] and all((t == 0).all() for t in held)
        assert queue(yes, held, source) == [1, 4], "those of another layout are the caller's"
        assert all(torch.equal(held[i], source[i].to(dtype)) for i in (0, 2, 3))
    gaps = torch.zeros(6, 2)[:, 0]
    assert queue(yes, [torch.ones(3, dtype=torch.int64), gaps, torch.ones(2)]) == [0, 1]
    import triton.language as tl

    nowhere = torch.tensor([[8, 16, 100]])  # addresses that nobody may read or write
    kinds = {"TO": tl.float32, "SOURCE": tl.float32, "COPIES": True, "BLOCK": 1024}
    where_kernel[(1,)](nowhere, no.view(torch.uint8), **kinds)


class Touched(TorchDispatchMode):
    """Elements that masked fills and selections pass over."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.masked_fill_, torch.ops.aten.where):
            self.elements += made.numel()
        return made


def trained(bad: int | None) -> tuple[Tensor, int]:
    """With Adam, whose moments are forgotten, too; bad: the step at which the parameters jump, after the warm-up."""
    params = [nn.Parameter(torch.linspace(-1, 1, SIZE))]
    optimizer = torch.optim.Adam(params, 0.01)
    co2 = CO2(params, KEEP)
    co2.rider(Guard).on_left_out = guard.forget(optimizer)
    with Touched() as touched:
        for step in range(18):
            params[0].grad = params[0].detach().clone()
            optimizer.step()
            with torch.no_grad():
                params[0].add_(100.0 * (step == bad))
            co2.step()
    return params[0].detach(), touched.elements


@pytest.mark.triton
def test_a_round_passes_over_what_a_left_out_worker_loses_only_where_one_is():
    for bad in (None, 14):
        plain, _ = trained(bad)
        assert plain.abs().max() < 2, "left out"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat, "read_blocks", lambda t: True)
            patch.setattr("core.robust.guard.read_blocks", lambda t: True)
            patch.setattr(offered, "takes_triton", lambda device: True)
            ours, touched = trained(bad)
        assert torch.equal(ours, plain), bad
        assert touched < SIZE, f"{touched} elements are passed over"


def compile_the_wiping() -> None:
    from core.triton.where import BLOCK, TYPES, where_kernel

    for copies in (False, True):
        fixed = {"TO": TYPES[torch.bfloat16], "SOURCE": TYPES[torch.float32], "COPIES": copies, "BLOCK": BLOCK}
        built(where_kernel, {"table": "*i64", "flag": "*u8"}, fixed, 4)


@pytest.mark.triton
def test_the_kernel_compiles_for_both_clusters():
    compile_apart("tests.core.test_triton_where", "compile_the_wiping")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_the_device():
    from core.triton.where import queue

    held = [t.cuda() for t in tensors(torch.float32)]
    flag = torch.tensor(False, device="cuda")
    for tensors_of in (held, held[:1]):  # compiled, and the tables are there
        queue(flag, tensors_of)
    torch.cuda.set_sync_debug_mode("error")
    try:
        queue(flag, held)
        queue(flag.fill_(True), held[:1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (held[0] == 0).all() and all(t.isnan().all() for t in held[1:] if t.numel())
