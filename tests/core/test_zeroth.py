"""Zeroth-order training against its reference, on one process and on several."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CollectiveError, DivergedError, UserError
from core.testing import run_distributed
from core.zeroth import ScalarLog, ZerothConfig, ZerothOrder
from core.zeroth.exchange import Exchange, Place
from core.zeroth.noise import CHUNK, Noise, mix
from core.zeroth.order import digest
from core.zeroth.reference import mezo, train

CPU = torch.device("cpu")
SAMPLES = 12  # of a step, over all workers


class Net(nn.Module):
    """Tied weights, a norm, biases and dropout."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(6, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.drop = nn.Dropout(0.5)
        self.back = nn.Linear(10, 6)
        self.back.weight = nn.Parameter(self.back.weight.detach())
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.drop(self.norm(self.embed(x)).tanh())))


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """All workers' samples of a step: [SAMPLES, 6]."""
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1000 + step), dtype=dtype)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).pow(2).mean(1)


def share(step: int, rank: int, workers: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uneven shares: the first has twice as many samples as each of the others, roughly."""
    sizes = [SAMPLES // (workers + 1)] * workers
    sizes[0] += SAMPLES - sum(sizes)
    return batch(step, dtype).split(sizes)[rank]


def rate(step: int) -> float:
    return 0.02 / (1 + step // 20)


def step_of(zo: ZerothOrder, model: nn.Module, step: int, dtype: torch.dtype = torch.float64):
    x = share(step, zo.data_rank, zo.data_workers, dtype)
    zo.lr = rate(step)
    return zo.step(lambda m: losses_of(m, x).mean(), count=len(x))


def expected(config: ZerothConfig, groups: int, steps: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """By the reference, on the joined data."""
    model = Net(dtype).eval()
    names = [name for name, _ in model.named_parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    noise = Noise(config.seed, CPU)

    def z(step: int, direction: int, tensor: int) -> Tensor:
        w = weights[tensor]
        return noise.chunk(step, direction, tensor, 0, w.numel(), CPU).view(w.shape).to(w.dtype)

    def loss(moved: list[Tensor], step: int, group: int) -> tuple[float, float]:
        x = share(step, group, groups, dtype)
        values = torch.func.functional_call(model, dict(zip(names, moved, strict=True)), (x,))
        found = (values - x.sum(1, keepdim=True)).pow(2).mean(1)
        return float(found.sum()), len(x)

    with torch.no_grad():
        how = {"groups": groups, "directions": config.directions, "delay": config.delay}
        return train(weights, loss, z, lr=rate, eps=config.eps, steps=steps, weight_decay=config.weight_decay, **how)


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


STEPS = 50, 8  # of the first, and of the others
CONFIGS = [
    ZerothConfig(weight_decay=0.1, seed=3),
    ZerothConfig(pairs=False, weight_decay=0.1),
    ZerothConfig(delay=1),
    ZerothConfig(directions=2, pairs=False, delay=1),
    ZerothConfig(directions=6),
]


@pytest.mark.parametrize("workers", [1, 2, 4, 6])
def test_every_mesh_gives_what_one_process_would(workers):
    """[D, 1] and [D, 2] for D of 1 to 6, to 1e-12, and with the same bits on all workers after every step."""
    configs = [c for c in CONFIGS if c.directions != 6 or workers == 6]
    results = [on_mesh(0, 1, configs)] if workers == 1 else run_distributed(on_mesh, workers, configs, timeout=240)
    for number, config in enumerate(configs):
        pairs, steps = workers % 2 == 0 if config.pairs is None else config.pairs, STEPS[min(number, 1)]
        reference = expected(config, workers // 2 if pairs else workers, steps)
        hashes, params = results[0][number]
        assert all(result[number][0] == hashes for result in results), config
        assert len(set(hashes)) == steps, "every step moves the weights, with delay but the first"
        torch.testing.assert_close(params, reference, rtol=0, atol=1e-12, msg=lambda m, c=config: f"{c}: {m}")


def test_mezo_in_place_with_the_same_directions():
    """100 steps in float32 to 1e-5: what is left is what going back in place rounds, and the losses, over eps."""
    model, config = Net(torch.float32), ZerothConfig(eps=1e-2)
    zo = ZerothOrder(model, config, lr=0.005)
    theirs = Net(torch.float32).eval()
    weights = [p.detach() for p in theirs.parameters()]
    noise = Noise(0, CPU)

    def z(step: int, direction: int, tensor: int) -> Tensor:
        return noise.chunk(step, direction, tensor, 0, weights[tensor].numel(), CPU).view(weights[tensor].shape)

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
    """The mean of g z over 20,000 directions is the gradient of a quadratic, within 3 standard deviations of a mean of
    so many; the central difference is exact there."""
    model = nn.Linear(8, 1, bias=False).double()
    target = torch.linspace(-1, 1, 8, dtype=torch.float64)
    curvature = torch.arange(1.0, 9.0, dtype=torch.float64)
    gradient = curvature * (model.weight.detach()[0] - target)
    config = ZerothConfig(directions=100, eps=1e-2)
    zo = ZerothOrder(model, config, lr=0.0)
    for _ in range(200):
        zo.step(lambda m: (curvature * (m.weight[0] - target) ** 2).sum() / 2, count=1)
    z = torch.stack([zo.weights.noise.chunk(t, j, 0, 0, 8, CPU) for t in range(200) for j in range(100)]).double()
    estimates = torch.tensor(zo.log.g)[:, None] * z
    deviation = estimates.std(0) / len(z) ** 0.5
    assert ((estimates.mean(0) - gradient).abs() < 3 * deviation).all()
    assert (deviation < 0.1 * gradient.norm()).all()


def test_noise_is_free_of_order_and_can_be_sliced():
    noise, again = Noise(0, CPU), Noise(0, CPU)
    pieces = [noise.chunk(3, 0, 2, number, CHUNK, CPU) for number in (0, 1)]
    assert torch.equal(again.chunk(3, 0, 2, 1, CHUNK, CPU), pieces[1])
    assert torch.equal(again.chunk(3, 0, 2, 0, CHUNK, CPU), pieces[0])
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    drawn = torch.stack([noise.chunk(*key, 1000, CPU) for key in keys])
    drawn = torch.cat([drawn, Noise(1, CPU).chunk(0, 0, 0, 0, 1000, CPU)[None]])
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlation.abs().max() < 0.15
    assert abs(float(pieces[0].mean())) < 0.005 and abs(float(pieces[0].var()) - 1) < 0.01
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
    z = torch.cat([Noise(0, CPU).chunk(0, 0, 0, i, n, CPU) for i, n in enumerate((CHUNK, 1_100_000 - CHUNK))])
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


@pytest.mark.parametrize("delay", [0, 1])
def test_the_last_update_is_applied(delay):
    assert not torch.equal(after(ZerothConfig(delay=delay), 1), after(ZerothConfig(delay=delay), 0))


def test_seed_0_is_a_seed():
    assert torch.equal(after(ZerothConfig(seed=0), 3), after(ZerothConfig(seed=0), 3))
    assert not torch.equal(after(ZerothConfig(seed=0), 3), after(ZerothConfig(seed=1), 3))


def test_a_slope_of_zero_does_not_skip_the_weight_decay():
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zo = ZerothOrder(model, ZerothConfig(weight_decay=0.5), lr=0.1)
    assert zo.step(lambda m: 1.0, count=1).g == (0.0,)
    for name, p in model.named_parameters():
        decayed = 0.95 if p.ndim >= 2 else 1.0  # neither biases nor norms
        torch.testing.assert_close(p.detach(), before[name] * decayed)


# -- losses that are not finite -------------------------------------------------------------------------------------


def one_is_nan(rank: int, world_size: int, always: bool) -> list[str]:
    model = Net()
    zo = ZerothOrder(model, ZerothConfig(weight_decay=0.1), lr=0.01, timeout=60)
    hashes = []
    for step in range(12):
        bad = rank == 1 and (always or step == 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = zo.step(lambda m, step=step, bad=bad: math.nan if bad else losses_of(m, batch(step)).mean(), 4)
        assert result.dropped == (always or step == 2)
        hashes.append(digest(list(model.parameters())))
    zo.close()
    return hashes


def test_a_loss_that_is_not_finite_on_one_worker_drops_the_step_for_all():
    first, second = run_distributed(one_is_nan, 2, False)
    assert first == second
    assert first[1] == first[2], "nothing moved, nor decayed"
    assert len(set(first)) == 11


def test_losses_that_stay_so_end_the_run():
    with pytest.raises(RuntimeError, match="DivergedError: the losses of 10 steps up to step 9 are not finite"):
        run_distributed(one_is_nan, 2, True)


def test_a_dropped_step_is_told_once_in_a_row():
    zo = ZerothOrder(Net(), lr=0.1)
    with pytest.warns(UserWarning, match="step 0 is dropped") as told:
        for _ in range(3):
            zo.step(lambda m: math.inf, 1)
    assert len(told) == 1
    with pytest.raises(DivergedError, match="up to step 9 are not finite"):
        for _ in range(7):
            zo.step(lambda m: math.nan, 1)


# -- traffic --------------------------------------------------------------------------------------------------------


def collectives_of_a_step(rank: int, world_size: int, width: int) -> tuple[list[str], int, int]:
    model = nn.Linear(width, 10)
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
    return called, zo.bytes_sent, sum(p.numel() for p in model.parameters())


def test_a_step_sends_three_numbers_to_each_worker_in_one_collective():
    for width in (10, 10_000):
        for called, sent, _ in run_distributed(collectives_of_a_step, 4, width):
            assert called == ["torch.float64 (4, 3)"] * 3
            assert sent == 3 * 24 <= 4096


# -- resuming and replaying -----------------------------------------------------------------------------------------


def interrupted(rank: int, world_size: int, config: ZerothConfig) -> tuple[list, list, bytes]:
    def new():
        model = Net()
        return model, ZerothOrder(model, config, lr=0.01, timeout=60)

    (model, zo), (other, resumed) = new(), new()
    for step in range(7):
        step_of(zo, model, step)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(zo.state_dict())
    for step in range(7, 15):
        for each, net in ((zo, model), (resumed, other)):
            step_of(each, net, step)
    zo.finish()
    resumed.finish()
    numbers = zo.log.g.tobytes()
    assert resumed.log.begins_with(zo.log)
    return [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], numbers


def test_a_run_resumes_where_scalars_were_in_flight_and_replays_bit_for_bit(tmp_path):
    config = ZerothConfig(delay=1, weight_decay=0.1, directions=2, pairs=False)
    for unbroken, resumed, numbers in run_distributed(interrupted, 2, config):
        assert len(numbers) == 8 * 2 * 15 and all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
    log = ScalarLog(0, 2, 0.1)
    log.g.frombytes(numbers)
    log.lrs = [(0, 0.02)]
    log.save(tmp_path / "run")
    assert (tmp_path / "run").stat().st_size < 8 * 2 * 15 + 200
    model = Net()
    zo = ZerothOrder(model, replace(config, delay=0), lr=1.0)
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
    ahead.save_scalars(tmp_path / "log")
    behind.replay(ScalarLog.load(tmp_path / "log"))
    assert any(math.isnan(g) for g in behind.log.g), "a dropped step is part of the list"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_scalars_of_another_run_are_refused(tmp_path):
    zo = ZerothOrder(Net(), lr=0.1)
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    zo.save_scalars(tmp_path / "log")
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
    for text in (b"", b"[]\n", b"{}\n", b'{"format": 1}\n', b"\xff\n"):
        (tmp_path / "log").write_bytes(text)
        with pytest.raises(UserError, match="no whole list"):
            ScalarLog.load(tmp_path / "log")
    with pytest.raises(UserError, match=r"the checkpoint has eps=0.001, here 0.1: resume with its settings"):
        ZerothOrder(Net(), ZerothConfig(eps=0.1), lr=0.1).load_state_dict(zo.state_dict())


# -- what is refused, and what is changed while it measures ---------------------------------------------------------


def test_dropout_is_off_while_a_step_measures_and_on_again_after_it():
    model = Net().train()
    model.norm.eval()
    zo = ZerothOrder(model, lr=0.1)
    modes = []
    zo.step(lambda m: modes.append([x.training for x in m.modules()]) or 1.0, 1)
    assert not any(any(mode) for mode in modes)
    assert model.drop.training and model.training and not model.norm.training


def test_weights_are_as_they_were_after_a_loss_that_fails():
    model = Net()
    before, at = digest(list(model.parameters())), [p.data_ptr() for p in model.parameters()]
    zo = ZerothOrder(model, lr=0.1)
    with pytest.raises(ZeroDivisionError):
        zo.step(lambda m: 1 / 0, 1)
    assert digest(list(model.parameters())) == before and [p.data_ptr() for p in model.parameters()] == at


def test_a_filter_leaves_the_rest_alone():
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zo = ZerothOrder(model, lr=0.1, trainable=lambda name, p: name.startswith("back."))
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"back.weight", "back.bias"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ZerothConfig(eps=0.0), "eps=0.0: give a number above 0"),
        (lambda: ZerothConfig(eps=math.nan), "eps=nan"),
        (lambda: ZerothConfig(directions=0), "directions=0: give a whole number"),
        (lambda: ZerothConfig(delay=2), "delay=2: give 0 or 1"),  # pyright: ignore[reportArgumentType]
        (lambda: ZerothConfig(weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: ZerothConfig(seed=-1), "seed=-1"),
        (lambda: ZerothOrder(Net(), ZerothConfig(pairs=True), lr=0.1), "pairs=True with 1 worker: a pair is two"),
        (lambda: ZerothOrder(Net().requires_grad_(False), lr=0.1), "nothing to train"),
        (lambda: ZerothOrder(Net(), lr=0.1, trainable=lambda name, p: False), "nothing to train"),
        (lambda: ZerothOrder(nn.BatchNorm1d(3), lr=0.1), "BatchNorm whose statistics have seen no data"),
        (
            lambda: ZerothOrder(nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), lr=0.1),
            "0 is a BatchNorm without running statistics",
        ),
        (lambda: ZerothOrder(Net(), lr=math.inf).step(lambda m: 1.0, 1), "lr=inf: give a finite number"),
        (lambda: ZerothOrder(Net(), lr=0.1).step(lambda m: 1.0, -1), "count=-1"),
        (lambda: ZerothOrder(Net(), lr=0.1).step(lambda m: torch.ones(2), 1), r"the loss has shape \(2,\)"),
    ],
)
def test_mistakes_are_told_in_one_line(build: Callable, message: str):
    with pytest.raises(UserError, match=message) as found:
        build()
    assert "\n" not in str(found.value)


def test_batch_norm_with_trained_statistics_is_taken():
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(5, 3))
    assert ZerothOrder(norm, lr=0.1).step(lambda m: float(m(torch.ones(2, 3)).sum()), 2).step == 0


def test_what_16_bits_swallow_is_told():
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(100, 100).bfloat16()

    with pytest.warns(UserWarning, match="swallows the perturbation of 100% of the elements: raise eps=1e-06"):
        ZerothOrder(net(), ZerothConfig(eps=1e-6), lr=1.0).step(lambda m: 0.0, 1)
    values = iter((1e-3, 0.0))
    with pytest.warns(UserWarning, match="swallows the update of .* raise lr"):
        ZerothOrder(net(), ZerothConfig(eps=1e-3), lr=1e-6).step(lambda m: next(values), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = iter((1.0, 0.0))
        ZerothOrder(net(), ZerothConfig(eps=1e-2), lr=1e-3).step(lambda m: next(values), 1)


def test_where_workers_cannot_be_shared_out():
    with pytest.raises(UserError, match="directions=2 over 3 groups of workers with data of their own"):
        Place.make(0, 3, ZerothConfig(directions=2))
    with pytest.raises(UserError, match="pairs=True with 3 workers: a pair is two, start an even number"):
        Place.make(0, 3, ZerothConfig(pairs=True))
    places = [Place.make(rank, 4, ZerothConfig()) for rank in range(4)]
    assert [(p.data_rank, p.data_workers, p.signs) for p in places] == [
        (0, 2, (1,)),
        (0, 2, (-1,)),
        (1, 2, (1,)),
        (1, 2, (-1,)),
    ]
    with pytest.raises(UserError, match="rank 0 had 2 samples and rank 1 3: a pair takes the same batch"):
        Place.make(0, 2, ZerothConfig()).combine([[1.0, 0.0, 2.0], [0.0, 1.0, 3.0]])


def differing(rank: int, world_size: int, what: str) -> str:
    config = ZerothConfig(seed=rank if what == "seed" else 0)
    chosen = (lambda name, p: "bias" not in name) if what == "filter" and rank else None
    kind = "a GPU" if what == "device" and rank else "cpu"
    try:
        with mock.patch("core.zeroth.order.kind_of", lambda device: kind):
            ZerothOrder(Net(), config, lr=0.1, trainable=chosen, timeout=60)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seed", "seed=0"),
        ("filter", "5 tensors, against 3"),
        ("device", "z drawn on cpu (with rng='host' all draw alike), against z drawn on a GPU"),
    ],
)
def test_workers_that_differ_are_refused(what, message):
    for text in run_distributed(differing, 2, what):
        assert text.startswith("workers differ: rank 0 has") and message in text and text.endswith("of rank 1")


def one_leaves(rank: int, world_size: int) -> str:
    zo = ZerothOrder(Net(), lr=0.1, timeout=3)
    if rank == 1:
        import os

        os._exit(0)
    try:
        zo.step(lambda m: 1.0, 1)
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_worker_that_is_gone_is_named():
    text = run_distributed(one_leaves, 2, expect_death=(1,))[0]
    assert text.startswith("rank 0: the scalars of step 0 did not come; no answer from rank 1")


def test_an_exchange_over_a_slow_link_takes_as_long():
    class Link:
        def reserve(self, nbytes: float) -> float:
            raise AssertionError("a lone worker sends nothing")

    assert Exchange([1.0, 2.0, 3.0], None, Link()).wait(0) == [[1.0, 2.0, 3.0]]
