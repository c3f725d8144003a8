"""The planner's formulas against numbers computed by hand."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.live import Live, of_block
from training.checks import held
from training.plan import command, memory, time
from training.plan.case import (
    FLOAT32,
    MEGATRON,
    MERGES,
    RECOMPUTE,
    WIRES,
    Case,
    Cluster,
    Device,
    Layouts,
    Model,
    Software,
    preset,
    preset_model,
)

MODEL = Model("m", "gpt2", 8, 100, 4, 1000, 50, 400, 4, tied=True)
DEVICE = Device("d", 1e12, 2e9, 1e11, 1e10, top=0.5, passes=2, calls=(0, 0, 0))
CLUSTER = Cluster("c", DEVICE, 2, 4, inside=1e10, across=1e9, latency=1e-3, inside_latency=1e-5)
CUT = Layouts(2, 2, 2, 1, 2)  # tp2.pp2.dp2, micro-batches of 2
ISLANDS = Layouts(1, 1, 4, 2, 1, zero=3, tau=3, merge=2)  # tp1.pp1.dp4.fsdp.co2x2
OWN = 1_075_600  # parameters of MODEL
BLOCK = (400, 3_200), (100, 200)  # of a token; of a sample's 50: (20,000, 160,000), (5,000, 10,000)


@pytest.fixture
def a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block keeps."""
    monkeypatch.setattr(Model, "in_block", lambda *_: BLOCK)


def case(layout: Layouts, **changes: object) -> Case:
    return replace(Case(MODEL, CLUSTER, Software(), 16, layout), **changes)  # pyright: ignore


def parts(found: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value}  # pyright: ignore


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_parameters_flops_and_activations_are_the_published_ones():
    assert preset_model("gpt-125m", None).params == 124_439_808  # transformers' gpt2
    assert preset_model("llama-7b", None).params == 6_738_415_616  # transformers' Llama
    gpt = preset_model("gpt-175b", None)
    n, h, v, s = gpt.layers, gpt.width, gpt.vocabulary, gpt.context
    assert gpt.params - 2 * h == pytest.approx(
        12 * n * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * n * h))
    )  # [N] eq. 2
    assert (MODEL.linear_flops, MODEL.attention_flops, MODEL.head_flops) == (12e6, 1e6, 1e7)
    assert MODEL.step_flops == 3 * (8 * 13e6 + 1e7) and MODEL.params == OWN
    c = case(CUT)
    assert command.mfu(c, 2.0) == 16 * 342e6 / (2.0 * 8 * 1e12)
    m = preset_model("gpt-22b", None)
    n, h, v, s = m.layers, m.width, m.vocabulary, m.context
    assert m.step_flops == pytest.approx(72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))
    again = 4 / 3 * m.step_flops - m.head_flops  # all but the head is computed twice
    assert again == pytest.approx(96 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h)))  # [N] eq. 3
    layout = Layouts(8, 1, 1, 1, 4, recompute=RECOMPUTE.index("full"))
    c = Case(m, replace(preset("frontier"), nodes=1), MEGATRON, 4, layout)
    assert time.products(c) == pytest.approx(4 * again / 8 / (c.cluster.device.top * c.cluster.device.peak))
    m = preset_model("gpt-22b", None)
    b, t, s, h, a = 4, 8, m.context, m.width, m.heads
    c = Case(m, CLUSTER, MEGATRON, 4, Layouts(t, 1, 1, 1, b))
    whole = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))  # [K] eq. 2
    assert c.kept + c.scores == pytest.approx(whole) and replace(c, software=Software()).scores == 0


def test_a_collective_takes_what_ring_or_trees_take():
    c = CLUSTER
    assert c.allreduce(1e6, 4, 1) == pytest.approx(2 * 3 / 4 * 1e6 / 1e10 + 6e-5)  # inside a node, a ring
    assert c.allreduce(1e6, 2, 4) == pytest.approx(1e6 / 2.5e8 + 2e-3)  # four rings leave a node at once
    assert c.allreduce(1e3, 1024, 1) == pytest.approx(2 * 1e3 / 1e9 + 20e-3)  # trees: a ring would take 2 s
    assert c.allreduce(1e6, 1, 1) == 0


