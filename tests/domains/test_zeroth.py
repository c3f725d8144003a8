"""Zeroth-order training against its reference, as its list of scalars, and what it refuses."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CollectiveError, DivergedError, UserError, load, save
from core.testing import run_distributed
from language.zeroth import ScalarLog, ZerothConfig, ZerothOrder
from language.zeroth.order import CHUNK, Noise, Place, digest
from tests.on_ranks import on_ranks, total_world_size

CPU = torch.device("cpu")
SAMPLES = 12  # of a step, over all workers


class Net(nn.Module):
    """Tied weights, a norm, biases and dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(6, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.drop = nn.Dropout(0.5)
        self.back = nn.Linear(10, 6)
        self.back.weight = nn.Parameter(self.back.weight.detach())
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.drop(self.norm(self.embed(x)).tanh())))


def batch(step: int) -> Tensor:
    """All workers' samples of a step: [SAMPLES, 6]."""
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean(1)


def share(step: int, rank: int, workers: int) -> Tensor:
    """Uneven shares: the first has twice as many samples as each of the others, roughly."""
    sizes = [SAMPLES // (workers + 1)] * workers
    sizes[0] += SAMPLES - sum(sizes)
    return batch(step).split(sizes)[rank]


def rate(step: int) -> float:
    return 0.02 / (1 + step // 20)


def step_of(zo: ZerothOrder, step: int):
    x = share(step, zo.place.data_rank, zo.place.data_workers)
    zo.lr = rate(step)
    return zo.step(lambda m: losses_of(m, x).mean(), count=len(x))


# -- against the reference --------------------------------------------------------------------------------------------


def expected(config: ZerothConfig, steps: int) -> list[Tensor]:
    """The reference: the weights after `steps` steps on the joined data. A step's update has the rate of that step."""
    model = Net().eval()
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    noise = Noise(config.seed, CPU)

    def z(step: int, tensor: int) -> Tensor:
        w = weights[tensor]
        return noise.chunk(step, tensor, 0, w.numel()).view(w.shape).to(w.dtype)

    def mean_loss(step: int, sign: int) -> float:
        moved, x = [w + sign * config.eps * z(step, i) for i, w in enumerate(weights)], batch(step)
        values = torch.func.functional_call(model, dict(zip(names, moved, strict=True)), (x,))
        return float((values - x.sum(1, keepdim=True)).pow(2).mean())

    with torch.no_grad():
        for step in range(steps):
            g = (mean_loss(step, 1) - mean_loss(step, -1)) / (2 * config.eps)
            for i, w in enumerate(weights):
                weights[i] = w - rate(step) * g * z(step, i)
    return weights


def on_mesh(rank: int, world_size: int) -> tuple[list[str], list]:
    model = Net()
    if rank:
        model.back.bias.data.fill_(rank)  # rank 0's are taken
    zo = ZerothOrder(model, CONFIG, lr=1.0, timeout=60)
    hashes = []
    for step in range(STEPS):
        step_of(zo, step)
        hashes.append(digest(list(model.parameters())))
    zo.finish()
    zo.close()
    return hashes, [p.detach() for p in model.parameters()]


STEPS, CONFIG = 30, ZerothConfig(seed=3)


@pytest.mark.parametrize("workers", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
def test_every_mesh_gives_what_one_process_would(workers):
    """[D, 1] and [D, 2] for D of 1 to 3, to 1e-12, and with the same bits on all workers after every step."""
    results = [on_mesh(0, 1)] if workers == 1 else run_distributed(on_mesh, workers, timeout=240)
    hashes, params = results[0]
    assert all(result[0] == hashes for result in results)
    assert len(set(hashes)) == STEPS, "every step moves the weights"
    torch.testing.assert_close(params, expected(CONFIG, STEPS), rtol=0, atol=1e-12)


def test_noise_is_free_of_order_and_can_be_sliced():
    noise, again = Noise(0, CPU), Noise(0, CPU)
    pieces = [noise.chunk(3, 2, number, CHUNK) for number in (0, 1)]
    assert torch.equal(again.chunk(3, 2, 1, CHUNK), pieces[1]) and torch.equal(again.chunk(3, 2, 0, CHUNK), pieces[0])
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = torch.stack([*(noise.chunk(*key, 1000) for key in keys), Noise(1, CPU).chunk(0, 0, 0, 1000)])
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlation.abs().max() < 0.15
    assert abs(float(pieces[0].mean())) < 0.005 and abs(float(pieces[0].var()) - 1) < 0.01


def test_a_tensor_of_several_chunks_is_perturbed_and_updated_as_a_whole():
    model = nn.Linear(1100, 1000, bias=False)
    start = model.weight.detach().clone()
    zo = ZerothOrder(model, ZerothConfig(eps=0.5), lr=1.0)
    seen = []

    def loss(m: nn.Module) -> float:
        seen.append(m.weight.detach().clone())
        return 1.0 if len(seen) == 1 else 0.0

    zo.step(loss, count=1)
    z = torch.cat([Noise(0, CPU).chunk(0, 0, i, n) for i, n in enumerate((CHUNK, 1_100_000 - CHUNK))])
    z = z.view(start.shape)
    torch.testing.assert_close(seen, [start + 0.5 * z, start - 0.5 * z])
    torch.testing.assert_close(model.weight.detach(), start - z)  # g = (1 - 0) / (2 eps) = 1


# -- losses that are not finite -------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_loss_that_is_not_finite_on_one_worker_drops_the_step_for_all(rank: int):
    model = Net()
    zo = ZerothOrder(model, lr=0.01, timeout=60)
    hashes = []
    for step in range(12):
        bad = rank == 1 and step == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = zo.step(lambda m, step=step, bad=bad: math.nan if bad else losses_of(m, batch(step)).mean(), 4)
        assert result.dropped == (step == 2)
        hashes.append(digest(list(model.parameters())))
    zo.close()
    assert total_world_size(hashes) == [hashes] * 2
    assert hashes[1] == hashes[2] and len(set(hashes)) == 11, "nothing moved"


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


@on_ranks(4)
def test_a_step_sends_three_numbers_to_each_worker_in_one_collective(rank: int):  # noqa: ARG001
    model = nn.Linear(1000, 10)
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
    assert called == ["torch.float64 (4, 3)"] * 3 and zo.stats.bytes_sent == 3 * 24


# -- what is refused, and what is changed while it measures ---------------------------------------------------------


def frozen_but(part: str) -> Net:
    """Parameters that have it in their names are trained."""
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(part in name)
    return model


def test_a_step_leaves_modes_frozen_tensors_and_after_a_loss_that_fails_all_weights_as_they_were():
    model = Net().train()
    model.norm.eval()
    zo = ZerothOrder(model, lr=0.1)
    modes = []
    zo.step(lambda m: modes.append([x.training for x in m.modules()]) or 1.0, 1)
    assert not any(any(mode) for mode in modes) and model.drop.training and model.training and not model.norm.training
    model = Net()
    before, at = digest(list(model.parameters())), [p.data_ptr() for p in model.parameters()]
    zo = ZerothOrder(model, lr=0.1)
    with pytest.raises(ZeroDivisionError):
        zo.step(lambda m: 1 / 0, 1)
    assert digest(list(model.parameters())) == before and [p.data_ptr() for p in model.parameters()] == at
    model = frozen_but("back.")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zo = ZerothOrder(model, lr=0.1)
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"back.weight", "back.bias"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ZerothConfig(eps=0.0), "eps=0.0: give a number above 0"),
        (lambda: ZerothConfig(eps="1e-3"), "eps='1e-3'"),  # pyright: ignore[reportArgumentType]
        (lambda: ZerothConfig(seed=-1), "seed=-1"),
        (
            lambda: Place(0, 2).combine([[1.0, 0.0, 2.0], [0.0, 1.0, 3.0]]),
            "rank 0 had 2 samples and rank 1 3: a pair takes the same batch",
        ),
        (lambda: ZerothOrder(Net().requires_grad_(False), lr=0.1), "nothing to train"),
        (lambda: ZerothOrder(Net(), lr=math.inf).step(lambda m: 1.0, 1), "lr=inf: give a finite number"),
        (lambda: ZerothOrder(Net(), lr=0.1).step(lambda m: 1.0, -1), "count=-1"),
        (lambda: ZerothOrder(Net(), lr=0.1).step(lambda m: torch.ones(2), 1), r"the loss has shape \(2,\)"),
    ],
)
def test_mistakes_are_told_in_one_line(build: Callable, message: str):
    with pytest.raises(UserError, match=message) as found:
        build()
    assert "\n" not in str(found.value)


