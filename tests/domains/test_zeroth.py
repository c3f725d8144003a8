"""Zeroth-order training against its reference, on one process and on several."""

import math
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import DivergedError
from core.testing import run_distributed
from language.zeroth import ZerothConfig, ZerothOrder
from language.zeroth.order import CHUNK, Noise, digest
from tests.zeroth_net import CPU, SAMPLES, Net, batch, losses_of, rate, share, step_of
from tests.zeroth_reference import mezo, train
from training.data import mix


def expected(config: ZerothConfig, groups: int, steps: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """By the reference, on the joined data."""
    model = Net(dtype).eval()
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    noise = Noise(config.seed, CPU)

    def z(step: int, tensor: int) -> Tensor:
        w = weights[tensor]
        return noise.chunk(step, tensor, 0, w.numel(), CPU).view(w.shape).to(w.dtype)

    def loss(moved: list[Tensor], step: int, group: int) -> tuple[float, float]:
        x = share(step, group, groups, dtype)
        values = torch.func.functional_call(model, dict(zip(names, moved, strict=True)), (x,))
        found = (values - x.sum(1, keepdim=True)).pow(2).mean(1)
        return float(found.sum()), len(x)

    with torch.no_grad():
        how = {"groups": groups, "weight_decay": config.weight_decay}
        return train(weights, loss, z, lr=rate, eps=config.eps, steps=steps, **how)


def on_mesh(rank: int, world_size: int, configs: list[ZerothConfig]) -> list[tuple[list[str], list]]:
    found = []
    for number, config in enumerate(configs):
        model = Net()
        if rank:
            model.back.bias.data.fill_(rank)  # rank 0's are taken
        zo = ZerothOrder(model, config, lr=1.0, timeout=60)
        hashes = []
        for step in range(STEPS[min(number, 1)]):
            step_of(zo, model, step)
            hashes.append(digest(list(model.parameters())))
        zo.finish()
        found.append((hashes, [p.detach() for p in model.parameters()]))
        zo.close()
    return found


STEPS = 30, 8  # of the first, and of the others
CONFIGS = [ZerothConfig(weight_decay=0.1, seed=3), ZerothConfig(pairs=False, weight_decay=0.1)]


@pytest.mark.parametrize("workers", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
def test_every_mesh_gives_what_one_process_would(workers):
    """[D, 1] and [D, 2] for D of 1 to 6, to 1e-12, and with the same bits on all workers after every step."""
    results = [on_mesh(0, 1, CONFIGS)] if workers == 1 else run_distributed(on_mesh, workers, CONFIGS, timeout=240)
    for number, config in enumerate(CONFIGS):
        pairs, steps = workers % 2 == 0 if config.pairs is None else config.pairs, STEPS[min(number, 1)]
        reference = expected(config, workers // 2 if pairs else workers, steps)
        hashes, params = results[0][number]
        assert all(result[number][0] == hashes for result in results), config
        assert len(set(hashes)) == steps, "every step moves the weights"
        torch.testing.assert_close(params, reference, rtol=0, atol=1e-12, msg=lambda m, c=config: f"{c}: {m}")


def test_mezo_in_place_with_the_same_directions():
    """100 steps in float32 to 1e-5: what is left is what going back in place rounds, and the losses, over eps."""
    model, config = Net(torch.float32), ZerothConfig(eps=1e-2)
    zo = ZerothOrder(model, config, lr=0.005)
    theirs = Net(torch.float32).eval()
    weights = [p.detach() for p in theirs.parameters()]
    noise = Noise(0, CPU)

    def z(step: int, tensor: int) -> Tensor:
        return noise.chunk(step, tensor, 0, weights[tensor].numel(), CPU).view(weights[tensor].shape)

    for step in range(100):
        x = batch(step, torch.float32)
        zo.step(lambda m, x=x: losses_of(m, x).mean(), SAMPLES)
    with torch.no_grad():
        mezo(weights, lambda step: float(losses_of(theirs, batch(step, torch.float32)).mean()), z, 0.005, 1e-2, 100)
    torch.testing.assert_close([p.detach() for p in model.parameters()], weights, rtol=0, atol=1e-5)
    start = list(Net(torch.float32).parameters())
    moved = [float((w - s.detach()).abs().max()) for w, s in zip(weights, start, strict=True)]
    assert max(moved) > 0.02, "and it has moved"


def test_the_estimates_are_unbiased():
    """The mean of g z over 4,000 steps is the gradient of a quadratic, within 3 standard deviations of a mean of
    so many; the central difference is exact there."""
    model = nn.Linear(8, 1, bias=False).double()
    target = torch.linspace(-1, 1, 8, dtype=torch.float64)
    curvature = torch.arange(1.0, 9.0, dtype=torch.float64)
    gradient = curvature * (model.weight.detach()[0] - target)
    zo = ZerothOrder(model, ZerothConfig(eps=1e-2), lr=0.0)
    for _ in range(4000):
        zo.step(lambda m: (curvature * (m.weight[0] - target) ** 2).sum() / 2, count=1)
    z = torch.stack([zo.weights.noise.chunk(t, 0, 0, 8, CPU) for t in range(4000)]).double()
    estimates = torch.tensor(zo.log.g)[:, None] * z
    deviation = estimates.std(0) / len(z) ** 0.5
    assert ((estimates.mean(0) - gradient).abs() < 3 * deviation).all() and (deviation < 0.1 * gradient.norm()).all()


def test_noise_is_free_of_order_and_can_be_sliced():
    noise, again = Noise(0, CPU), Noise(0, CPU)
    pieces = [noise.chunk(3, 2, number, CHUNK, CPU) for number in (0, 1)]
    assert torch.equal(again.chunk(3, 2, 1, CHUNK, CPU), pieces[1])
    assert torch.equal(again.chunk(3, 2, 0, CHUNK, CPU), pieces[0])
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = torch.stack([noise.chunk(*key, 1000, CPU) for key in keys])
    drawn = torch.cat([drawn, Noise(1, CPU).chunk(0, 0, 0, 1000, CPU)[None]])
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlation.abs().max() < 0.15
    assert abs(float(pieces[0].mean())) < 0.005 and abs(float(pieces[0].var()) - 1) < 0.01
    assert mix(0, 1, 2) == 8427206145701047172, "logs that were saved are replayed with it"
    assert len({mix(0, i) for i in range(1000)} | {mix(i, 0) for i in range(1, 1000)}) == 1999


def test_a_tensor_of_several_chunks_is_perturbed_and_updated_as_a_whole():
    model = nn.Linear(1100, 1000, bias=False)
    start = model.weight.detach().clone()
    zo = ZerothOrder(model, ZerothConfig(eps=0.5), lr=1.0)
    seen = []

    def loss(m: nn.Module) -> float:
        seen.append(m.weight.detach().clone())
        return 1.0 if len(seen) == 1 else 0.0

    zo.step(loss, count=1)
    z = torch.cat([Noise(0, CPU).chunk(0, 0, i, n, CPU) for i, n in enumerate((CHUNK, 1_100_000 - CHUNK))])
    z = z.view(start.shape)
    torch.testing.assert_close(seen, [start + 0.5 * z, start - 0.5 * z])
    torch.testing.assert_close(model.weight.detach(), start - z)  # g = (1 - 0) / (2 eps) = 1


# -- what the released code gets wrong ------------------------------------------------------------------------------


def after(config: ZerothConfig, steps: int, lr: float = 0.01) -> Tensor:
    model = Net()
    zo = ZerothOrder(model, config, lr=lr)
    for step in range(steps):
        x = batch(step)
        zo.step(lambda m, x=x: losses_of(m, x).mean(), SAMPLES)
    zo.finish()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_last_update_is_applied_seed_0_is_a_seed_and_a_slope_of_zero_does_not_skip_the_weight_decay():
    assert not torch.equal(after(ZerothConfig(), 1), after(ZerothConfig(), 0))
    assert torch.equal(after(ZerothConfig(seed=0), 3), after(ZerothConfig(seed=0), 3))
    assert not torch.equal(after(ZerothConfig(seed=0), 3), after(ZerothConfig(seed=1), 3))
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zo = ZerothOrder(model, ZerothConfig(weight_decay=0.5), lr=0.1)
    assert zo.step(lambda m: 1.0, count=1).g == 0.0
    for name, p in model.named_parameters():
        decayed = 0.95 if p.ndim >= 2 else 1.0  # neither biases nor norms
        torch.testing.assert_close(p.detach(), before[name] * decayed)


# -- losses that are not finite -------------------------------------------------------------------------------------


def one_is_nan(rank: int, world_size: int) -> list[str]:
    model = Net()
    zo = ZerothOrder(model, ZerothConfig(weight_decay=0.1), lr=0.01, timeout=60)
    hashes = []
    for step in range(12):
        bad = rank == 1 and step == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = zo.step(lambda m, step=step, bad=bad: math.nan if bad else losses_of(m, batch(step)).mean(), 4)
        assert result.dropped == (step == 2)
        hashes.append(digest(list(model.parameters())))
    zo.close()
    return hashes


def test_a_loss_that_is_not_finite_on_one_worker_drops_the_step_for_all():
    first, second = run_distributed(one_is_nan, 2)
    assert first == second
    assert first[1] == first[2], "nothing moved, nor decayed"
    assert len(set(first)) == 11


def test_a_dropped_step_is_told_once_in_a_row_and_ten_end_the_run():
    zo = ZerothOrder(Net(), lr=0.1)
    with pytest.warns(UserWarning, match="step 0 is dropped") as told:
        for _ in range(3):
            zo.step(lambda m: math.inf, 1)
    assert len(told) == 1
    with pytest.raises(DivergedError, match="up to step 9 are not finite"):
        for _ in range(7):
            zo.step(lambda m: math.nan, 1)


# -- traffic --------------------------------------------------------------------------------------------------------


def collectives_of_a_step(rank: int, world_size: int) -> list[tuple[list[str], int]]:
    """By the width of a model, what three steps call, and how many bytes the last one sends."""
    return [calls_of(nn.Linear(width, 10)) for width in (10, 10_000)]


def calls_of(model: nn.Module) -> tuple[list[str], int]:
    zo = ZerothOrder(model, lr=0.01, timeout=60)
    called, send = [], dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, **options):
        called.append(f"{sent.dtype} {tuple(sent.shape)}")
        return send(received, sent, **options)

    names = [n for n in dir(dist) if n.startswith(("all_", "broadcast", "reduce", "gather", "send", "isend"))]
    refused = {n: mock.Mock(side_effect=AssertionError(n)) for n in names if callable(getattr(dist, n))}
    with mock.patch.multiple(dist, **refused | {"all_to_all_single": counted}):
        for _ in range(3):
            zo.step(lambda m: m.weight.sum(), count=2)
    zo.close()
    return called, zo.bytes_sent


def test_a_step_sends_three_numbers_to_each_worker_in_one_collective():
    for found in run_distributed(collectives_of_a_step, 4):
        assert found == [(["torch.float64 (4, 3)"] * 3, 3 * 24)] * 2