@pytest.mark.usefixtures("a_block")
def test_memory_of_a_cut_model():
    c = case(CUT)
    assert c.micro_batches == 4 and c.block == 60_950 and (c.own(False), c.own(True)) == (298_800, 294_000)
    assert parts(memory.of_stage(c, last=False)) == {
        "parameters": 4 * 298_800,
        "gradients": 4 * 298_800,
        "optimizer": 8 * 298_800,
        "casts": 2 * 298_800,
        "activations": 2 * (4 * 200_000 + 40_000),  # two micro-batches are in flight in the first stage
        "received": 4 * 40_000,
        "passing": 20_000 + 4 * 60_950,
        "reserve": 1.5 * 2**30,
    }
    last = memory.of_stage(c, last=True)
    assert memory.memory(c) == last, "which needs 9,800 bytes more, for it keeps its logits"
    assert (last["activations"], last["passing"]) == (4 * 200_000 + 40_000, 1_200_000)
    chunks = memory.of_stage(case(replace(CUT, v=2)), last=False)
    assert (chunks["activations"], chunks["received"]) == (1_680_000 * (1 + 1 / 4), 3 * 160_000)  # [K]
    few = memory.of_stage(case(replace(CUT, v=2, micro=4)), last=False)
    assert few["activations"] == 2 * 2 * 840_000, "no more than there are"
    full = case(replace(CUT, recompute=1))
    assert memory.activations(full, last=True) == 4 * 40_000 + 40_000
    assert memory.passing(full, last=False) == 220_000 + 4 * 60_950
    two = case(replace(CUT, micro=4))  # of two micro-batches none begins once the first one's gradients are there
    assert memory.gradients(two, last=False) == 0 < memory.gradients(two, last=True)


@pytest.mark.usefixtures("a_block")
def test_memory_of_islands():
    few = OWN - 6 * 121_300
    assert parts(memory.memory(case(ISLANDS))) == {
        "parameters": OWN,
        "gradients": 4 * OWN,  # of two micro-batches, the sum is whole
        "optimizer": 2 * OWN,
        "gathered": 2 * few,
        "activations": 8 * 180_000 + 2 * 20_000,
        "passing": 15_000 + 8 * 121_300,
        "co2": 3 * OWN,
        "reserve": 1.5 * 2**30,
    }
    assert memory.gradients(case(replace(ISLANDS, micro=2)), last=True) == 0
    assert memory.gathered(case(replace(ISLANDS, zero=2)), last=True) == 2 * OWN
    by_ddp = memory.memory(case(replace(ISLANDS, zero=1)))
    assert (by_ddp["buckets"], by_ddp["optimizer"], by_ddp["parameters"]) == (4 * OWN, 2 * OWN, 4 * OWN)
    assert by_ddp["casts"] == 2 * OWN and memory.casts(case(CUT, software=FLOAT32), last=True) == 0
    assert by_ddp["co2"] == 4 * OWN * (1 + 2 / 4) and memory.co2(case(replace(ISLANDS, offload=1)), last=True) == 0
    cut = case(Layouts(2, 1, 2, 2, 1, merge=2))
    assert memory.co2(cut, last=True) == 3 * 4 * cut.own(True), "replicas of a cut island share nothing out"


