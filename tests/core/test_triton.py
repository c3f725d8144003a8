"""Triton's boundary and wire formats against the plain ones: in its interpreter on a CPU (make test-triton), and on a
device; and compiled for both clusters' GPUs, whose instructions have to round as torch's do."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from core import outer
from core.buckets import Scalars, make_buckets
from core.compression import quantized
from core.compression.formats import UNIFORM_FORMATS
from core.compression.quantized import Quantized
from core.config import MERGES
from core.outer import OuterStep, Rule
from core.shares import make_outer_step
from tests.core.test_outer import BETA, DTYPES, RULES, SHAPES, flat, make
from tests.dispatch import Operations
from tests.imports import ROOT
from training.data.samples import generator

ON_DEVICE = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.triton), pytest.param("cuda", marks=ON_DEVICE)]
)
ARCHITECTURES = (80, 90)  # A100, H100


def on(device: str, rule: Rule) -> Rule:
    return Rule(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(rule).values()))


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_boundary_is_plain_bit_for_bit(dtype: torch.dtype, device: str):
    """But for what was seen, whose sums are taken in another order."""
    from core.compression.outer_kernels import TritonOuterStep

    landed = [on(device, rule) for rule in RULES.values()]
    ways = [(m, takes) for m in MERGES for takes in (True, False)]
    merged = [replace(landed[0], merge=m, takes_difference=takes) for m, takes in ways]
    scaled = replace(landed[0], scale=torch.tensor(1 / 3, device=device))
    for rule in (*landed, *merged, scaled, Rule()):
        results = []
        for kind in (OuterStep, TritonOuterStep):
            params, d, x, m = make(dtype, SHAPES, device)
            snapshot = flat(params).to(x.dtype) + 0.1 * x
            seen = kind(params, d, x, m, snapshot).run(rule)
            results.append((flat(params), d, x, m, snapshot))
            results.append((seen,))
        for name, a, b in zip(("p", "d", "x", "m", "snapshot"), results[0], results[2], strict=True):
            assert torch.equal(a, b), f"{name} of {rule}"
        torch.testing.assert_close(results[1], results[3], rtol=1e-5, atol=0)


@devices
def test_any_strides_and_several_blocks(device: str):
    from core.compression.outer_kernels import TritonOuterStep

    for shape in ((2, 3, 4, 5, 6), (9000,), (65, 3, 7, 7)):  # more strides than a row of the table holds
        p = torch.randn(shape, device=device).permute(*reversed(range(len(shape))))
        d, x, m = torch.randn(3, p.numel(), device=device).unbind()
        TritonOuterStep([p], d, x, m).run(Rule())
        assert torch.equal(p.reshape(-1), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fast_is_the_kernel_on_the_device_and_reads_nothing_from_it():
    params, d, x, m = make(torch.float32, SHAPES, "cuda")
    tested = make_outer_step(params, d, x, m, torch.zeros_like(x))
    assert type(tested).__name__ == "TritonOuterStep"
    rule = Rule(BETA, 0.9, 0.9, 0.6, 0.5, delta_rms=torch.ones((), device="cuda"))
    calls = [partial(tested.run, replace(rule, merge=m)) for m in MERGES]
    where = torch.ones((), device="cuda", dtype=torch.bool)
    calls += [tested.take, tested.restart, partial(tested.restart, where)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
        outer.norm([d])
    finally:
        torch.cuda.set_sync_debug_mode("default")


QUEUES_NOTHING = ("aten::empty.memory_format", "aten::new_empty", "aten::empty_like", "aten::detach")


def launches(act: Callable[[], Any]) -> tuple[int, int]:
    """What it would queue on a GPU: operations that are no views, and Triton's kernels, which are not run."""
    from triton.runtime.interpreter import GridExecutor

    def queued(func: Any, *_: Any) -> str | None:
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        return None if views or func.name() in QUEUES_NOTHING else func.name()

    kernels: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, Operations(queued) as operations:
        patch.setattr(GridExecutor, "__call__", lambda executor, *_, **__: kernels.append(executor))
        act()
    return len(operations.seen), len(kernels)


@pytest.mark.triton
def test_a_boundary_queues_as_few_kernels_however_many_the_parameters():
    from core.compression.outer_kernels import TritonOuterStep

    counts = []
    for many in (1, 100):
        params, d, x, m = make(torch.bfloat16, SHAPES * many)
        tested = TritonOuterStep(params, d, x, m, torch.zeros_like(x))
        rules = [Rule(0.5, 0.5, 0.5, 1.0, torch.tensor(0.5), torch.tensor(1.0), merge=merge) for merge in MERGES]
        calls = [*(partial(tested.run, rule) for rule in rules), tested.take, tested.restart]
        for _ in range(2):  # the first time plans, and fills the scalars
            last = [launches(call) for call in calls]
        counts += last
    assert counts[: len(calls)] == counts[len(calls) :]
    assert all(kernels == 2 and operations <= 12 for operations, kernels in counts), "contiguous and strided parameters"


