"""A worker whose numbers are not finite, or jump, is left out of the mean: one bad worker is not everybody's ruin."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, make_method
from core.comm import AsyncAllReduce
from core.errors import DivergedError
from core.guards.workers import BUFFER, MAX_REPEATS, WARMUP_ROUNDS, OutlierFilter, forget
from core.hooks import ReductionInfo
from core.nodes import node_mesh
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import LR, Settings, bare_co2, flat, gradient, odd_parameters, reference, sgd_step, trace_of

NAN, INF = float("nan"), float("inf")
STEPS, BAD, SPOILT_AT, JUMP_AT = 24, 1, 7, 20
WAYS = {
    "paper": Settings(tau=3),
    "norm": Settings(tau=3, gap="norm", clip=None),
    "keep_local": Settings(tau=3, merge="keep_local", delay=1, gap="none"),
    "keep_local_momentum": Settings(tau=3, merge="keep_local", delay=2, gap="none", outer_momentum=0.3),
    "keep_local_whole": Settings(tau=3, merge="keep_local", gap="none"),
    "blocking": Settings(tau=3, delay=0, gap="none"),
    "nesterov": Settings(tau=3, nesterov=True),
}
SHARED = ("shard", "offload")  # with our reading of the paper's rule


def expected(s: Settings, steps: int) -> list[Tensor]:
    ref, workers = reference(s, 3, flat(odd_parameters()))
    for step in range(steps):
        ref.x.sub_(LR * gradient(ref.x, workers, step))
        if step == SPOILT_AT:
            ref.x[BAD, 1] = NAN
        if step == JUMP_AT:
            ref.x[BAD] *= 1e5
        ref.weights = torch.tensor([1.0, 0.0, 1.0]) if step == JUMP_AT else None
        ref.local_step()
    rounds = [rows.clone() for rows in ref.restarts]
    ref.finish()
    return [*rounds, ref.x]


def train_or_spoil(params: list[nn.Parameter], rank: int, step: int) -> None:
    sgd_step(params, rank, step)
    if rank == BAD and step == SPOILT_AT:
        params[1].data[0] = NAN
    if rank == BAD and step == JUMP_AT:
        torch._foreach_mul_([p.detach() for p in params[:-1]], 1e5)


@on_ranks(3, timeout=240)
def test_the_others_train_as_the_reference_does_without_the_bad_one(rank: int):
    kinds: dict[str, Any] = {name: s.build for name, s in WAYS.items()}
    kinds |= {how: partial(CO2, config=WAYS["paper"].co2, **{how: True}) for how in SHARED}
    for name, build in kinds.items():
        with warnings.catch_warnings(record=True, action="always") as seen:
            go = partial(train_or_spoil, params := odd_parameters(), rank)
            ours = trace_of(build(params), go, partial(flat, params), STEPS)
        for i, (a, rows) in enumerate(zip(ours, expected(WAYS.get(name, WAYS["paper"]), STEPS), strict=True)):
            torch.testing.assert_close(a, rows[rank], rtol=1e-9, atol=1e-9, msg=lambda m, k=(name, i): f"{k} {m}")
        told = [str(w.message) for w in seen if "excluded" in str(w.message)]
        assert len(told) == (0 if rank else 2) and all(text.startswith("rank 1 is") for text in told), name


@pytest.mark.parametrize(("name", "means"), [("local", [2.0, 3.5, 5.5]), ("slowmo", [2.0, 4.5, 7.75])])
@on_ranks(3)
def test_methods_that_average_parameters(rank: int, name: str, means: list[float]):
    """Worker r adds r + 1 in each round of one step; rank 2 holds NaN at the end of the second. SlowMo: u = 2,
    0.5 u + 1.5 = 2.5, 0.5 u + 2 = 3.25."""
    p = nn.Parameter(torch.zeros(2))
    _, method = make_method(name, nn.ParameterList([p]), co2=CO2Config(tau=1))
    for step in range(3):
        with torch.no_grad():
            p.add_(rank + 1.0)
            if rank == 2 and step == 1:
                p[0] = NAN
        method.step()
        assert p.tolist() == [means[step]] * 2
    method.finish()
    assert p.tolist() == [means[-1]] * 2


@on_ranks(3, timeout=120)
def test_other_methods_and_formats_and_one_that_is_never_well(rank: int):
    """Overlap-Local-SGD and narrow wires, with a buffer; and a worker that holds NaN in every round."""
    warnings.simplefilter("ignore")
    for name, config in {
        "overlap_local": CO2Config(tau=3),
        "int8": Settings(tau=3, compression="int8").co2,
        "auto": CO2Config.recommended(),
    }.items():
        params = odd_parameters()
        model = nn.ParameterList(params)
        model.register_buffer("mean", torch.full((3,), float(rank), dtype=torch.float64))
        _, method = make_method("overlap_local" if name == "overlap_local" else "co2", model, co2=config)
        for step in range(STEPS):
            sgd_step(params, rank, step)
            model.get_buffer("mean").fill_(rank)
            if rank == BAD and step == SPOILT_AT:
                model.get_buffer("mean").fill_(NAN)
                with torch.no_grad():
                    params[1].fill_(INF)
            method.step()
        method.finish()
        state = [f for flats in (method.state | method.reducer.state).values() for f in flats]
        assert all(f.isfinite().all() for f in [*params, *state, model.get_buffer("mean")]), name
        assert alike(flat(params)), name
    params = odd_parameters()
    co2 = CO2(params, CO2Config(tau=1))
    with pytest.raises(DivergedError) as caught:
        for step in range(20):
            sgd_step(params, rank, step)
            if rank == 2:
                params[1].data.fill_(NAN)
            co2.step()
    assert step == MAX_REPEATS + 1 and str(caught.value).startswith("rank 2 is excluded")
    assert total_world_size(str(caught.value)) == [str(caught.value)] * 3 and (
        flat(params).isfinite().all() or rank == 2
    )


@pytest.mark.parametrize("pieces", [False, True])
@on_ranks(4, timeout=120)
def test_a_node_is_left_out_as_one(rank: int, pieces: bool):
    """One worker of the second of two nodes holds NaN, in its own part of the model or (as DDP would have it) with its
    partner. The mean is 1.5 in a round of both, and 1 in that of the first node alone; it is taken one round late."""
    mesh, (node, place) = node_mesh("cpu", 2), divmod(rank, 2)
    p, more = nn.Parameter(torch.zeros(3, dtype=torch.float64)), 10.0 * place if pieces else 0.0
    options: dict[str, Any] = {"mesh": mesh}
    if pieces:
        options["shards"] = True
    s = Settings(tau=1, outer_momentum=0.0, gap="none", clip=None, allow_unstable=True)
    co2, seen = CO2([p], s.co2, **options), []
    with warnings.catch_warnings(record=True, action="always") as told:
        for step in range(5):
            with torch.no_grad():
                p.sub_(1.0 + node + more)
                if step == 1 and node and (place or not pieces):
                    p[1] = NAN
            co2.step()
            seen.append(p.detach().mean().item() if p.isfinite().all() else NAN)
        co2.finish()
    moves = [0.0, *(-(mean + more) for mean in (1.5, 1.0, 1.5, 1.5, 1.5))]
    assert [*seen, p.detach().mean().item()] == pytest.approx(torch.tensor(moves).cumsum(0).tolist())
    texts = [str(w.message) for w in told if "excluded" in str(w.message)]
    assert len(texts) == (rank == 0) and all("the node of rank 2 is excluded" in text for text in texts)


def left_out_once(build: Any, **options: Any) -> list[float]:
    """A worker alone: the outer iterate after each round, one of which jumps and so is left out."""
    p = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    co2, trace = build([p], CO2Config(tau=2, gap="norm", outer_momentum=0.3), **options), []
    with warnings.catch_warnings(action="ignore"):
        for step in range(20):
            with torch.no_grad():
                p -= 1e6 if step == 11 else 0.1
            if co2.step():
                trace.append(p[0].item())
        co2.finish()
    return [*trace, p[0].item()]


@pytest.mark.parametrize(("build", "round"), [(CO2, 5), (partial(CO2, shard=True), 6)])
def test_the_optimiser_forgets_once_after_a_jump(build: Any, round: int):
    p, told = nn.Parameter(torch.zeros(5, dtype=torch.float64)), []
    co2 = build([p], CO2Config(tau=2))
    co2.on_excluded = lambda _: told.append(co2.rounds)
    with pytest.warns(UserWarning, match="larger than its usual"):
        for step in range(20):
            with torch.no_grad():
                p -= 1e6 if step == 11 else 0.1
            co2.step()
    assert told == [round]


@pytest.mark.parametrize("options", [{"shard": True}, {"offload": True}])
def test_where_all_are_left_out_shared_state_goes_on_as_unshared(options: dict[str, bool]):
    """The mean of nobody is zero, and the momentum goes on."""
    expected = left_out_once(CO2)
    assert abs(expected[-1]) < 100 and len(set(expected[5:8])) == 3
    assert left_out_once(CO2, **options) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@on_ranks(3, timeout=120)
def test_an_optimiser_that_was_spoilt_spoils_one_round_also_of_shared_state(rank: int):
    """A gradient that is not finite, after which Adam's moments are not, either."""
    traces = []
    for options in ({}, {"shard": True}, {"offload": True}):
        params = odd_parameters()
        _, method = make_method("co2", nn.ParameterList(params), co2=CO2Config(tau=3), **options)
        optimizer = torch.optim.Adam(params[:-1], 0.01)  # the last is the first one once more
        method.on_excluded, trace = forget(optimizer), []
        with warnings.catch_warnings(record=True, action="always") as seen:
            for step in range(STEPS):
                for p in params[:-1]:
                    p.grad = gradient(p.detach(), rank, step) * (NAN if rank == BAD and step == SPOILT_AT else 1.0)
                optimizer.step()
                if method.step():
                    trace.append(flat(params))
            method.finish()
        traces.append([*trace, flat(params)])
        assert rank or len([w for w in seen if "excluded" in str(w.message)]) == 1
    for plain, *shared in zip(*traces, strict=True):
        for ours in shared:
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@on_ranks(3, timeout=120)
def test_a_checkpoint_knows_of_a_worker_that_was_left_out(rank: int):
    """Goes on from a checkpoint in other objects, between a bad sending and its landing."""
    warnings.simplefilter("ignore")
    models = [odd_parameters(), odd_parameters()]
    first, second = (make_method("co2", nn.ParameterList(p), co2=WAYS["paper"].co2, shard=True)[1] for p in models)
    told: list[list[int]] = [[], []]
    for method, steps in zip((first, second), told, strict=True):
        method.on_excluded = lambda _, method=method, steps=steps: steps.append(method.rounds)
    for step in range(9):
        sgd_step(models[0], rank, step)
        if rank == BAD and step == SPOILT_AT:
            models[0][1].data[0] = NAN
        first.step()
    with torch.no_grad():
        torch._foreach_copy_([p.detach() for p in models[1]], [p.detach() for p in models[0]])
    second.load_state_dict(first.state_dict())
    for step in range(9, 18):
        for params, method in zip(models, (first, second), strict=True):
            sgd_step(params, rank, step)
            method.step()
    first.finish(), second.finish()
    assert told == ([[2], []] if rank == BAD else [[], []]), "it forgets as it sends"
    assert torch.equal(*map(flat, models)) and flat(models[0]).isfinite().all()


