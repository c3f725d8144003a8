"""The command python -m training.plan. --help lists its options."""

import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from core.errors import UserError
from training.layout import Layout
from training.plan import methods, time
from training.plan.case import (
    FORMATS,
    MERGES,
    RECOMPUTE,
    Case,
    Layouts,
    Numbers,
    from_doctor,
    preset,
    preset_model,
    presets,
)
from training.plan.search import ALIKE, GB, Plan, listed, notes, plan
from training.start.script import parse_options

TEN, WIDTH = 10, 120
COLUMNS = "{:>2} {:<28} {:<13} {:<24} {:>6} {:>8} {:>10} {:>6} {:>6} {:>7}"
TITLES = ("", "layout", "micro, again", "tau, format, merge", "GB", "s/step", "tokens/s", "MFU", "bubble", "exposed")
LOSS = (
    "loss is left out: after 2,000 steps of a 0.07 M model tau 24 cost 4.6 +- 0.5 % against ddp, tau 2 1.6 +- 0.2 % "
    "(results/loss.md); layouts within 1 % are ordered by tau; a round sends one payload, not fragments"
)


def mfu(c: Case, seconds: Numbers) -> Numbers:
    """`3 batch (l (linear + attention) + head) / (seconds devices peak)`: recomputation does not count [K sec. 6]"""
    return c.batch * c.model.step_flops / (seconds * c.cluster.devices * c.cluster.device.peak)


def rounded(value: float) -> str:
    """The value with three digits, or as a whole number if it has more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def header(c: Case) -> Iterator[str]:
    k, d, params = c.cluster, c.cluster.device, c.model.params
    size = f"{rounded(params / 1e9)} billion" if params >= 1e9 else f"{params / 1e6:.3g} million"
    yield f"{c.model.name}, {size} parameters, {c.batch} samples of {c.model.context} tokens a step"
    inside = f"{k.inside / GB:.3g} GB/s inside" if k.per_node > 1 else ""
    links = ", ".join(filter(None, (inside, f"{rounded(k.across * 8 / GB)} Gbit/s across" if k.nodes > 1 else "")))
    nodes = f"{k.nodes} node{'s' * (k.nodes > 1)} of {k.per_node}{f' ({links})' * bool(links)}"
    rate = f"{d.top * d.peak / 1e12:.3g} TFLOP/s of products"
    yield f"{k.name}: {nodes}, {d.name}, {d.memory / GB:.3g} GB, {rate}"


def rows(p: Plan) -> Iterator[str]:
    """Three lines for each of the best layouts: its figures, its gigabytes and its seconds by part."""
    yield COLUMNS.format(*TITLES)
    for number, row in enumerate(p.best[:TEN], 1):
        c, seconds = p.at(row), p.total[row]
        x = c.layout
        waits = sum(p.seconds[part][row] for part in time.COMMUNICATION)
        shares = mfu(c, seconds), p.seconds["bubble"][row] / seconds, waits / seconds
        co2 = f"{x.tau}, {list(FORMATS)[x.compression]}, {'host' if x.offload else MERGES[x.merge]}"
        yield COLUMNS.format(
            number,
            p.name(row),
            f"{x.micro}, {RECOMPUTE[x.recompute]}",
            co2 if x.islands > 1 else "ddp",
            f"{p.bytes[row] / GB:.3g}",
            f"{seconds:.4g}",
            f"{c.batch * c.model.context / seconds:,.0f}",
            *(f"{share:.1%}" for share in shares),
        )
        yield f"      GB: {large(p.memory, row, GB)}" + (f"; {text}" if (text := notes(c)) else "")
        yield f"      s: {large(p.seconds, row, 1)}"


def large(parts: dict[str, Numbers], row: int, unit: float) -> str:
    """The parts that make up 1 % of the sum or more."""
    least = sum(values[row] for values in parts.values()) / 100
    return ", ".join(f"{name} {v[row] / unit:.2g}" for name, v in parts.items() if v[row] and v[row] >= least)


def table(p: Plan) -> Iterator[str]:
    """The lines of the screen."""
    best = f"the best of each TP x PP x DP, islands, interleaving and ZeRO; exposed: {', '.join(time.COMMUNICATION)}"
    dropped = [f"dropped: {listed(p.dropped)}" + (f"; nearest miss: {p.miss}" if p.miss else "")] if p.dropped else []
    for text in (*header(p.case), *rows(p), best, *dropped, *gain(p)):
        width = max(WIDTH, len(text)) if text.endswith("%") else WIDTH  # a row with a long name stays on one line
        yield from textwrap.wrap(text, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


def gain(p: Plan) -> Iterator[str]:
    """Compares the best CO2 layout with the best synchronous layout, and names the part that decides."""
    sync, co2 = (next((row for row in p.best if (p.case.layout.islands[row] > 1) == of), None) for of in (False, True))
    if co2 is None:
        return
    if sync is None:
        yield f"no synchronous layout fits; {LOSS}"
        return
    ratio = p.total[sync] / p.total[co2]
    told = f"{ratio:.2f} times as fast" if ratio > 1 + ALIKE else f"no gain, {ratio:.2f} times as fast"
    part = max(p.seconds, key=lambda name: abs(p.seconds[name][sync] - p.seconds[name][co2]))
    reason = f"{part} decides, {p.seconds[part][sync]:.4g} s against {p.seconds[part][co2]:.4g}"
    yield f"CO2, {p.name(co2)}: {told} as {p.name(sync)}, the best synchronous layout; {reason}"
    yield LOSS


# -- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Plans the layout of a model on a cluster: tensor, pipeline and data parallelism, ZeRO and CO2."""

    model: str
    """A preset (gpt-125m, gpt-175b, llama-7b, ...), or a folder with Hugging Face's config.json."""
    batch: int
    """Samples of a step over all devices."""
    preset: str | None = None
    """A cluster: dgx-a100-roce, dgx-a100-tcp, rtx3090, frontier, internet-1000, laptops or selene."""
    cluster: Path | None = None
    """Instead of a preset: the file that core.doctor --out wrote."""
    context: int | None = None
    """Tokens of a sample. Default: the model's."""
    nodes: int | None = None
    """Nodes, in place of the cluster's."""
    per_node: int | None = None
    """Devices per node, in place of the cluster's."""
    probe: bool = False
    """Measures this machine's device instead of looking it up by the name in the doctor's report."""
    layout: str | None = None
    """Plans only this layout, such as tp2.pp2.dp2.co2x2."""
    sbatch: bool = False
    """Prints a Slurm submission and the arguments of language.train for the first layout."""
    recipe: str | None = None
    """The recipe of language.train for --sbatch. Default: the recipe of the model."""

    def check(self) -> None:
        """Raises UserError for the first invalid option."""
        for name in ("batch", "context", "nodes", "per_node"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name}={value}: give 1 or more")
        if (self.preset is None) == (self.cluster is None):
            raise UserError(
                f"preset={self.preset} and cluster={self.cluster}: give one of them, a preset of "
                f"{', '.join(presets()['clusters'])} or a file"
            )


