"""What workers agree on: equal starts, replicas, schedules, and where to stop."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core import CO2, CO2Config, make_method
from core.baselines import LocalSGD
from core.comm import AsyncAllReduce
from core.config import CompressionConfig
from core.groups import broadcast
from core.guards.workers import (
    PARTS,
    REPAIR_EVERY,
    OutlierFilter,
    ReplicaChecksum,
    checksum,
    checksum_bits,
    checksum_of,
    equal,
)
from core.hooks import Requests
from core.nodes import node_mesh
from tests import problems
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import sgd_step


def test_what_a_gpu_tells_late_is_of_as_many_workers_as_there_were(monkeypatch: pytest.MonkeyPatch):
    """Elastic workers: three have agreed, and one of them is gone when that is heard."""
    monkeypatch.setattr("core.stats.read_blocks", lambda t: True)

    def of_three(device: torch.device) -> AsyncAllReduce:
        flight = AsyncAllReduce(device)
        flight.world_size = flight.places = flight.most = 3
        return flight

    hooks = [OutlierFilter(), ReplicaChecksum()]
    bare = problems.bare_co2([nn.Parameter(torch.ones(3))], allreduce=of_three, hooks=hooks)
    bare.scalars["settings"].copy_(torch.tensor([5.0, 25.0]))  # means, as of workers who all tell the same
    bare.scalars["replicas"].copy_(torch.tensor([7.0, 49.0]))
    bare.scalars["excluded"][2] = 1 / 3
    bare.rounds = 1
    bare._deliver_scalars()
    bare.allreduce.world_size = 2
    bare.rounds = 2
    with pytest.warns(UserWarning, match="rank 2 is excluded from the average of round 0"):
        bare._deliver_scalars()
    assert not bare.stats.drifted


def layers(*names: str) -> nn.Module:
    net = nn.Module()
    for name in names:
        net.add_module(name, nn.BatchNorm1d(3))
    return net


@on_ranks(2)
def test_tensors_in_another_order_are_refused_if_modules_hold_them(rank: int):
    """As of a model that is built from a set of names. A wrapper on one worker is none of this."""
    names, config = ("a", "b") if rank == 0 else ("b", "a"), CO2Config.paper(2)
    makers: list[Callable[[nn.Module], Any]] = [
        lambda net: CO2(net.parameters(), config),
        lambda net: LocalSGD(net.parameters(), 2),
        lambda net: LocalSGD([nn.Parameter(torch.ones(2))], 2, average=net),
        lambda net: make_method("ddp", net),
    ]
    for make in makers:
        said = problems.refusal(make, layers(*names))
        assert "rank 0 has Module.a.weight ((3,), 'torch.float32'), against Module.b.weight ((3,)" in said
    net = layers("a", "b")
    given = [p for name in names for p in net.get_submodule(name).parameters()]
    assert "against Module.b.weight ((3,)" in problems.refusal(CO2, given, config)
    buffers = [b for name in names for b in net.get_submodule(name).buffers()]
    said = problems.refusal(lambda: CO2(net.parameters(), config, buffers=buffers))
    assert "rank 0 has Module.a.running_mean ((3,), 'torch.float32'), against Module.b.running_mean ((3,)" in said
    wide = nn.Sequential(nn.Linear(3, 4 + rank), nn.Linear(4, 4))
    said = problems.refusal(CO2, wide.parameters(), config)
    assert said.startswith(
        "workers differ: rank 0 has Sequential.0.weight ((4, 3), 'torch.float32'), against Sequential."
    )
    shapes = [(2,), (3,)][:: 1 - 2 * rank]
    said = problems.refusal(CO2, [nn.Parameter(torch.ones(shape)) for shape in shapes], config)
    assert "rank 0 has ((2,), 'torch.float32'), against ((3,)" in said and "are the same in another order" in said
    wrapped = nn.Sequential(net) if rank else net
    CO2(wrapped.parameters(), config, buffers=wrapped.buffers()).close()


@on_ranks(2)
def test_workers_with_other_schedules_are_refused_when_their_first_round_lands(rank: int):
    schedule = lambda number: {"outer_lr": 1.0 if number < 2 else 0.5 + rank / 10}  # noqa: E731
    co2 = CO2(params := [nn.Parameter(torch.ones(3))], CO2Config(tau=1), schedule=schedule)
    differs = problems.refusal(problems.take_steps, co2, params, rank, range(9))
    assert "workers differ in their settings in round 2" in differs and f"'outer_lr': {0.5 + rank / 10}" in differs


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_replicas_that_drift_apart_are_noticed_and_made_equal_again(rank: int, workers: int):
    """One worker's outer iterate is moved by less than float32 shows in its norm; a mean of differences would keep it
    apart for ever. The workers of a node compare a part each, so it may take twice as long."""
    for kind in ("co2", "int8", "offload", "slowmo", "local") if workers == 2 else ("node",):
        mesh = node_mesh("cpu", 2) if kind == "node" else None
        params = [nn.Parameter(torch.linspace(-1, 1, 1000))]
        if mesh or kind == "offload":
            method: Any = CO2(params, CO2Config(tau=1, outer_momentum=0.0), mesh=mesh, offload=not mesh)
        else:
            config = CO2Config(
                tau=1, outer_momentum=0.0, compression=CompressionConfig(kind if kind == "int8" else "float32")
            )
            _, method = make_method("co2" if kind == "int8" else kind, nn.ParameterList(params), co2=config)
        drift, seen, longest = rank == workers // 2, [], PARTS * (2 if mesh else 1)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for number in range(3 * longest):
                if drift and number == 3 and "outer_iterate" in method.state:
                    method.allreduce.drain()
                    (method.share.g if mesh else method.state["outer_iterate"])[0].mul_(1 + 1e-6)
                with torch.no_grad():
                    params[0].sub_(0.01 * torch.sin(params[0] + (0 if mesh else rank)))
                method.step()
                seen.append(method.stats.drifted)
        method.finish()
        first = seen.index(1.0) if 1.0 in seen else None
        assert total_world_size(first) == [first] * workers, "all workers notice in the same round"
        assert first is None if kind == "local" else first is not None and 3 <= first <= 4 + longest, kind
        assert alike(params[0].detach()) and (mesh or len(caught) == (rank == 0 and kind != "local")), kind


@on_ranks(4)
def test_every_worker_of_a_node_compares_all_parts_of_its_share(rank: int):
    params = [nn.Parameter(torch.linspace(-1, 1, 1600))]
    co2 = CO2(params, CO2Config(tau=1, outer_momentum=0.0), mesh=node_mesh("cpu", 2))
    co2.rounds = 3 * PARTS
    if rank == 2:
        co2.share.g[0][60] += 1e-4  # x_{1,0}, of 800 elements: in part 1, which is odd
    seen = 0.0
    with warnings.catch_warnings(action="ignore"):
        for _ in range(2 * PARTS + 2):
            co2.step()
            seen = max(seen, co2.stats.drifted)
        co2.finish()
    assert seen == 1.0


@on_ranks(2)
def test_a_repair_leaves_alone_what_merge_keep_local_has_sent(rank: int):
    """Each worker's own parameters at the sending: with another's its progress would be added twice, or not at all."""
    traces = []
    for drift in (False, True):
        params = [nn.Parameter(torch.linspace(-1, 1, 1000))]
        co2 = CO2(params, CO2Config(tau=2, merge="keep_local", delay=1, outer_momentum=0.0, gap="none"))
        seen, trace = 0.0, []
        for step in range(4 * PARTS):
            if drift and rank and step == 6:
                co2.state["outer_iterate"][0].mul_(1 + 1e-6)
            with torch.no_grad():
                params[0].sub_(0.01 * torch.sin(params[0] + 3 * rank))
            co2.step()
            seen = max(seen, co2.stats.drifted)
            trace.append(params[0].detach().clone())
        assert bool(seen) is drift
        co2.finish()
        traces.append(torch.stack(trace))
    torch.testing.assert_close(*traces[::-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workers", [1, 2, 7, 128, 1024])
def test_checksums_are_exact_in_float32_and_differ_where_one_bit_does(workers: int):
    flats = [torch.randn(1000), torch.randn(70, dtype=torch.float64)]
    one = [checksum(flats, number, workers) for number in range(PARTS)]
    assert torch.equal(torch.stack(one), torch.stack([checksum(flats, PARTS + n, workers) for n in range(PARTS)]))
    assert workers * (2 ** checksum_bits(workers)) ** 2 <= 2**20 or checksum_bits(workers) == 1
    flats[0][500] = torch.nextafter(flats[0][500], torch.tensor(9.0))
    changed = [checksum(flats, number, workers) for number in range(PARTS)]
    assert sum(a != b for a, b in zip(one, changed, strict=True)) == 1
    c, d = float(one[0]), float(one[0]) + 1
    same = torch.tensor([workers * c, workers * c * c])
    other = torch.tensor([(workers - 1) * c + d, (workers - 1) * c * c + d * d])
    assert equal(same.tolist(), workers)
    assert equal(other.tolist(), workers) == (workers == 1)
    assert checksum_of({"a": 1.0}, workers) == checksum_of({"a": 1.0}, workers) < 2 ** checksum_bits(workers)


@on_ranks(2)
def test_a_second_drift_is_seen_but_not_repaired_within_a_hundred_rounds(rank: int):
    assert REPAIR_EVERY == 100
    params = [nn.Parameter(torch.linspace(-1, 1, 1000))]
    co2 = CO2(params, CO2Config(tau=1, outer_momentum=0.0))
    sent, seen = [], []
    for number in range(3 * PARTS):
        if rank and number in (3, PARTS + 8):
            co2.allreduce.drain()
            co2.state["outer_iterate"][0].mul_(1 + 1e-6)
        sgd_step(params, rank, number)
        with warnings.catch_warnings(action="ignore"):
            co2.step()
        sent.append(co2.stats.bytes_sent)
        seen.append(co2.stats.drifted)
    assert sum(count > sent[1] for count in sent) == 1, "one round carried the outer state, too"
    assert sum(seen[2 * PARTS :]) > 0


def asking(compression: Any) -> tuple[CO2, Requests]:
    requests = Requests("stop")
    config = CO2Config(tau=2, compression=CompressionConfig(compression))
    return CO2([nn.Parameter(torch.linspace(-1, 1, 3000))], config, hooks=[requests]), requests


@pytest.mark.parametrize(("workers", "compression"), [(2, "float32"), (3, "int8")])
@on_ranks()
def test_one_worker_that_asks_to_stop_is_heard_by_all_and_not_again_after_a_resume(
    rank: int, workers: int, compression: Any
):
    (co2, requests), (resumed, later) = (asking(compression) for _ in range(2))
    for step in range(10):
        if rank == 1 and step == 3:
            requests.ask("stop")
        problems.take_steps(co2, co2.trained, rank, [step])
        assert ("stop" in requests.granted) is (step > 4), "sent after step 4, landed after step 6"
        assert not co2.stats.drifted
    resumed.load_state_dict(co2.state_dict())
    resumed.step(), resumed.step()
    assert "stop" not in later.granted
    co2.finish()
    requests.answered("stop")
    for _ in range(2):
        co2.step(), co2.step()
        co2.finish()
    assert "stop" not in requests.granted


@on_ranks(2)
def test_requests_that_finish_carries_are_not_lost_and_one_to_stop_lasts_until_it_is_answered(rank: int):
    requests = Requests("stop", "save")
    co2 = CO2([nn.Parameter(torch.ones(3))], CO2Config(tau=2), hooks=[requests])
    for _ in range(5):
        co2.step()
    if rank == 1:  # behind the last boundary
        requests.ask("save"), requests.ask("stop")
    co2.finish()
    assert set(requests.granted) == {"save", "stop"}
    for _ in range(2):
        for _ in range(4):
            co2.step()
        co2.finish()
        assert set(requests.granted) == {"stop"}, "finish() was for an evaluation"


def base() -> list[Tensor]:
    """Of many types, with a scalar, an empty one and one that is not contiguous."""
    rows = torch.arange(6.0).view(2, 3)
    half, flags = torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([True, False])
    more = torch.tensor(7), torch.tensor(40), torch.zeros(0), torch.zeros(2, dtype=torch.cfloat)
    return [rows, rows.t().double() + 1, half, flags, *more]


CHANGES: dict[str, Callable[[list[Tensor]], Any]] = {
    "one bit": lambda t: t[2].view(torch.int16)[1:].bitwise_xor_(1),
    "two elements swapped": lambda t: t[3].copy_(t[3].flip(0)),
    "swapped between tensors, so that their sum stays": lambda t: (t[0][0, 1].zero_(), t[1][0, 0].fill_(2.0)),
    "the sign of a zero": lambda t: t[0][0, 0].fill_(-0.0),
    "two signs in float64, each the highest of 64 bits": lambda t: t[1][0].neg_(),
    "what weights of 1 and 3 would cancel": lambda t: t[0].view(torch.int32).view(-1)[:2].add_(torch.tensor([3, -1])),
    "two scalars, by 1 and by 31": lambda t: (t[4].add_(1), t[5].sub_(31)),
    "the last element": lambda t: t[-1][1].fill_(1j),
    "nothing": lambda t: None,
}


@on_ranks(3)
def test_tensors_are_sent_where_a_bit_of_them_differs_and_only_there(rank: int):
    """Each change is the last worker's alone."""
    send = dist.broadcast
    for name, change in CHANGES.items():
        tensors = base()
        if rank == 2:
            change(tensors)
        with mock.patch.object(dist, "broadcast", side_effect=send) as sent:
            broadcast(tensors, dist.group.WORLD, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        bits, wanted = ([t.contiguous().view(-1).view(torch.uint8) for t in some] for some in (tensors, base()))
        assert sent.call_count == (0 if name == "nothing" else len(tensors)) and all(map(torch.equal, bits, wanted)), (
            name
        )


TAKEN = inspect.signature(DistributedDataParallel).parameters


@pytest.mark.parametrize("method", ["co2", *(["ddp"] if "init_sync" in TAKEN else [])])  # torch 2.6 has none
@on_ranks(2)
def test_a_method_that_begins_alike_sends_no_model(rank: int, method: str):
    """All have one seed, or each has its own."""
    for seed, apart in ((0, False), (rank, True)):
        model = problems.small_net(seed=seed)
        # torch's own module states go through _broadcast_coalesced
        with (
            mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as ours,
            mock.patch.object(dist, "_broadcast_coalesced", side_effect=dist._broadcast_coalesced) as torchs,
        ):
            _, made = make_method(method, model)
        assert (ours.call_count + torchs.call_count > 0) is apart
        made.close()


@on_ranks(2)
def test_another_number_of_workers_is_told_when_the_method_is_made(rank: int):
    for given, tells in ((200, 2), rank == 0), ((2, 200), False), ((), False):
        with warnings.catch_warnings(record=True, action="always") as told:
            CO2(nn.Linear(2, 2).parameters(), CO2Config.recommended(*given, tau=2)).close()
        said = "".join(str(w.message) for w in told)
        assert ("recommended(workers=200), and 2 average here" in said) if tells else not said, given
