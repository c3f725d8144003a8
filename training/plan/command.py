"""The command: python -m training.plan --preset dgx-a100-tcp --model llama-7b --batch 512; --help lists the options."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from core.errors import UserError
from training.data import paths_from_home
from training.layouts.layout import Layout
from training.plan import clusters, methods, show
from training.plan.case import FLOAT32, MERGES, WIRES, Case, Layouts, Software
from training.plan.model import preset_model, presets
from training.plan.search import plan


@dataclass(frozen=True)
class Options:
    """Which layout of tensor, pipeline and data parallelism, ZeRO and CO2 a model should take on a cluster."""

    model: str
    """A preset (gpt-125m, gpt-175b, llama-7b, ...), or a folder with Hugging Face's config.json."""
    batch: int
    """Samples of a step over all devices."""
    preset: str | None = None
    """A cluster: dgx-a100-roce, dgx-a100-tcp, rtx3090, frontier, internet-1000, laptops or selene."""
    cluster: Path | None = None
    """Or the file that core.doctor --out wrote."""
    context: int | None = None
    """Tokens of a sample; the model's by default."""
    nodes: int | None = None
    """In place of the cluster's."""
    per_node: int | None = None
    """Devices of a node, in place of the cluster's."""
    probe: bool = False
    """Measure this machine's device in place of looking it up by the name that the doctor found."""
    layout: str | None = None
    """Plan with this one alone, such as tp2.pp2.dp2.co2x2."""
    sbatch: bool = False
    """Shows the submission line and the overrides of the first."""
    recipe: str | None = None
    """The recipe of language.train for --sbatch; the model's by default."""

    def check(self) -> None:
        """UserError names the first option that cannot be."""
        for name in ("batch", "context", "nodes", "per_node"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name}={value}: give 1 or more")
        if (self.preset is None) == (self.cluster is None):
            raise UserError(
                f"preset={self.preset} and cluster={self.cluster}: give one of them, a preset of "
                f"{', '.join(presets()['clusters'])} or a file"
            )


def case(options: Options) -> Case:
    """Without layouts yet."""
    if options.cluster is not None:
        cluster = clusters.from_doctor(options.cluster, probe=options.probe)
    else:
        cluster = clusters.preset(options.preset or "", probe=options.probe)
    given = {"nodes": options.nodes, "per_node": options.per_node}
    cluster = replace(cluster, **{name: value for name, value in given.items() if value is not None})
    for name, rate in (("nodes", cluster.across), ("per_node", cluster.inside)):
        if (number := getattr(cluster, name)) > 1 and rate == math.inf:
            raise UserError(f"{name}={number}: {options.cluster} knows no such link: run core.doctor on as many")
    software = Software() if cluster.device.gpu else FLOAT32
    model = preset_model(options.model, options.context)
    return Case(model, cluster, software, options.batch, Layouts(1, 1, 1, 1, 1))


def overrides(c: Case, text: str) -> list[str]:
    """Of a train script, for one layout. text: its name."""
    x, m = c.layout, int(c.micro_batches)
    if x.tp == x.pp == 1 and (x.zero == 0 or x.offload):  # a layout knows one wire and merge, and no offload
        found = ["--accumulate", m, "--per_node", x.dp if x.islands > 1 else 1, "--zero", x.zero]
    else:
        found = ["--layout", text]
    found += ["--method", "co2" if x.islands > 1 else "ddp"]
    if x.islands > 1:
        merge, wire = MERGES[x.merge], list(WIRES)[x.wire]
        found += ["--no_recommended", "--co2.tau", x.tau, "--co2.merge", merge, "--co2.wire.format", wire]
        found += ["--co2.delay", "auto", "--co2.gap", "none"] if merge != "outer" else []
    found += ["--offload"] if x.offload else []
    found += ["--recompute"] if x.recompute else []
    found += ["--precision", "bfloat16"] if c.software.value == 2 else []
    return [str(word) for word in (*found, "--batch_size", c.batch, "--context", c.model.context)]


def sbatch(c: Case, words: list[str], recipe: str) -> str:
    """The submission line of a cluster's script (slurm/README.md), which gives method, tau and batch itself."""
    own = {"--method": "METHOD", "--co2.tau": "TAU", "--batch_size": "BATCH_SIZE"}
    env, rest, options = {"RECIPE": recipe}, [], iter(words)
    for word in options:
        if word in own:
            env[own[word]] = next(options)
        else:
            rest.append(word)
    script = "slurm/gpt2_3090.sh" if "3090" in c.cluster.device.name else "slurm/gpt2_a100.sh"
    size = f"--nodes={c.cluster.nodes} --gpus-per-node={c.cluster.per_node}"
    return f"{' '.join(f'{k}={v}' for k, v in env.items())} sbatch {size} {script} {shlex.join(rest)}"


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["methods"]:
        methods.main(argv[1:])
        return
    options = tyro.cli(Options, prog="python -m training.plan", args=argv, use_underscores=True)
    options = paths_from_home(options)
    options.check()
    named = Layout.parse(options.layout) if options.layout else None
    asked = case(options)
    began = time.perf_counter()
    p = plan(asked, named)
    spent = time.perf_counter() - began
    print("\n".join(show.table(p)), f"\n{len(p.total) + p.dropped.total():,} layouts in {spent:.2f} s")
    if options.sbatch:
        recipe = options.recipe or presets()["recipes"].get(options.model)
        if recipe is None:
            raise UserError(f"model {options.model} is no recipe's of language.train: give --recipe")
        first = p.best[0]
        words = overrides(p.at(first), p.name(first))
        print(sbatch(p.at(first), words, recipe))
        print(f"-m language.train {recipe} {shlex.join(words)}")
