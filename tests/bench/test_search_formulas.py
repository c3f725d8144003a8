"""bench.search: its optimisers and methods against plain formulas."""

from typing import Any

import pytest
import torch
from bench.search.__main__ import parse
from bench.search.methods import ACCO, DPU, mean_over
from bench.search.task import Inner, clip_rows, matrices_inside
from torch import Tensor, nn


@pytest.mark.parametrize(
    ("inner", "theirs"),
    [
        (Inner("sgd", 0.1, momentum=0.8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8)),
        (Inner("adamw", 0.1, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
        (Inner("adamw", 0.1, clip=0.5), lambda p: torch.optim.AdamW(p, 0.1)),
    ],
)
def test_the_inner_optimisers_are_torchs_row_by_row(inner: Inner, theirs: Any):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    rows = [torch.nn.Parameter(row.clone()) for row in x]
    optimizers, state = [theirs([row]) for row in rows], inner.start(x)
    for _ in range(4):
        gradients = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        untouched = x.clone()
        state.copy().step(untouched, gradients, 0.1)
        state.step(x, gradients, 0.1)
        assert torch.equal(untouched, x)  # a copy has the same state, and leaves it alone
        for row, gradient, optimizer in zip(rows, gradients, optimizers, strict=True):
            row.grad = gradient.clone()
            if inner.clip:
                torch.nn.utils.clip_grad_norm_([row], inner.clip)
            optimizer.step()
    torch.testing.assert_close(x, torch.stack([row.detach() for row in rows]), rtol=1e-12, atol=1e-12)


def test_muon_is_torchs_row_by_row():
    """Its iterations are in bfloat16, in which a product of all workers' matrices is rounded otherwise than of one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5))
    inner = Inner("muon", 0.1, weight_decay=0.3, matrices=matrices_inside(model, "1."))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 23, generator=generator)
    state, rows = inner.start(x), [[torch.nn.Parameter(p.clone()) for p in row.split([8, 10, 5])] for row in x]
    muons = [torch.optim.Muon([row[1].data.view(5, 2)], 0.1, 0.3, adjust_lr_fn="match_rms_adamw") for row in rows]
    adamws = [torch.optim.AdamW([row[0], row[2]], 0.1, weight_decay=0.3) for row in rows]
    for _ in range(4):
        gradients = torch.randn(2, 23, generator=generator)
        state.step(x, gradients, 0.1)
        for row, gradient, muon, adamw in zip(rows, gradients, muons, adamws, strict=True):
            parts = gradient.split([8, 10, 5])
            muon.param_groups[0]["params"][0].grad = parts[1].view(5, 2).clone()
            row[0].grad, row[2].grad = parts[0].clone(), parts[2].clone()
            muon.step()
            adamw.step()
    theirs = torch.stack([torch.cat([p.detach().flatten() for p in row]) for row in rows])
    torch.testing.assert_close(x, theirs, rtol=0.01, atol=0.01)


def test_gradients_are_clipped_by_row():
    rows = clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=1e-5, atol=1e-5)


def offset(x: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """A gradient that shows where it was taken, and of which samples: x plus their mean."""
    return x + batch[0].mean(dim=1, keepdim=True)


def batches(steps: int) -> list[tuple[Tensor, ...]]:
    """Two workers of two samples: 1 and 3 in the first half, 10 and 30 in the second; times the step's number."""
    return [((step + 1) * torch.tensor([[1.0, 10.0], [3.0, 30.0]]).double(),) for step in range(steps)]


def test_dpu_applies_each_gradient_one_step_late():
    x = torch.zeros(2, 1, dtype=torch.float64)
    method, inner = DPU(x, 1), Inner("sgd", 0.1, momentum=0.0).start(x)
    seen = [0.0]
    for step, batch in enumerate(batches(4)):
        seen.append(seen[step] - (0.1 * (seen[step - 1] + 11.0 * step) if step else 0.0))
        method.train_step(offset, batch, inner, 0.1)
        assert x[:, 0].tolist() == [pytest.approx(seen[-1])] * 2


def test_acco_by_hand():
    """First halves' means 2, 4, 6; second halves' 20, 40."""
    x = torch.zeros(2, 1, dtype=torch.float64)
    method, inner = ACCO(x, 1), Inner("sgd", 0.1, momentum=0.0).start(x)
    for batch in batches(3):
        method.train_step(offset, batch, inner, 0.1)
    x1 = -0.1 * 2  # h_1 = 20, at x_0
    estimate = x1 - 0.1 * 20
    x2 = x1 - 0.1 * (20 + x1 + 4) / 2
    x3 = x2 - 0.1 * (estimate + 40 + x2 + 6) / 2
    assert x[:, 0].tolist() == [pytest.approx(x3)] * 2


def steady(x: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """1 for the first worker, 3 for the second, everywhere."""
    return torch.tensor([[1.0], [3.0]], dtype=x.dtype).expand_as(x)


def test_streaming_diloco_by_hand():
    """Two fragments of one parameter, tau 2: the first is sent after 1, 3, ... steps, the second after 2, 4, ...; each
    mean is merged a step later, with a Nesterov step of the fragment's outer iterate z, half of which is taken."""
    x = torch.zeros(2, 2, dtype=torch.float64)
    settings = parse("streaming:fragments=2,alpha=0.5,beta=0.5")[0]
    method, inner = settings.make(x, 2), Inner("sgd", 1.0, momentum=0.0).start(x)
    expected = [
        ([-1, -3], [-1, -3]),
        ([-1.75, -3.75], [-2, -6]),  # sent 2: m = 2, z = -0.5 (0.5 * 2 + 2) = -1.5
        ([-2.75, -6.75], [-3, -6]),  # sent 4: m = 4, z = -0.5 (0.5 * 4 + 4) = -3
        ([-3.96875, -6.96875], [-4, -9]),  # sent 3.25: m = 1 + 3.25, z = -1.5 - 0.5 (0.5 * 4.25 + 3.25) = -4.1875
    ]
    for first, second in expected:
        method.train_step(steady, (), inner, 1.0)
        assert (x[:, 0].tolist(), x[:, 1].tolist()) == (first, second)
    method.finish()
    assert torch.equal(x[0], x[1])


def test_des_loc_averages_each_moment_in_its_own_rounds():
    x = torch.zeros(2, 1, dtype=torch.float64)
    method, inner = parse("des_loc")[0].make(x, 2), Inner("adamw", 0.1).start(x)
    alike = []
    for _ in range(24):
        method.train_step(steady, (), inner, 0.1)
        alike.append([bool(value[0] == value[1]) for value in (x, *(moment for moment, _ in inner.moments()))])
    rounds = [r + 1 for r in range(12) if alike[2 * r + 1][1]], [r + 1 for r in range(12) if alike[2 * r + 1][2]]
    assert rounds == ([3, 6, 9, 12], [6, 12])
    assert [i + 1 for i in range(24) if alike[i][0]] == [*range(2, 25, 2)]


def test_a_moment_that_comes_late_is_what_it_would_have_become():
    """Momentum 0.5, gradients 1 and 3: after two steps 1.5 and 4.5, mean 3; a step later 0.5 * 3 + 1 and + 3."""
    x = torch.zeros(2, 1, dtype=torch.float64)
    settings = parse("co2:merge=keep,gap=none,beta=0,delay=1,first_every=1")[0]
    method, inner = settings.make(x, 2), Inner("sgd", 1.0, momentum=0.5).start(x)
    seen = []
    for _ in range(3):
        method.train_step(steady, (), inner, 1.0)
        seen.append(inner.first[:, 0].tolist())
    assert seen == [[1, 3], [1.5, 4.5], [2.5, 4.5]]


def test_a_narrow_wire_sends_later_what_it_rounded_off():
    """Scale 1: a block's largest magnitude is 7. What is left of 0.4, 0.8, 0.2, 0.6, 0.0 is sent in the next."""
    sent = torch.zeros(2, 300)
    sent[:, 0], sent[:, 1] = 7.0, 0.4
    mean, everyone = mean_over("int4"), torch.ones(2)
    seen = [mean(sent, everyone)[:3] for _ in range(5)]
    assert [part[1].item() for part in seen] == [0, 1, 0, 1, 0] and all(part[0] == 7 and part[2] == 0 for part in seen)
    assert mean_over("float32")(sent, everyone)[1] == pytest.approx(0.4)


def test_ddp_sends_gradients_over_the_wire():
    x = torch.zeros(2, 2)
    method, inner = parse("ddp:wire=int4")[0].make(x, 1), Inner("sgd", 1.0, momentum=0.0).start(x)
    for step in range(2):
        method.train_step(lambda x, _: torch.tensor([[7.0, 0.4], [7.0, 0.4]]), (), inner, 1.0)
        assert x.tolist() == [[-7.0 * (step + 1), -float(step)]] * 2
