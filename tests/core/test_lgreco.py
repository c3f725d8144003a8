"""L-GreCo's reducer on real processes against all workers in one, and the ways of sending that it is made of."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core import UserError
from core.allocate import total
from core.fast import WireConfig
from core.lgreco.choices import Choice, code, offered, parse, sent_bytes, uniform
from core.lgreco.config import LGrecoConfig
from core.lgreco.curves import curve
from core.lgreco.layout import in_bucket
from core.lgreco.reference import Reference
from core.testing import run_distributed
from tests.core.test_wire_bytes import loopback_bytes
from tests.problems import Mean
from training.sampling import generator

SHAPES = [(24, 40), (300,), (16, 8, 3, 3), (7,), (60, 20), (3, 90)]
ROUNDS = 7
SETTINGS = [
    ("int4", LGrecoConfig(every=2, first=2)),
    ("int4", LGrecoConfig("any", every=2, first=2)),
    ("top0.01", LGrecoConfig(every=2, first=1, error="squared")),
    ("rank4", LGrecoConfig(every=2, first=2)),
    ("rank4", LGrecoConfig("any", "lgreco_accordion", every=3, first=1)),
    ("top0.05", LGrecoConfig(rule="accordion", every=2, first=1)),
    ("rank2", LGrecoConfig(rule="uniform", every=2, first=2)),
]


def written(rank: int, round: int, layer: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Layers of very unlike sizes and spectra, and other ones in later rounds."""
    shape = SHAPES[layer]
    noise = torch.randn(shape, generator=generator(rank, round, layer), dtype=dtype)
    scale = 10.0 ** ((layer + round // 3) % 3 - 1)
    if layer % 2 == 0:
        column = torch.randn(shape[0], 1, generator=generator(9, layer), dtype=dtype)
        noise = 0.05 * noise.view(shape[0], -1) + column
    return scale * noise.reshape(-1)


def reducers(rank: int, world_size: int) -> list[list[Tensor]]:
    return [of_rounds(rank, *setting) for setting in SETTINGS]


def built(like: str, config: LGrecoConfig, dtype: torch.dtype = torch.float64, **more: Any) -> Mean:
    wire = WireConfig("lgreco", like=like, lgreco=config, **more)
    tensors = [torch.zeros(s, dtype=dtype) for s in SHAPES]
    return Mean(tensors, {"steps": 1, "weight": 1}, wire.reducer, buffers=[torch.zeros(5, dtype=dtype)])


def once(mean: Mean, rank: int, round: int, steps: float = 1.0) -> Tensor:
    """One reduction; what lands."""
    bucket = mean.buckets[0]
    bucket.payload.copy_(torch.cat([written(rank, round, i, bucket.flat.dtype) for i in range(len(SHAPES))]))
    bucket.values.fill_(rank + 0.5)
    mean.scalars.set("steps", steps)
    mean.scalars.set("weight", 1.0)
    mean.launch()
    mean.wait()
    return bucket.payload.clone()


def of_rounds(rank: int, like: str, config: LGrecoConfig) -> list[Any]:
    """What lands in each round, the buffers' mean, the codes of what is sent, and the bytes: counted and allocated."""
    mean, seen = built(like, config), []
    for round in range(ROUNDS):
        allocated = sum(
            sent_bytes(z, c, mean.background.world_size)
            for z, c in zip(mean.reducer.layers, mean.reducer.chosen, strict=True)
        )
        landed = once(mean, rank, round)
        codes = torch.tensor([code(c) for c in mean.reducer.chosen], dtype=torch.float64)
        seen.append([landed, mean.buckets[0].values.clone(), codes, mean.background.bytes_sent, allocated])
    mean.close()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_all_workers_in_one_process(world_size: int):
    """Means, choices, switches and what is held back, round after round; every rank holds the same bits."""
    results = run_distributed(reducers, world_size)
    for number, (like, config) in enumerate(SETTINGS):
        expected, switches = Reference(SHAPES, world_size, like, config, torch.float64), set()
        for round in range(ROUNDS):
            rows = [torch.stack([written(r, round, i) for r in range(world_size)]) for i in range(len(SHAPES))]
            landed = torch.cat(expected.reduce(rows))
            codes = torch.tensor([code(c) for c in expected.chosen], dtype=torch.float64)
            switches.add(tuple(codes.tolist()))
            first = results[0][number][round]
            torch.testing.assert_close(first[0], landed, rtol=1e-9, atol=1e-9)
            assert torch.equal(first[2], codes)
            for result in results:
                assert torch.equal(result[number][round][0], first[0]), "decoded alike, bit for bit"
                assert torch.equal(result[number][round][1], torch.full((5,), world_size / 2, dtype=torch.float64))
        assert len(switches) > 1 or config.rule == "uniform", f"{like} {config}: nothing was ever chosen anew"


# -- int4 everywhere --------------------------------------------------------------------------------------------


def int4_twice(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """By rounding and dtype: what int4 lands after three rounds, and what lgreco does that sends int4 everywhere."""
    seen = []
    for rounding in ("nearest", "stochastic"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            ours = built("int4", LGrecoConfig(rule="uniform"), dtype, rounding=rounding)
            tensors = [torch.zeros(s, dtype=dtype) for s in SHAPES]
            plain = Mean(
                tensors,
                {"steps": 1, "weight": 1},
                WireConfig("int4", rounding).reducer,
                buffers=[torch.zeros(5, dtype=dtype)],
            )
            for round in range(3):
                landed = [once(mean, rank, round) for mean in (ours, plain)]
            landed += [ours.buckets[0].rest, plain.buckets[0].rest]
            seen.append((*landed, ours.background.bytes_sent, plain.background.bytes_sent))
            ours.close(), plain.close()
    return seen


@pytest.mark.parametrize("world_size", [1, 3])
def test_int4_everywhere_is_int4(world_size: int):
    """Bit for bit, with the same bytes."""
    for result in run_distributed(int4_twice, world_size):
        for ours, plain, ours_rest, plain_rest, ours_bytes, plain_bytes in result:
            assert torch.equal(ours, plain) and torch.equal(ours_rest, plain_rest) and ours_bytes == plain_bytes


# -- bytes ------------------------------------------------------------------------------------------------------

LARGE = [(400, 300), (300, 250), (5000,), (64, 32, 3, 3)]


def bytes_of(rank: int, world_size: int) -> list[tuple[str, float, float, list[str]]]:
    """(like, counted, allocated, choices) where every family is in use."""
    seen = []
    for like, config in (
        ("int4", LGrecoConfig(first=1)),
        ("top0.01", LGrecoConfig(first=1)),
        ("rank4", LGrecoConfig("any", first=1)),
    ):
        mean = Mean(
            [torch.zeros(s) for s in LARGE],
            {"steps": 1, "weight": 1},
            WireConfig("lgreco", like=like, lgreco=config).reducer,
        )
        for round in range(2):
            draw = torch.randn(mean.buckets[0].numel, generator=generator(rank, round))
            mean.buckets[0].payload.copy_(draw * torch.linspace(0.01, 3, len(draw)) ** 3)
            mean.scalars.set("steps", 1.0)
            mean.scalars.set("weight", 1.0)
            mean.launch()
            mean.wait()
        allocated = sum(
            sent_bytes(z, c, world_size) for z, c in zip(mean.reducer.layers, mean.reducer.chosen, strict=True)
        )
        seen.append((like, mean.background.bytes_sent, allocated, [str(c) for c in mean.reducer.chosen]))
        mean.close()
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_sent_are_those_allocated(world_size: int):
    for result in run_distributed(bytes_of, world_size):
        for like, counted, allocated, choices in result:
            assert counted == pytest.approx(allocated, rel=0.02), f"{like}: {choices}"


COUNT = """
from core.testing import run_distributed
from tests.core.test_lgreco import counted_by_the_kernel
print(run_distributed(counted_by_the_kernel, 3, timeout=200))
"""


def counted_by_the_kernel(rank: int, world_size: int) -> dict[str, tuple[float, int]]:
    """By the uniform setting: the bytes allocated to this worker, and what the kernel sent over lo, of all workers."""
    counted = {}
    for like, family in (("int4", "same"), ("top0.01", "same"), ("rank32", "same")):
        wire = WireConfig("lgreco", like=like, lgreco=LGrecoConfig(family, first=1))
        mean = Mean(
            [torch.zeros(s) for s in [(2000, 1500), (1000, 700), (20000,)]], {"steps": 1, "weight": 1}, wire.reducer
        )
        draw = torch.randn(mean.buckets[0].numel, generator=generator(rank))
        for _ in range(2):  # connections are made, and the choices
            before = counted_once(mean, draw * torch.linspace(0.01, 3, len(draw)) ** 3)
        counted[like] = before
        mean.close()
    return counted


def counted_once(mean: Mean, values: Tensor) -> tuple[float, int]:
    workers = mean.background.world_size
    pairs = zip(mean.reducer.layers, mean.reducer.chosen, strict=True)
    allocated = sum(sent_bytes(z, c, workers) for z, c in pairs)
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()  # nobody starts before all have read
    mean.buckets[0].payload.copy_(values)
    mean.scalars.set("steps", 1.0)
    mean.scalars.set("weight", 1.0)
    mean.launch()
    mean.wait()
    dist.barrier()
    return allocated, loopback_bytes() - before


@pytest.mark.root
def test_the_kernel_counts_what_is_allocated():
    """In a network namespace of its own, whose packets of 64 KiB have few headers: within 2 %, and 16 KB for barriers,
    acknowledgements and gloo's preambles."""
    inside = ["sh", "-c", 'ip link set lo up && exec "$0" -c "$1"', sys.executable, COUNT]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(["unshare", "-rn", *inside], capture_output=True, text=True, env=environment, timeout=240)
    assert run.returncode == 0, run.stderr
    results = ast.literal_eval(run.stdout)
    for like, (allocated, counted) in results[0].items():
        assert abs(counted - 3 * allocated) <= 0.02 * 3 * allocated + 16e3, like


def test_costs_by_hand():
    """A matrix 40 x 30, float32, four workers: 1.5 messages of what is reduced, three of what is gathered."""
    layer = built("int4", LGrecoConfig()).reducer.layers[0]
    layer = type(layer)(0, 0, 1200, 40, 30, 4, (40, 30))
    costs = {
        "int4": 1200 * 132 / 256 * 1.5,
        "int2": 1200 * 68 / 256 * 1.5,
        "rank4": 4 * 70 * 4 * 1.5,
        "top0.01": 12 * 8 * 3,
    }
    for name, bytes in costs.items():
        assert sent_bytes(layer, parse(name), 4) == pytest.approx(bytes)
    assert sent_bytes(layer, Choice("raw"), 4) == 4800 * 1.5
    assert sent_bytes(layer, parse("top0.01"), 1) == 96, "one worker decides as one of two"


# -- what the released code gets wrong, and bad input -----------------------------------------------------------


def unlike_workers(rank: int, world_size: int) -> list[list[str]]:
    """Worker 1's first layer is hard, worker 0's is easy."""
    seen = []
    for hard in (0.0, 30.0):
        mean = Mean(
            [torch.zeros(64, 64), torch.zeros(64, 64)],
            {"steps": 1, "weight": 1},
            WireConfig("lgreco", like="int4", lgreco=LGrecoConfig(first=1)).reducer,
        )
        mean.buckets[0].payload.copy_(torch.randn(8192, generator=generator(0)))
        mean.buckets[0].payload[:4096] *= 1 + hard * rank
        mean.scalars.set("steps", 1.0)
        mean.scalars.set("weight", 1.0)
        mean.launch()
        mean.wait()
        seen.append([str(c) for c in mean.reducer.chosen])
        mean.close()
    return seen


def test_every_workers_errors_count():
    """Released: the first worker's alone."""
    first, second = run_distributed(unlike_workers, 2)
    assert first == second
    assert first[0] != first[1] and first[1][0] > first[1][1], "the hard layer gets more bits"


def train(mean: Mean, rounds: range, scale: Any = 1.0) -> None:
    for round in rounds:
        bucket = mean.buckets[0]
        bucket.payload.copy_(torch.cat([written(0, round, i, bucket.flat.dtype) for i in range(len(SHAPES))]))
        for i, view in enumerate(in_bucket(bucket.payload, mean.reducer.layers, range(len(SHAPES)))):
            view.mul_(scale if isinstance(scale, float) else scale(i, round))
        mean.scalars.set("steps", 1.0)
        mean.scalars.set("weight", 1.0)
        mean.launch()
        mean.wait()


@pytest.mark.parametrize("like", ["int4", "top0.01", "rank4"])
def test_a_layer_that_is_not_finite_keeps_its_choice_and_the_others_go_on(like: str):
    mean = built(like, LGrecoConfig(every=1, first=1))
    train(mean, range(2))
    before = list(mean.reducer.chosen)
    train(mean, range(2, 3), lambda i, round: float("nan") if i == 4 else 10.0**i)
    assert mean.reducer.chosen[4] == before[4] and mean.reducer.allocation.number == 3
    assert like == "rank4" or list(mean.reducer.chosen) != before
    assert "layers 4 are not finite and keep what they have" in mean.reducer.allocation.reason
    bad = [bool(v.isnan().any()) for v in in_bucket(mean.buckets[0].payload, mean.reducer.layers, range(len(SHAPES)))]
    assert bad[4], "what is not finite is seen by all"


def test_a_layer_of_zeros_gets_the_least_bytes():
    for like, least in (("int4", "int2"), ("top0.01", "top0.001"), ("rank4", "rank2")):
        mean = built(like, LGrecoConfig(first=1))
        train(mean, range(1), lambda i, round: 0.0 if i == 4 else 1.0)
        assert str(mean.reducer.chosen[4]) == least
        train(mean, range(1, 4))
        assert mean.buckets[0].payload.isfinite().all(), "and comes back from zero"


def test_one_layer():
    for like in ("int4", "top0.01", "rank4"):
        mean = Mean(
            [torch.zeros(40, 50)],
            {"steps": 1, "weight": 1},
            WireConfig("lgreco", like=like, lgreco=LGrecoConfig(first=1)).reducer,
        )
        mean.buckets[0].payload.copy_(torch.randn(2000, generator=generator(1)))
        mean.scalars.set("steps", 1.0)
        mean.scalars.set("weight", 1.0)
        mean.launch(), mean.wait()
        found = mean.reducer.allocation
        assert sum(found.bytes) <= found.uniform_bytes


def test_a_matrix_narrower_than_the_largest_rank():
    """Released: the branch by singular values fails there. (3, 90) has rank 3 at most."""
    mean = built("rank4", LGrecoConfig("any", first=1, highest_rank=16.0))
    assert max(c.value for c in mean.reducer.decider.choices if c.kind == "rank") == 64
    train(mean, range(2))
    narrow = mean.reducer.decider.offered[5].tolist()
    assert not any(
        ok and c.kind == "rank" and c.value > 3 for ok, c in zip(narrow, mean.reducer.decider.choices, strict=True)
    )


def test_the_report_counts_what_is_sent_not_the_uniform_setting():
    """Released: the ratio it prints is of the uniform rank."""
    mean = built("rank4", LGrecoConfig("any", first=1))
    train(mean, range(1))
    found = mean.reducer.allocation
    assert sum(found.bytes) == pytest.approx(
        total(mean.reducer.decider.sizes, [mean.reducer.decider.choices.index(c) for c in found.choices])
    )
    assert sum(found.bytes) < found.uniform_bytes
    assert found.table().count("\n") == 1 + len(SHAPES) and "| 24 x 40 |" in found.table()
    assert sum(b * z.numel for b, z in zip(found.bits, found.layers, strict=True)) / 8 == pytest.approx(
        sum(found.bytes), rel=1e-6
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s[0])
def test_nothing_is_lost_over_switches_nor_where_nobody_moved(setting: Any):
    """What landed and what is held back are the sum of all differences; means of nothing are thrown away."""
    mean, sums, got = built(*setting), 0.0, 0.0
    for round in range(8):
        if round % 3 == 2:
            mean.buckets[0].payload.zero_()
            mean.scalars.set("steps", 0.0)
            mean.scalars.set("weight", 1.0)
            mean.launch(), mean.wait()
            continue
        train(mean, range(round, round + 1))
        got = got + mean.buckets[0].payload
        sums = sums + torch.cat([written(0, round, i) for i in range(len(SHAPES))])
    mean.reducer._switch([Choice("raw")] * len(SHAPES))  # all that is held back of means joins the worker's own
    layout = mean.reducer._layouts[0]
    held = torch.cat(
        [mean.reducer._errors[0][layout.starts[i] :][: z.numel] for i, z in enumerate(mean.reducer.layers)]
    )
    torch.testing.assert_close(got + held, sums, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("setting", SETTINGS[:5], ids=lambda s: s[0])
@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_resumed_reducer_goes_on_bit_for_bit(setting: Any, at: int):
    first, second = built(*setting), built(*setting)
    train(first, range(at))
    for name, flats in first.reducer.state.items():
        for to, source in zip(second.reducer.state[name], flats, strict=True):
            assert to.shape == source.shape
            to.copy_(source)
    second.background.restore(first.background.launched, False)
    for round in range(at, 7):
        train(first, range(round, round + 1)), train(second, range(round, round + 1))
        assert torch.equal(first.buckets[0].payload, second.buckets[0].payload), round
        assert list(first.reducer.chosen) == list(second.reducer.chosen)


def test_state_of_zeros_is_the_start():
    """As resync() makes it."""
    for setting in SETTINGS[:5]:
        used, fresh = built(*setting), built(*setting)
        train(used, range(5))
        for flat in (flat for flats in used.reducer.state.values() for flat in flats):
            flat.zero_()
        used.background.restore(0, False)
        for round in range(5):
            train(used, range(round, round + 1)), train(fresh, range(round, round + 1))
            assert torch.equal(used.buckets[0].payload, fresh.buckets[0].payload)


def test_another_settings_allocation_is_refused():
    first, second = built("int4", LGrecoConfig("any", first=1)), built("int4", LGrecoConfig(first=1))
    second.reducer._codes_now.copy_(torch.full((len(SHAPES),), code(parse("rank4")), dtype=torch.float64))
    with pytest.raises(UserError, match="wire.like='int4' with family='same' does not offer: resume with the settings"):
        once(second, 0, 0)
    first.close()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"format": "lgreco"}, "wire.like='': give int2"),
        ({"format": "lgreco", "like": "int7"}, "wire.like='int7': give int2"),
        ({"format": "lgreco", "like": "top0.7"}, "wire.like='top0.7': give"),
        ({"format": "lgreco", "like": "rank0"}, "such as rank4"),
        ({"format": "lgreco", "like": "rank2.5"}, "wire.like='rank2.5'"),
        ({"format": "lgreco", "like": "int4", "error_feedback": False}, "always feeds back"),
        ({"format": "int4", "like": "int4"}, "wire.like='int4' is of wire.format lgreco, not int4"),
        ({"format": "int4", "lgreco": LGrecoConfig(every=3)}, "is of wire.format lgreco, not int4"),
    ],
)
def test_bad_settings(settings: dict[str, Any], text: str):
    with pytest.raises(UserError) as caught:
        WireConfig(**settings)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "all"},
        {"rule": "best"},
        {"error": "max"},
        {"share": 0.0},
        {"lowest_rank": 2.0},
        {"highest_rank": 0.5},
        {"every": 0},
        {"first": 1.5},
    ],
)
def test_bad_lgreco_settings(settings: dict[str, Any]):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(UserError, match=f"wire.lgreco.{name}={value!r}: "):
        LGrecoConfig(**settings)


