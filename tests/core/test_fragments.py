"""Fragments in turn: each equals the specification on its slice, with its rounds shifted."""

import copy
import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core import CO2, CO2Config
from core.buckets import slices, slices_alike
from core.config import CompressionConfig
from core.errors import CollectiveError
from core.tau import CUT_MARGIN, LATE, TauTuner
from core.testing.link import ThrottledLink
from core.testing.reference import fragments
from tests import problems
from tests.core.test_nodes import apart, mesh_of, whole, wrapped
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import LR, flat, gradient, node_step, sgd_step

TAU, STEPS = 6, 27
SHAPES = {"several": [(3, 5), (7,), (40, 9), (1,)], "giant": [(5000,), (3,)]}


def config(**changes: Any) -> CO2Config:
    settings = {"tau": TAU, "gap": "none", "merge": "keep_local", "outer_momentum": 0.0, "clip": None, "delay": 1}
    return CO2Config(**settings | changes)  # pyright: ignore[reportArgumentType]


def model(shapes: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(7)
    params = [torch.randn(*shape, dtype=torch.float64, generator=g) for shape in SHAPES[shapes]]
    return [(p.t().contiguous().t() if p.ndim == 2 else p).requires_grad_() for p in params]  # strides of all kinds


def train(rank: int, world_size: int, c: CO2Config, shapes: str, steps: int = STEPS, save_at: int = 0) -> Any:
    """Each worker's parameters after every step and after finish(), and whether a round closed."""
    params = model(shapes)
    co2 = CO2(params, c)
    found, closed = [], []
    for step in range(steps):
        sgd_step(params, rank, step)
        closed.append(co2.step())
        found.append(flat(params))
        if step + 1 == save_at:
            state, held = copy.deepcopy(co2.state_dict()), [p.detach().clone() for p in params]
            co2.finish()  # of a run that goes on; the saved one resumes from here
            co2.close()
            params = model(shapes)
            co2 = CO2(params, c)
            with torch.no_grad():
                for p, q in zip(params, held, strict=True):
                    p.copy_(q)
            co2.load_state_dict(state)
    co2.finish()
    found.append(flat(params))
    rounds = co2.rounds
    co2.close()
    return found, closed, rounds


def expected(c: CO2Config, shapes: str, workers: int) -> list[Tensor]:
    x = flat(model(shapes)).repeat(workers, 1)
    delay = c.delay if isinstance(c.delay, int) else c.tau // c.fragments
    settings = {"alpha": c.outer_lr, "beta": c.outer_momentum, "gap": "none", "phi": c.clip, "nesterov": c.nesterov}
    parts = fragments(x, slices(x.shape[1], c.fragments), c.tau, **settings, delay=delay, merge="keep_local")
    found = []
    for step in range(STEPS):
        x.sub_(LR * gradient(x, torch.arange(workers).double()[:, None], step))
        for one in parts:
            one.local_step()
        found.append(x.clone())
    for one in parts:
        one.finish()
    return [*found, x]


CASES = [
    *(config(fragments=f) for f in (2, 3, 6)),
    config(fragments=2, delay=0),
    config(fragments=2, delay=3),
    config(fragments=3, delay="boundary"),
    config(fragments=2, delay=2, outer_momentum=0.3, clip=0.01),
    config(fragments=3, outer_momentum=0.5, outer_lr=0.7, nesterov=True),
    config(fragments=6, tau=6),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_each_slice_equals_the_specification(shapes: str):
    cases = CASES if shapes == "several" else CASES[2::4]  # six fragments, and momentum with a clip
    for c, of_ranks in zip(cases, problems.run_cases(train, 2, [(c, shapes) for c in cases]), strict=True):
        want = expected(c, shapes, 2)
        for rank, (found, closed, _) in enumerate(of_ranks):
            assert [i for i, ended in enumerate(closed) if ended] == [5, 11, 17, 23], "a round lasts tau steps"
            for step, (mine, theirs) in enumerate(zip(found, want, strict=True)):
                assert (mine - theirs[rank]).abs().max() <= 1e-12, f"{c}, step {step}"


@on_ranks(2)
def test_a_failed_all_reduce_is_named_by_its_round_and_its_fragment(rank: int):
    """It is the fourth, of the second round."""
    params = model("several")
    co2 = CO2(params, config(fragments=2))
    for step in range(14):
        sgd_step(params, rank, step)
        co2.step()
    if rank:
        return co2.leave()
    with pytest.raises(CollectiveError, match=r"^rank 0: the all-reduce of round 1 \(fragment 1\) failed; "):
        for _ in range(6):
            co2.step()
    co2.leave()


@on_ranks(2, timeout=60)
def test_a_state_is_saved_while_one_worker_is_a_fragment_ahead(rank: int):
    """With delay auto, averages are merged as they arrive."""
    params, slow = model("giant"), {} if rank else {"link": ThrottledLink(5.0)}  # a fragment takes 20 ms
    co2 = CO2(params, config(fragments=3, delay="auto"), timeout=10.0, **slow)  # pyright: ignore
    for step in range(36):
        time.sleep(0.005)
        sgd_step(params, rank, step)
        co2.step()
        if step % TAU == 2:  # the slow worker's first fragment has not arrived, and the other has started one more
            (state,) = co2.state_dict().values()
            assert alike(torch.tensor(state["at"]))
    co2.finish()
    assert alike(flat(params))
    co2.close()


@on_ranks(2)
def test_more_fragments_than_elements(rank: int):
    param = torch.zeros(2).requires_grad_()
    co2 = CO2([param], config(fragments=5))
    for _ in range(12):
        with torch.no_grad():
            param += 1.0 + rank
        co2.step()
    co2.finish()
    assert torch.equal(param, torch.full((2,), 18.0))
    co2.close()


def test_a_run_resumes_bit_for_bit_with_any_fragment_in_flight():
    c = config(fragments=3, delay=2, outer_momentum=0.3, compression=CompressionConfig("int4"))
    cases = [(c, "several", STEPS, save_at) for save_at in (0, 7, 8, 12, 13)]
    for of_rank in zip(*problems.run_cases(train, 2, cases), strict=True):
        whole, *resumed = [found for found, *_ in of_rank]
        for ends in resumed:
            assert all(torch.equal(p, q) for p, q in zip(whole, ends, strict=True))


@pytest.mark.parametrize("delay", [0, 2])
def test_hooks_are_told_of_every_write(delay: int):
    """The copies in 16 bits follow float32 masters, which each fragment's merge writes in mid-round."""
    masters = [nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(5))]
    copies = [nn.Parameter(m.detach().to(torch.bfloat16)) for m in masters]
    with CO2(masters, config(tau=8, fragments=4, delay=delay, outer_lr=0.5), model_params=copies) as co2:
        for step in range(20):
            for m, c in zip(masters, copies, strict=True):
                with torch.no_grad():
                    c.copy_(m.add_(1.0 + step))  # as the loop of such an optimizer does
            co2.step()
            assert all(torch.equal(c, m.to(c.dtype)) for m, c in zip(masters, copies, strict=True)), step


@on_ranks(2)
def test_an_evaluation_gets_one_model(rank: int):
    delays: list[Any] = [1, "auto"]
    for delay in delays:
        params = model("several")
        found = []
        with CO2(params, config(fragments=2, delay=delay)) as co2:
            if rank:  # it sees no average before the boundary, where its other fragments start
                co2.allreduce.arrived = lambda: False
            for step in range(24):
                time.sleep(0.02)
                sgd_step(params, rank, step)
                if not co2.step():
                    assert not co2.sync_for_eval()
                elif co2.rounds % 2 == 0:
                    assert co2.sync_for_eval()
                    found += [flat(params)]
                    assert co2.sync_for_eval(), "a second call sends nothing"
                    found += [flat(params)]
        assert alike(*found) and torch.equal(found[0], found[1])


@pytest.mark.filterwarnings("ignore:.*is excluded")
@on_ranks(2)
def test_a_fragment_that_is_not_finite_is_left_out_and_the_worker_restarts(rank: int):
    params, told, excluded = model("several"), [], []
    co2 = CO2(params, config(fragments=3, delay=1, outlier=None))
    co2.on_excluded = lambda where: told.append(int(where))
    for step in range(24):
        sgd_step(params, rank, step)
        if (rank, step) == (1, 8):
            with torch.no_grad():
                params[2][-1, -1] = float("nan")  # an element of the last fragment
        if co2.step():
            excluded.append(co2.stats.excluded)
    co2.finish()
    co2.close()
    assert alike(flat(params)) and flat(params).isfinite().all()
    assert rank or max(excluded) == 1, "the other workers learn of it with the next boundary"
    assert rank == 0 or sum(told) == 1


def test_tau_and_fragments_by_hand():
    """An all-reduce of 10 local steps: 10 (1 + CUT_MARGIN) + 1 = 12.5, into which 6 fragments of 2 steps fit."""
    assert (LATE, CUT_MARGIN) == (1.25, 0.15)
    tuner = TauTuner(192, 1.5, cuts=True)
    for number in range(4):
        tuner.receive(number, [0.1], [1.0])
    assert (tuner.tau, tuner.fragments) == (13, 6)
    nodes = TauTuner(192, 1.5, cuts=True)
    nodes.vote = 1  # 11.5 + 4 steps, and 4 fragments of 3 steps and a vote
    for number in range(4):
        nodes.receive(number, [0.1], [1.0])
    assert (nodes.tau, nodes.fragments) == (16, 4)
    for number in range(4, 12):  # a link that is not slow: one fragment, and the margin of before
        tuner.receive(number, [0.1], [0.11])
    assert (tuner.tau, tuner.fragments) == (3, 1)
    again = TauTuner(192, 1.5, cuts=True)
    again.load_state_dict(tuner.state_dict())
    assert (again.tau, again.fragments) == (3, 1)
    whole = TauTuner(192, 1.5)
    for number in range(4):
        whole.receive(number, [0.1], [1.0])
    assert (whole.tau, whole.fragments) == (25, 1)


@on_ranks(2)
def test_a_slow_link_gets_fragments(rank: int):
    params = [torch.zeros(60_000).requires_grad_()]
    c = config(tau="auto", delay="auto", fragments="auto", outlier=None)
    link = ThrottledLink(24.0)  # an all-reduce of 240 kB takes 80 ms
    cuts, late = [], []
    with CO2(params, c, link=link) as co2:
        for _ in range(120):
            time.sleep(0.01)
            with torch.no_grad():
                params[0].add_(1e-3 * (rank + 1))
            if co2.step():
                cuts.append(len(co2.fragments))
                late.append(co2.stats.merged_after / co2.stats.local_steps)
    assert alike(flat(params)) and total_world_size(cuts) == [cuts] * 2, "all workers choose alike"
    assert cuts[0] == 1 and cuts[-1] >= 3
    assert rank or late[-1] < 0.5, "a fragment is merged a part of a round after its start"


# -- nodes -------------------------------------------------------------------------------------------------------------

IN_NODES = [(5, 3), (7,), (1,), (4, 6), (3,)]  # the last two dimensions of FSDP2's tensors are uneven on two ranks
PLAIN = (1, 2)  # beside shards, the tensors that all ranks of a node hold


def sharded(inside: str, i: int) -> bool:
    return inside == "shards" or (inside == "shards and plain tensors" and i not in PLAIN)


def local_params(inside: str, mesh: DeviceMesh) -> tuple[list[nn.Parameter], Tensor]:
    """The parameters of this rank, and which elements of the whole model they hold."""
    from torch.distributed.tensor import Shard, distribute_tensor  # its import takes a second

    g, params, held, start = torch.Generator().manual_seed(7), [], [], 0
    for i, shape in enumerate(IN_NODES):
        whole = torch.randn(*shape, dtype=torch.float64, generator=g)
        places = torch.arange(start, start := start + whole.numel()).view(shape)
        if sharded(inside, i):
            placed = {"device_mesh": mesh["shard"], "placements": [Shard(0)]}
            whole, places = (distribute_tensor(t, **placed) for t in (whole, places))
            places = places.to_local()
        params.append(nn.Parameter(whole))
        held.append(places.reshape(-1))
    return params, torch.cat(held)


def own(params: list[nn.Parameter]) -> list[Tensor]:
    """This rank's elements."""
    return [getattr(p.detach(), "to_local", lambda p=p: p.detach())() for p in params]


def of_fragments(
    inside: str, count: int, params: list[nn.Parameter], held: Tensor, per_node: int, owners: int
) -> list[Tensor]:
    """Which elements of the whole model each fragment has, on all ranks of a node."""
    if inside == "replicas":
        length = -(-len(held) // (per_node * owners)) * owners
        cuts = [
            [range(i * length + s.start, min(i * length + s.stop, len(held))) for i in range(per_node)]
            for s in slices(length, count, owners)
        ]
        return [torch.tensor([at for cut in each for at in cut]) for each in cuts]
    sizes = [(mine.numel(), p.numel()) for mine, p in zip(own(params), params, strict=True)]
    mine = [held[s].tolist() for s in slices_alike(sizes, count)]
    node = torch.distributed.get_rank() // per_node * per_node
    ranks = total_world_size(mine)[node : node + per_node]
    return [torch.tensor(sorted({at for rank in ranks for at in rank[i]})) for i in range(count)]


def in_nodes(rank: int, c: CO2Config, inside: str, per_node: int, steps: list[int], save_at: int = 0, **how: Any):
    """This rank's elements after every step and at the end, and of the reference. Node i takes steps[i] steps."""
    mesh = mesh_of(per_node)
    params, held = local_params(inside, mesh)
    node, ranks = rank // per_node, torch.arange(4).view(-1, per_node, 1)
    x = flat(local_params("replicas", mesh)[0]).expand(len(steps), -1).clone()
    parts = of_fragments(inside, c.fragments, params, held, per_node, len(steps) if how.get("shard") else 1)
    assert sorted(at for part in parts for at in part.tolist()) == [*range(x.shape[1])], "each element in one fragment"
    delay = c.delay if isinstance(c.delay, int) else c.tau // c.fragments
    settings = {"alpha": c.outer_lr, "beta": c.outer_momentum, "gap": c.gap, "phi": c.clip, "nesterov": c.nesterov}
    refs = fragments(x, parts, c.tau, **settings, delay=delay, merge="keep_local")
    co2, ours, theirs = CO2(params, c, mesh=mesh, **how), [], []
    for step in range(max(steps)):
        moves = torch.tensor([step < its for its in steps]).double()[:, None]
        x.sub_(moves * LR * gradient(x[:, None], ranks.double(), step).mean(1))
        for part, one in zip(parts, refs, strict=True):
            one.x.copy_(x[:, part])
            one.local_step()
            x[:, part] = one.x
        if step >= steps[node]:
            continue
        node_step(own(params), ranks[node, :, 0].tolist(), step)
        co2.step()
        ours.append(flat(own(params)))
        theirs.append(x[node, held].clone())
        if step + 1 == save_at:
            state, kept = copy.deepcopy(co2.state_dict()), [t.clone() for t in own(params)]
            co2.finish()
            co2.close()
            params, _ = local_params(inside, mesh)
            co2 = CO2(params, c, mesh=mesh, **how)
            for p, q in zip(own(params), kept, strict=True):
                p.copy_(q)
            co2.load_state_dict(state)
    co2.finish()
    co2.close()
    for part, one in zip(parts, refs, strict=True):
        one.x.copy_(x[:, part])
        one.finish()
        x[:, part] = one.x
    return [*ours, flat(own(params))], [*theirs, x[node, held]]


NODE_CASES = [
    config(fragments=2, tau=8, outer_momentum=0.3, outer_lr=0.7),
    config(fragments=8, tau=8),
    config(fragments=3, delay=2, outer_momentum=0.3, gap="elementwise", clip=0.02),
    config(fragments=3, delay=2, outer_momentum=0.3, gap="norm"),
    config(fragments=2, delay="boundary", outer_momentum=0.5, outer_lr=0.7, nesterov=True, gap="norm"),
    config(fragments=3, delay=0),
]


EVERY = ("replicas", "shards", "shards and plain tensors")


@pytest.mark.parametrize(
    ("per_node", "kinds", "cases"),
    [(2, EVERY[::2], 2), *(pytest.param(n, EVERY, 6, marks=pytest.mark.slow) for n in (1, 2))],
    ids=["few", "single", "pairs"],
)
@on_ranks(4, timeout=600)
def test_nodes_equal_the_specification_after_every_step(rank: int, per_node: int, kinds: tuple[str, ...], cases: int):
    """Also where node 1 ends five steps earlier."""
    for inside, c, fewer in itertools.product(kinds, NODE_CASES[:cases], (0, 5)):
        steps = [STEPS - fewer * (node == 1) for node in range(4 // per_node)]
        difference = apart(*in_nodes(rank, c, inside, per_node, steps))
        assert difference < 1e-12, (inside, c.fragments, c.delay, c.gap, fewer, difference)


@on_ranks(4, timeout=200)
def test_parts_of_shares_equal_the_specification(rank: int):
    shares: Any = ("replicas", {"shard": True}), ("replicas", {"offload": True})
    for inside, how in (*shares, ("shards and plain tensors", {"offload": True})):
        for c in NODE_CASES[2:5:2]:
            assert apart(*in_nodes(rank, c, inside, 2, [STEPS, STEPS - 5], **how)) < 1e-12, (inside, how)


@on_ranks(4, timeout=200)
def test_nodes_resume_bit_for_bit_with_any_fragment_in_flight(rank: int):
    c = config(fragments=3, delay=2, outer_momentum=0.3, compression=CompressionConfig("int4"))
    kinds: Any = ("replicas", {}), ("shards and plain tensors", {}), ("replicas", {"shard": True})
    for inside, how in kinds:
        whole, *resumed = (in_nodes(rank, c, inside, 2, [STEPS, STEPS], at, **how)[0] for at in (0, 7, 9, 12))
        assert all(all(map(torch.equal, whole, ends)) for ends in resumed), (inside, how)


@pytest.mark.filterwarnings("ignore:.*is excluded")
@on_ranks(4, timeout=200)
def test_a_node_that_is_not_finite_restarts_in_all_fragments_at_once(rank: int):
    """A network takes a NaN to all of its parameters in one step, so fragments that restarted in turn stayed NaN."""
    for inside in problems.INSIDE:
        delay: Any = "auto" if inside == "ddp" else 1
        mesh, model, restarted = mesh_of(2), problems.small_net(), []
        called = wrapped(model, inside, mesh)
        co2 = CO2(model.parameters(), config(fragments=3, delay=delay), mesh=mesh)
        co2.on_excluded = lambda where, seen=restarted: seen.append(int(where))
        optimizer, finite = torch.optim.SGD(model.parameters(), LR), []
        for step in range(5 * TAU):
            inputs, labels = problems.batch(rank, step)
            inputs *= float("nan") if (rank, step) == (3, 2 * TAU + 3) else 1
            problems.loss(called, (inputs, labels)).backward()
            optimizer.step(), optimizer.zero_grad(), co2.step()
            finite.append(bool(whole(model).isfinite().all()))
        co2.finish()
        co2.close()
        assert alike(whole(model)) and bool(whole(model).isfinite().all())
        assert finite.count(False) <= (2 * TAU if rank > 1 else 0) and finite[-1], finite
        assert bool(sum(restarted)) == (rank > 1)


@on_ranks(4)
def test_a_round_of_nodes_sends_the_same_bytes(rank: int):
    kinds, sent = (("ddp", "float32"), ("fsdp2", "int4")), []
    for (inside, kind), count in itertools.product(kinds, (1, 3)):
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
        wrapped(model, inside, mesh := mesh_of(2))
        c = config(delay=1, compression=CompressionConfig(kind), fragments=count)  # pyright: ignore
        with CO2(model.parameters(), c, mesh=mesh) as co2:
            for step in range(18):
                node_step(own([*model.parameters()]), [rank // 2], step)
                co2.step()
            sent.append(co2.stats.bytes_sent)
    for plain, cut in (sent[:2], sent[2:]):
        assert plain <= cut <= 1.02 * plain + 2000


@pytest.mark.slow
@pytest.mark.parametrize("inside", ["ddp", "fsdp2"])
@on_ranks(4, timeout=200)
def test_nodes_choose_fragments_alike_and_evaluate_one_model(rank: int, inside: str):
    model, cuts, equal = nn.Sequential(nn.Linear(300, 200)), [], []
    wrapped(model, inside, mesh := mesh_of(2))
    c = config(tau="auto", delay="auto", fragments="auto", outlier=None, outer_momentum=0.3)
    with CO2(model.parameters(), c, mesh=mesh, link=ThrottledLink(24.0)) as co2:  # an all-reduce takes 40 ms
        for step in range(160):
            time.sleep(0.01)
            node_step(own([*model.parameters()]), [rank // 2], step)
            torch.distributed.barrier(mesh.get_group(1))  # as gradients do
            if co2.step():
                cuts.append(len(co2.fragments))
                if len(cuts) % 4 == 0:
                    assert co2.sync_for_eval()
                    equal.append(whole(model))
    assert alike(torch.tensor(cuts)) and cuts[0] == 1 and cuts[-1] > 1
    for one in equal:  # p + D rounds
        torch.testing.assert_close(one, total_world_size(one)[0], rtol=1e-5, atol=1e-5)
    assert alike(whole(model))