@pytest.mark.parametrize(("changes", "off"), [({}, 0.03), ({"accumulate": 2}, 0.03), ({"recompute": True}, 0.07)])
def test_a_step_holds_what_is_counted(changes: dict[str, Any], off: float):
    """Every tensor of a step of the recipe's model, forward and backward."""
    from language.recipes import RECIPES
    from language.train import backward, make_model

    recipe = replace(RECIPES["gpt2_pydoc_small"], method="ddp", batch_size=8, **changes)
    trained = make_model(recipe, pad=1).train()
    tokens = torch.zeros(8, recipe.context, dtype=torch.int64)
    run = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
    with Live([*trained.parameters(), *trained.buffers()]) as live:
        backward(run, recipe, trained, (tokens, tokens))  # pyright: ignore
    again = RECOMPUTE.index("full" if recipe.recompute else "none")
    layout = Layouts(1, 1, 1, 1, 8 // recipe.accumulate, recompute=again)
    c = Case(preset_model("gpt2-tiny", recipe.context), replace(CLUSTER, nodes=1, per_node=1), FLOAT32, 8, layout)
    found = memory.memory(c)
    assert found["gradients"] + found["activations"] + found["passing"] == pytest.approx(live.peak, rel=off)


GPT_BLOCK = replace(MODEL, width=128, inner=384, context=64)
LLAMA_BLOCK = replace(GPT_BLOCK, family="llama", activation="silu", kv_heads=2)


@pytest.mark.parametrize("value", [2, 4])
@pytest.mark.parametrize(
    "model",
    [*(replace(GPT_BLOCK, activation=a) for a in ("gelu", "gelu_new", "gelu_pytorch_tanh")), LLAMA_BLOCK],
    ids=lambda m: f"{m.family} {m.activation}",
)
def test_a_block_keeps_what_is_counted(model: Model, value: int):
    """Every tensor of transformers' block, whole and cut in two."""
    kept, more = model.in_block(value)
    for tp in (1, 2):
        measured = of_block(model, value, tp)
        assert kept[0] + kept[1] / tp == pytest.approx(measured[0], abs=1)
        if model.activation == "gelu_new" and value == 2:  # where it peaks depends on the sizes
            assert more[0] + more[1] / tp >= measured[1] - 8
        else:
            assert more[0] + more[1] / tp == pytest.approx(measured[1], abs=8)


@pytest.mark.parametrize(("merge", "wire"), [("outer", "float32"), ("mix", "int8"), ("keep", "int4")])
def test_co2_holds_as_much_as_a_dry_run_counts(merge: str, wire: str):
    from language.model import build_model
    from language.recipes import RECIPES

    recipe = RECIPES["gpt2_pydoc_small"]
    config = replace(recipe.co2, wire=replace(recipe.co2.wire, format=wire), merge=merge)
    config = replace(config, gap="none", delay="auto") if merge != "outer" else config
    with torch.device("meta"):
        model = build_model("gpt2_tiny", vocab_size=1024, context=64, dropout=0.0)
    counted = held(replace(recipe, method="co2", co2=config), model, 1, 8)
    layout = Layouts(1, 1, 1, 8, 4, wire=list(WIRES).index(wire), merge=MERGES.index(merge))
    c = Case(preset_model("gpt2-tiny", None), replace(CLUSTER, nodes=8, per_node=1), FLOAT32, 32, layout)
    assert c.model.params == sum(p.numel() for p in model.parameters())
    assert memory.co2(c, last=True) == pytest.approx(counted, rel=2e-3)  # blocks are filled up


def test_seconds_of_a_cut_model():
    assert parts(time.seconds(case(CUT))) == pytest.approx(
        {
            "products": 4 * 2 * (4 * 39.5e6 + 30e6) / 2 / 5e11,
            "passes": 4 * 4 * 3 * 2 * 220_000 / 1e11,
            "tensor": 4 * 4 * 4 * 2.2e-5,
            "ends": 4 * (4e-5 / 2 + 2.2e-5),  # logits of 200,000 bytes, gathered; what the head gives back
            "pipeline": (2 + 3) * (40_000 / 2.5e8 + 1e-3),
            "tied": 4 * 50_000 / 2.5e8 + 1e-3,
            "bubble": (1.264e-3 + 2.112e-4 + 1.408e-3) / 4,  # other stages have no head
            "data": 4 * 298_800 / 1e10 + 48 * 2e-5,  # nothing hides it behind a pipeline, one tensor after the other
            "optimizer": 28 * 298_800 / 1e11,
        }
    )
    full = case(replace(CUT, recompute=1))
    assert time.tensor(full) == pytest.approx(4 * 4 * 6 * 2.2e-5)
    assert time.products(full) == pytest.approx(4 * 2 * (4 * (4 * 12e6 + 4.5 * 1e6) + 30e6) / 2 / 5e11)
    interleaved = case(replace(CUT, v=2))
    assert time.pipeline(interleaved) == pytest.approx(2 * (1 + 4 * 2) * 1.16e-3)
    assert time.bubble(interleaved) == pytest.approx((1.264e-3 + 2.112e-4 + 1.408e-3) / 8)
    four = case(Layouts(2, 4, 1, 1, 2))  # inner stages exchange twice while the last has its head to compute
    assert time.pipeline(four) == pytest.approx(6 * 1.08e-3 + 7 * (1.08e-3 + 1.08e-3 - 3 * 2 * 1e7 / 2 / 5e11))
    alone = case(replace(CUT, pp=1, dp=4, micro=1))  # which has the embedding, too
    assert time.ends(alone) == pytest.approx(4 * ((1e-5 + 2e-5) / 2 + 2 * 2.1e-5))


def test_a_host_is_hidden_beneath_its_gpu_s_computing():
    slow = replace(CLUSTER, device=replace(DEVICE, calls=(1e-3, 2e-3, 4e-3)))
    c = case(CUT, cluster=slow)
    assert time.host(c) == pytest.approx(4 * 4 * 3e-3 - time.products(c) - time.passes(c))
    cpu = replace(slow, device=replace(slow.device, gpu=False))
    assert time.host(case(CUT, cluster=cpu)) == pytest.approx(4 * 4 * 3e-3)
    assert time.host(case(ISLANDS, cluster=cpu)) == pytest.approx(2 * 8 * 5e-3)
    assert time.host(case(CUT, cluster=replace(slow, device=replace(slow.device, peak=1e9)))) == 0


def test_seconds_of_islands():
    quick = replace(CLUSTER, inside_latency=0.0)
    found = parts(time.seconds(case(ISLANDS, cluster=quick)))
    step = 1.384e-3 + 1.632e-4 + 28 * OWN / 4 / 1e11
    allreduce = OWN / 2.5e8 + 2e-3
    assert found == pytest.approx(
        {
            "products": 1.384e-3,
            "passes": 1.632e-4,
            "optimizer": 28 * OWN / 4 / 1e11,
            "waiting": allreduce / 3 - step,
            "boundary": 32 * OWN / 4 / 1e11 / 3,
        }
    )
    hidden = time.seconds(case(replace(ISLANDS, tau=48), cluster=quick))
    assert hidden["waiting"] == 0
    narrow = case(Layouts(1, 1, 1, 8, 1, wire=2), cluster=replace(CLUSTER, nodes=8, per_node=1))
    assert time.outer_allreduce(narrow) == pytest.approx(2 * OWN * 132 / 256 / 1e9 + 6e-3)  # trees


@pytest.mark.parametrize(("zero", "volume"), [(0, 2.0), (1, 3.0), (2, 1 + 0.5), (3, 1 + 4 * 0.5)])
def test_data_parallel_traffic(zero: int, volume: float):
    """Halves of a ring of float32 gradients, with nothing hidden, two micro-batches and no latency."""
    cluster = replace(CLUSTER, inside_latency=0.0)
    c = case(replace(ISLANDS, zero=zero), cluster=cluster, software=replace(Software(), overlap=False))
    assert time.data(c) == pytest.approx(volume / 2 * 2 * 3 / 4 * 4 * OWN / 1e10)
    if zero == 0:
        whole, compute = 2 * 3 / 4 * 4 * OWN / 1e9, 1.384e-3 + 1.632e-4
        slow = case(replace(ISLANDS, zero=0), cluster=replace(cluster, inside=1e9))
        late = 1 - 2**20 / (4 * OWN)  # the first bucket is full
        assert time.data(slow) == pytest.approx(whole - compute / 2 * 2 / 3 * late)
        stages = case(Layouts(1, 2, 4, 1, 1), cluster=replace(cluster, inside=1e9))
        assert time.data(stages) == pytest.approx(2 * 3 / 4 * 4 * stages.largest / 1e9), "a pipeline hides nothing"


def test_gloo_waits_and_takes_detours():
    """Without latency, of 4 ranks: whole all-reduces for FSDP2, trees for ZeRO-1; DDP's last bucket hides nowhere."""
    cluster = replace(CLUSTER, inside_latency=0.0, inside=1e9)
    gloo, ring = {"cluster": cluster, "software": FLOAT32}, 2 * 3 / 4 * 4 * OWN / 1e9
    assert time.data(case(replace(ISLANDS, zero=3), **gloo)) == pytest.approx((1 + 4 / 2) * ring)
    last = (4 * OWN - 2**20) * 1.5 / 1e9
    fast = replace(cluster, device=replace(DEVICE, peak=1e11))
    assert time.data(case(replace(ISLANDS, zero=0), cluster=fast)) == pytest.approx(last)
    by_one = time.data(case(replace(ISLANDS, zero=1), **gloo)) - time.data(case(replace(ISLANDS, zero=0), **gloo))
    assert by_one == pytest.approx(2 * 4 * OWN / 1e9)
    wide = case(Layouts(1, 1, 8, 1, 1, zero=1), software=FLOAT32)  # two hops in a node, then four ranks share a card
    trees = 2 * 4 * OWN / 1e10 + 4 * 4 * OWN / 1e9 + 1e-3 + 3 * 96 * 1e-3
    assert time.broadcasts(wide, 4 * OWN) == pytest.approx(trees)
