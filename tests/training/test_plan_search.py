"""What the planner reads, refuses, chooses, says and runs."""

import json
import os
import re
import subprocess
import sys
import time as clock
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core import UserError
from tests.scripts import refused
from tests.training.test_plan import CLUSTER, CUT, MODEL, case
from training.layouts.layout import Layout
from training.plan import command, time
from training.plan.case import WIRES, Case, Cluster, Software, from_config, from_doctor, preset, preset_model
from training.plan.command import main, overrides
from training.plan.search import holds, plan

SMALL_GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 96, "n_positions": 16}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
LLAMA |= {"intermediate_size": 128, "max_position_embeddings": 16}

# -- models and clusters that are read --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_a_config_of_transformers_has_the_parameters_of_its_model(kind: str, tmp_path: Path):
    import training.prepared  # noqa: F401

    # isort: split
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
        ({"format": 2}, "no report of format 1"),
        ({"nodes": []}, "nodes=[]"),
        ({"workers_per_node": None}, "workers_per_node=None: the planner needs a number above 0"),
        ({"workers_per_node": 2.5}, "workers_per_node=2.5: the planner needs a whole number"),
        ({"workers": 5}, "workers=5, but 2 nodes of 2"),
        ({"links": {"across": {"workers": 2, "latency_seconds": -1}}}, "links.within.workers=None"),
        (report(across=LINK | {"bandwidth_bits_per_second": -8}), "links.across.bandwidth_bits_per_second=-8: the"),
        ({"device": {"name": "x", "memory_bytes_per_worker": -4}}, "device.memory_bytes_per_worker=-4"),
        (
            {"device": {"name": "x", "memory_bytes_per_worker": 4}},
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


def test_7b_over_roce_may_take_ddp_and_laptops_take_co2_over_a_narrow_wire():
    p = of(preset("dgx-a100-roce"), "llama-7b", 512)
    assert p.case.layout.islands[p.best[0]] == 1
    assert "no gain" in "".join(command.gain(p))
    p = of(preset("laptops"), "gpt-125m", 64)
    x = p.at(p.best[0]).layout
    assert (x.islands, x.tp * x.pp * x.dp) == (8, 1) and list(WIRES)[x.wire] == "int4" and x.tau < 48
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
