"""The boundary in one pass against the plain functions of core/outer.py, step by step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core import fused, outer
from core.fused import Boundary, ChunkedBoundary, Rule, Work

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PHI, BETA = 0.6, 0.7
ROOT = Path(__file__).parents[2]


def make(dtype: torch.dtype, shapes: list[tuple[int, ...]], device: str = "cpu", channels_last: bool = True):
    """Parameters and flat state on `device`; the 4-d parameters channels_last, the 2-d ones transposed in memory."""
    torch.manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    params = [torch.nn.Parameter(torch.randn(shape, dtype=wide).to(dtype)) for shape in shapes]
    for p in params:
        if p.dim() == 4 and channels_last:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
        elif p.dim() == 2 and channels_last:
            p.data = p.data.t().contiguous().t()
    n = sum(p.numel() for p in params)
    d, x, m = torch.randn(3, n, dtype=wide).to(device).unbind()
    for p in params:
        p.data = p.data.to(device)  # keeps the strides
    return params, d, x, m


SHAPES = [(7,), (0,), (3, 5), (), (4, 3, 2, 2), (1001,), (2, 1, 3), (257, 9)]


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params])


def expected(params: list[Tensor], d: Tensor, x: Tensor, m: Tensor, rule: Rule, snapshot: bool = True):
    """(p, d, x, m) after a boundary and (Lambda, momentum before clipping), in core.outer's functions."""
    p, delta = flat(params), d * rule.scale
    gap = rule.gap
    if rule.c is not None:
        gap = outer.gap_elementwise(m * -rule.last_alpha, rule.c)
    raw = outer.momentum(m, delta, rule.beta, gap)
    new = raw if rule.phi is None else outer.clip_elements(raw, rule.phi)
    next_d = x.to(p.dtype).to(x.dtype) - p if snapshot else d
    next_x = outer.outer_step(x, new, rule.alpha)
    return (next_x.to(p.dtype), next_d, next_x, new), gap, raw


RULES = {
    "elementwise": Rule(BETA, 0.9, 0.9, PHI, 1 / 3, c=torch.tensor(0.3)),
    "first_step": Rule(BETA, 0.9, 0.0, PHI, 1 / 4, c=torch.tensor(0.3)),
    "unclipped": Rule(BETA, 1.0, 1.0, None, 1.0, c=torch.tensor(0.3)),
    "norm": Rule(BETA, 0.9, 0.9, PHI, 1 / 3, gap=torch.tensor(1.75)),
    "none": Rule(BETA, 1.0, 1.0, PHI),
    "far_clip": Rule(BETA, 0.5, 0.5, 100.0, 0.5, c=torch.tensor(0.3)),
}


