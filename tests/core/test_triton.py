"""Triton's boundary against the plain pass: in Triton's interpreter on a CPU (make test-triton), and on a device; and
compiled for both clusters' GPUs, whose instructions have to round as torch's do. The wire formats: test_triton_wire."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core import outer
from core.adaptive.config import MERGES
from core.adaptive.merging import MergeRule, MergingBoundary, make_boundary, with_merge
from core.outer import NOTHING_LANDED, Rule
from tests.core.test_boundary import BETA, DTYPES, RULES, SHAPES, check, flat, make

ROOT = Path(__file__).parents[2]
ON_DEVICE = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.triton), pytest.param("cuda", marks=ON_DEVICE)]
)
ARCHITECTURES = (80, 90)  # A100, H100


def on(device: str, rule: Rule) -> Rule:
    return Rule(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(rule).values()))


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_boundary_is_the_formulas(dtype: torch.dtype, device: str):
    from core.triton.boundary import TritonBoundary

    for rule in RULES.values():
        check(TritonBoundary, dtype, rule, device)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_boundary_is_plain_bit_for_bit(dtype: torch.dtype, device: str):
    """But for what was seen, whose sums are taken in another order."""
    from core.triton.boundary import TritonBoundary

    landed = [on(device, rule) for rule in RULES.values()]
    merged = [replace(with_merge(landed[0]), merge=m, sends=s, share=0.3) for m in MERGES for s in (True, False)]
    scaled = replace(landed[0], scale=torch.tensor(1 / 3, device=device))
    for rule in (*landed, *merged, scaled, NOTHING_LANDED):
        results = []
        for kind in (MergingBoundary, TritonBoundary):
            params, d, x, m = make(dtype, SHAPES, device)
            sent = flat(params).to(x.dtype) + 0.1 * x
            seen = kind(params, d, x, m, sent).run(rule)
            results.append((flat(params), d, x, m, sent))
            results.append((seen,))
        for name, a, b in zip(("p", "d", "x", "m", "sent"), results[0], results[2], strict=True):
            assert torch.equal(a, b), f"{name} of {rule}"
        torch.testing.assert_close(results[1], results[3], rtol=1e-5, atol=0)


@devices
def test_any_strides_and_several_blocks(device: str):
    from core.triton.boundary import TritonBoundary

    for shape in ((2, 3, 4, 5, 6), (9000,), (65, 3, 7, 7)):  # more strides than a row of the table holds
        p = torch.randn(shape, device=device).permute(*reversed(range(len(shape))))
        d, x, m = torch.randn(3, p.numel(), device=device).unbind()
        TritonBoundary([p], d, x, m).run(NOTHING_LANDED)
        assert torch.equal(p.reshape(-1), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fast_is_the_kernel_on_the_device_and_reads_nothing_from_it():
    params, d, x, m = make(torch.float32, SHAPES, "cuda")
    tested = make_boundary(params, d, x, m, torch.zeros_like(x))
    assert type(tested).__name__ == "TritonBoundary"
    rule = MergeRule(BETA, 0.9, 0.9, 0.6, 0.5, c=torch.ones((), device="cuda"))
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


# -- how many launches ------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """Counts what would be queued on a GPU: operations that are no views, and Triton's kernels, which are not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.operations = self.kernels = 0
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "__call__", self._launch)

    def _launch(self, *args: Any, **kwargs: Any) -> None:
        self.kernels += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        queues_nothing = ("aten::empty.memory_format", "aten::new_empty", "aten::empty_like", "aten::detach")
        self.operations += not views and func.name() not in queues_nothing
        return func(*args, **(kwargs or {}))


@pytest.mark.triton
def test_a_boundary_queues_as_few_kernels_however_many_the_parameters(monkeypatch: pytest.MonkeyPatch):
    from core.triton.boundary import TritonBoundary

    counts = []
    for many in (1, 100):
        params, d, x, m = make(torch.bfloat16, SHAPES * many)
        tested = TritonBoundary(params, d, x, m, torch.zeros_like(x))
        rules = [MergeRule(0.5, 0.5, 0.5, 1.0, torch.tensor(0.5), torch.tensor(1.0), merge=merge) for merge in MERGES]
        calls = [*(partial(tested.run, rule) for rule in rules), tested.take, tested.restart]
        for call in calls:  # plans, and fills the scalars
            with monkeypatch.context() as patch, Launches(patch):
                call()
        for call in calls:
            with monkeypatch.context() as patch, Launches(patch) as seen:
                call()
            counts.append((seen.operations, seen.kernels))
    assert counts[: len(calls)] == counts[len(calls) :]
    assert all(kernels == 2 and operations <= 12 for operations, kernels in counts), "contiguous and strided parameters"


# -- compiled ---------------------------------------------------------------------------------------------------


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
    from core.triton.boundary import BLOCK, TYPES, boundary_kernel, copy_kernel

    for dtype, wide in zip(DTYPES, ("fp64", "fp32", "fp32", "fp32"), strict=True):
        common = {"P": TYPES[dtype], "BLOCK": BLOCK}
        names = {"table": "*i64"} | dict.fromkeys(("d_ptr", "x_ptr", "m_ptr", "sent_ptr", "scalars"), f"*{wide}")
        for merge, gap, strided in zip(MERGES, range(3), (True, False, True), strict=True):
            fixed = {"GAP": gap, "CLIP": True, "MERGE": merge, "SENDS": merge != "keep", "STRIDED": strided} | common
            built(boundary_kernel, names | {"gap_ptr": f"*{wide}", "seen_ptr": f"*{wide}"}, fixed, 8)
        names.pop("m_ptr")
        for takes in (True, False):
            fixed = {"TAKES": takes, "WHERE": not takes, "SENT": True, "STRIDED": not takes} | common
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
