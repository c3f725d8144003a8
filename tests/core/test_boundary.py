"""The plain update against the formulas of core/outer.py, step by step, and the faster passes against both."""

import pytest
import torch
from torch import Tensor

from core import flat as flats
from core import outer
from core.outer import Boundary, ChunkedBoundary, Rule, make_boundary

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
    if rule.c is not None:
        gap = outer.gap_elementwise(m * -rule.last_alpha, rule.c)
    raw = outer.momentum(m, delta, rule.beta, gap)
    new = raw if rule.phi is None else outer.clip_elements(raw, rule.phi)
    next_d = x.to(p.dtype).to(x.dtype) - p
    next_x = outer.outer_step(x, new, rule.alpha)
    return (next_x.to(p.dtype), next_d, next_x, new), gap, raw


RULES = {
    "elementwise": Rule(BETA, 0.9, 0.9, PHI, 1 / 3, c=torch.tensor(0.3)),
    "first_step": Rule(BETA, 0.9, 0.0, PHI, 1 / 4, c=torch.tensor(0.3)),
    "unclipped": Rule(BETA, 1.0, 1.0, None, 1.0, c=torch.tensor(0.3)),
    "norm": Rule(BETA, 0.9, 0.9, PHI, 1 / 3, gap=torch.tensor(1.75)),
    "none": Rule(BETA, 1.0, 1.0, PHI, 1.0),
    "far_clip": Rule(BETA, 0.5, 0.5, 100.0, 0.5, c=torch.tensor(0.3)),
}


def check(kind: type[Boundary], dtype: torch.dtype, rule: Rule, device: str = "cpu") -> None:
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
            assert kind is not Boundary or torch.equal(got, value), f"{name}: the plain pass is exact"
        assert torch.equal(flat(params), x.to(dtype))  # exactly the iterate, whatever its rounding
        gap = torch.ones_like(m) if gap is None else gap.expand(m.shape)
        clipped = 0 if rule.phi is None else int((raw.abs() > rule.phi).sum())
        want_seen = [float((want[3] ** 2).sum()), float(gap.sum()), float(gap.max()), clipped]
        assert seen.dtype == torch.float64 and seen.tolist() == pytest.approx(want_seen, 1e-5)
        d.copy_(torch.randn(d.shape))  # the next mean lands
    assert strides == [p.stride() for p in params]


KINDS = [Boundary, ChunkedBoundary]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_boundary_is_the_formulas_in_their_order(dtype, rule, kind, monkeypatch):
    """Also with segments so small that tensors are split, and that some hold whole tensors and pieces."""
    for segment in (outer.SEGMENT, 16):
        monkeypatch.setattr(outer, "SEGMENT", segment)
        check(kind, dtype, rule)


def test_which_pass_runs_where(monkeypatch):
    flats = torch.zeros(3, 2).unbind()
    assert type(make_boundary([torch.zeros(2)], *flats)) is ChunkedBoundary
    on_gpu = [t.to("meta") for t in flats]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert type(make_boundary([torch.zeros(2, device="meta")], *on_gpu)) is Boundary


@pytest.mark.parametrize("kind", KINDS)
def test_by_hand(kind):
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    d, x, m = torch.tensor([[4.0, 8.0, -80.0], [2.0, 2.0, 2.0], [1.0, -3.0, 0.0]]).unbind()
    seen = kind([p], d, x, m).run(Rule(0.5, 0.5, 1.0, 2.0, 0.5, c=torch.tensor(1.0)))
    # Delta = [2, 4, -40], Lambda = [2, 4, 1], beta m + Delta / Lambda = [1.5, -0.5, -40], clipped at 2
    assert m.tolist() == [1.5, -0.5, -2.0]
    assert d.tolist() == [1.0, 0.0, -1.0]
    assert x.tolist() == p.tolist() == [1.25, 2.25, 3.0]
    assert seen.tolist() == [6.5, 7.0, 4.0, 1.0]


def test_many_small_tensors_share_a_segment():
    params, d, x, m = make(torch.float32, [(5,)] * 3000)
    tested = ChunkedBoundary(params, d, x, m)
    want, _, _ = expected(params, d, x, m, RULES["elementwise"])
    tested.run(RULES["elementwise"])
    torch.testing.assert_close(flat(params), want[0], rtol=1e-5, atol=1e-6)
    assert len(tested.segments) == 1


def test_pieces_cover_a_transposed_tensor_in_order():
    for shape, dims in (((6, 5), (1, 0)), ((3, 4, 5, 2), (0, 2, 3, 1)), ((2, 50), (1, 0))):
        t = torch.arange(torch.Size(shape).numel()).view(shape).permute(dims)
        for limit in (1, 7, 10, 1000):
            parts = list(flats._pieces(t, limit))
            assert all(part.numel() <= limit for part in parts)
            assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), t.reshape(-1))
