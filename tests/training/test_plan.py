"""The planner: its formulas against numbers by hand, and what it reads, refuses, chooses, says and runs."""

import training.prepared  # noqa: F401, transformers and timm import torchvision when it is installed

# isort: split
import contextlib
import json
import os
import re
import subprocess
import sys
import time as clock
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from core import UserError
from tests.scripts import refused
from tests.training.live import Live, of_block
from training.checks import held
from training.layouts.layout import Layout
from training.plan import command, memory, time
from training.plan.case import (
    FLOAT32,
    FORMATS,
    MERGES,
    RECOMPUTE,
    Case,
    Cluster,
    Device,
    Layouts,
    Model,
    Software,
    device,
    from_config,
    from_doctor,
    preset,
    preset_model,
    presets,
)
from training.plan.command import main, overrides
from training.plan.search import holds, plan

MODEL = Model("m", "gpt2", 8, 100, 4, 1000, 50, 400, 4, tied=True)
DEVICE = Device("d", 1e12, 2e9, 1e11, 1e10, top=0.5, passes=2, calls=(0, 0, 0))
CLUSTER = Cluster("c", DEVICE, 2, 4, inside=1e10, across=1e9, latency=1e-3, inside_latency=1e-5)
CUT = Layouts(2, 2, 2, 1, 2)  # tp2.pp2.dp2, micro-batches of 2
ISLANDS = Layouts(1, 1, 4, 2, 1, zero=3, tau=3, merge=1)  # tp1.pp1.dp4.fsdp.co2x2
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
    b, t = 4, 8
    c = Case(m, CLUSTER, Software(), 4, Layouts(t, 1, 1, 1, b))
    assert c.kept == pytest.approx(s * b * h * (10 + 24 / t))  # [K] eq. 2, without scores


def test_devices_have_the_constants_that_were_fitted_to_published_runs():
    fitted = json.loads((Path(__file__).parents[2] / "results/plan.json").read_text())["megatron"]["constants"]
    for name in presets()["devices"]:
        assert (device(name).top, device(name).passes) == (round(fitted["top"], 2), round(fitted["passes"], 2))
    for name in ("dgx-a100-roce", "dgx-a100-tcp", "selene"):
        assert preset(name).inside == round(fitted["inside"], -9)


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
    cut = case(Layouts(2, 1, 2, 2, 1, merge=1))
    assert memory.co2(cut, last=True) == 3 * 4 * cut.own(True), "replicas of a cut island share nothing out"


