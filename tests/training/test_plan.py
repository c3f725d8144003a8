"""The planner's formulas against numbers computed by hand, what it refuses, and what it chooses."""

import inspect
import json
import re
import time as clock
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core import UserError
from training.layout import Layout
from training.memory import held
from training.plan import memory, show, time
from training.plan.case import FLOAT32, MEGATRON, MERGES, RECOMPUTE, WIRES, Case, Layouts, Software
from training.plan.clusters import Cluster, Device, from_doctor, preset
from training.plan.command import main, overrides
from training.plan.model import Model, from_config, preset_model
from training.plan.search import holds, plan
from training.plan.trial import step_seconds

MODEL = Model("m", "gpt", 8, 100, 4, 1000, 50, 400, 4, tied=True)
DEVICE = Device("d", 1e12, 2e9, 1e11, 1e10, top=0.5, passes=2)
CLUSTER = Cluster("c", DEVICE, 2, 4, inside=1e10, across=1e9, latency=1e-3, inside_latency=1e-5)
CUT = Layouts(2, 2, 2, 1, 2)  # tp2.pp2.dp2, micro-batches of 2
ISLANDS = Layouts(1, 1, 4, 2, 1, zero=3, tau=3, merge=2)  # tp1.pp1.dp4.fsdp.co2x2
OWN = 1_075_600  # parameters of MODEL


def case(layout: Layouts, **changes: object) -> Case:
    return replace(Case(MODEL, CLUSTER, Software(), 16, layout), **changes)  # pyright: ignore


def parts(found: dict[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in found.items() if value}  # pyright: ignore


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_parameters_of_known_models():
    assert preset_model("gpt-125m", None).params == 124_439_808  # transformers' gpt2
    assert preset_model("llama-7b", None).params == 6_738_415_616  # transformers' Llama
    gpt = preset_model("gpt-175b", None)
    n, h, v, s = gpt.layers, gpt.width, gpt.vocabulary, gpt.context
    assert gpt.params - 2 * h == pytest.approx(
        12 * n * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * n * h))
    )  # [N] eq. 2


def test_flops_are_those_of_megatron():
    m = preset_model("gpt-22b", None)
    n, h, v, s = m.layers, m.width, m.vocabulary, m.context
    assert m.step_flops == pytest.approx(72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h)))
    again = 4 / 3 * m.step_flops - m.head_flops  # all but the head is computed twice
    assert again == pytest.approx(96 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h)))  # [N] eq. 3
    layout = Layouts(8, 1, 1, 1, 4, recompute=RECOMPUTE.index("full"))
    c = Case(m, replace(preset("frontier"), nodes=1), MEGATRON, 4, layout)
    assert time.products(c) == pytest.approx(4 * again / 8 / (c.cluster.device.top * c.cluster.device.peak))


@pytest.mark.parametrize("sequence", [0, 1])
def test_kept_activations_are_those_of_megatron(sequence: int):
    m = preset_model("gpt-22b", None)
    b, t, s, h, a = 4, 8, m.context, m.width, m.heads
    c = Case(m, CLUSTER, MEGATRON, 4, Layouts(t, 1, 1, 1, b, sequence=sequence))
    whole = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))  # [K] eq. 2
    cut = s * b * h / t * (34 + 5 * a * s / h)  # [K] eq. 4
    assert c.kept + c.scores == pytest.approx(cut if sequence else whole)
    assert replace(c, software=Software()).scores == 0


def test_a_collective_takes_what_ring_or_trees_take():
    c = CLUSTER
    assert c.allreduce(1e6, 4, 1) == pytest.approx(2 * 3 / 4 * 1e6 / 1e10 + 6e-5)  # inside a node, a ring
    assert c.allreduce(1e6, 2, 4) == pytest.approx(1e6 / 2.5e8 + 2e-3)  # four rings leave a node at once
    assert c.allreduce(1e3, 1024, 1) == pytest.approx(2 * 1e3 / 1e9 + 20e-3)  # trees: a ring would take 2 s
    assert c.allreduce(1e6, 1, 1) == 0