def built(kernel: Any, pointers: dict[str, str], fixed: dict[str, Any], warps: int) -> None:
    """Compiles a kernel for every architecture, by ptxas as well: every float32 product, sum and quotient is rounded to
    nearest for itself, denormal numbers too."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, pointers | dict.fromkeys(fixed, "constexpr"), fixed)
    for arch in ARCHITECTURES:
        options = {"num_warps": warps, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        assert f".target sm_{arch}" in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
        loose = set(re.findall(r"\b(?:fma|rcp|mad|div\.full|div\.approx)\S*f(?:32|64)\b|\S*\.ftz\S*", made.asm["ptx"]))
        assert not loose, f"{kernel.__name__} {fixed} for sm_{arch}: {loose}"


def compile_the_boundary() -> None:
    from core.compression.kernels import TYPES
    from core.compression.outer_kernels import BLOCK, copy_kernel, outer_step_kernel

    for dtype, wide in zip(DTYPES, ("fp64", "fp32", "fp32", "fp32"), strict=True):
        common = {"P": TYPES[dtype], "BLOCK": BLOCK}
        names = {"table": "*i64"} | dict.fromkeys(("d_ptr", "x_ptr", "m_ptr", "snapshot_ptr", "scalars"), f"*{wide}")
        for merge, gap, strided in zip((*MERGES, MERGES[0]), range(3), (True, False, True), strict=True):
            fixed = {
                "GAP": gap,
                "CLIP": True,
                "MERGE": merge,
                "TAKES_DIFFERENCE": merge != "keep_local",
                "STRIDED": strided,
            } | common
            built(outer_step_kernel, names | {"gap_ptr": f"*{wide}", "stats_ptr": f"*{wide}"}, fixed, 8)
        names.pop("m_ptr")
        for takes in (True, False):
            fixed = {"TAKES": takes, "WHERE": not takes, "SNAPSHOT": True, "STRIDED": not takes} | common
            built(copy_kernel, names, fixed, 8)


@pytest.mark.triton
def test_the_boundary_compiles_for_both_clusters():
    compile_apart("tests.core.test_triton", "compile_the_boundary")


def compile_apart(module: str, name: str) -> None:
    """In a process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = f"from {module} import {name}; {name}()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


WORKERS = 3
ZEROS = [[0, 0, 0, 0], [0, 0, 0, 0x80]]  # a float32's bytes
SIZES = (7000, 40)  # of a float64 or float32 bucket's parameters: several programs; and its buffers


class Worker:
    """One worker's buckets and reducer, whose messages are handed over here."""

    def __init__(self, rank: int, compression: Any, dtype: torch.dtype, device: str):
        kinds = {dtype: SIZES, torch.float16: (0, 3), torch.bfloat16: (5, 0)}
        of = [
            [torch.zeros(n, dtype=kind, device=device) for kind, ns in kinds.items() for n in ns[i : i + 1]]
            for i in (0, 1)
        ]
        self.scalars = Scalars({"steps": 1, "weight": 1})
        self.buckets = make_buckets([t for t in of[0] if len(t)], of[1], 2)
        self.scalars.attach(self.buckets[0].scalars)
        self.reducer = Quantized(self.buckets, self.scalars, rank, WORKERS, compression)

    def write(self, seed: int, weight: float) -> None:
        for i, bucket in enumerate(self.buckets):
            draw = torch.randn(len(bucket.flat), generator=generator(seed, i), dtype=torch.float64)
            bucket.flat.copy_(draw * 10.0 ** (i - 2))
            hard_cases(bucket.payload)
        self.scalars.set("steps", 1.0)
        self.scalars.set("weight", weight)

    def all(self) -> list[Tensor]:
        state = [flat for flats in self.reducer.state.values() for flat in flats]
        return [t.clone() for t in (*(b.flat for b in self.buckets), *state)]


def hard_cases(payload: Tensor) -> None:
    """A block of zeros, two of denormal numbers, one of which rounds to a scale of 0, ties, and a wide range."""
    if len(payload) > 2000:
        payload[256:512] = 0.0
        payload[512:768] *= 1e-41
        payload[768:1024] = 1e-45
        payload[1024:1280] = torch.arange(256, device=payload.device) / 2 - 64
        payload[1280:1536] *= 10.0 ** (torch.arange(256, device=payload.device) / 8 - 30)


def exchange(workers: list[Worker]) -> list[Tensor]:
    """A reduction; every message, then all that it leaves behind."""
    sent = [w.reducer._outgoing() for w in workers]
    means = [w.reducer._average(torch.stack([s[j] for s in sent])) for j, w in enumerate(workers)]
    for w in workers:
        w.reducer._unpack(torch.stack(means))
    return [*sent, *(m[None] for m in means), *(t for w in workers for t in w.all())]