def make_guard(workers: int = 1, factor: float | None = 10.0) -> tuple[OutlierFilter, CO2]:
    """As one of so many workers, whose buffers are one number."""

    def flight(device: torch.device) -> AsyncAllReduce:
        alone = AsyncAllReduce(device)
        alone.world_size = alone.places = workers
        return alone

    guard = OutlierFilter(factor)
    params, buffers = [nn.Parameter(torch.zeros(2))], [torch.zeros(1)]
    return guard, bare_co2(params, buffers=buffers, allreduce=flight, hooks=[guard])


def sends(guard: OutlierFilter, bare: CO2, size: float, *, buffer: float = 0.0, steps: int = 1) -> int:
    """The verdict on a difference of that norm."""
    (bucket,) = bare.buckets
    bucket.payload.fill_(size / 2**0.5)
    bucket.values.fill_(buffer)
    bare.scalars.set("weight", 1.0)
    bare.local_steps_sent = steps
    excluded = guard.before_allreduce()
    assert excluded is not None
    bare.exclude(excluded)
    assert bare.scalars["weight"].item() == (guard.verdict == 0)
    assert bare.scalars["excluded"].item() == guard.verdict
    assert not excluded or not (bucket.payload.any() or bucket.values.any())
    assert excluded or bucket.payload.all()
    return int(guard.verdict)


