"""CO2 where a worker is a node of several ranks, or holds a part of the outer state: equal to the specification."""

import copy
import functools
import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from core import CO2, CO2Config, CompressionConfig, node_mesh
from core.checkpoint import runs as checkpoint
from core.compression.formats import BLOCK, decode, encode
from core.testing.reference import Reference
from tests import problems
from tests.on_ranks import alike, on_ranks, shared_out, total_world_size
from tests.problems import INSIDE, LR, batch, flat, gradient, node_step, small_net

TAU, STEPS, NEAR = 4, 14, 1e-12
LATE: dict[str, Any] = {"merge": "keep_local", "delay": 2, "gap": "none", "clip": None, "outer_momentum": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "keep_local": LATE,
    "keep_local, elementwise": LATE | {"gap": "elementwise", "clip": 0.02},
    "keep_local, norm": LATE | {"gap": "norm", "delay": 1, "outer_lr": 0.7},
    "keep_local, Nesterov": LATE | {"nesterov": True, "outer_lr": 0.7},
    "keep_local, Nesterov, norm": LATE | {"nesterov": True, "outer_lr": 0.7, "gap": "norm"},
    "keep_local, boundary": LATE | {"delay": "boundary"},
    "keep_local, boundary, elementwise": LATE | {"delay": "boundary", "gap": "elementwise", "clip": 0.02},
    "keep_local, at once": LATE | {"delay": 0},
    "keep_local, schedule": LATE | {"delay": 1, "taus": (2, 3, 4)},
    "paper": {"outer_momentum": 0.5},
    "paper, clip": {"outer_momentum": 0.5, "clip": 0.02},
    "paper, norm": {"gap": "norm", "outer_lr": 0.7, "outer_momentum": 0.5, "clip": None},
    "paper, none": {"gap": "none", "outer_lr": 0.7, "outer_momentum": 0.2, "clip": None},
    "paper, Nesterov": {"nesterov": True, "outer_lr": 0.7, "outer_momentum": 0.3},
    "paper, schedule": {"outer_momentum": 0.5, "taus": (3, 4)},
    "restart, at once": {"delay": 0, "gap": "none", "outer_momentum": 0.3, "clip": None},
}
CORNERS = ["keep_local, norm", "keep_local, boundary, elementwise", "keep_local, schedule", "paper, Nesterov"]
FEW = [*CORNERS, "keep_local, at once", "paper, clip"]  # test_grid.py has the others in nodes, round by round
mesh_of = functools.cache(functools.partial(node_mesh, "cpu"))  # of each process


def config(name: str, **more: Any) -> tuple[CO2Config, Any]:
    """The settings and the schedule of a case."""
    given = dict(CASES[name])
    taus = given.pop("taus", None)
    c = CO2Config(**{"tau": taus[0] if taus else TAU, "outlier": None, "allow_unstable": True} | given | more)
    return c, (lambda number: {"tau": taus[number % len(taus)]}) if taus else None


def specification(name: str, rows: Tensor, **more: Any) -> Reference:
    """All start from rows [workers, n]."""
    c, _ = config(name)
    delay = None if c.is_a_round_late else c.delay
    numbers: Any = c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip
    return Reference(rows.clone(), *numbers, delay=delay, merge=c.merge, nesterov=c.nesterov, **more)  # pyright: ignore


def go(ref: Reference, name: str) -> None:
    """A local step has been taken: what follows, and the next round's tau."""
    _, schedule = config(name)
    closed = len(ref.deltas)
    if ref.local_step() and schedule:
        ref.tau = schedule(closed + 1)["tau"]


def expected(name: str, x: Tensor, nodes: list[list[int]], steps: int = STEPS, **more: Any) -> list[Tensor]:
    """[workers, n] after each local step of `problems.gradient` and at the end."""
    ref, ranks, seen = specification(name, x.expand(len(nodes), -1), **more), torch.tensor(nodes)[:, :, None], []
    for step in range(steps):
        ref.x.sub_(LR * gradient(ref.x[:, None], ranks.to(x), step).mean(1))
        go(ref, name)
        seen.append(ref.x.clone())
    ref.finish()
    return [*seen, ref.x.clone()]


def apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference on all ranks."""
    assert len(ours) == len(theirs)
    return max(total_world_size(max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))))


# -- DDP and FSDP2 inside ----------------------------------------------------------------------------------------------


def wrapped(model: nn.Sequential, inside: str, mesh: DeviceMesh) -> Any:
    """What a loop calls."""
    if inside == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(1))
    from torch.distributed.fsdp import fully_shard  # its import takes a second

    for layer in (*(m for m in model if isinstance(m, nn.Linear)), model):
        fully_shard(layer, mesh=mesh["shard"])
    return model


def whole(model: nn.Module) -> Tensor:
    """All elements of a model, [n]."""
    return flat(p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())  # pyright: ignore


def run_inside(inside: str, name: str, mesh: DeviceMesh, steps: int, **more: Any) -> Iterator[tuple[nn.Module, CO2]]:
    """Yields after each local step and after finish(). The ranks' data differ."""
    model = small_net()
    called, (c, schedule) = wrapped(model, inside, mesh), config(name, **more.pop("settings", {}))
    co2 = CO2(model.parameters(), c, mesh=mesh, schedule=schedule, **more)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(steps):
        problems.loss(called, batch(dist.get_rank(), step)).backward()
        optimizer.step(), optimizer.zero_grad(), co2.step()
        yield model, co2
    co2.finish()
    yield model, co2
    co2.close()