def rounds(compression: Any, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Three reductions, of which the second moves nobody, and the last has a NaN and an infinity."""
    workers = [Worker(rank, compression, dtype, device) for rank in range(WORKERS)]
    seen = []
    for number in range(3):
        for rank, w in enumerate(workers):
            w.write(10 * number + rank, 0.0 if number == 1 else 1.0)
        if number == 2:
            workers[1].buckets[0].payload[300], workers[2].buckets[0].payload[2100] = float("nan"), -float("inf")
        landed = exchange(workers)
        seen += landed if number < 2 else [torch.nan_to_num(t, 7.0, 7.0, 7.0) for t in landed[2 * WORKERS :]]
    return seen


@devices
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, by which the interpreter computes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("compression", [*UNIFORM_FORMATS[1:], "int2"])
def test_bytes_means_and_errors_are_the_plain_codecs(compression, dtype, device, monkeypatch):
    monkeypatch.setattr(quantized, "has_triton", lambda device: False)
    plain = rounds(compression, dtype, device)
    monkeypatch.setattr(quantized, "has_triton", lambda device: True)
    for number, (a, b) in enumerate(zip(plain, rounds(compression, dtype, device), strict=True)):
        differ = (a != b).nonzero().tolist()
        if a.dtype == torch.uint8:  # a scale of -0.0
            differ = [(i, j) for i, j in differ if a[i, j - 3 : j + 1].tolist() not in ZEROS]
        assert not differ, f"tensor {number}: {differ[:5]}"


def reduction_launches(compression: Any, numel: int, workers: int) -> tuple[int, int]:
    scalars = Scalars({"steps": 1, "weight": 1})
    buckets = make_buckets([torch.nn.Parameter(torch.zeros(numel))], [torch.zeros(50)], 2)
    scalars.attach(buckets[0].scalars)
    reducer = Quantized(buckets, scalars, 0, workers, compression)

    def reduce() -> None:
        mean = reducer._average(reducer._outgoing())
        reducer._unpack(mean[None].expand(workers, -1).contiguous())

    operations, kernels = launches(reduce)
    return operations - 1, kernels  # `contiguous` is of this test


@pytest.mark.triton
@pytest.mark.parametrize("compression", [*UNIFORM_FORMATS[1:], "int2"])
def test_a_reduction_queues_as_few_kernels_however_large_the_model_and_many_the_workers(compression, monkeypatch):
    """A segment is 256 elements here, so that 2^20 are 4096 segments: 6 x 10^10 parameters on a GPU."""
    monkeypatch.setattr(quantized, "SEGMENT", 256)
    plain = reduction_launches(compression, 1 << 14, 8)
    monkeypatch.setattr(quantized, "has_triton", lambda device: True)
    counts = {of: reduction_launches(compression, *of) for of in product((1 << 14, 1 << 20), (2, 64))}
    assert len(set(counts.values())) == 1, counts
    operations, kernels = counts[1 << 14, 2]
    assert kernels == 5, "encode, average, decode; the means of the scalars and of the buffers"
    assert operations <= 20 and sum(plain) > 500, (operations, plain)


def compile_the_wire_formats() -> None:
    """Each of float32; int4 also of float64, and where Triton takes a 1 for a constant."""
    ways = [(compression, torch.float32, {}) for compression in UNIFORM_FORMATS[1:]]
    ones = {"workers": 1, "blocks": 1, "numel": 1}
    ways += [("int4", torch.float64, {}), ("int4", torch.float32, ones)]
    for way in (*ways, ("int2", torch.float32, {}), ("bfloat16", torch.float64, {})):
        compile_the_wire_format(*way)


def compile_the_wire_format(compression: Any, dtype: torch.dtype, constants: dict[str, int]) -> None:
    from core.compression import kernels as codec
    from core.compression.kernels import TYPES

    wide = "*fp64" if dtype == torch.float64 else "*fp32"
    rows = {"rows_ptr": "*u8", "stride": "i64", "blocks": "i64"}
    held = {"error_ptr": wide, "moved_ptr": "*u8"}
    values = {"values_ptr": wide, "numel": "i64"}
    mean = {"workers": "i32", "out_ptr": "*u8"}
    kind, form = {"D": TYPES[dtype]}, codec._format(compression)
    for kernel, arguments, fixed in (
        (codec.encode_kernel, values | held | rows, form),
        (codec.average_kernel, rows | held | mean, form | kind),
        (codec.decode_kernel, rows | values, form | kind),
        (
            codec.mean_kernel,
            {"rows_ptr": wide, "out_ptr": wide, "numel": "i64", "workers": "i32"},
            kind | {"ELEMENTS": 1024},
        ),
    ):
        constant = {name: value for name, value in constants.items() if name in arguments}
        built(kernel, {k: v for k, v in arguments.items() if k not in constant}, fixed | constant, codec.WARPS)


@pytest.mark.triton
def test_the_format_formats_compile_for_both_clusters():
    compile_apart("tests.core.test_triton", "compile_the_wire_formats")