def test_memory_of_a_cut_model():
    c = case(CUT)
    assert c.micro_batches == 4 and c.block == 60_950
    assert (c.own(False), c.own(True)) == (298_800, 294_000)
    found = memory.memory(c)
    assert parts(found) == {
        "parameters": 4 * 294_000,
        "gradients": 4 * 294_000,
        "optimizer": 8 * 294_000,
        "activations": 4 * 220_000,  # one micro-batch is in flight in the last stage
        "received": 4 * 20_000,
        "logits": 1_000_000,
        "reserve": 1.5 * 2**30,
    }
    first = memory.of_stage(c, last=False)
    assert first["activations"] == 4 * 220_000 * 2 and first["logits"] == 0
    assert memory.of_stage(case(replace(CUT, v=2)), last=False)["activations"] == 4 * 220_000 * 2 * (1 + 1 / 4)  # [K]
    full = case(replace(CUT, recompute=2))
    assert memory.activations(full, last=True) == 4 * 20_000 + 220_000


def test_memory_of_islands():
    few = OWN - 6 * 121_300
    assert parts(memory.memory(case(ISLANDS))) == {
        "parameters": OWN,
        "gradients": 4 * OWN,  # of two micro-batches, the sum is whole
        "optimizer": 2 * OWN,
        "gathered": 2 * few + 6 * few,
        "activations": 8 * 170_000,
        "logits": 500_000,
        "co2": 3 * OWN,
        "reserve": 1.5 * 2**30,
    }
    assert memory.gradients(case(replace(ISLANDS, micro=2)), last=True) == OWN
    assert memory.gathered(case(replace(ISLANDS, zero=2)), last=True) == 2 * OWN + 6 * few
    by_ddp = memory.memory(case(replace(ISLANDS, zero=1)))
    assert (by_ddp["buckets"], by_ddp["optimizer"], by_ddp["parameters"]) == (4 * OWN, 2 * OWN, 4 * OWN)
    assert by_ddp["co2"] == 4 * OWN * (1 + 2 / 4)
    assert memory.co2(case(replace(ISLANDS, offload=1)), last=True) == 0


@pytest.mark.parametrize(("merge", "wire"), [("outer", "float32"), ("mix", "int8"), ("keep", "int4")])
def test_co2_holds_what_a_dry_run_counts(merge: str, wire: str):
    """training/memory.py makes the method itself."""
    from language.model import build_model
    from language.recipes import RECIPES

    recipe = RECIPES["gpt2_pydoc_small"]
    config = replace(recipe.co2, wire=replace(recipe.co2.wire, format=wire), merge=merge)
    config = replace(config, gap="none", delay="auto") if merge != "outer" else config
    with torch.device("meta"):
        model = build_model("gpt2_tiny", vocab_size=1024, context=64, dropout=0.0)
    counted = held(replace(recipe, method="co2", co2=config), model, 1, 8).always
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
            "pipeline": 4 * 2 * (20_000 / 2.5e8 + 1e-3),
            "bubble": (1.504e-3 + 2.112e-4 + 1.408e-3 + 8.64e-3) / 4,
            "data": 4 * 298_800 / 1e10 + 2e-5,  # nothing hides it behind a pipeline
            "optimizer": 28 * 298_800 / 1e11,
        }
    )
    full = case(replace(CUT, recompute=2))
    assert time.tensor(full) == pytest.approx(4 * 4 * 6 * 2.2e-5)
    assert time.products(full) == pytest.approx(4 * 2 * (4 * (4 * 12e6 + 4.5 * 1e6) + 30e6) / 2 / 5e11)
    interleaved = case(replace(CUT, v=2))
    assert time.pipeline(interleaved) == pytest.approx(2 * 8.64e-3)
    assert time.bubble(interleaved) == pytest.approx((1.504e-3 + 2.112e-4 + 1.408e-3 + 2 * 8.64e-3) / 8)


def test_seconds_of_islands():
    found = parts(time.seconds(case(ISLANDS)))
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
    hidden = time.seconds(case(replace(ISLANDS, tau=48)))
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
        assert time.data(slow) == pytest.approx(whole - compute / 2 * 2 / 3)


