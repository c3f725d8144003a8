"""ddp with its gradients in a narrow wire format, on real processes."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from core import CollectiveError, CompressionConfig, LGrecoConfig, buckets, make_method
from core.baselines.ddp import GradientCompression
from core.buckets import Scalars, make_buckets
from core.comm import AsyncAllReduce
from core.nodes import node_mesh
from core.state import of_rank, under_rank
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import flat, refusal
from training.data.samples import generator

LGRECO = {
    "int4": CompressionConfig("lgreco", like="int4", lgreco=LGrecoConfig(every=3, first=2)),
    "rank2": CompressionConfig("lgreco", like="rank2", lgreco=LGrecoConfig(every=3, first=2)),
    "top0.05": CompressionConfig("lgreco", like="top0.05", lgreco=LGrecoConfig(every=3, first=2)),
    "uniform": CompressionConfig("lgreco", like="rank2", lgreco=LGrecoConfig(rule="uniform")),
}
NARROW_FORMATS = {"float32": CompressionConfig(), "int8": CompressionConfig("int8"), **LGRECO}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    return nn.Sequential(*layers).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, poison: bool = False) -> float:
    draw = generator(rank, number)
    x = torch.randn(16, 12, generator=draw)
    y = (x[:, :3] * 3 + torch.randn(16, 3, generator=draw) * 0.1).argmax(1)
    dtype = next(model.parameters()).dtype
    loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
    (loss * float("nan") if poison else loss).backward()
    if not poison:
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module, Any, torch.optim.Optimizer]:
    """The model, as it is called, the method and the optimiser."""
    wrapped, method = make_method("ddp", model := net(dtype), ddp_compression=NARROW_FORMATS[name], timeout=30.0)
    return model, wrapped, method, torch.optim.SGD(model.parameters(), lr=0.2)


def trained(rank: int, name: str, steps: int = 40, dtype: torch.dtype = torch.float32) -> tuple[float, int, list[str]]:
    """The last losses, the bytes sent, and what L-GreCo has chosen; workers end equal, and a poisoned step is lost."""
    model, wrapped, method, optimizer = build(name, dtype)
    losses, sent = [], 0
    for number in range(steps):
        losses.append(step(wrapped, optimizer, rank, number, poison=number == 5))
        method.step()
        sent += method.stats.bytes_sent
    assert method.stats.allreduce_seconds > 0
    method.finish()
    chosen = [str(c) for c in getattr(method.compression and method.compression.reducer, "chosen", [])]
    method.close()
    assert alike(flat(model.parameters())) and flat(model.parameters()).isfinite().all(), name
    return sum(losses[-10:]) / 10, sent, chosen


@pytest.mark.parametrize(
    "names", [["float32", "int8", "rank2"], pytest.param([*NARROW_FORMATS], marks=pytest.mark.slow)]
)
@on_ranks(2, timeout=120)
def test_ddp_trains_with_every_format(rank: int, names: list[str]):
    """Fewer bytes, and about the loss of float32."""
    found = {name: trained(rank, name) for name in names}
    plain_loss, plain_sent, _ = found["float32"]
    for name, (loss, sent, _) in found.items():
        assert loss < plain_loss + 0.3 and (name == "float32" or sent < 0.6 * plain_sent), name
    assert len(set(found["rank2"][2])) > 1
    trained(rank, "int4", 12, torch.bfloat16)


def loss_of(model: nn.Module, rank: int, number: int, part: int) -> Tensor:
    x = torch.randn(16, 12, generator=generator(rank, number, part))
    return nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))


# -- buckets that travel during the backward pass --------------------------------------------------------------------


def wide(unused: bool = False) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    if unused:
        model.spare = nn.Linear(300, 300)  # pyright: ignore[reportArgumentType]
    return model


class Alone:
    """What a compression makes of each bucket alone, after the backward pass, as all of it was sent before."""

    def __init__(self, compression: CompressionConfig, params: list[Tensor]):
        self.compression, self.params, self.allreduce = compression, params, AsyncAllReduce(torch.device("cpu"))
        self.made: dict[tuple[int, ...], Any] = {}

    def average(self, partition: list[tuple[int, ...]], gradients: list[Tensor]) -> None:
        for places in partition:
            if places not in self.made:  # error feedback starts again
                scalars = Scalars({"steps": 1, "weight": 1})
                (bucket,) = make_buckets([self.params[i] for i in places], [], 2)
                scalars.attach(bucket.scalars)
                rank = self.allreduce.rank, self.allreduce.world_size
                self.made[places] = bucket, scalars, self.compression.reducer([bucket], scalars, *rank)
            bucket, scalars, reducer = self.made[places]
            own = [gradients[i] for i in places]
            buckets.copy(bucket.payload_views, own)
            scalars.place.fill_(1.0)
            self.allreduce.launch(reducer.stages(self.allreduce.group, self.allreduce.launched + 1))
            self.allreduce.wait()
            buckets.copy(own, bucket.payload_views)


@contextlib.contextmanager
def watched_method(model: nn.Module, compression: CompressionConfig, **options: Any):
    """ddp, and the partitions that its hook sees."""
    seen: list[Any] = []
    real = GradientCompression.hook

    def hook(self, state, bucket):  # DDP accepts no other annotations
        seen.append(tuple(sorted(self._place[id(p)] for p in bucket.parameters())))
        return real(self, state, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientCompression, "hook", hook)
        wrapped, method = make_method("ddp", model, ddp_compression=compression, timeout=30.0, **options)
        yield wrapped, method, seen
        method.close()


LAST = {"lgreco": CompressionConfig("lgreco", like="int4", lgreco=LGrecoConfig(every=100, first=10))}
FORMATS = {name: CompressionConfig(name) for name in ("int4", "int8", "bfloat16")} | LAST


@on_ranks(2)
def test_each_bucket_is_averaged_as_if_it_were_alone(rank: int):
    """Bit for bit, with one bucket as before, and with several that DDP makes anew after the first step. queued: as
    with NCCL, where the hook queues a bucket's stages, and no thread runs."""
    for cap, queued in ((None, False), (0.2, False), (0.2, True)):
        options = {} if cap is None else {"bucket_cap_mb": cap}
        for name, compression in FORMATS.items():
            if name == "lgreco" and cap is not None:
                continue  # its error bound is the whole model's
            model, plain = wide(), wide()
            alone = Alone(compression, [*plain.parameters()])
            with watched_method(model, compression, **options) as (wrapped, method, seen):
                allreduce, most = method.compression.allreduce, 0
                allreduce.by_nccl = queued
                for number in range(4):
                    loss_of(wrapped, rank, number, 0).backward()
                    assert not queued or allreduce._thread is None
                    loss_of(plain, rank, number, 0).backward()
                    with torch.no_grad():
                        alone.average(seen, [p.grad for p in plain.parameters()])
                    ours, theirs = (flat([p.grad for p in m.parameters()]) for m in (model, plain))
                    assert torch.equal(ours, theirs) and alike(ours), (name, number)
                    most = max(most, len(seen))
                    model.zero_grad(), plain.zero_grad(), seen.clear(), method.step()
            assert (most == 1) == (cap is None)