def verdicts(sizes: list[float], factor: float | None = 10.0) -> list[int]:
    of = make_guard(factor=factor)
    return [sends(*of, size) for size in sizes]


def hears(guard: OutlierFilter, codes: list[float], number: int) -> None:
    guard.on_reduced_scalars({"excluded": codes}, ReductionInfo(number, len(codes), len(codes), 0))


USUAL = [1.0] * WARMUP_ROUNDS


def test_what_counts_as_a_jump():
    assert verdicts([*USUAL, 9.0, 1.0]) == [0] * (WARMUP_ROUNDS + 2)
    assert verdicts([*USUAL, 11.0, 1.0]) == [0] * WARMUP_ROUNDS + [2, 0]
    assert verdicts([1.0, 1000.0, 1.0]) == [0, 0, 0], "nothing is usual yet"
    assert verdicts([*USUAL, 1e6], factor=None) == [0] * (WARMUP_ROUNDS + 1)


def test_a_level_that_lasts_is_a_jump_once_and_growth_without_end_is_one_for_ever():
    assert verdicts([*USUAL, 100.0, 90.0, 80.0, 2000.0]) == [0] * WARMUP_ROUNDS + [2, 0, 0, 2]
    assert verdicts([*USUAL, 1e2, 1e4, 1e6]) == [0] * WARMUP_ROUNDS + [2, 2, 2]


