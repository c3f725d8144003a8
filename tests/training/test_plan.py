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
from tests.dispatch import Live
from tests.imports import ROOT
from tests.scripts import refused
from training.checks import held
from training.layout import Layout
from training.plan import command, memory, time
from training.plan.case import (
    FORMATS,
    MERGES,
    RECOMPUTE,
    Case,
    Cluster,
    Device,
    Layouts,
    Model,
    from_config,
    from_doctor,
    preset,
    preset_model,
)
from training.plan.command import main, overrides
from training.plan.search import plan

MODEL = Model("m", "gpt2", 8, 100, 4, 1000, 50, 400, 4, tied=True)
DEVICE = Device("d", 1e12, 2e9, 1e11, 1e10, top=0.5, passes=2, calls=(0, 0, 0))
CLUSTER = Cluster("c", DEVICE, 2, 4, inside=1e10, across=1e9, latency=1e-3, inside_latency=1e-5)
CPUS = replace(CLUSTER, device=replace(DEVICE, gpu=False))
CUT = Layouts(2, 2, 2, 1, 2)  # tp2.pp2.dp2, micro-batches of 2
ISLANDS = Layouts(1, 1, 4, 2, 1, zero=3, tau=3, merge=1)  # tp1.pp1.dp4.fsdp.co2x2
OWN = 1_075_600  # parameters of MODEL
BLOCK = (400, 3_200), (100, 200)  # of a token; of a sample's 50: (20,000, 160,000), (5,000, 10,000)


@pytest.fixture
def a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block keeps."""
    monkeypatch.setattr(Model, "in_block", lambda *_: BLOCK)


def case(layout: Layouts, **changes: object) -> Case:
    return replace(Case(MODEL, CLUSTER, 16, layout), **changes)  # pyright: ignore


def parts(found: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value}  # pyright: ignore


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_parameters_flops_and_activations_are_the_published_ones():
    assert preset_model("gpt-125m", None).params == 124_439_808  # transformers' gpt2
    assert preset_model("llama-7b", None).params == 6_738_415_616  # transformers' Llama
    gpt = preset_model("gpt-175b", None)
    n, h, v, s = gpt.layers, gpt.width, gpt.vocabulary, gpt.context
    published = 12 * n * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * n * h))  # [N] eq. 2
    assert gpt.params - 2 * h == pytest.approx(published)
    assert (MODEL.linear_flops, MODEL.attention_flops, MODEL.head_flops) == (12e6, 1e6, 1e7)
    assert MODEL.step_flops == 3 * (8 * 13e6 + 1e7) and MODEL.params == OWN
    c = case(CUT)
    assert command.mfu(c, 2.0) == 16 * 342e6 / (2.0 * 8 * 1e12)
    m = preset_model("gpt-22b", None)
    n, h, v, s = m.layers, m.width, m.vocabulary, m.context
    assert m.step_flops == pytest.approx(72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))
    b, t = 4, 8
    c = Case(m, CLUSTER, 4, Layouts(t, 1, 1, 1, b))
    assert c.kept == pytest.approx(s * b * h * (10 + 24 / t))  # [K] eq. 2, without scores


def test_a_collective_takes_what_ring_or_trees_take():
    c = CLUSTER
    assert c.allreduce(1e6, 4, 1) == pytest.approx(2 * 3 / 4 * 1e6 / 1e10 + 6e-5)  # inside a node, a ring
    assert c.allreduce(1e6, 2, 4) == pytest.approx(1e6 / 2.5e8 + 2e-3)  # four rings leave a node at once
    assert c.allreduce(1e3, 1024, 1) == pytest.approx(2 * 1e3 / 1e9 + 20e-3)  # trees: a ring would take 2 s
    assert c.allreduce(1e6, 1, 1) == 0


# Megatron-LM's cells with TP above 2 (Narayanan et al., table 1), for it did not overlap gradients' all-reduce as DDP
# does: name, layers, width, heads, TP, PP, micro-batch, batch, nodes, chunks of a stage, TFLOP/s of a device
CELLS = (
    ("7.5B", 36, 4096, 32, 4, 1, 16, 512, 16, 1, 142),
    ("18B", 40, 6144, 48, 8, 1, 8, 1024, 32, 1, 135),
    ("39B", 48, 8192, 64, 8, 2, 4, 1536, 64, 1, 138),
    ("76B", 60, 10240, 80, 8, 4, 2, 1792, 128, 3, 140),
    ("145B", 80, 12288, 96, 8, 8, 2, 2304, 192, 2, 148),
    ("310B", 96, 16384, 128, 8, 16, 1, 2160, 240, 2, 155),
    ("530B", 105, 20480, 128, 8, 35, 1, 2520, 315, 3, 163),
    ("1T", 128, 25600, 160, 8, 64, 1, 3072, 384, 1, 163),
)


@pytest.mark.parametrize("cell", CELLS, ids=[cell[0] for cell in CELLS])
def test_seconds_are_those_of_published_runs(cell: tuple[Any, ...]):
    """Products, passes, tensor and pipeline parallelism together."""
    name, layers, width, heads, tp, pp, micro, batch, nodes, v, published = cell
    model = Model(name, "gpt2", layers, width, heads, 51200, 2048, 4 * width, heads, True)
    layout = Layouts(tp, pp, nodes * 8 // (tp * pp), 1, micro, v, recompute=RECOMPUTE.index("full"))
    c = Case(model, replace(preset("selene"), nodes=nodes), batch, layout)
    flops = batch * (4 / 3 * model.step_flops - model.head_flops)  # what is computed again counts as work there
    found = flops / (float(sum(time.seconds(c).values())) * c.cluster.devices) / 1e12
    assert found == pytest.approx(published, rel=0.15)


def test_bytes_are_those_measured_on_an_emulated_cluster():
    """The peaks of the fullest rank under each layout of one island, of which results/dropped.md tells."""
    found = json.loads((ROOT / "results/layouts.json").read_text())["bytes"]
    cluster = replace(CPUS, nodes=4, per_node=2)
    off = {}
    for name, (measured, _) in found.items():
        x = Layout.parse(name)
        if x.islands == 1:
            layout = Layouts(x.tp, x.pp, x.dp, 1, 32 // (x.dp * x.parts), x.v, x.zero)
            planned = sum(memory.memory(Case(preset_model("gpt2-tiny", 32), cluster, 32, layout)).values())
            off[name] = float(planned) / measured - 1
    assert len(off) == 13 and max(map(abs, off.values())) <= 0.1, off


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
    assert by_ddp["casts"] == 2 * OWN and memory.casts(case(CUT, cluster=CPUS), last=True) == 0
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
    c = Case(preset_model("gpt2-tiny", recipe.context), replace(CPUS, nodes=1, per_node=1), 8, layout)
    found = memory.memory(c)
    assert found["gradients"] + found["activations"] + found["passing"] == pytest.approx(live.peak, rel=off)


GPT_BLOCK = replace(MODEL, width=128, inner=384, context=64)
LLAMA_BLOCK = replace(GPT_BLOCK, family="llama", activation="silu", kv_heads=2)


@pytest.mark.parametrize(
    ("model", "value", "kept", "more"),
    [
        (GPT_BLOCK, 2, (2064, 2576), (512, 0)),
        (GPT_BLOCK, 4, (2064, 5136), (512, 1536)),
        (replace(GPT_BLOCK, activation="gelu_new"), 2, (2064, 7184), (512, 3840)),
        (LLAMA_BLOCK, 2, (3336, 3856), (512, 0)),
        (LLAMA_BLOCK, 4, (3080, 7696), (512, 1536)),
    ],
)
def test_a_block_keeps_what_was_counted(model: Model, value: int, kept: Any, more: Any):
    """Bytes of a token, whole and cut by TP, as every tensor of transformers' blocks gave; gelu_new peaks lower."""
    assert model.in_block(value) == (kept, more)


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
    c = Case(preset_model("gpt2-tiny", None), replace(CPUS, nodes=8, per_node=1), 32, layout)
    assert c.model.params == sum(p.numel() for p in model.parameters())
    assert memory.co2(c, last=True) == pytest.approx(counted, rel=2e-3)  # blocks are filled up


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