@on_ranks(2)
def test_lgreco_decides_for_the_whole_model_over_several_buckets(rank: int):
    """From the last period: the choices hold for all buckets, and workers agree."""
    model = wide()
    config = CompressionConfig("lgreco", like="top0.05", lgreco=LGrecoConfig(every=3, first=4))
    with watched_method(model, config, bucket_cap_mb=0.2) as (wrapped, method, _):
        optimizer, chosen = torch.optim.SGD(model.parameters(), lr=0.2), []
        for number in range(9):
            loss_of(wrapped, rank, number, 0).backward()
            optimizer.step(), optimizer.zero_grad(), method.step()
            chosen.append([*method.compression.reducer.chosen])
        reducer = method.compression.reducer
        assert reducer.allocation.number == 7 and len(reducer.buckets) > 1
    assert chosen[2] == chosen[3] != chosen[4] and len(reducer.chosen) == 6
    assert alike(flat(model.parameters())) and len(set(map(str, total_world_size(str(chosen))))) == 1


@on_ranks(2)
def test_unused_parameters_and_silent_passes(rank: int):
    """find_unused_parameters makes several buckets from the first step on. The spare layer's gradient stays empty. A
    step has two backward passes, of which the first one sends nothing, but in the last step."""
    model, plain = wide(unused=True), wide(unused=True)
    forward = lambda m, x: m[4](m[3](m[2](m[1](m[0](x)))))  # noqa: E731
    model.forward = lambda x: forward(model, x)  # pyright: ignore
    plain.forward = lambda x: forward(plain, x)  # pyright: ignore
    options = {"bucket_cap_mb": 0.2, "find_unused_parameters": True}
    with watched_method(model, CompressionConfig("int8"), **options) as (wrapped, method, seen):
        for number in range(3):
            with wrapped.no_sync() if number < 2 else contextlib.nullcontext():
                loss_of(wrapped, rank, number, 0).backward()
            assert bool(seen) == (number == 2)
            loss_of(wrapped, rank, number, 1).backward()
            method.step()
            for worker in range(2):
                (sum(loss_of(plain, worker, number, part) for part in range(2)) / 2).backward()
            assert model.spare.weight.grad is None
            ours, exact = (flat([p.grad for p in m.parameters() if p.grad is not None]) for m in (model, plain))
            assert (ours - exact).norm() < 0.02 * exact.norm() and alike(ours) and len(seen) > 1
            assert not method.compression._ready
            model.zero_grad(), plain.zero_grad(), seen.clear()


