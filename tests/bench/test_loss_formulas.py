"""bench.loss: its optimizers and methods against plain formulas."""

from typing import Any

import pytest
import torch

from bench.loss.__main__ import parse
from bench.loss.methods import CompressedMean, mean
from bench.loss.tasks import Inner, clip_rows


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
        state.step(x, gradients, 0.1)
        for row, gradient, optimizer in zip(rows, gradients, optimizers, strict=True):
            row.grad = gradient.clone()
            if inner.clip:
                torch.nn.utils.clip_grad_norm_([row], inner.clip)
            optimizer.step()
    torch.testing.assert_close(x, torch.stack([row.detach() for row in rows]), rtol=1e-12, atol=1e-12)


def test_gradients_are_clipped_by_row():
    rows = clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    torch.testing.assert_close(rows, torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=1e-5, atol=1e-5)


def test_a_narrow_wire_sends_later_what_it_rounded_off():
    """Scale 1: a block's largest magnitude is 7. What is left of 0.4, 0.8, 0.2, 0.6, 0.0 is sent in the next."""
    sent = torch.zeros(2, 300)
    sent[:, 0], sent[:, 1] = 7.0, 0.4
    compressed, everyone = CompressedMean("int4"), torch.ones(2)
    seen = [compressed(sent, everyone)[:3] for _ in range(5)]
    assert [part[1].item() for part in seen] == [0, 1, 0, 1, 0] and all(part[0] == 7 and part[2] == 0 for part in seen)
    assert mean(sent, everyone)[1] == pytest.approx(0.4)


def test_ddp_sends_gradients_over_the_wire():
    x = torch.zeros(2, 2)
    method, inner = parse("ddp:wire=int4")[0].make(x, 1), Inner("sgd", 1.0, momentum=0.0).start(x)
    for step in range(2):
        method.train_step(lambda x, _: torch.tensor([[7.0, 0.4], [7.0, 0.4]]), (), inner, 1.0)
        assert x.tolist() == [[-7.0 * (step + 1), -float(step)]] * 2