def check(kind: type[Boundary], dtype: torch.dtype, rule: Rule, snapshot: bool, device: str = "cpu") -> None:
    params, d, x, m = make(dtype, SHAPES, device)
    strides = [p.stride() for p in params]
    rule = Rule(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(rule).values()))
    tested = kind(params, d, x, m)
    for _ in range(2):
        want, gap, raw = expected(params, d, x, m, rule, snapshot)
        stats = tested.step(rule, snapshot=snapshot)
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        for name, got, value in zip("dxm", (d, x, m), want[1:], strict=True):
            torch.testing.assert_close(got, value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
        assert torch.equal(flat(params), x.to(dtype))  # exactly the iterate, whatever its rounding
        gap = torch.ones_like(m) if gap is None else gap.expand(m.shape)
        clipped = 0 if rule.phi is None else int((raw.abs() > rule.phi).sum())
        seen = [float(v) for v in (stats.momentum_squares, stats.gap_sum, stats.gap_max, stats.clipped)]
        assert seen == pytest.approx([float((want[3] ** 2).sum()), float(gap.sum()), float(gap.max()), clipped], 1e-5)
        d.copy_(torch.randn(d.shape))  # the next mean lands
    assert strides == [p.stride() for p in params]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are split, and shared segments mix whole tensors with pieces."""
    monkeypatch.setattr(fused, "CHUNK", 16)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_boundary_is_the_plain_formulas(dtype, rule):
    for snapshot in (True, False):
        check(ChunkedBoundary, dtype, rule, snapshot)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_segments_may_end_anywhere(dtype, small_chunks):
    check(ChunkedBoundary, dtype, RULES["elementwise"], True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_for_bit_where_the_order_of_operations_is_the_same(dtype):
    """alpha 1, one worker, powers of two elsewhere: every product is exact, only the formulas' own roundings stay."""
    for rule in (Rule(0.5, 1.0, 1.0, 1.0), Rule(0.5, 1.0, 1.0, 1.0, 0.25, gap=torch.tensor(2.0))):
        params, d, x, m = make(dtype, SHAPES)
        want, _, _ = expected(params, d, x, m, rule)
        ChunkedBoundary(params, d, x, m).step(rule)
        assert all(torch.equal(a, b) for a, b in zip((flat(params), d, x, m), want, strict=True))


def test_by_hand():
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    d, x, m = torch.tensor([[4.0, 8.0, -80.0], [2.0, 2.0, 2.0], [1.0, -3.0, 0.0]]).unbind()
    stats = ChunkedBoundary([p], d, x, m).step(Rule(0.5, 0.5, 1.0, 2.0, 0.5, c=torch.tensor(1.0)))
    # Delta = [2, 4, -40], Lambda = [2, 4, 1], beta m + Delta / Lambda = [1.5, -0.5, -40], clipped at 2
    assert m.tolist() == [1.5, -0.5, -2.0]
    assert d.tolist() == [1.0, 0.0, -1.0]
    assert x.tolist() == p.tolist() == [1.25, 2.25, 3.0]
    assert [float(v) for v in vars(stats).values()] == [6.5, 7.0, 4.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_before_anything_landed_only_snapshot_and_restart(dtype):
    params, d, x, m = make(dtype, SHAPES)
    before = flat(params), x.clone(), m.clone()
    ChunkedBoundary(params, d, x, m).first()
    rounded = x.to(dtype)
    assert torch.equal(d, rounded.to(x.dtype) - before[0])
    assert torch.equal(flat(params), rounded)
    assert torch.equal(x, before[1]) and torch.equal(m, before[2])


def test_restore_writes_nothing_but_parameters(small_chunks):
    params, d, x, m = make(torch.bfloat16, SHAPES)
    before = [t.clone() for t in (d, x, m)]
    ChunkedBoundary(params, d, x, m).restore()
    assert torch.equal(flat(params), x.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip((d, x, m), before, strict=True))


def test_clipping_by_norm_in_two_passes():
    params, d, x, m = make(torch.float64, SHAPES)
    rule = Rule(BETA, 0.9, 0.9, c=torch.tensor(0.3))
    want_m = outer.momentum(m, d, BETA, outer.gap_elementwise(m * -0.9, rule.c))
    want_d = x - flat(params)
    tested = ChunkedBoundary(params, d, x, m)
    factor = outer.clip_norm_factor(tested.run(Work.MOMENTUM, rule).momentum_squares.sqrt(), 2.0)
    want_x = x - 0.9 * factor * want_m
    tested.m.mul_(factor)
    tested.run(Work.SNAPSHOT | Work.ADVANCE | Work.RESTORE, rule)
    torch.testing.assert_close([d, x, flat(params)], [want_d, want_x, want_x], rtol=1e-12, atol=1e-12)


def test_rms_sum_counts_the_scale():
    params, d, x, m = make(torch.float64, SHAPES)
    tested = ChunkedBoundary(params, d, x, m)
    assert float(tested.rms_sum(0.25)) == pytest.approx(float((d * 0.25).square().sum()), rel=1e-12)


@pytest.mark.slow
def test_rms_sum_of_a_model_too_large_for_float32_accumulators():
    """On a CPU torch.linalg.vector_norm of these 3 x 10^8 ones is a third too small (1.2 GB of memory)."""
    d = torch.ones(3 * 10**8)
    assert float(ChunkedBoundary([d], d, d, d).rms_sum()) == 3e8


def test_no_parameters_and_empty_ones():
    for params in ([], [torch.empty(0), torch.empty(3, 0)]):
        tested = ChunkedBoundary(params, *torch.zeros(3, 0).unbind())
        stats = tested.step(RULES["elementwise"])
        tested.first()
        assert [float(v) for v in vars(stats).values()] == [0, 0, 1, 0]
        assert float(tested.rms_sum()) == 0


def test_many_small_tensors_share_a_segment():
    params, d, x, m = make(torch.float32, [(5,)] * 3000)
    tested = ChunkedBoundary(params, d, x, m)
    want, _, _ = expected(params, d, x, m, RULES["elementwise"])
    tested.step(RULES["elementwise"])
    torch.testing.assert_close(flat(params), want[0], rtol=1e-5, atol=1e-6)
    assert len(tested._segments) == 1


def test_a_parameter_that_moved_is_found():
    params, d, x, m = make(torch.float32, SHAPES)
    tested = ChunkedBoundary(params, d, x, m)
    tested.restore()
    for p in params:
        p.data = torch.zeros_like(p)
    params[4].data = params[4].data.contiguous()
    x.add_(1)
    tested.restore()
    assert torch.equal(flat(params), x)


def test_pieces_cover_a_transposed_tensor_in_order():
    for shape, dims in (((6, 5), (1, 0)), ((3, 4, 5, 2), (0, 2, 3, 1)), ((2, 50), (1, 0))):
        t = torch.arange(torch.Size(shape).numel()).view(shape).permute(dims)
        for limit in (1, 7, 10, 1000):
            parts = list(fused.pieces(t, limit))
            assert all(part.numel() <= limit for part in parts)
            assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), t.reshape(-1))