@on_ranks(2)
def test_gradients_that_are_not_finite_leave_nothing_in_any_bucket(rank: int):
    """As under a GradScaler that searches its scale: all workers see it, and error feedback discards it."""
    model = wide()
    with watched_method(model, CompressionConfig("int4"), bucket_cap_mb=0.2) as (wrapped, method, _):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1e38), torch.optim.SGD(model.parameters(), lr=0.1)
        skipped = 0
        for number in range(6):
            scale = scaler.get_scale()
            scaler.scale(loss_of(wrapped, rank, number, 0) * (1e38 if rank and number == 3 else 1)).backward()
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad(), method.step()
            skipped += scaler.get_scale() < scale
        state = [flat for flats in method.compression.reducer.state.values() for flat in flats]
        assert skipped and all(held.isfinite().all() for held in state) and any(held.any() for held in state)
        assert flat(model.parameters()).isfinite().all() and alike(flat(model.parameters()))


@on_ranks(4)
def test_nodes_average_in_float32_and_compress_between_them(rank: int):
    """Two nodes of two: equal on all workers, bit for bit what two workers of a bucket's share would get."""
    model, plain = wide(), wide()
    mesh = node_mesh("cpu", 2)
    options = {"mesh": mesh, "bucket_cap_mb": 0.2}
    with watched_method(model, CompressionConfig("int8"), **options) as (wrapped, method, seen):
        for number in range(4):
            loss_of(wrapped, rank, number, 0).backward()
            for worker in range(4):
                (loss_of(plain, worker, number, 0) / 4).backward()
            ours, exact = (flat([p.grad for p in m.parameters()]) for m in (model, plain))
            assert (ours - exact).norm() < 0.02 * exact.norm() and alike(ours)
            model.zero_grad(), plain.zero_grad(), method.step()
        assert len(set(seen)) > 2
        reducer, whole = method.compression.reducer, method.compression.buckets
        assert reducer.world_size == 2
        assert [b.numel for b in reducer.buckets] == [b.padded // 2 for b in whole]
    both = CompressionConfig("lgreco", like="int8")  # needs whole layers: all workers as one level
    with watched_method(model, both, mesh=mesh) as (wrapped, method, _):
        loss_of(wrapped, rank, 0, 0).backward()
        assert method.compression.reducer.world_size == 4


@on_ranks(2)
def test_several_buckets_go_on_after_a_resume_bit_for_bit(rank: int):
    """DDP begins with one bucket again; what was encoded in several goes on to be."""
    config = CompressionConfig("int4")

    def run(steps: range, state: Any = None) -> tuple[Tensor, Any]:
        model = wide()
        with watched_method(model, config, bucket_cap_mb=0.2) as (wrapped, method, _):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            if state is not None:
                torch.save(state, file := io.BytesIO())
                saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                model.load_state_dict(saved[0]), method.load_state_dict(saved[1])
            for number in steps:
                loss_of(wrapped, rank, number, 0).backward()
                optimizer.step(), optimizer.zero_grad(), method.step()
            return flat(model.parameters()).clone(), [copy.deepcopy(model.state_dict()), method.state_dict()]

    whole, _ = run(range(8))
    _, state = run(range(4))
    assert len(of_rank(state[1])["compression"]["buckets"]) > 1
    assert torch.equal(run(range(4, 8), state)[0], whole)


@on_ranks(2)
def test_buckets_cross_a_slow_link_during_the_backward_pass(rank: int):
    """The backward pass takes 4 x 100 ms, and the link 200 ms, of which only the last of four buckets' is exposed."""
    model = nn.Sequential(*(nn.Linear(400, 400) for _ in range(4)))
    for layer in model:
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(0.1))
    link = ThrottledLink(4 * 400 * 401 * 132 / 256 * 8e-6 / 0.2)
    exposed, idle = {}, {}
    for cap in (0.3, 1000):
        options = {"link": link, "bucket_cap_mb": cap}
        with watched_method(model, CompressionConfig("int4"), **options) as (wrapped, method, seen):
            found, waited = [], []
            for _ in range(5):
                wrapped(torch.randn(2, 400)).square().mean().backward()
                method.step()
                found.append(method.stats.exposed_seconds)
                waited.append(method.compression.idle)
                assert method.stats.allreduce_seconds > 0.19
            exposed[cap], idle[cap] = min(found[2:]), max(waited[2:])
    assert idle[0.3] > 0.01 > idle[1000], "waiting for gradients is no part of the all-reduce's time"
    assert exposed[1000] > 0.19 and exposed[0.3] < 0.6 * exposed[1000], exposed