def test_every_sum_names_its_formula_and_source():
    for part in (*memory.PARTS, *time.PARTS):
        assert re.search(r"\[[NKRFPTCMO]\b.*\]", inspect.getdoc(part).splitlines()[0]), part  # pyright: ignore
    assert set(time.COMMUNICATION) <= {part.__name__ for part in time.PARTS}


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
    ],
)
def test_a_config_that_is_no_decoder_s_is_one_line(config: object, said: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(UserError, match=re.escape(said)) as error:
        main(["--preset", "laptops", "--model", str(tmp_path), "--batch", "8"])
    assert "\n" not in str(error.value)


def report(**links: object) -> dict[str, object]:
    """A part of what core.doctor writes for two nodes of two."""
    link = {"workers": 2, "latency_seconds": 2e-4, "bandwidth_bits_per_second": 8e8}
    return {
        "format": 1,
        "workers": 4,
        "workers_per_node": 2,
        "nodes": [{}, {}],
        "device": {"type": "cuda", "name": "NVIDIA A100-SXM4-40GB", "memory_bytes_per_worker": 42e9},
        "links": {"within": link, "across": link, "all": None} | links,
    }


def test_the_doctor_s_cluster_is_read(tmp_path: Path):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(report()))
    c = from_doctor(file, probe=False)
    assert (c.nodes, c.per_node, c.inside, c.across, c.latency) == (2, 2, 1e8, 1e8, 1e-4)
    assert (c.device.peak, c.device.memory, c.device.gpu) == (312e12, 42e9, True)
    main(["--cluster", str(file), "--model", "gpt-125m", "--batch", "8", "--probe"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "no report of format 1"),
        ({"nodes": []}, "nodes=[]"),
        ({"workers_per_node": None}, "workers_per_node=None: the planner needs a number above 0"),
        ({"workers": 5}, "workers=5, but 2 nodes of 2"),
        ({"links": {"across": {"workers": 2, "latency_seconds": -1}}}, "links.within.workers=None"),
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
    with pytest.raises(UserError, match=re.escape(said)) as error:
        from_doctor(file, probe=False)
    assert "\n" not in str(error.value)
    file.write_text(json.dumps(report(across={"workers": 2, "latency_seconds": 1, "bandwidth_bits_per_second": -8})))
    with pytest.raises(
        UserError, match="links.across.bandwidth_bits_per_second=-8: the planner needs a number above 0"
    ):
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
    ("TCP --layout tp1.pp1.dp128 --memory_gb 1", "nothing fits: "),
    ("TCP --explain 9999", "number 9999: the list has 1 to"),
    ("TCP --why 1 tp1.pp2.dp64.v16", "layout tp1.pp2.dp64.v16 is not among those that fit"),
    ("--preset laptops --model gpt-175b --batch 8", "the nearest miss, tp8.pp1.dp1"),
    ("TCP --sbatch", "model llama-7b is no recipe's of language.train: give --recipe"),
    ("TCP --plot /nowhere/x.png", "there is no folder /nowhere: make it first"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line(arguments: str, said: str):
    with pytest.raises(UserError, match=re.escape(said)) as error:
        main(arguments.replace("TCP", " ".join(TCP)).split())
    assert "\n" not in str(error.value)


def test_nothing_but_a_batch_of_too_few_is_told_with_the_nearest():
    c = replace(case(CUT), model=replace(MODEL, layers=7, heads=5, kv_heads=5), batch=3)
    with pytest.raises(
        UserError, match="batch 3: 8 is the nearest that divides among 8 replicas; 7 layers divide among 1 s"
    ):
        plan(c)


def test_primes_cut_nothing():
    """A prime number of heads or layers: what is left is data parallelism, islands, and 7 stages of a layer each."""
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
        assert said in capsys.readouterr().out
    main(["--preset", "laptops", "--nodes", "3", "--model", "gpt-125m", "--batch", "12", "--layout", "tp1.pp3.dp1.mb6"])
    assert "tp1.pp3.dp1.mb6" in capsys.readouterr().out  # an odd number of stages


# -- what is chosen ---------------------------------------------------------------------------------------------------


def of(cluster: Cluster, model: str, batch: int):
    return plan(Case(preset_model(model, None), cluster, Software(), batch, CUT))


def test_ten_thousand_layouts_take_under_two_seconds():
    began = clock.process_time()
    p = of(preset("dgx-a100-tcp"), "llama-7b", 512)
    assert p.best and clock.process_time() - began < 2 and p.count > 10_000
    assert len(p.total) + p.dropped.total() == p.count
    assert all(holds(Layout.parse(p.name(row)), p.at(row)) for row in p.best)


def test_7b_over_tcp_takes_co2_across_nodes(capsys: pytest.CaptureFixture[str]):
    main(TCP)
    screen = capsys.readouterr().out
    first = re.search(r"^ 1  \S+\.co2x(\d+) ", screen, re.MULTILINE)
    assert first and int(first[1]) >= 16, "an island is a node, or a part of one"
    gain = re.search(r"CO2, \S+: ([\d.]+) times as fast as (\S+), the best synchronous layout; \w+ decides", screen)
    assert gain and float(gain[1]) > 1.5 and "co2" not in gain[2]
    assert "memory" in screen and "nearest miss: " in screen and "results/loss.md" in screen


def test_7b_over_roce_may_take_ddp():
    p = of(preset("dgx-a100-roce"), "llama-7b", 512)
    assert p.case.layout.islands[p.best[0]] == 1
    assert "no gain" in "".join(show.gain(p))


def test_laptops_take_co2_over_a_narrow_wire():
    p = of(preset("laptops"), "gpt-125m", 64)
    x = p.at(p.best[0]).layout
    assert (x.islands, x.tp * x.pp * x.dp) == (8, 1) and list(WIRES)[x.wire] == "int4" and x.tau < 48
    sync = next(row for row in p.best if p.case.layout.islands[row] == 1)
    assert p.total[sync] > 5 * p.total[p.best[0]]


@pytest.mark.parametrize("per_node", [1, 8])
def test_one_device_and_one_node_make_sense(per_node: int, capsys: pytest.CaptureFixture[str]):
    p = of(replace(preset("dgx-a100-tcp"), nodes=1, per_node=per_node), "gpt-125m", 64)
    assert p.case.layout.islands[p.best[0]] == 1, "NVSwitch needs no CO2"
    exposed = show.exposed(p.seconds)[p.best[0]]
    assert exposed == 0 if per_node == 1 else exposed < 0.05 * p.total[p.best[0]]
    print("\n".join(show.table(p)))
    assert ("across" in capsys.readouterr().out) is False


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    main([*TCP, "--explain", "1", "--why", "1", "tp1.pp1.dp128.fsdp", "--plot", str(tmp_path / "plan.png")])
    screen = capsys.readouterr().out
    seconds = screen.partition("seconds of a step")[2].partition("tokens/s")[0]
    *terms, total = [float(x) for x in re.findall(r"^  \w+ +([\d.]+)", seconds, re.MULTILINE)]
    assert len(terms) == len(time.PARTS) and sum(terms) == pytest.approx(total, abs=1e-5)
    assert "data decides" in screen and (tmp_path / "plan.png").stat().st_size > 10_000
    p = of(preset("laptops"), "gpt-125m", 64)
    at = show.front(p)
    assert all((p.bytes[at[1:]] >= p.bytes[at[:-1]]) & (p.total[at[1:]] < p.total[at[:-1]]))
    assert p.total[at[-1]] == p.total.min()


# -- what is run ------------------------------------------------------------------------------------------------------


def test_overrides_are_settings_of_the_recipes(monkeypatch: pytest.MonkeyPatch):
    from language.recipes import RECIPES
    from training.recipe import parse

    laptops, tcp = of(preset("laptops"), "gpt2-tiny", 64), of(preset("dgx-a100-tcp"), "gpt2-tiny", 256)
    for p in (laptops, tcp):
        co2 = next(row for row in p.best if p.case.layout.islands[row] > 1)
        for row in (p.best[0], co2):
            words = overrides(p.at(row), p.name(row))
            if words[0] == "--layout":
                words = words[2:]
            monkeypatch.setattr("sys.argv", ["language.train", "gpt2_pydoc_small", *words])
            recipe = parse(RECIPES, prog="language.train")
            assert recipe.method == ("co2" if p.case.layout.islands[row] > 1 else "ddp") and recipe.context == 64


def test_the_submission_line(capsys: pytest.CaptureFixture[str]):
    main(["--preset", "dgx-a100-tcp", "--model", "gpt-125m", "--batch", "512", "--sbatch", "--pick", "2"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "sbatch" in line)
    assert line.startswith("RECIPE=gpt2_small_owt METHOD=") and " BATCH_SIZE=512 " in line
    assert " sbatch --nodes=16 --gpus-per-node=8 slurm/gpt2_a100.sh " in line and line.endswith("--context 1024")


def test_seconds_of_a_step_leave_the_first_steps_out(tmp_path: Path):
    lines = [{"step": n, "seconds": 10.0 + 0.5 * n if n >= 4 else 2.0 * n, "train_loss": 1.0} for n in range(1, 11)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("\n".join(map(json.dumps, [*lines, {"step": 10, "val_loss": 2.0}])))
    assert step_seconds(file) == pytest.approx(0.5)
    file.write_text(json.dumps(lines[0]))
    with pytest.raises(UserError, match="too few steps to time"):
        step_seconds(file)
