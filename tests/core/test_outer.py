"""The outer step: its formulas by hand, and every pass over memory that takes it, against them."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core import buckets as flats
from core import outer
from core.config import MERGES
from core.outer import FusedOuterStep, OuterStep, Rule, keep_local
from core.shares import make_outer_step
from tests.imports import ROOT


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def test_norm_accumulates_in_the_widest_dtype():
    """In float32, 1 + 1e-10 would be 1."""
    total = outer.norm([vector(1.0, dtype=torch.float32), vector(1e-5)])
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx((1 + 1e-10) ** 0.5, rel=1e-15)


@pytest.mark.slow
def test_norm_of_a_model_too_large_for_float32_accumulators():
    """On a CPU torch.linalg.vector_norm of these 3 x 10^8 ones is a third too small (1.2 GB of memory)."""
    assert outer.norm([torch.ones(3 * 10**8)]).item() == pytest.approx((3e8) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (outer.gap_elementwise(vector(0.0, -1.0, 3.0), vector(2.0)[0]), [1.0, 1.5, 2.5]),
        (outer.gap_scalar(vector(6.0), vector(3.0)), [3.0]),
        (outer.momentum(vector(10.0, 10.0), vector(4.0, 4.0), 0.5), [9.0, 9.0]),
        # the gap scales the new term alone
        (outer.momentum(vector(10.0, 10.0), vector(4.0, 4.0), 0.5, vector(1.0, 2.0)), [9.0, 7.0]),
        (outer.momentum(vector(10.0, 10.0), vector(4.0, 4.0), 0.5, vector(4.0)[0]), [6.0, 6.0]),
        (outer.clip_elements(vector(-3.0, -0.5, 2.0), 1.0), [-1.0, -0.5, 1.0]),
        (outer.outer_step(vector(1.0, 2.0), vector(4.0, -4.0), 0.5), [-1.0, 4.0]),
        (keep_local(vector(4.0), vector(8.0), vector(7.0)), [5.0]),
    ],
)
def test_formulas_by_hand(found: Tensor, expected: list[float]):
    torch.testing.assert_close(found, vector(*expected))


@pytest.mark.parametrize("gap", [outer.gap_elementwise, outer.gap_scalar])
def test_gap_is_finite_when_the_pseudo_gradient_is_zero(gap):
    assert gap(vector(0.0)[0], vector(0.0)[0]).item() == 1.0
    assert torch.isfinite(gap(vector(1.0)[0], vector(0.0)[0]))


def test_nesterov_is_that_of_torch():
    parameter = torch.nn.Parameter(vector(1.0, -2.0))
    sgd = torch.optim.SGD([parameter], lr=0.3, momentum=0.7, nesterov=True)
    x, m = parameter.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for delta in (vector(1.0, 2.0), vector(-3.0, 0.5), vector(0.2, 0.1)):
        parameter.grad = delta
        sgd.step()
        m = outer.momentum(m, delta, 0.7)
        x = outer.outer_step(x, outer.nesterov(m, delta, 0.7), 0.3)
        torch.testing.assert_close(x, parameter.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_is_kept_when_the_scale_is_wider(dtype: torch.dtype):
    """c_t comes from all dtypes of a model, as float64 if one of them is."""
    x, scale = vector(1.0, -2.0, dtype=dtype), torch.tensor(0.5, dtype=torch.float64)
    gap = outer.gap_elementwise(x, scale)
    assert gap.dtype == dtype
    assert outer.momentum(x, x, 0.5, gap).dtype == dtype
    assert outer.momentum(x, x, 0.5, outer.gap_scalar(scale, scale)).dtype == dtype


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PHI, BETA = 0.6, 0.7


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


def expected(params: list[Tensor], d: Tensor, x: Tensor, m: Tensor, rule: Rule):
    """(p, d, x, m) after a boundary and (Lambda, momentum before clipping), formula by formula."""
    p, delta = flat(params), d * rule.scale
    gap = rule.gap
    if rule.delta_rms is not None:
        gap = outer.gap_elementwise(m * -rule.last_alpha, rule.delta_rms)
    raw = outer.momentum(m, delta, rule.beta, gap)
    new = raw if rule.phi is None else outer.clip_elements(raw, rule.phi)
    next_d = x.to(p.dtype).to(x.dtype) - p
    next_x = outer.outer_step(x, new, rule.alpha)
    return (next_x.to(p.dtype), next_d, next_x, new), gap, raw


RULES = {
    "elementwise": Rule(BETA, 0.9, 0.9, PHI, 1 / 3, delta_rms=torch.tensor(0.3)),
    "first_step": Rule(BETA, 0.9, 0.0, PHI, 1 / 4, delta_rms=torch.tensor(0.3)),
    "unclipped": Rule(BETA, 1.0, 1.0, None, 1.0, delta_rms=torch.tensor(0.3)),
    "norm": Rule(BETA, 0.9, 0.9, PHI, 1 / 3, gap=torch.tensor(1.75)),
    "none": Rule(BETA, 1.0, 1.0, PHI, 1.0),
    "far_clip": Rule(BETA, 0.5, 0.5, 100.0, 0.5, delta_rms=torch.tensor(0.3)),
}


def check(kind: type[OuterStep], dtype: torch.dtype, rule: Rule, device: str = "cpu") -> None:
    params, d, x, m = make(dtype, SHAPES, device)
    strides = [p.stride() for p in params]
    rule = Rule(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(rule).values()))
    tested = kind(params, d, x, m)
    for _ in range(2):
        want, gap, raw = expected(params, d, x, m, rule)
        seen = tested.run(rule)
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        for name, got, value in zip("dxm", (d, x, m), want[1:], strict=True):
            torch.testing.assert_close(got, value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
            assert kind is not OuterStep or torch.equal(got, value), f"{name}: the plain pass is exact"
        assert torch.equal(flat(params), x.to(dtype))  # exactly the iterate, whatever its rounding
        gap = torch.ones_like(m) if gap is None else gap.expand(m.shape)
        clipped = 0 if rule.phi is None else int((raw.abs() > rule.phi).sum())
        want_seen = [float((want[3] ** 2).sum()), float(gap.sum()), float(gap.max()), clipped]
        assert seen.dtype == torch.float64 and seen.tolist() == pytest.approx(want_seen, 1e-5)
        d.copy_(torch.randn(d.shape))  # the next mean lands
    assert strides == [p.stride() for p in params]


KINDS = [OuterStep, FusedOuterStep]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_boundary_is_the_formulas_in_their_order(dtype, rule, kind, monkeypatch):
    """In float64 also with segments so small that tensors are split, and some hold whole tensors and pieces."""
    for segment in (outer.SEGMENT, 16) if dtype == torch.float64 else (outer.SEGMENT,):
        monkeypatch.setattr(outer, "SEGMENT", segment)
        check(kind, dtype, rule)


def test_which_pass_runs_where(monkeypatch):
    flats = torch.zeros(3, 2).unbind()
    assert type(make_outer_step([torch.zeros(2)], *flats)) is FusedOuterStep
    assert type(make_outer_step([torch.zeros(2)], *flats, nesterov=True)) is OuterStep, "no other knows it"
    on_gpu = [t.to("meta") for t in flats]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert type(make_outer_step([torch.zeros(2, device="meta")], *on_gpu)) is OuterStep


def test_many_small_tensors_share_a_segment():
    params, d, x, m = make(torch.float32, [(5,)] * 3000)
    tested = FusedOuterStep(params, d, x, m)
    want, _, _ = expected(params, d, x, m, RULES["elementwise"])
    tested.run(RULES["elementwise"])
    torch.testing.assert_close(flat(params), want[0], rtol=1e-5, atol=1e-6)
    assert len(tested.segments) == 1


def test_pieces_cover_a_transposed_tensor_in_order():
    for shape, dims in (((6, 5), (1, 0)), ((3, 4, 5, 2), (0, 2, 3, 1)), ((2, 50), (1, 0))):
        t = torch.arange(torch.Size(shape).numel()).view(shape).permute(dims)
        for limit in (1, 7, 10, 1000):
            groups = list(flats.group_pieces([t], limit))
            parts = [part for group in groups for part in group]
            assert all(sum(part.numel() for part in group) <= limit for group in groups)
            assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), t.reshape(-1))


@cache
def subclasses() -> list[Any]:
    """A parameter (module, name) for OuterStep and each class that derives from it, found in the source: so also one
    whose imports are not installed here."""
    found: dict[str, tuple[Path, set[str]]] = {}
    for path in (path for room in ("core", "training", "bench") for path in (ROOT / room).rglob("*.py")):
        for name, bases in re.findall(r"^ *class (\w+)(?:\(([^)]*)\))?:", path.read_text(), re.MULTILINE):
            found[name] = path, set(re.findall(r"\w+", bases))
    names = {"OuterStep"}
    while more := {name for name, (_, bases) in found.items() if bases & names} - names:
        names |= more
    return [_parameter(found[name][0], name) for name in sorted(names)]


def _parameter(path: Path, name: str) -> Any:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    marks = [pytest.mark.triton] if "import triton" in path.read_text() else []
    marks += [pytest.mark.slow] if name == "CompiledOuterStep" else []  # compiles for half a minute
    return pytest.param(module, name, id=name, marks=marks)


def build(module: str, name: str, params: list[Any], state: list[Tensor], snapshot: Tensor | None) -> OuterStep:
    return getattr(importlib.import_module(module), name)(params, *state, snapshot)


def numbers(like: Tensor) -> Tensor:
    return (torch.randint(-16, 17, like.shape) / 8).to(like)


State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # p, d, x, m, snapshot, each flat


def after_run(rule: Rule) -> Callable[..., State]:
    def expected(p: Tensor, d: Tensor, x: Tensor, m: Tensor, snapshot: Tensor) -> State:
        new = outer.clip_elements(outer.momentum(m, rule.scale * d, rule.beta, rule.gap), rule.phi or 1e9)
        next_x, wide = outer.outer_step(x, new, rule.alpha), p.to(x.dtype)
        merged = {"restart": next_x, "keep_local": keep_local(next_x, wide, snapshot)}
        next_d = x.to(p.dtype).to(x.dtype) - p if rule.takes_difference else d
        return merged[rule.merge].to(p.dtype), next_d, next_x, new, snapshot

    return expected


def after_take(p: Tensor, d: Tensor, x: Tensor, m: Tensor, snapshot: Tensor) -> State:
    return p, x.to(p.dtype).to(x.dtype) - p, x, m, p.to(x.dtype)


def after_restart(where: bool | None) -> Callable[..., State]:
    def expected(p: Tensor, d: Tensor, x: Tensor, m: Tensor, snapshot: Tensor) -> State:
        start = p if where is False else x.to(p.dtype)
        return start, d, x, m, start.to(x.dtype) if where else snapshot

    return expected


def calls(device: str) -> dict[str, tuple[Callable[[Any], Any], Callable[..., State]]]:
    """Name -> (the call, what the state becomes)."""
    landed = Rule(0.5, 0.5, 1.0, 1.0, 0.25, gap=torch.tensor(2.0, device=device))
    rules = {
        f"run {merge}, takes {takes}": replace(landed, merge=merge, takes_difference=takes)
        for merge in MERGES
        for takes in (True, False)
    }
    rules |= {"run nothing landed": Rule(), "run unclipped": replace(landed, phi=None, gap=None)}
    known: dict[str, Any] = {name: (lambda b, rule=rule: b.run(rule), after_run(rule)) for name, rule in rules.items()}
    for where in (True, False):
        truth = torch.tensor(where, device=device)
        known[f"restart {where}"] = (lambda b, truth=truth: b.restart(truth), after_restart(where))
    return known | {"restart": (lambda b: b.restart(), after_restart(None)), "take": (lambda b: b.take(), after_take)}


def move(params: list[Any]) -> None:
    """To other storage, the strided ones to other strides."""
    for p in params:
        p.data = torch.empty_like(p, memory_format=torch.contiguous_format if p.dim() > 1 else torch.preserve_format)


def check_calls(module: str, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
    for call, (act, expected) in calls(device).items():
        params, *state = make(dtype, SHAPES, device)
        state += [torch.empty_like(state[0])]
        tested = build(module, name, params, state[:3], state[3])
        for moved in (False, True):
            if moved:
                move(params)
            for t in [*(p.data for p in params), *state]:
                t.copy_(numbers(t.cpu()))
            want = expected(*(t.clone() for t in (flat(params), *state)))
            act(tested)
            for what, got, value in zip(("p", "d", "x", "m", "snapshot"), (flat(params), *state), want, strict=True):
                assert torch.equal(got, value), f"{call}{', moved' * moved}: {what}"


@pytest.mark.parametrize("free", [True, False], ids=["host reads", "host never reads"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("module", "name"), subclasses())
def test_every_call_of_every_subclass(module: str, name: str, dtype: torch.dtype, free: bool, monkeypatch: Any):
    monkeypatch.setattr(flats, "read_blocks", lambda t: not free)
    check_calls(module, name, dtype)


@pytest.mark.parametrize(("module", "name"), subclasses())
def test_without_a_snapshot(module: str, name: str):
    params, d, x, m = make(torch.float32, SHAPES)
    tested = build(module, name, params, [d, x, m], None)
    before = flat(params)
    tested.take()
    assert torch.equal(d, x - before)
    tested.restart(torch.tensor(True))
    assert torch.equal(flat(params), x)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["OuterStep", "TritonOuterStep"])
def test_every_call_on_the_device(name: str, dtype: torch.dtype):
    modules = {"OuterStep": "core.outer", "TritonOuterStep": "core.compression.outer_kernels"}
    check_calls(modules[name], name, dtype, "cuda")
