"""Buffers that are not finite from the start, as a causal mask of -inf, and buffers that become so."""

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core import CO2, CO2Config, CompressionConfig, DivergedError, load, save
from core.baselines import LocalSGD, SlowMo
from core.baselines.ddp import DDP
from core.baselines.local import DiLoCo, OverlapLocalSGD
from core.nodes import node_mesh
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import run_cases

INF, NAN = math.inf, math.nan


def causal() -> Tensor:
    return torch.triu(torch.full((4, 4), -INF), 1)


CONSTANTS: dict[str, Callable[[], Tensor]] = {
    "causal": causal,
    "half": lambda: causal().half(),
    "bfloat16": lambda: causal().bfloat16(),
    "double": lambda: causal().double(),
    "nan": lambda: torch.full((3,), NAN),
    "both infinities": lambda: torch.tensor([INF, -INF, 0.1, NAN]),
    "scalar": lambda: torch.tensor(-INF),
    "complex": lambda: torch.tensor([complex(INF, 0.3), complex(0.1, NAN)]),
    "float8": lambda: torch.tensor([0.5, NAN]).to(torch.float8_e5m2),
    "not contiguous": lambda: causal().t(),
    "finfo.min": lambda: torch.triu(torch.full((4, 4), torch.finfo(torch.float32).min), 1),
    "thirds": lambda: torch.tensor([0.1, 1 / 3, 1e-30, 3e38]),  # whose sum over three workers is rounded, or overflows
}
PLAIN = {name: c for name, c in CONSTANTS.items() if name not in ("complex", "float8")}


def masked(constants: dict[str, Callable[[], Tensor]] = CONSTANTS) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    for name, make in constants.items():
        net.register_buffer("of " + name.replace(".", " "), make())
    return net


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


METHODS: dict[str, Callable[..., Any]] = {
    "co2": lambda net: CO2(net.parameters(), CO2Config.paper(2), buffers=net.buffers()),
    "keep_local": lambda net: CO2(
        net.parameters(), CO2Config(tau=2, merge="keep_local", outer_momentum=0.0), buffers=net.buffers()
    ),
    "int4": lambda net: CO2(
        net.parameters(),
        replace(CO2Config.recommended(), tau=2, delay=1, compression=CompressionConfig("int4")),
        buffers=net.buffers(),
    ),
    "lgreco": lambda net: LocalSGD(
        net.parameters(), 2, compression=CompressionConfig("lgreco", like="int4"), buffers=net.buffers()
    ),
    "diloco": lambda net: DiLoCo(net.parameters(), 2, buffers=net.buffers()),
    "local": lambda net: LocalSGD(net.parameters(), 2, buffers=net.buffers()),
    "slowmo": lambda net: SlowMo(net.parameters(), 2, buffers=net.buffers()),
    "overlap": lambda net: OverlapLocalSGD(net.parameters(), 2, buffers=net.buffers()),
    "shard": lambda net: CO2(net.parameters(), CO2Config.paper(2), shard=True, buffers=net.buffers()),
    "ddp": lambda net: DDP(net),
}