# -- models and clusters that are read --------------------------------------------------------------------------------


SMALL_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 16}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
LLAMA |= {"intermediate_size": 128, "max_position_embeddings": 16}


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
        ("{", "config.json cannot be read (JSONDecodeError"),
        ({"model_type": "bert"}, "model_type 'bert' is no decoder"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size=0: the planner needs a whole number"),
        ({"model_type": "gpt2", "n_layer": 2, "n_embd": 10, "n_head": 3}, "n_head=3 does not divide n_embd=10"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        (LLAMA | {"hidden_size": 12}, "hidden_size / num_attention_heads is 3: rotary positions need an even number"),
        (LLAMA | {"head_dim": 32}, "head_dim=32: the planner counts 16 alone"),
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
    ("TCP --layout tp3.pp1.dp1", "it takes 3 devices, dgx-a100-tcp has 128: name as many"),
    ("TCP --layout tp64.pp1.dp2", "tp=64 does not divide 32 attention heads: give tp 32"),
    ("TCP --layout tp8.pp16.dp1.mb16.fsdp", "dp is 1, ZeRO has nothing to share out: leave it out"),
    ("TCP --nodes 15 --layout tp4.pp5.dp1.co2x6", "islands of 20 neither divide nodes of 8 nor fill them"),
    ("--preset laptops --model gpt-175b --batch 8", "the nearest miss, tp4.pp1.dp2.fsdp needs 36"),
    ("TCP --sbatch", "model llama-7b is no recipe's of language.train: give --recipe"),
    ("TCP --nodes 8193", "dgx-a100-tcp has 65544 devices: the planner takes 65536: give fewer --nodes"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line(arguments: str, said: str):
    with refused(said):
        main(arguments.replace("TCP", " ".join(TCP)).split())


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
    return plan(Case(preset_model(model, None), cluster, batch, CUT))


def test_ten_thousand_layouts_take_under_two_seconds():
    began = clock.process_time()
    p = of(preset("dgx-a100-tcp"), "llama-7b", 512)
    assert p.best and clock.process_time() - began < 2 and len(p.total) + p.dropped.total() > 10_000
    x, m = p.case.layout, p.case.micro_batches
    assert np.all(m >= x.pp) and np.all((x.v == 1) | (m % x.pp == 0)) and np.all(32 % (x.pp * x.v) == 0)
    assert np.all(x.ranks == 128) and np.all(m * x.micro * x.dp * x.islands == 512) and np.all(p.bytes <= 80e9)
    for row in p.best[:3]:
        only = plan(p.case, Layout.parse(p.name(row)))
        assert {only.name(other) for other in only.best} == {p.name(row)}, "a named layout is planned alone"


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
    run = f"-m training.launch --standalone --nproc-per-node 2 {done.stdout.splitlines()[-1]}"
    run += f" --epochs 1 --epoch_steps 10 --out {tmp_path / 'run'}"
    subprocess.run([sys.executable, *run.split()], check=True, env=env, timeout=300)