def test_what_saves_nothing_anywhere_is_refused():
    with pytest.raises(UserError, match="wire.like='rank1000' would save nothing in any parameter of this model"):
        built("rank1000", LGrecoConfig())


# -- curves and choices -----------------------------------------------------------------------------------------


def test_curves_by_hand():
    """diag(4, 3, 2, 1): rank r leaves the root of the squares of the rest; top-k what the smallest add up to."""
    matrix = torch.zeros(40, 30, dtype=torch.float64)
    matrix[range(4), range(4)] = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    layer = built("int4", LGrecoConfig()).reducer.layers[0]
    layer = type(layer)(0, 0, 1200, 40, 30, 8, (40, 30))
    choices = [Choice("raw"), Choice("rank", 1), Choice("rank", 3), Choice("top", 2 / 1200), parse("int2")]
    errors = curve(matrix.view(-1), layer, choices, [True] * 5, seed=0)
    assert errors.tolist() == pytest.approx([0.0, 14**0.5, 1.0, 5**0.5, 6**0.5], abs=1e-6)
    # int2: all four lie in the first block, whose step is 4: 3 becomes 4, 2 (half a step, to even) and 1 become 0
    assert curve(matrix.view(-1) * float("nan"), layer, choices, [True] * 5, seed=0).isnan().all()
    assert curve(matrix.view(-1), layer, choices, [True] * 4 + [False], seed=0)[4].isinf()


def test_choices_of_each_family():
    assert [str(c) for c in offered(parse("int4"), "same", 0.5, 2)] == [
        "as it is",
        "int4",
        "int2",
        "int3",
        "int5",
        "int6",
        "int8",
    ]
    assert [str(c) for c in offered(parse("rank4"), "same", 0.5, 2)][1:] == [
        "rank4",
        "rank2",
        "rank3",
        "rank5",
        "rank6",
        "rank7",
        "rank8",
    ]
    tops = [c.value for c in offered(parse("top0.01"), "same", 0.5, 2) if c.kind == "top"]
    assert sorted(tops) == pytest.approx([0.01 * 10 ** (i / 4 - 1) for i in range(9)])
    everything = {c.kind for c in offered(parse("top0.01"), "any", 0.5, 2)}
    assert everything == {"raw", "int", "top", "rank"}
    small = built("rank4", LGrecoConfig()).reducer.layers[3]
    assert str(uniform(small, parse("rank4"))) == "as it is", "a vector has no rank"