@on_ranks(3, timeout=120)
def test_buffers_that_nobody_changes_keep_their_bits_finite_or_not(rank: int):
    found = []  # methods and buffers that are not as they began
    for kind, make in METHODS.items():
        net = masked(PLAIN if kind == "ddp" else CONSTANTS)  # DDP itself cannot hold all of them
        method = make(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        torch.manual_seed(rank)
        for _ in range(5):
            step(getattr(method, "model", net), optimizer)
            method.step()
        method.finish()
        found += [f"{kind}: parameters" for p in net.parameters() if not p.isfinite().all()]
        for name, constant in CONSTANTS.items():
            if hasattr(net, "of " + name.replace(".", " ")):
                bits = [
                    t.contiguous().view(-1).view(torch.uint8)
                    for t in (net.get_buffer("of " + name.replace(".", " ")), constant())
                ]
                found += [] if torch.equal(*bits) else [f"{kind}: {name}"]
        method.close()
    assert found == []


def named(rank: int, world_size: int, who: str, kind: str) -> list[str]:
    """The error of a buffer that turns NaN on one worker, or on all of them, and the warnings before it."""
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    net.register_buffer("mask", causal())
    method = METHODS[kind](net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for _ in range(40):
                step(net, optimizer)
                if who == "all" or rank == 1:
                    net[1].running_var[0] = NAN
                method.step()
        except DivergedError as error:
            method.leave()
            return [str(error), *(str(w.message) for w in told)]
    return ["no error"]


def test_a_buffer_that_turns_nan_on_one_worker_or_on_all_is_named_on_all():
    of_all, of_one = ("co2", "local", "shard"), ("co2", "slowmo", "overlap")
    found = run_cases(named, 2, [("all", kind) for kind in of_all] + [("one", kind) for kind in of_one])
    for error, *_ in itertools.chain(*found[:3]):
        assert "not finite; buffer 2 (Sequential.1.running_var), of shape [2]: lower" in error
    for first, second in found[3:]:
        assert first[0] == second[0]
        assert first[0].startswith("rank 1 is excluded") and "buffer 2 (Sequential.1.running_var)" in first[0]
        assert any("not finite, buffer 2 (Sequential.1.running_var" in told for told in first[1:])


@on_ranks(2)
def test_buffers_that_are_filled_later_become_their_mean(rank: int):
    """Buffers that begin as infinite or NaN, such as an observer's minimum and maximum."""
    net = nn.Linear(4, 2)
    for name, start in (("low", INF), ("high", -INF), ("cache", NAN), ("one", 1.0), ("count", 0.0)):
        net.register_buffer(name, torch.full((2,), start))
    method = CO2(net.parameters(), CO2Config(tau=2), buffers=net.buffers())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for number in range(6):
        step(net, optimizer)
        if number >= 2:
            net.low.fill_(-1.0 - rank), net.high.fill_(3.0 + rank), net.cache.fill_(7.0 * rank)
        if rank == 1:
            net.one.fill_(4.0)
        net.count.add_(1.0)
        method.step()
    method.finish()
    ends = {name: b.tolist() for name, b in net.named_buffers()}
    assert alike(*net.buffers()) and ends["one"][0] > 1.0 and ends["count"][0] > 0.0
    assert ends["low"] == [-1.5] * 2 and ends["high"] == [3.5] * 2 and ends["cache"] == [3.5] * 2


def test_a_checkpoint_is_written_of_a_model_with_a_mask(tmp_path: Path):
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    net.register_buffer("mask", causal())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    method = CO2(net.parameters(), CO2Config(tau=1), buffers=net.buffers())
    step(net, optimizer)
    method.step()
    assert save(tmp_path, net, optimizer, method, step=1)
    assert load(tmp_path, net, optimizer, method) == 1
    net[1].running_var[0] = NAN
    assert not save(tmp_path, net, optimizer, method, step=2)
    net[1].running_var[0], net.mask[0, 0] = 1.0, INF
    assert not save(tmp_path, net, optimizer, method, step=2)


@on_ranks(2)
def test_constants_stay_on_a_mesh_of_one_node(rank: int):
    """The sum is over the node's workers, too."""
    net = masked({name: CONSTANTS[name] for name in ("finfo.min", "thirds")})
    before = [b.clone() for b in net.buffers()]
    co2 = CO2(net.parameters(), CO2Config(tau=2), mesh=node_mesh("cpu", 2), buffers=net.buffers())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(8):
        step(net, optimizer)
        co2.step()
    co2.finish()
    assert all(torch.equal(b, c) for b, c in zip(net.buffers(), before, strict=True))


class Masked(nn.Module):
    """A model as minGPT's: a mask of ones per layer, which its own loop never changes, and one BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        for i in range(3):
            self.register_buffer(f"mask{i}", torch.tril(torch.ones(64, 64)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x)


SENT = [kind for kind in METHODS if kind not in ("keep_local", "diloco", "ddp")]


def rounds_of(rank: int, world_size: int, kind: str, changes_in: int | None = None, steps: int = 12) -> dict[str, Any]:
    """Bytes sent in each round, and the buffers at the end. Worker 1 doubles a mask before a step."""
    net = Masked()
    method, optimizer = METHODS[kind](net), torch.optim.SGD(net.parameters(), 0.01)
    torch.manual_seed(rank)
    sent = []
    for number in range(steps):
        net(torch.randn(3, 8)).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        if rank == 1 and number == changes_in:
            net.mask1.mul_(2.0)
        if method.step():
            sent.append(method.stats.bytes_sent)
    method.finish()
    method.close()
    return {"sent": sent, "tensors": [t.tolist() for t in (*net.buffers(), *net.parameters())], "mask": net.mask1}


def test_masks_are_not_sent_and_are_found_when_one_changes():
    masks, cases = 3 * 64 * 64 * 4, [*itertools.product(SENT, (None, 7, 11))]
    found = run_cases(rounds_of, 2, cases)
    for kind, calm, late, last in zip(SENT, found[::3], found[1::3], found[2::3], strict=True):
        for seen in calm:  # the first rounds send everything
            assert max(seen["sent"]) > masks > 20 * min(seen["sent"][3:]), kind
        for ends in (calm, late, last):
            assert ends[0]["tensors"] == ends[1]["tensors"], kind
        assert torch.equal(calm[0]["mask"], torch.tril(torch.ones(64, 64))), kind
        for ends in (late, last):  # the average of one and two
            assert torch.equal(ends[0]["mask"], 1.5 * torch.tril(torch.ones(64, 64))), kind
        assert late[0]["sent"][-1] > 64 * 64 * 4 > 3 * late[0]["sent"][2], kind


def resumed(rank: int, world_size: int, kind: str, at: int, changes_in: int) -> list[Any]:
    """Bytes sent from the second round after step `at` on, and the tensors at the end: of a run and a resumed one.

    The resumed run makes its mask anew from other random numbers, as random Fourier features do.
    """
    found = []
    state, saved, generator = {}, {}, None
    for again in (False, True):
        net = Masked()
        net.mask0.copy_(torch.rand(64, 64, generator=torch.Generator().manual_seed(int(again))))
        method = METHODS[kind](net)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        torch.manual_seed(rank)
        if again:
            net.load_state_dict(saved), method.load_state_dict(state), torch.set_rng_state(generator)
        sent = []
        for number in range(at if again else 0, 12):
            if number == at and not again:
                state, generator = method.state_dict(), torch.get_rng_state()
                saved = {name: t.clone() for name, t in net.state_dict().items()}
            net(torch.randn(3, 8)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            if rank == 1 and number == changes_in:
                net.mask1.mul_(2.0)
            if method.step() and number >= at:
                sent.append(method.stats.bytes_sent)
        method.finish()
        method.close()
        found.append([sent[1:], [t.tolist() for t in (*net.buffers(), *net.parameters())]])
    return found


def test_a_resumed_run_sends_the_same_buffers():
    cases = [(kind, *when) for kind in ("co2", "int4", "shard") for when in ((6, 5), (7, 6), (1, 9))]
    for case, of_case in zip(cases, run_cases(resumed, 2, cases), strict=True):
        for plain, again in of_case:
            assert plain == again, case


@on_ranks(2)
def test_batchnorm_is_averaged_from_its_first_step_on(rank: int):
    """Its first round follows a finish() without a step."""
    net = Masked()
    method = LocalSGD(net.parameters(), 1, buffers=net.buffers())
    method.finish()
    net(torch.full((2, 8), float(rank)))
    own = torch.stack(total_world_size(net.norm.running_mean.clone()))
    method.step()
    method.finish()
    assert not torch.equal(*own) and alike(net.norm.running_mean)
    torch.testing.assert_close(net.norm.running_mean, own.mean(0))