def check_triton(device: str) -> None:
    """All of the above that the kernel can get wrong."""
    from core.fused_triton import TritonBoundary

    # The interpreter cuts float32 to bfloat16 where the device rounds; the compiled code is looked at below.
    for dtype in [t for t in DTYPES if device != "cpu" or t != torch.bfloat16]:
        for rule in RULES.values():
            check(TritonBoundary, dtype, rule, True, device)
        check(TritonBoundary, dtype, RULES["elementwise"], False, device)
        params, d, x, m = make(dtype, SHAPES, device)
        before = flat(params), x.clone(), m.clone()
        TritonBoundary(params, d, x, m).first()
        assert torch.equal(d, x.to(dtype).to(x.dtype) - before[0]) and torch.equal(flat(params), x.to(dtype))
        assert torch.equal(x, before[1]) and torch.equal(m, before[2])
    for shape in ((2, 3, 4, 5, 6), (9000,), (65, 3, 7, 7)):  # more strides than a row holds, several blocks
        p = torch.randn(shape, device=device).permute(*reversed(range(len(shape))))
        d, x, m = torch.randn(3, p.numel(), device=device).unbind()
        TritonBoundary([p], d, x, m).restore()
        assert torch.equal(p.reshape(-1), x)


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from core.fused_triton import boundary_kernel, TYPES
for arch in (80, 90):
    for dtype, p in ((torch.float32, "fp32"), (torch.float64, "fp64"), (torch.bfloat16, "fp32")):
        for strided in (False, True):
            pointers = dict.fromkeys(("d_ptr", "x_ptr", "m_ptr", "scalars", "gap_ptr", "seen_ptr"), "*" + p)
            fixed = dict(EPS=1e-12, P=TYPES[dtype], GAP=2, CLIP=True, MOMENTUM=True, SNAPSHOT=True, ADVANCE=True,
                         RESTORE=True, STRIDED=strided, BLOCK=2048)
            signature = {"table": "*i64"} | pointers | dict.fromkeys(fixed, "constexpr")
            source = ASTSource(boundary_kernel, signature, fixed)
            built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8})
            ptx = built.asm["ptx"]
            assert f".target sm_{arch}" in ptx
            assert ("cvt.rn.bf16" in ptx) == (dtype == torch.bfloat16)  # rounds to nearest
"""


def run_python(code: str, **env: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_triton_kernel_in_its_interpreter():
    pytest.importorskip("triton", reason="triton is not installed: it comes with torch's CUDA builds")
    run_python("from tests.core.test_fused import check_triton; check_triton('cpu')", TRITON_INTERPRET="1")


def test_the_triton_kernel_compiles_for_both_clusters():
    pytest.importorskip("triton", reason="triton is not installed: it comes with torch's CUDA builds")
    run_python(COMPILE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_triton_kernel_on_the_device():
    check_triton("cuda")
    params, d, x, m = make(torch.float32, SHAPES, "cuda")
    tested = fused.boundary(params, d, x, m)
    assert type(tested).__name__ == "TritonBoundary"
    tested.first()
    rule = Rule(BETA, 0.9, 0.9, PHI, 0.5, c=torch.ones((), device="cuda"))
    tested.step(rule)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tested.step(rule)
        tested.rms_sum()
    finally:
        torch.cuda.set_sync_debug_mode("default")