@pytest.mark.parametrize(("changes", "off"), [({}, 0.03), ({"accumulate": 2}, 0.03), ({"recompute": True}, 0.07)])
def test_a_step_holds_what_is_counted(changes: dict[str, Any], off: float):
    """Every tensor of a step of the recipe's model, forward and backward."""
    from language.recipes import RECIPES
    from language.train import backward, make_model

    recipe = replace(RECIPES["gpt2_pydoc_small"], method="ddp", batch_size=8, **changes)
    trained = make_model(recipe, pad=1).train()
    tokens = torch.zeros(8, recipe.context, dtype=torch.int64)
    run = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext, scaled=lambda loss: loss)
    with Live([*trained.parameters(), *trained.buffers()]) as live:
        backward(run, recipe, trained, (tokens, tokens))  # pyright: ignore
    again = RECOMPUTE.index("full" if recipe.recompute else "none")
    layout = Layouts(1, 1, 1, 1, 8 // recipe.accumulate, recompute=again)
    c = Case(preset_model("gpt2-tiny", recipe.context), replace(CLUSTER, nodes=1, per_node=1), FLOAT32, 8, layout)
    found = memory.memory(c)
    assert found["gradients"] + found["activations"] + found["passing"] == pytest.approx(live.peak, rel=off)


GPT_BLOCK = replace(MODEL, width=128, inner=384, context=64)
LLAMA_BLOCK = replace(GPT_BLOCK, family="llama", activation="silu", kv_heads=2)


@pytest.mark.parametrize("value", [2, pytest.param(4, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize(("merge", "compression"), [("restart", "float32"), ("keep_local", "int4")])
def test_co2_holds_as_much_as_a_dry_run_counts(merge: str, compression: str):
    from language.model import build_model
    from language.recipes import RECIPES

    recipe = RECIPES["gpt2_pydoc_small"]
    config = replace(recipe.co2, compression=replace(recipe.co2.compression, format=compression), merge=merge)
    config = replace(config, gap="none", delay="auto") if merge != "restart" else config
    with torch.device("meta"):
        model = build_model("gpt2_tiny", vocab_size=1024, context=64, dropout=0.0)
    counted = held(replace(recipe, method="co2", co2=config), model, 1, 8)
    layout = Layouts(1, 1, 1, 8, 4, compression=list(FORMATS).index(compression), merge=MERGES.index(merge))
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
    narrow = case(Layouts(1, 1, 1, 8, 1, compression=2), cluster=replace(CLUSTER, nodes=8, per_node=1))
    assert time.outer_allreduce(narrow) == pytest.approx(2 * OWN * 132 / 256 / 1e9 + 6e-3)  # trees


@pytest.mark.parametrize(("zero", "volume"), [(0, 2.0), (1, 3.0), (2, 1 + 0.5), (3, 1 + 4 * 0.5)])
def test_data_parallel_traffic(zero: int, volume: float):
    """Halves of a ring of float32 gradients, with nothing hidden, two micro-batches and no latency."""
    cluster = replace(CLUSTER, inside_latency=0.0)
    at_once = replace(cluster, device=replace(DEVICE, peak=1e30, bandwidth=1e30))
    c = case(replace(ISLANDS, zero=zero), cluster=at_once)
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


# -- what is read, refused, chosen, and started -----------------------------------------------------------------------


SMALL_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 16}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
LLAMA |= {"intermediate_size": 128, "max_position_embeddings": 16}

# -- models and clusters that are read --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_a_config_of_transformers_has_the_parameters_of_its_model(kind: str, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"intermediate_size": 80, "num_key_value_heads": 2} if kind != "gpt2" else {"n_positions": 40}
    config = AutoConfig.for_model(kind, **sizes, **more)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert from_config(tmp_path, None).params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "config.json: "),
        ("[]", "model_type None is no decoder that the planner knows: gpt2, llama, mistral"),
        ({"model_type": "bert"}, "model_type 'bert' is no decoder"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size=0: the planner needs a whole number"),
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 10, "n_head": 3}, "n_head=3 does not divide n_embd=10"),
        ({"model_type": ["llama"]}, "model_type ['llama'] is no decoder"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        (LLAMA | {"hidden_size": 12}, "hidden_size / num_attention_heads is 3: rotary positions need an even number"),
        (LLAMA | {"head_dim": 32}, "head_dim=32: the planner counts 16 alone"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=True: the planner counts False alone"),
        (SMALL_GPT2 | {"add_cross_attention": True}, "add_cross_attention=True: the planner counts False alone"),
        (SMALL_GPT2 | {"activation_function": "no"}, "activation 'no' does not exist; the planner knows gelu"),
    ],
)
def test_a_config_that_is_no_decoder_s_is_one_line(config: object, said: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with refused(said):
        main(["--preset", "laptops", "--model", str(tmp_path), "--batch", "8"])


LINK = {"workers": 2, "latency_seconds": 2e-4, "bandwidth_bits_per_second": 8e8}


def report(**links: object) -> dict[str, object]:
    """A part of what core.doctor writes for two nodes of two."""
    return {
        "format": 1,
        "workers": 4,
        "workers_per_node": 2,
        "nodes": [{}, {}],
        "device": {"type": "cuda", "name": "NVIDIA A100-SXM4-40GB", "memory_bytes_per_worker": 42e9},
        "links": {"within": LINK, "across": LINK, "all": None} | links,
    }


def test_the_doctor_s_cluster_is_read(tmp_path: Path):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(report()))
    c = from_doctor(file, probe=False)
    assert (c.nodes, c.per_node, c.inside, c.across, c.latency) == (2, 2, 1e8, 1e8, 1e-4)
    assert (c.device.peak, c.device.memory, c.device.gpu) == (312e12, 42e9, True)
    main(["--cluster", str(file), "--model", "gpt-125m", "--batch", "8", "--probe"])
    alone = {"workers": 1, "workers_per_node": 1, "nodes": [{}], "links": {"within": None, "across": None}}
    file.write_text(json.dumps(report() | alone))
    assert from_doctor(file, probe=False).devices == 1
    with pytest.raises(UserError, match="nodes=2: .* knows no such link: run core.doctor on as many"):
        main(["--cluster", str(file), "--model", "gpt-125m", "--batch", "8", "--nodes", "2"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "is no report of the doctor (format 1): run co2_training.doctor"),
        (
            {"workers_per_node": None},
            "its nodes have different numbers of workers: run the doctor with as many on each",
        ),
        ({"workers": 5}, "workers=5, but 2 nodes of 2"),
        ({"links": {}}, "KeyError: 'within'"),
        (report(across=LINK | {"bandwidth_bits_per_second": -8}), "-8 is no number of a cluster"),
        (
            {"device": {"name": "x", "type": "cuda", "memory_bytes_per_worker": 4}},
            "device 'x' is not known to the planner: add --probe",
        ),
    ],
)
def test_a_cluster_file_that_cannot_be_is_one_line(changes: dict[str, object], said: str, tmp_path: Path):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(report() | changes))
    with refused(said):
        from_doctor(file, probe=False)