@on_ranks(2)
def test_bad_options_of_buckets_shards_and_workers_with_other_shapes_are_refused(rank: int):
    for cap in (0, -1, float("nan"), "25"):
        assert "give MiB, above 0" in refusal(make_method, "ddp", net(), bucket_cap_mb=cap)
    said = refusal(make_method, "ddp", net(), bucket_cap_mb=1 + rank, timeout=30.0)
    assert "workers differ: rank 0 has bucket_cap_mb=1, against bucket_cap_mb=2 of rank 1" in said
    assert "no argument bucket_cap_mb=1" in refusal(make_method, "local", net(), bucket_cap_mb=1)
    for compression in (CompressionConfig(), NARROW_FORMATS["int4"]):  # of as many elements, of the same bits
        model = nn.Linear(*((4, 40) if rank else (40, 4)), bias=False)
        nn.init.zeros_(model.weight)
        text = refusal(make_method, "ddp", model, ddp_compression=compression, timeout=30.0)
        assert "differ: rank 0 has Linear.weight ((4, 40), 'torch.float32'), against Linear.weight ((40, 4), " in text
    sharded, mesh = nn.Linear(4, 40), init_device_mesh("cpu", (2,))
    for name, p in list(sharded.named_parameters()):
        setattr(sharded, name, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
    said = refusal(make_method, "ddp", sharded, ddp_compression=NARROW_FORMATS["int4"])
    assert said == "ddp_compression.format='lgreco' with ZeRO: shards are sent as float32; leave it out"


@on_ranks(2, expect_death=(1,))
def test_a_worker_that_dies_is_named(rank: int):
    wrapped, method = make_method("ddp", net(), ddp_compression=NARROW_FORMATS["rank2"], timeout=4.0)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for number in range(3):
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if number < 2:
            step(wrapped, optimizer, rank, number)
    with pytest.raises(CollectiveError, match=r"^[^\n]*no answer from rank 1[^\n]*$"):
        step(wrapped, optimizer, rank, 2)


@on_ranks(2)
def test_ddp_resumes_with_its_allocation(rank: int):
    first, second = build("rank2"), build("rank2")
    for number in range(6):
        step(first[1], first[3], rank, number)
        first[2].step()
    torch.save([first[0].state_dict(), first[2].state_dict()], file := io.BytesIO())
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second[0].load_state_dict(state[0])
    second[2].load_state_dict(state[1])
    for run in (first, second):
        for number in range(6, 12):
            step(run[1], run[3], rank, number)
            run[2].step()
    assert torch.equal(flat(first[0].parameters()), flat(second[0].parameters()))
    load = build("int8")[2].load_state_dict
    assert "another ddp_compression compressed the gradients" in refusal(load, state[1])
    assert "with float32 gradients: resume without ddp_compression" in refusal(load, under_rank({"rounds": 3}))


def gone_on(rank: int, world_size: int, state: dict[str, Any] | None) -> tuple[dict[str, Any], Tensor, int]:
    model, wrapped, method, optimizer = build("int4")
    if state is not None:
        method.load_state_dict({"rank0": state})
    for number in range(4):
        step(wrapped, optimizer, rank, number)
        method.step()
    return of_rank(method.state_dict()), flat(model.parameters()), method.compression.reducer.allocation.number


def test_ddp_goes_on_with_another_number_of_workers():
    """As CO2 does: reductions are counted on, what was held back is lost."""
    state = run_distributed(gone_on, 3, None)[0][0]
    for after, ours, number in (results := run_distributed(gone_on, 2, state)):
        assert torch.equal(ours, results[0][1]) and number > 4
        assert after["rounds"] == after["compression"]["launched"] == 8 and after["compression"]["workers"] == 2