def case(options: Options) -> Case:
    """The model and the cluster of the options, without layouts yet."""
    if options.cluster is not None:
        cluster = from_doctor(options.cluster, probe=options.probe)
    else:
        cluster = preset(options.preset or "", probe=options.probe)
    given = {"nodes": options.nodes, "per_node": options.per_node}
    cluster = replace(cluster, **{name: value for name, value in given.items() if value is not None})
    for name, rate in (("nodes", cluster.across), ("per_node", cluster.inside)):
        if (number := getattr(cluster, name)) > 1 and rate == math.inf:
            raise UserError(f"{name}={number}: {options.cluster} knows no such link: run core.doctor on as many")
    model = preset_model(options.model, options.context)
    return Case(model, cluster, options.batch, Layouts(1, 1, 1, 1, 1))


def overrides(c: Case, text: str) -> list[str]:
    """The arguments of a train script for a case with one layout, whose name is `text`."""
    x, m = c.layout, int(c.micro_batches)
    if x.tp == x.pp == 1 and (x.zero == 0 or x.offload):  # --layout has no offload
        found = ["--accumulate", m, "--per_node", x.dp if x.islands > 1 else 1, "--zero", x.zero]
    else:
        found = ["--layout", text]
    found += ["--method", "co2" if x.islands > 1 else "ddp"]
    if x.islands > 1:
        merge, compression = MERGES[x.merge], list(FORMATS)[x.compression]
        found += ["--no_recommended", "--co2.tau", x.tau, "--co2.merge", merge, "--co2.compression.format", compression]
        found += ["--co2.delay", "auto", "--co2.gap", "none"] if merge != "restart" else []
    found += ["--offload"] if x.offload else []
    found += ["--recompute"] if x.recompute else []
    found += ["--precision", "bfloat16"] if c.gpu else []
    return [str(word) for word in (*found, "--batch_size", c.batch, "--context", c.model.context)]


def sbatch(c: Case, words: list[str], recipe: str) -> str:
    """The submission of a cluster's script (slurm/README.md), which sets method, tau and batch from the environment."""
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
    options = parse_options(Options, prog="python -m training.plan", args=argv, use_underscores=True)
    options.check()
    named = Layout.parse(options.layout) if options.layout else None
    asked = case(options)
    began = perf_counter()
    p = plan(asked, named)
    spent = perf_counter() - began
    print("\n".join(table(p)), f"\n{len(p.total) + p.dropped.total():,} layouts in {spent:.2f} s")
    if options.sbatch:
        recipe = options.recipe or presets()["recipes"].get(options.model)
        if recipe is None:
            raise UserError(f"model {options.model} is no recipe's of language.train: give --recipe")
        first = p.best[0]
        words = overrides(p.at(first), p.name(first))
        print(sbatch(p.at(first), words, recipe))
        print(f"-m language.train {recipe} {shlex.join(words)}")