# -- what is refused --------------------------------------------------------------------------------------------------

TCP = ["--preset", "dgx-a100-tcp", "--model", "llama-7b", "--batch", "512"]
MISTAKES = [
    ("--preset dgx-a100 --model llama-7b --batch 8", "cluster 'dgx-a100' does not exist; did you mean dgx-a100-"),
    ("--preset rtx3090 --model llama --batch 8", "model 'llama' does not exist; did you mean llama-7b?"),
    ("--model llama-7b --batch 8", "preset=None and cluster=None: give one of them"),
    ("TCP --batch 0", "batch=0: give 1 or more"),
    ("TCP --layout tp1.pp1.dp128 --batch 500", "choose a multiple of 128, such as 512"),
    ("TCP --layout tp8.pp8.dp2.mb4", "4 micro-batches: fewer than 8 stages: give mb8 or more"),
    ("TCP --layout tp8.pp8.dp2.mb10", "2 x 10 micro-batches: choose a multiple of 20, such as 520"),
    ("TCP --layout tp2.pp8.dp8.v2.mb12", "v2 with mb12: needs a multiple of pp=8: give mb"),
    ("TCP --layout tp2.pp32.dp2.v2.mb64", "pp * v = 64 does not divide 32 layers"),
    ("TCP --layout tp3.pp1.dp1", "it takes 3 devices, dgx-a100-tcp has 128: name as many"),
    ("TCP --layout tp64.pp1.dp2", "tp=64 does not divide 32 attention heads: give tp 32"),
    ("TCP --layout tp2.pp64.dp1.mb64", "pp=64 does not divide 32 layers: give pp 32"),
    ("TCP --layout tp8.pp16.dp1.mb16.fsdp", "dp is 1, ZeRO has nothing to share out: leave it out"),
    ("TCP --nodes 15 --layout tp4.pp5.dp1.co2x6", "islands of 20 neither divide nodes of 8 nor fill them"),
    ("TCP --layout 2x2x2", "layout='2x2x2'"),
    ("--preset laptops --model gpt-175b --batch 8", "the nearest miss, tp4.pp1.dp2.fsdp needs 36"),
    ("TCP --sbatch", "model llama-7b is no recipe's of language.train: give --recipe"),
    ("TCP --nodes 8193", "dgx-a100-tcp has 65544 devices: the planner takes 65536: give fewer --nodes"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line(arguments: str, said: str):
    with refused(said):
        main(arguments.replace("TCP", " ".join(TCP)).split())


def test_what_drops_every_layout_is_counted_and_primes_cut_nothing():
    c = replace(case(CUT), model=replace(MODEL, layers=7, heads=5, kv_heads=5), batch=3)
    with pytest.raises(UserError, match="no layout can be: .*layers.*batch.*: give another --batch, --nodes or"):
        plan(c)
    # A prime number of heads or layers: what is left is data parallelism, islands, and 7 stages of a layer each.
    c = case(CUT, model=replace(MODEL, layers=7, heads=5, kv_heads=5), cluster=replace(CLUSTER, nodes=7), batch=56)
    p = plan(c)
    assert set(np.unique(p.case.layout.tp)) == {1} and set(np.unique(p.case.layout.pp)) == {1, 7}
    assert p.dropped["heads"] and p.dropped["layers"]


def test_what_is_costed_and_not_run_is_said(capsys: pytest.CaptureFixture[str]):
    for text, said in {
        "tp8.pp8.dp2.mb8.zero2": "ZeRO-2 with a pipeline keeps whole gradients",
        "tp2.pp1.dp64.zero1": "zero1 with tp: torch's ZeroRedundancyOptimizer takes no DTensors",
        "tp16.pp1.dp8": "TP reaches across nodes",
    }.items():
        main([*TCP, "--layout", text])
        assert said in " ".join(capsys.readouterr().out.split())
    main(["--preset", "laptops", "--nodes", "3", "--model", "gpt-125m", "--batch", "12", "--layout", "tp1.pp3.dp1.mb6"])
    assert "tp1.pp3.dp1.mb6" in capsys.readouterr().out  # an odd number of stages


# -- what is chosen ---------------------------------------------------------------------------------------------------


def of(cluster: Cluster, model: str, batch: int):
    return plan(Case(preset_model(model, None), cluster, Software(), batch, CUT))


def test_ten_thousand_layouts_take_under_two_seconds():
    began = clock.process_time()
    p = of(preset("dgx-a100-tcp"), "llama-7b", 512)
    assert p.best and clock.process_time() - began < 2 and len(p.total) + p.dropped.total() > 10_000
    x, m = p.case.layout, p.case.micro_batches
    assert np.all(m >= x.pp) and np.all((x.v == 1) | (m % x.pp == 0)) and np.all(32 % (x.pp * x.v) == 0)
    assert np.all(x.ranks == 128) and np.all(m * x.micro * x.dp * x.islands == 512) and np.all(p.bytes <= 80e9)
    assert all(holds(Layout.parse(p.name(row)), p.at(row)) for row in p.best)


def test_7b_over_tcp_takes_co2_across_nodes(capsys: pytest.CaptureFixture[str]):
    main(TCP)
    lines = capsys.readouterr().out
    screen = " ".join(lines.split())
    first = re.search(r"^ 1 \S+\.co2x(\d+) ", lines, re.MULTILINE)
    assert first and int(first[1]) >= 16, "an island is a node, or a part of one"
    gain = re.search(r"CO2, \S+: ([\d.]+) times as fast as (\S+), the best synchronous layout; \w+ decides", screen)
    assert gain and float(gain[1]) > 1.5 and "co2" not in gain[2]
    assert "memory" in screen and "nearest miss: " in screen and "results/loss.md" in screen


def test_7b_over_roce_may_take_ddp_and_laptops_take_co2_over_int4():
    p = of(preset("dgx-a100-roce"), "llama-7b", 512)
    assert p.case.layout.islands[p.best[0]] == 1
    assert "no gain" in "".join(command.gain(p))
    p = of(preset("laptops"), "gpt-125m", 64)
    x = p.at(p.best[0]).layout
    assert (x.islands, x.tp * x.pp * x.dp) == (8, 1) and list(FORMATS)[x.compression] == "int4" and x.tau < 48
    sync = next(row for row in p.best if p.case.layout.islands[row] == 1)
    assert p.total[sync] > 5 * p.total[p.best[0]]


@pytest.mark.parametrize("per_node", [1, 8])
def test_one_device_and_one_node_make_sense(per_node: int, capsys: pytest.CaptureFixture[str]):
    p = of(replace(preset("dgx-a100-tcp"), nodes=1, per_node=per_node), "gpt-125m", 64)
    assert p.case.layout.islands[p.best[0]] == 1, "NVSwitch needs no CO2"
    exposed = sum(p.seconds[part][p.best[0]] for part in time.COMMUNICATION)
    assert exposed == 0 if per_node == 1 else exposed < 0.05 * p.total[p.best[0]]
    print("\n".join(command.table(p)))
    assert ("across" in capsys.readouterr().out) is False


def test_large_parts_are_shown(capsys: pytest.CaptureFixture[str]):
    main([*TCP, "--layout", "tp1.pp1.dp128.fsdp"])
    screen = capsys.readouterr().out
    (said,) = re.findall(r"^      s: (.*)", screen, re.MULTILINE)
    shown = {name: float(x) for name, x in (part.split() for part in said.split(", "))}
    total = float(re.findall(r"^ 1 .*?([\d.]+) +[\d,]+ +[\d.]+% ", screen, re.MULTILINE)[0])
    assert sum(shown.values()) == pytest.approx(total, rel=0.05) and max(shown, key=shown.__getitem__) == "data"
    assert shown.keys() <= {part.__name__ for part in time.PARTS}


# -- what starts ------------------------------------------------------------------------------------------------------


def test_overrides_are_settings_of_the_recipes(monkeypatch: pytest.MonkeyPatch):
    from language.recipes import RECIPES
    from training.recipe import parse

    laptops, tcp = of(preset("laptops"), "gpt2-tiny", 64), of(preset("dgx-a100-tcp"), "gpt2-tiny", 256)
    for p in (laptops, tcp):
        co2 = next(row for row in p.best if p.case.layout.islands[row] > 1)
        for row in (p.best[0], co2):
            words = overrides(p.at(row), p.name(row))
            monkeypatch.setattr("sys.argv", ["language.train", "gpt2_pydoc_small", *words])
            recipe = parse(RECIPES, prog="language.train")
            assert recipe.method == ("co2" if p.case.layout.islands[row] > 1 else "ddp") and recipe.context == 64


def test_the_submission_line(capsys: pytest.CaptureFixture[str]):
    main(["--preset", "dgx-a100-tcp", "--model", "gpt-125m", "--batch", "512", "--sbatch"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "sbatch" in line)
    assert line.startswith("RECIPE=gpt2_small_owt METHOD=") and " BATCH_SIZE=512 " in line
    assert " sbatch --nodes=16 --gpus-per-node=8 slurm/gpt2_a100.sh " in line and line.endswith("--context 1024")


@pytest.mark.slow
def test_from_the_doctor_to_a_run(tmp_path: Path):
    """As docs/planning.md: two processes measured, planned for, and trained by the best layout."""
    file, env = tmp_path / "cluster.json", os.environ | {"OMP_NUM_THREADS": "1"}
    doctor = "-m torch.distributed.run --standalone --nproc-per-node 2 -m core.doctor --params 932608 --out"
    subprocess.run([sys.executable, *doctor.split(), str(file)], check=True, env=env, timeout=300)
    plans = f"-m training.plan --cluster {file} --probe --model gpt2-tiny --batch 32 --sbatch"
    done = subprocess.run([sys.executable, *plans.split()], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    run = (
        f"-m training.launch --standalone --nproc-per-node 2 {done.stdout.splitlines()[-1]} --epochs 1 --epoch_steps 10"
    )
    run += f" --out {tmp_path / 'run'}"
    subprocess.run([sys.executable, *run.split()], check=True, env=env, timeout=300)


# -- what is said -----------------------------------------------------------------------------------------------------


def test_each_number_of_a_stage_by_hand():
    """tp4.pp2.dp16.v2: activations, what passes, hops."""
    model, cluster = preset_model("gpt-22b", None), preset("dgx-a100-tcp")
    p = plan(Case(model, cluster, Software(), 512, Layouts(1, 1, 1, 1, 1)), Layout.parse("tp4.pp2.dp16.v2.mb16.zero1"))
    c = p.at(p.best[0])
    first, seconds, (kept, more) = memory.of_stage(c, False), time.seconds(c), c.of_block
    assert first["activations"] == pytest.approx((24 * kept + c.given) * 2 * (1 + 1 / 4))
    assert first["passing"] == pytest.approx(more + 4 * c.block)
    assert time.hop(c) == pytest.approx(c.given / 1e9 + 50e-6)  # 64 of a node's ranks share 8 GB/s
    assert seconds["pipeline"] == pytest.approx(2 * (1 + 16 * 2) * time.hop(c))


def test_rows_with_long_names_are_one_line_and_any_chunks_of_a_stage_can_be_named(capsys: pytest.CaptureFixture[str]):
    main(["--preset", "internet-1000", "--model", "llama-7b", "--batch", "2000"])
    rows = re.findall(r"^ ?\d+ tp.*", capsys.readouterr().out, re.M)
    assert len(rows) == 10 and all(row.endswith("%") and row.count("%") == 3 for row in rows)
    assert [command.rounded(x) for x in (1008.2, 1600, 6.738, 64)] == ["1,008", "1,600", "6.74", "64"]
    main(["--preset", "laptops", "--model", "gpt-125m", "--batch", "64", "--layout", "pp2.v6.dp4"])
    assert "tp1.pp2.dp4.v6.mb4" in capsys.readouterr().out


def test_a_model_that_fits_nowhere_is_refused():
    with pytest.raises(UserError, match="nothing fits"):
        of(preset("laptops"), "gpt-175b", 8)


def test_the_nearest_miss_needs_more_than_there_is():
    p = of(preset("dgx-a100-tcp"), "llama-7b", 512)
    needs, has = (float(x) for x in re.findall(r"\d+\.\d+", p.miss))
    assert has == 80 < needs < 80.1


def test_a_preset_is_not_probed_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="preset=laptops: --probe would measure a GPU, this machine has none"):
        preset("laptops", probe=True)