def test_what_is_not_finite_never_counts_and_is_not_remembered():
    assert verdicts([NAN, *USUAL, INF, -INF, 11.0, 1.0]) == [1, *[0] * WARMUP_ROUNDS, 1, 1, 2, 0]


def test_a_buffer_that_is_not_finite_counts_too():
    assert sends(*make_guard(), 1.0, buffer=NAN) == BUFFER


def test_the_number_of_local_steps_is_allowed_for():
    """48 times the steps lead at most 48 times as far: no jump; with as many steps it is one."""
    of = make_guard()
    assert not any(sends(*of, 1.0, steps=4) for _ in range(WARMUP_ROUNDS))
    assert sends(*of, 48.0, steps=192) == 0
    assert sends(*of, 48.0, steps=4) == 2


def test_the_bad_one_is_named_and_after_some_rounds_it_ends_the_run():
    guard, _ = make_guard(3)
    for number in range(MAX_REPEATS):
        with pytest.warns(UserWarning, match=f"^rank 1 is excluded from the average of round {number}: .*not finite"):
            hears(guard, [0.0, 1.0, 0.0], number)
    with pytest.raises(DivergedError, match=f"^rank 1 .*as in the {MAX_REPEATS} rounds before; lower") as caught:
        hears(guard, [0.0, 1.0, 0.0], 9)
    assert "\n" not in str(caught.value)


def test_rounds_in_a_row_alone_count():
    guard, _ = make_guard(2)
    with pytest.warns(UserWarning):
        for number in range(20):
            hears(guard, [2.0 * (number % 2), 0.0], number)
    hears(guard, [0.0, 0.0], 20)