def of_nets(name: str, per_node: int, steps: list[int]) -> list[Tensor]:
    """The same by the specification; node i takes steps[i] local steps. A row's gradient is the mean of its ranks'."""
    model, seen = small_net(), []
    ref = specification(name, flat(model.parameters()).repeat(len(steps), 1))
    descend = problems.descent_of(model, per_node)
    for step in range(max(steps)):
        moves = torch.tensor([step < its for its in steps])
        ref.x[moves] -= LR * descend(ref.x, step)[moves]
        go(ref, name)
        seen.append(ref.x.clone())
    ref.finish()
    return [*seen, ref.x.clone()]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("inside", "per_node", "cases"),
    [(inside, 2, FEW if inside == "ddp" else CORNERS) for inside in INSIDE]
    + [pytest.param(inside, 2, [*CASES], marks=SLOW) for inside in INSIDE]
    + [pytest.param(inside, n, CORNERS, marks=SLOW) for inside in INSIDE for n in (1, 4)],
)
@on_ranks(4, timeout=600)
def test_equals_the_reference_after_every_step(rank: int, inside: str, per_node: int, cases: list[str]):
    """Also where node 1 ends five steps earlier, and then takes part in the others' rounds."""
    mesh, nodes = mesh_of(per_node), 4 // per_node
    each = [(name, 0) for name in cases] + [(name, 5) for name in CORNERS if nodes > 1]
    each = [(name, [STEPS - fewer * (node == 1) for node in range(nodes)]) for name, fewer in each]
    for (name, steps), theirs in zip(each, shared_out(lambda of: of_nets(of[0], per_node, of[1]), each), strict=True):
        ours = [whole(model) for model, _ in run_inside(inside, name, mesh, steps[rank // per_node])]
        theirs = [rows[rank // per_node] for rows in [*theirs[: len(ours) - 1], theirs[-1]]]
        assert apart(ours, theirs) < NEAR < (ours[-1] - ours[0]).abs().max(), (name, steps)


@on_ranks(4, timeout=200)
def test_batch_norm_and_frozen_parameters_in_nodes(rank: int):
    """BatchNorm's statistics are means over all four ranks. A frozen layer stays node 0's."""
    mesh, ends = mesh_of(2), []
    for inside, nodes in product(INSIDE, (True, False)):
        torch.manual_seed(rank // 2)  # all begin as node 0
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
        model[0].requires_grad_(False)
        frozen = flat(model[0].parameters())
        if nodes:
            called = wrapped(model, inside, mesh)
        else:
            # with FSDP2, each rank has running statistics of its own
            own = {} if inside == "ddp" else {"broadcast_buffers": False}
            called = DistributedDataParallel(model, process_group=mesh.get_group(1), **own)
        # without nodes: the two ranks of a pair take the same steps
        where = {"mesh": mesh} if nodes else {}
        c = CO2Config(tau=3, outlier=None, **LATE | {"delay": 1})
        co2 = CO2(model.parameters(), c, buffers=model.buffers(), **where)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], LR)
        for step in range(8):
            problems.loss(called, batch(rank, step)).backward()
            optimizer.step(), optimizer.zero_grad(), co2.step()
        co2.finish()
        co2.close()
        buffers = flat(b.to(torch.float64) for b in model.buffers())
        ends.append((whole(model), buffers))
        kept = whole(model[0])
        assert torch.equal(kept, frozen) == (rank < 2) and alike(kept)
    for pair in (ends[:2], ends[2:]):
        assert apart(*map(list, pair)) < NEAR  # pyright: ignore[reportArgumentType]


# -- who holds which part ----------------------------------------------------------------------------------------------

NODES = [[0, 1], [2, 3]]
SINGLE = [[0], [1], [2], [3]]
PLACES: dict[str, dict[str, bool]] = {
    "nodes": {"mesh": True},
    "nodes, shard": {"mesh": True, "shard": True},
    "nodes, offload": {"mesh": True, "offload": True},
    "shard": {"shard": True},
    "offload": {"offload": True},
    "shard, offload": {"shard": True, "offload": True},
}


def run(
    params: list[nn.Parameter], c: CO2Config, rank: int, place: str, steps: int = STEPS, **more: Any
) -> tuple[list[Tensor], CO2]:
    """The parameters after each step and at the end."""
    how: dict[str, Any] = dict(PLACES[place])
    ranks = [rank // 2 * 2, rank // 2 * 2 + 1] if "mesh" in how else [rank]
    how |= {"mesh": mesh_of(2)} if "mesh" in how else {}
    co2, seen = CO2(params, c, **how, **more), []
    for step in range(steps):
        node_step(params, ranks, step)
        co2.step()
        seen.append(flat(params))
    co2.finish()
    co2.close()
    return [*seen, flat(params)], co2


@pytest.mark.parametrize("names", [CORNERS, pytest.param([*CASES], marks=pytest.mark.slow)], ids=["corners", "whole"])
@on_ranks(4, timeout=600)
def test_every_part_equals_the_reference(rank: int, names: list[str]):
    """Of parameters that tile no part: 0-d, empty, odd, channels_last, transposed; and of storages that move."""
    start = flat(problems.odd_parameters())
    of_nodes, of_ranks = (shared_out(lambda n, w=w: expected(n, start, w), names) for w in (NODES, SINGLE))
    for place, (i, name) in product(PLACES, enumerate(names)):
        params, (c, schedule), in_nodes = problems.odd_parameters(), config(name), "nodes" in place

        def moves(number: int, params: list[Any] = params, schedule: Any = schedule) -> dict[str, Any]:
            params[3].data = params[3].data.clone() if number % 2 else torch.empty(5, 3).double().t().copy_(params[3])
            return schedule(number) if schedule else {}

        ours, co2 = run(params, c, rank, place, schedule=moves)
        mine = [rows[rank // 2] for rows in of_nodes[i]] if in_nodes else [rows[rank] for rows in of_ranks[i]]
        assert apart(ours, mine) < NEAR < (ours[-1] - ours[0]).abs().max(), (place, name)
        parts = (2 if in_nodes else 1) * ((2 if in_nodes else 4) if "shard" in place else 1)
        assert [len(m) for m in co2.state["outer_momentum"]] == [-(-co2.buckets[0].numel // parts)], place


@on_ranks(4, timeout=200)
def test_the_distance_from_the_mean_is_that_of_the_workers(rank: int):
    """Of what each worker sent, as told a round later. Ranks of a node count as one worker."""
    cases = [*product(PLACES, ("keep_local", "paper")), *product(("",), ("keep_local, boundary", "restart, at once"))]
    for place, name in cases:
        how: dict[str, Any] = dict(PLACES.get(place, {}))
        ranks = [rank // 2 * 2, rank // 2 * 2 + 1] if "mesh" in how else [rank]
        how |= {"mesh": mesh_of(2)} if "mesh" in how else {}
        params, sent, told, c = problems.odd_parameters(), list[Tensor](), list[float](), config(name)[0]
        co2 = CO2(params, c, **how)
        for step in range(5 * TAU):
            node_step(params, ranks, step)
            before = flat(params)
            if co2.step():
                sent.append(flat(params) if c.merge == "keep_local" else before)
                told.append(co2.stats.as_dict()["consensus_distance"])
        co2.finish(), co2.close()
        late = int(c.delay != 0)
        for of_all, seen in zip(zip(*total_world_size(sent), strict=True), told[late:], strict=False):
            x = torch.stack(of_all)
            assert seen == pytest.approx(float((x - x.mean(0)).square().sum(1).mean().sqrt()), rel=1e-6), (place, name)
            assert seen > 0.01


class Rounding:
    """What a format with error feedback leaves of a mean of workers' differences, [numel] each.

    once: the owner of a part keeps the mean as it is, and sends x.
    """

    def __init__(self, numel: int, compression: str = "int4", workers: int = 2, *, once: bool = False):
        self.size, self.once = -(-numel // (workers * BLOCK)) * workers * BLOCK, once
        self.compression, self.workers = compression, workers
        self.errors = torch.zeros(workers + 1, self.size, dtype=torch.float64)  # of the workers, and of their mean

    def __call__(self, own: Tensor, weights: Tensor) -> Tensor:
        assert (weights == 1).all()
        rows = [self.send(pad(row, (0, self.size - len(row))), i) for i, row in enumerate(own)]
        mean = sum(rows, torch.zeros(())) / self.workers
        return (mean if self.once else self.send(mean, self.workers))[: own.shape[1]]

    def send(self, x: Tensor, i: int) -> Tensor:
        total = x + self.errors[i]
        decoded = decode(encode(total, self.compression), self.compression, total.dtype)
        self.errors[i] = total - decoded
        return decoded


COMPRESSED = [
    *product(["int4"], ["nodes", "nodes, shard", "shard", "offload"], ["keep_local"]),
    *product(["int4"], ["offload"], ["keep_local, Nesterov, norm", "keep_local, at once"]),
    ("bfloat16", "nodes", "keep_local"),
]


@on_ranks(4, timeout=200)
def test_compressed_parts_equal_the_reference(rank: int):
    """Each rank rounds its own part, in the blocks of single workers. Owners get averages that were rounded once."""
    numel = 2048  # whole blocks in each part
    start = torch.linspace(-1, 1, numel, dtype=torch.float64)
    for compression, place, name in COMPRESSED:
        nodes, mine = (NODES, rank // 2) if "nodes" in place else (SINGLE, rank)
        c, _ = config(name, compression=CompressionConfig(compression))  # pyright: ignore[reportArgumentType]
        ours, _ = run([nn.Parameter(start.clone())], c, rank, place, 3 * TAU)
        reduce = Rounding(numel, compression, len(nodes), once="shard" in place)
        theirs = [rows[mine] for rows in expected(name, start, nodes, 3 * TAU, reduce=reduce)]
        plain = [rows[mine] for rows in expected(name, start, nodes, 3 * TAU)]
        assert apart(ours, theirs) < NEAR < 1e-5 < apart(ours, plain), (compression, place, name)


@on_ranks(2)
def test_a_node_of_one_rank_is_a_worker_bit_for_bit(rank: int):
    for name in CORNERS:
        c, schedule = config(name)
        params, others = problems.odd_parameters(), problems.odd_parameters()
        co2 = CO2(others, c, mesh=mesh_of(1), schedule=schedule)
        assert len(co2._m[0]) == co2.buckets[0].numel
        plain = CO2(params, c, schedule=schedule)
        ends = [problems.train_with(method, p, rank, STEPS) for method, p in ((plain, params), (co2, others))]
        assert all(map(torch.equal, *ends))


@on_ranks(4)
def test_a_node_with_a_spoilt_stage_is_left_out_as_a_whole(rank: int):
    """In one step rank 3's stage is not a number. Both ranks of its node then continue from the outer iterate.

    With keep_local the node knows so only when the average arrives, so its steps until then are lost.
    """
    for name in ("keep_local, norm", "paper", "paper, norm"):
        stages, node, at = [torch.linspace(-1, 1, n, dtype=torch.float64) for n in (7, 5)], rank // 2, TAU + 1
        c = config(name)[0]
        p, seen = nn.Parameter(stages[rank % 2].clone()), []
        co2 = CO2([p], c, mesh=mesh_of(2), shards=True)
        ref, ranks = specification(name, torch.cat(stages).expand(2, -1)), torch.tensor(NODES)[:, :, None]
        for step in range(STEPS):
            node_step([p], NODES[node], step)
            ref.x.sub_(LR * gradient(ref.x[:, None], ranks.double(), step).mean(1))
            if step == at:
                ref.x[1, len(stages[0]) :] = float("nan")
                p.data.fill_(float("nan")) if rank == 3 else None
            if c.merge == "keep_local" and ref.excluded[1] and ref.in_flight:
                ref.base[1] = ref.x[1]
            go(ref, name)
            if co2.step():
                seen.append((p.detach().clone(), ref.x[node].split([7, 5])[rank % 2].clone(), step))
        ref.finish()
        co2.finish()
        co2.close()
        seen.append((p.detach().clone(), ref.x[node].split([7, 5])[rank % 2].clone(), STEPS))
        # with keep_local, the parameters of the spoilt boundary are not a number until the average arrives
        pairs = [pair for *pair, step in seen if c.merge != "keep_local" or step > 2 * TAU]
        assert len(pairs) >= 2 and apart(*map(list, zip(*pairs, strict=True))) < NEAR  # pyright: ignore


@on_ranks(4, timeout=200)
def test_sixteen_bit_parameters_in_every_part(rank: int):
    """x and m are float32, so that what was sent is not rounded twice."""
    for name, dtype in (("keep_local", torch.bfloat16), ("paper, clip", torch.float16)):
        ends, c = {}, config(name)[0]
        for place in PLACES:
            params = [nn.Parameter(torch.linspace(-1, 1, 37).to(dtype)), nn.Parameter(torch.ones(3))]
            ends[place] = run(params, c, 0 if "nodes" not in place else rank // 2 * 2, place)[0][-1]
            assert alike(ends[place])
        for place, end in ends.items():
            like = ends["nodes" if "nodes" in place else "offload"]
            torch.testing.assert_close(end, like, rtol=2**-7, atol=2**-7)


@on_ranks(2)
def test_statistics_are_of_the_whole_model(rank: int):
    seen = []
    for how in ({}, {"shard": True}):
        params = [nn.Parameter(torch.linspace(0, 1, 11, dtype=torch.float64))]
        co2 = CO2(params, CO2Config.paper(2, clip=None), **how)
        for step in range(12):
            node_step(params, [rank], step)
            co2.step()
        seen.append(co2.stats.as_dict())
        co2.finish()
    unshared, shared = seen
    assert shared["pseudo_gradient_norm"] == pytest.approx(unshared["pseudo_gradient_norm"])
    assert shared["allreduce_seconds"] > 0 and unshared["gap_max"] > 1
    most, means = (total_world_size(shared[name]) for name in ("gap_max", "gap_mean"))
    assert max(most) == pytest.approx(unshared["gap_max"]) and min(means) <= unshared["gap_mean"] <= max(means)


# -- one model per node ------------------------------------------------------------------------------------------------


class Uneven:
    """A link that holds each stage back: rank 3's by 10 to 30 ms, the others' by up to 2 ms."""

    def __init__(self, rank: int):
        self.between = (0.01, 0.03) if rank == 3 else (0.0, 0.002)

    def reserve(self, nbytes: float) -> float:  # noqa: ARG002
        return time.perf_counter() + random.uniform(*self.between)


def late(arrived: Callable[[], bool], steps: int = 3) -> Callable[[], bool]:
    """Sees so many local steps later that an average has arrived."""
    seen = 0

    def seen_late() -> bool:
        nonlocal seen
        seen = seen + 1 if arrived() else 0
        return seen > steps

    return seen_late


def stop_for_a_second() -> None:
    """Stops this process, with its background thread."""
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def merges(inside: str, fragments: int) -> list[tuple[int, list[bool]]]:
    """By rank: after which local step each average was merged, and whether the node's replicas were equal bit for bit
    after each step. Rank 2 is stopped once."""
    rank, mesh, merged, equal = dist.get_rank(), mesh_of(2), [], []
    form = {"compression": CompressionConfig("int4"), "delay": "auto", "tau": 30, "fragments": fragments}
    steps = run_inside(inside, "keep_local", mesh, 120, settings=form, link=Uneven(rank))
    for step, (model, co2) in enumerate(steps):
        time.sleep(0.01)
        if (rank, step) == (3, 0):
            co2.allreduce.done = late(co2.allreduce.done)
        stop_for_a_second() if (rank, step) == (2, 70) else None
        if inside == "ddp":
            mine = whole(model)
            theirs = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(theirs, mine, group=mesh.get_group(1))
            equal.append(torch.equal(*theirs))
        if step % 30 == 29:
            merged.append(co2.stats.merged_after)
    return total_world_size((merged[1:], equal))


@pytest.mark.parametrize(
    ("inside", "fragments"),
    [("ddp", 3), *(pytest.param(*of, marks=SLOW) for of in (("ddp", 1), ("fsdp2", 1), ("fsdp2", 3)))],
)
@on_ranks(4, timeout=200)
def test_a_node_merges_after_one_local_step(rank: int, inside: str, fragments: int):
    """It would not if each rank merged when its own average has arrived."""
    told = merges(inside, fragments)
    assert any(0 < after < 30 for merged, _ in told for after in merged), "no average was merged in mid-round"
    assert all(told[node][0] == told[node + 1][0] for node in (0, 2)) and all(all(equal) for _, equal in told)


# -- resume in flight --------------------------------------------------------------------------------------------------


def half(place: str, c: CO2Config, rank: int, steps: range, saved: Any = None, at: int = -1) -> tuple[Any, Tensor]:
    """What a new object goes on from `saved` with: the same in front of step `at`, and the parameters at the end."""
    how, mine = dict(PLACES[place]), rank // 2 * 2
    params = [nn.Parameter(torch.linspace(-1, 1, 2100))]
    co2 = CO2(params, c, **how | ({"mesh": mesh_of(2)} if "mesh" in how else {}))
    if saved:
        params[0].data.copy_(saved[0])
        co2.load_state_dict(saved[1])
    for step in steps:
        if step == at:
            saved = params[0].detach().clone(), copy.deepcopy(co2.state_dict())
        node_step(params, [mine, mine + 1] if "mesh" in how else [rank], step)
        co2.step()
    co2.finish()
    co2.close()
    return saved, flat(params)


@on_ranks(4, timeout=200)
def test_a_run_resumed_in_flight_is_bit_identical(rank: int):
    for place, (name, compression) in product(PLACES, (("keep_local, norm", "int4"), ("paper, clip", "bfloat16"))):
        c = config(name, compression=CompressionConfig(compression))[0]  # pyright: ignore[reportArgumentType]
        saved, end = half(place, c, rank, range(STEPS), at=TAU + 1)
        assert torch.equal(half(place, c, rank, range(TAU + 1, STEPS), saved)[1], end), (place, name)


def saved_on_two_nodes(rank: int, world_size: int, name: str, folder: str, at: int) -> None:
    params = problems.odd_parameters()
    co2 = CO2(params, config(name)[0], mesh=mesh_of(2))
    for step in range(at):
        node_step(params, [rank // 2 * 2, rank // 2 * 2 + 1], step)
        co2.step()
    checkpoint.save(folder, nn.ParameterList(params), None, co2, step=at)
    co2.finish()
    co2.close()


def gone_on(rank: int, world_size: int, name: str, folder: str) -> list[Tensor]:
    params = problems.odd_parameters()
    co2 = CO2(params, config(name)[0], mesh=mesh_of(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the number has changed
        begins = checkpoint.load(folder, nn.ParameterList(params), None, co2)
    seen = []
    for step in range(begins or 0, STEPS):
        node_step(params, [rank // 2 * 2, rank // 2 * 2 + 1], step)
        co2.step()
        seen.append(flat(params))
    co2.finish()
    co2.close()
    return [*seen, flat(params)]


@pytest.mark.parametrize("nodes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_number_of_nodes_goes_on_in_flight(tmp_path: Path, nodes: int):
    """Two nodes save one local step after a launch. Node i goes on from what node i modulo 2 held."""
    at, cases = TAU + 1, [(name, str(tmp_path / name)) for name in ("keep_local", "paper")]
    problems.run_cases(saved_on_two_nodes, 4, [(*case, at) for case in cases], timeout=200)
    traces = problems.run_cases(gone_on, 2 * nodes, cases, timeout=200)
    for (name, _), ours in zip(cases, traces, strict=True):
        x, seen = flat(problems.odd_parameters()), []
        ref, ranks = specification(name, x.expand(2, -1)), torch.tensor(NODES)[:, :, None]
        for step in range(STEPS):
            if step == at:
                before = torch.arange(nodes) % 2
                ranks = torch.arange(2 * nodes).view(nodes, 2, 1)
                ref.x, ref.base, ref.excluded = ref.x[before], ref.base[before], ref.excluded[before]
                ref.in_flight = [(tau, own[before], delta) for tau, own, delta in ref.in_flight]
            ref.x.sub_(LR * gradient(ref.x[:, None], ranks.to(x), step).mean(1))
            go(ref, name)
            seen.append(ref.x.clone())
        ref.finish()
        for rank, trace in enumerate(ours):
            mine = [rows[rank // 2] for rows in [*seen[at:], ref.x]]
            problems.assert_traces_equal(trace, mine, NEAR)


# -- memory and checkpoints, by counting -------------------------------------------------------------------------------

NUMEL = 1 << 15  # elements, in whole blocks for each part
GOOD: dict[str, Any] = LATE | {"outer_momentum": 0.0, "compression": CompressionConfig("int4")}
PAPER: dict[str, Any] = {"outer_momentum": 0.5}


def copies(inside: str, c: dict[str, Any], ranks: int, nodes: int) -> float:
    """Copies of the whole model's parameters that CO2 holds on a rank, in float32: by arithmetic.

    All of the payload with DDP inside, else a share of it. Of the share: x, m, keep_local's snapshot, and both stages'
    error feedback.
    """
    compressed = "compression" in c
    share = 2 + ("merge" in c) + (1 + 1 / nodes) * compressed
    return (1 if inside == "ddp" else 1 / ranks) + share / ranks


def held(inside: str, c: dict[str, Any], per_node: int) -> float:
    """The same, counted."""
    mesh = mesh_of(per_node)
    model = nn.Sequential(nn.Linear(128, NUMEL // 128, bias=False))
    wrapped(model, inside, mesh)
    co2 = CO2(model.parameters(), CO2Config(tau=TAU, **c), mesh=mesh)
    tensors = [b.payload for b in co2.buckets]
    assert co2.share is not None
    for flats in (*co2.state.values(), co2.share.snapshots, *co2.reducer.state.values()):
        tensors += flats
    places = {t.data_ptr(): t for t in tensors}
    co2.close()
    return sum(t.numel() for t in places.values()) / NUMEL


@on_ranks(4, timeout=100)
def test_memory_in_copies(rank: int):
    for inside, most in (("ddp", 1.6), ("fsdp2", 0.7)):
        for c, per_node in product((GOOD, PAPER), (2, 4)):
            assert held(inside, c, per_node) == pytest.approx(copies(inside, c, per_node, 4 // per_node))
        assert copies(inside, GOOD, 8, 16) <= most


def stored(c: dict[str, Any], nodes: int, *, light: bool) -> float:
    """Bytes of a checkpoint per parameter, with AdamW, at a boundary: by arithmetic. What is equal is written once.

    x once, and m unless the momentum is 0. Each node has moments of its own; with keep_local also parameters and a
    payload. Error feedback is each rank's own. A light one has one node's moments, and no error feedback.
    """
    late = "merge" in c
    moments, own = 2 * (1 if light else nodes), 2 * (nodes if late else 1)  # parameters and payload
    equal = 1 + (c["outer_momentum"] > 0)
    return 4 * (equal + moments + own + (nodes + 1) * ("compression" in c and not light))


@on_ranks(4, timeout=100)
def test_bytes_of_a_checkpoint(rank: int, tmp_path: Path):
    mesh = mesh_of(2)
    for c, limits in ((GOOD, (42e9, 18e9)), (PAPER, (18e9, 3e9))):
        model = nn.Sequential(nn.Linear(128, NUMEL // 128, bias=False))
        ddp = wrapped(model, "ddp", mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        co2 = CO2(model.parameters(), CO2Config(tau=TAU, **c), mesh=mesh)
        draws = torch.Generator().manual_seed(rank)
        for _ in range(2 * TAU):
            ddp(torch.randn(4, 128, generator=draws)).square().mean().backward()
            optimizer.step(), optimizer.zero_grad(), co2.step()
        for light, most in zip((False, True), limits, strict=True):
            folder = tmp_path / f"{len(c)} {light}"
            assert checkpoint.save(folder, model, optimizer, co2, step=2 * TAU, light=light)
            written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            assert written / NUMEL == pytest.approx(stored(c, 2, light=light), rel=0.05)
            assert stored(c, 16, light=light) * 124.4e6 <= most, "GPT-2 Small on 16 nodes"
        co2.finish()
        co2.close()