def test_two_neighbours_take_the_sides_of_one_share_of_the_data():
    places = [Place(rank, 4) for rank in range(4)]
    assert [(p.data_rank, *p.signs) for p in places] == [(0, 1), (0, -1), (1, 1), (1, -1)]
    assert {p.data_workers for p in places} == {2}


DIFFERENCES = {
    "seed": "seed=0",
    "frozen": "5 tensors, against 3",
    "dtype": "'torch.float64'), against ((",
    "device": "z drawn on cpu, against z drawn on a GPU",
}


@on_ranks(2)
def test_workers_that_differ_are_refused(rank: int):
    for what, message in DIFFERENCES.items():
        config = ZerothConfig(seed=rank if what == "seed" else 0)
        model = frozen_but("weight") if what == "frozen" and rank else Net()
        model = model.bfloat16() if what == "dtype" and rank else model
        kind = "a GPU" if what == "device" and rank else "cpu"
        with mock.patch.object(Noise, "kind", kind), pytest.raises(UserError) as told:
            ZerothOrder(model, config, lr=0.1, timeout=60)
        assert str(told.value).startswith("workers differ: rank 0 has") and message in str(told.value)


def test_nobody_trains_alone_where_others_were_started(monkeypatch: pytest.MonkeyPatch):
    """But a list may be replayed."""
    zo, other = ZerothOrder(Net(), lr=0.1), ZerothOrder(Net(), lr=0.1)
    zo.step(lambda m: 1.0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    other.replay(zo.log)
    with pytest.raises(UserError, match="WORLD_SIZE=2, but torch.distributed is not initialized"):
        zo.step(lambda m: 1.0, 1)


@on_ranks(2, expect_death=(1,))
def test_a_worker_that_is_gone_is_named(rank: int):
    zo = ZerothOrder(Net(), lr=0.1, timeout=3)
    if rank == 1:
        os._exit(0)
    with pytest.raises(CollectiveError, match="^rank 0: the scalars of step 0 did not come; no answer from rank 1"):
        zo.step(lambda m: 1.0, 1)


# -- resuming and replaying -----------------------------------------------------------------------------------------


def interrupted(rank: int, world_size: int, folder: str) -> tuple[list, list, bytes]:
    def new():
        model = Net()
        return model, ZerothOrder(model, lr=0.01, timeout=60)

    (model, zo), (other, resumed) = new(), new()
    for step in range(7):
        step_of(zo, step)
    other.back.bias.data.fill_(7.0)
    assert save(folder, model, None, zo, step=7) and load(folder, other, None, resumed) == 7
    for step in range(7, 15):
        for each in (zo, resumed):
            step_of(each, step)
    zo.finish()
    resumed.finish()
    numbers = zo.log.g.tobytes()
    assert resumed.log.beyond(zo.log) == [], "the same, bit for bit"
    return [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], numbers


def test_a_run_resumes_and_replays_bit_for_bit(tmp_path):
    for unbroken, resumed, numbers in run_distributed(interrupted, 2, str(tmp_path / "checkpoints")):
        assert len(numbers) == 8 * 15 and all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
    log = ScalarLog(0)
    log.g.frombytes(numbers)
    log.lrs = [(0, 0.02)]
    log.save(tmp_path / "run")
    assert (tmp_path / "run").stat().st_size < 8 * 15 + 200
    model = Net()
    zo = ZerothOrder(model, lr=1.0)
    zo.replay(ScalarLog.load(tmp_path / "run"))
    assert all(torch.equal(p.detach(), u) for p, u in zip(model.parameters(), unbroken, strict=True))
    assert zo.steps == 15


def test_a_worker_that_is_behind_replays_the_rest(tmp_path):
    first, second = Net(), Net()
    ahead, behind = ZerothOrder(first, lr=0.1), ZerothOrder(second, lr=0.1)
    for step in range(6):
        if step == 3:
            ahead.lr = 0.05
        x = batch(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ahead.step(lambda m, x=x, step=step: losses_of(m, x).mean() if step != 4 else math.nan, SAMPLES)
        if step == 2:
            behind.replay(ahead.log)
    ahead.log.save(tmp_path / "log")
    behind.replay(ScalarLog.load(tmp_path / "log"))
    assert any(math.isnan(g) for g in behind.log.g), "a dropped step is part of the list"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_scalars_of_another_run_are_refused(tmp_path):
    zo = ZerothOrder(Net(), lr=0.1)
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    zo.log.save(tmp_path / "log")
    log = ScalarLog.load(tmp_path / "log")
    with pytest.raises(UserError, match="scalars are of seed=0, here it is 1"):
        ZerothOrder(Net(), ZerothConfig(seed=1), lr=0.1).replay(log)
    other = ZerothOrder(Net(), lr=0.1)
    other.step(lambda m: losses_of(m, batch(1)).mean(), SAMPLES)
    with pytest.raises(UserError, match="of another run than this one"):
        other.replay(log)
    (tmp_path / "log").write_bytes((tmp_path / "log").read_bytes()[:-3])
    with pytest.raises(UserError, match="no whole list of a zeroth-order run's scalars"):
        ScalarLog.load(tmp_path / "log")
    with pytest.raises(UserError, match=r"the checkpoint has eps=0.001, here 0.1: resume with its settings"):
        ZerothOrder(Net(), ZerothConfig(eps=0.1), lr=0.1).load_state_dict(zo.state_dict())