@on_ranks(2)
def test_one_bad_gradient_does_not_stop_a_plain_loop(rank: int):
    """Adam's moments are not finite, either, until its state is reset, which is the default."""
    p = nn.Parameter(torch.ones(3))
    co2, optimizer = CO2([p], CO2Config(tau=2)), torch.optim.AdamW([p], 0.01)
    with warnings.catch_warnings(action="ignore"):
        for step in range(2 * MAX_REPEATS + 10):
            p.grad = torch.full_like(p, NAN if rank == BAD and step == SPOILT_AT else 1.0)
            optimizer.step()
            co2.step()
        co2.finish()
    assert p.isfinite().all() and all(v.isfinite().all() for v in optimizer.state[p].values())


def test_when_nobody_is_finite_nothing_goes_on():
    guard, _ = make_guard(2)
    with pytest.raises(DivergedError, match="every worker"):
        hears(guard, [1.0, 1.0], 3)
    with pytest.warns(UserWarning):
        hears(guard, [2.0, 2.0], 3)  # all have jumped, as where a learning rate starts anew


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_an_optimiser_that_forgets_begins_anew(name: str):
    options = {"momentum": 0.9} if name == "SGD" else {}
    p, q = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    spoilt, fresh = (getattr(torch.optim, name)([x], lr=0.1, **options) for x in (p, q))
    for bad in (1.0, NAN):
        p.grad = torch.full((2,), bad)
        spoilt.step()
    with torch.no_grad():
        p.copy_(q)
    for excluded in (False, True):
        forget(spoilt)(torch.tensor(excluded))
    for x, optimizer in ((p, spoilt), (q, fresh)):
        x.grad = torch.tensor([0.5, 3.0])
        optimizer.step()
    assert torch.equal(p, q)


def test_a_count_of_steps_in_host_memory_is_reset_as_soon_as_the_host_knows(monkeypatch: pytest.MonkeyPatch):
    """As of Adam on a GPU, whose moments are there and whose count is not. The first steps after it are no larger."""
    known = False
    monkeypatch.setattr("core.guards.workers._reaches", lambda flag, v: v.dim() > 0)
    monkeypatch.setattr("core.stats.HostCopy.is_ready", lambda copy: known)
    p, q, r = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(3))
    spoilt, fresh, kept = (torch.optim.Adam([x], lr=0.1) for x in (p, q, r))

    def steps(x: nn.Parameter, optimizer: torch.optim.Optimizer, *numbers: float) -> None:
        for number in numbers:
            x.grad = torch.tensor([number, 3.0])
            optimizer.step()

    for x, optimizer in ((p, spoilt), (r, kept)):
        steps(x, optimizer, 1.0)
    steps(p, spoilt, NAN)
    forget(spoilt)(torch.tensor(True))
    forget(kept)(torch.tensor(False))
    steps(p, spoilt, 0.5)
    assert spoilt.state[p]["step"] == 3 and bool(spoilt.state[p]["exp_avg"].isfinite().all())
    known = True
    with torch.no_grad():
        p.copy_(q)
    for x, optimizer in ((p, spoilt), (q, fresh), (r, kept)):
        steps(x, optimizer, 0.5, 2.0)
    assert torch.equal(p, q) and spoilt.state[p]["step"] == 2 and kept.state[r]["step"] == 3
    assert not spoilt._optimizer_step_pre_hooks and not kept._optimizer_step_pre_hooks


def test_a_round_that_a_schedule_makes_longer_is_no_jump():
    """Drift grows with the steps, and the size is divided by their square root only."""
    p = nn.Parameter(torch.zeros(3))
    co2 = CO2([p], CO2Config.paper(1), schedule=lambda t: {"tau": 1 if t < 12 else 192})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12 + 3 * 192):
            p.data.add_(1e-3)
            co2.step()
    assert co2.stats.excluded == 0 and co2.rounds == 15
