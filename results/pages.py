"""Makes the tables of the results pages from their rows: python -m results.pages

A line `<!-- table: NAME -->` precedes a table in a page of results/, in README.md, or in one of DOCS. The command makes
the table again with TABLES[NAME] from the rows in results/*.json and *.jsonl. Figures are rounded once, here.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import regimes
from bench.loss.methods import METHODS, Method
from bench.report import TUNING_SEED, holm, mean_ratio
from bench.report import mean_sd as with_sd
from bench.report import table as markdown
from bench.time_to_loss import ratio_of
from training.start.script import launch, parse_options

RESULTS = Path(__file__).parent
DOCS = ("docs/from_ddp.md", "docs/choosing.md")
PAGES = (*(RESULTS.parent / name for name in ("README.md", *DOCS)), *sorted(RESULTS.glob("*.md")))
MARK = re.compile(r"(?m)^<!-- table: (\S+) -->\n(?:\n?(?:\|.*\n)+)?")
Row = dict[str, Any]
Cells = dict[str, Sequence[str]]
TABLES: dict[str, Callable[[], list[Sequence[str]]]] = {}


def table(titles: str | Callable[[], str], name: str = "") -> Callable[[Callable[[], Cells]], Callable[[], Cells]]:
    """Specifies a table by its titles, separated by " | ". The function below returns its lines: the first cell of
    each, and the other cells. Its name is the table's if none is given."""

    def add(lines: Callable[[], Cells]) -> Callable[[], Cells]:
        def made() -> list[Sequence[str]]:
            first = titles if isinstance(titles, str) else titles()
            return [first.split(" | "), *((line, *cells) for line, cells in lines().items())]

        TABLES[name or lines.__name__] = made
        return lines

    return add


def fill() -> None:
    """Makes the tables of the results pages, of README.md and of docs again from the rows in results/."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """Returns the text of a page with its tables remade."""

    def made(found: re.Match[str]) -> str:
        titles, *rows = TABLES[found[1]]()
        return f"<!-- table: {found[1]} -->\n\n{markdown(titles, rows)}\n"

    return MARK.sub(made, text)


# -- reading rows and writing cells ---------------------------------------------------------------------------------


@functools.cache
def load(name: str) -> Any:
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def select(rows: Iterable[Row], **same: Any) -> list[Row]:
    """Returns the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in same.items())]


def mean_sd(values: Iterable[float], spec: str = ".1f") -> str:
    """Mean and sample standard deviation, or only the value if there is one. Empty without values."""
    found = [*values]
    return with_sd(found, spec) if found else ""


def against(mine: Mapping[int, float], other: Mapping[int, float]) -> str:
    """How much greater the loss is, in percent, over the seeds that both have."""
    both = sorted(mine.keys() & other.keys())
    return mean_sd((100 * (mine[seed] / other[seed] - 1) for seed in both), "z.1f")


def bold(rows: Sequence[Sequence[Row | None]]) -> list[list[str]]:
    """The cells of a family of comparisons, from `ratio_of`. Bold: not 1, with p < 0.05 after Holm's correction.

    > is a lower bound, < an upper bound, and ~ neither, because a method missed the target.
    """
    family = [found for row in rows for found in row if found]
    sure = [found for found, p in zip(family, holm([found["p"] for found in family]), strict=True) if p < 0.05]

    def cell(found: Row | None) -> str:
        if found is None:
            return ""
        missed = found["missed"] > 0, found["against_missed"] > 0
        bound = {(True, False): "> ", (False, True): "< ", (True, True): "~ "}.get(missed, "")
        text = f"{bound}{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
        return f"**{text}**" if any(found is each for each in sure) else text

    return [[cell(found) for found in row] for row in rows]


# -- seconds to a loss ----------------------------------------------------------------------------------------------

TASK_NAMES = {"vision": "digits", "cifar10": "CIFAR-10", "language": "text"}
SHOWN = (("vision", 10), ("cifar10", 10), ("language", 10), ("language", 40), ("language", 200))  # in README


def seconds_cell(runs: Sequence[Row]) -> str:
    """Mean ± standard deviation of the seconds to the loss, or the limit and how many runs reached the loss."""
    missed = [run for run in runs if run["status"] != "reached"]
    count = f"{len(runs) - len(missed)} of {len(runs)}"
    if not missed:
        return mean_sd(run["seconds"] for run in runs)
    if len(select(missed, status="out of time")) == len(missed):
        return f"> {max(run['seconds'] for run in missed):.0f} ({count})"
    return f"{count} reached it"


@table(" | ".join(("seconds to a loss", *(f"{TASK_NAMES[task]}, {rate} Mbit/s" for task, rate in SHOWN))))
def readme_seconds() -> Cells:
    """README's table, with a row for each method and a column for each task and link rate."""
    columns = [
        [seconds_cell(select(with_fragments(), task=at[0], rate_mbit=at[1], method=m)) for m in (IN_PARTS, *TUNED[at])]
        for at in SHOWN
    ]
    methods = ("CO2, recommended", "Local-SGD, tau tuned", "DDP that overlaps")
    return dict(zip(methods, zip(*columns, strict=True), strict=True))


@table("seconds over CO2's | links | first target | late target | differ after Holm's correction")
def pooled() -> Cells:
    """Estimates over all measured links, which count alike, with an interval by t over the links' averages.

    The last column counts the links and targets that differ from 1 after Holm's correction within the row.
    """
    local, ddp = ({at: beside(*at, TUNED[at][i]) for at in TUNED} for i in (0, 1))
    lines: Cells = {}
    for name, runs, methods in (
        ("Local-SGD, tau tuned, over CO2 with fragments", local, {at: (TUNED[at][0], IN_PARTS) for at in TUNED}),
        ("same, r of 10 and more", local, {at: (TUNED[at][0], IN_PARTS) for at in SLOW}),
        ("DDP, int4, that overlaps, over CO2 with fragments", ddp, {at: (TUNED[at][1], IN_PARTS) for at in TUNED}),
    ):
        found = [[ratio_of(runs[at], *methods[at], late=late) for at in methods] for late in (False, True)]
        means = (mean_ratio([each["ratio"] for each in row if each]) for row in found)
        corrected = holm([each["p"] for row in found for each in row if each])
        cells = (f"{mean.ratio:.2f} ({mean.low:.2f}–{mean.high:.2f})" for mean in means)
        links = sum(each is not None for each in found[0])
        lines[name] = (str(links), *cells, f"{sum(p < 0.05 for p in corrected)} of {len(corrected)}")
    return lines


def ratio_of_cell(found: Sequence[float]) -> str:
    ratio, low, high = found
    return f"{ratio:.2f} ({low:.2f}–{high:.2f})"


@table(
    "task, r | blocking tau | hidden tau, delay | against blocking | against an ideal DDP | against ours "
    "| fragments: tau, number | against blocking",
    "regimes",
)
def regime_map() -> Cells:
    """The best hidden run, and the best with fragments, against the best blocking run, by task and r."""
    lines, more = Cells(), fmean(map(waits_more, DDP_LINKS))
    in_turn = {(cell.task, cell.link.r): cell for cell in regimes.cells(regimes.FRAGMENTS)}
    for cell in regimes.cells(links=tuple(map(regimes.Link, (3, 10, 30, 100)))):
        line = [str(cell.blocking.tau), f"{cell.hidden.tau}, {cell.hidden.delay}"]
        ideal = cell.link.step_seconds(regimes.DDP)
        ours = tuple((ideal + more) / ideal * ratio for ratio in cell.than_ddp)
        line += map(ratio_of_cell, (cell.faster, cell.than_ddp, ours))
        if cut := in_turn.get((cell.task, cell.link.r)):
            line += [f"{cut.hidden.tau}, {cut.hidden.fragments}", ratio_of_cell(cut.faster)]
        else:
            line += ["", ""]
        lines[f"{cell.task}, {cell.link.r:g}"] = line
    return lines


COSTS_OF_HIDING = {  # codec, slowdown, latency: see regimes.Link
    "`--codec 0.53`": (0.53, 0.0),
    "`--slowdown 0.5`": (0.0, 0.5),
    "both": (0.53, 0.5),
    "`--latency 0.2`": (0.0, 0.0, 0.2),
}


@table(" | ".join(("task, r 10", *COSTS_OF_HIDING)))
def regime_costs() -> Cells:
    """The best hidden run against the best blocking run where hiding has costs."""
    every = [regimes.cells(links=(regimes.Link(10, *costs),)) for costs in COSTS_OF_HIDING.values()]
    found = [{cell.task: ratio_of_cell(cell.faster) for cell in cells} for cells in every]
    return {task: [cells.get(task, "not run") for cells in found] for task in regimes.RATES}


# -- DDP, fragments, nodes --------------------------------------------------------------------------------------------

BUCKETED = {  # DDP with buckets of one size
    "ddp:cap=1000": "DDP, one bucket",
    "ddp:cap=0.25": "DDP",
    "ddp:compression=int4,cap=1000": "DDP, int4, one bucket",
    "ddp:compression=int4,cap=0.25": "DDP, int4",
    "ddp:cap=1": "DDP, 1 MiB",
    "ddp:compression=int4,cap=1": "DDP, int4, 1 MiB",
}
ACCUMULATED = {
    "ddp:accumulate=4,cap=0.25,lr=": "DDP, 4 micro-batches",
    "ddp:accumulate=4,cap=0.25,compression=int4,lr=": "DDP, int4, 4 micro-batches",
}
IN_PARTS, WHOLE = "co2_auto:compression=int4", "co2_auto:compression=int4,fragments=1"
TUNED = {  # Local-SGD and DDP beside CO2 with fragments, by task and link
    (task, rate): (f"local:share={share},compression=int4{lr}", f"ddp:compression=int4,cap={cap}")
    for task, rate, share, cap, lr in (
        ("language", 10, 0.2, "0.25", ""),
        ("language", 40, 0.2, "0.25", ""),
        ("language", 200, 0.2, "1", ""),
        ("language", 1000, 0.2, "1", ""),
        ("vision", 10, 0.1, "0.25", ""),
        ("vision", 40, 0.1, "0.25", ""),
        ("vision", 200, 0.1, "0.25", ""),
        ("vision", 1000, 0.1, "0.25", ""),
        ("cifar10", 10, 0.4, "0.25,lr=0.1", ",lr=0.02"),
        ("cifar10", 40, 0.1, "0.25,lr=0.1", ",lr=0.02"),
    )
}
SLOW = (("language", 10), ("language", 40), ("vision", 10), ("vision", 40), ("cifar10", 10))  # r of 10 and more
DILOCO = {"language": "diloco:share=0.2,compression=int4", "vision": "diloco:share=0.1,compression=int4"}
ON_NODES = "co2_auto:nodes=2,compression=int4"
NODES = ("text", "text_200", "cifar10")  # of results/paired/nodes_*.json
# the starts of the methods there
BESIDE_NODES = ("co2_auto:compression=int4", "local:nodes=2,share=", "ddp:nodes=2,compression=int4,cap=1")


DDP_LINKS = tuple((task, rate) for task in ("vision", "language") for rate in (10, 40, 200, 1000))


def beside_ddp(task: str, rate: float, method: str) -> list[Row]:
    """The runs of a task and link to compare this kind of DDP with CO2."""
    if rate < 200:
        return select(load("paired/ddp_links.json")["runs"], task=task, rate_mbit=rate)
    return beside(task, rate, method)


@table(" | ".join(("method", *(f"{TASK_NAMES[task]}, {rate} Mbit/s" for task, rate in DDP_LINKS))))
def ddp_seconds() -> Cells:
    """DDP's seconds to the first target over the seconds of CO2 with fragments, by link."""
    found = {name: [ratio_of(beside_ddp(*at, m), m, IN_PARTS) for at in DDP_LINKS] for m, name in BUCKETED.items()}
    summed = [run for run in load("paired/accumulation.json")["runs"] if run["seed"] < TUNING_SEED]
    each = [select(summed, task=task, rate_mbit=rate) for task, rate in DDP_LINKS]
    for start, name in ACCUMULATED.items():  # a task's own learning rate ends the method's name
        methods = [next((run["method"] for run in of if run["method"].startswith(start)), "") for of in each]
        found[name] = [ratio_of(of, method, IN_PARTS) for of, method in zip(each, methods, strict=True)]
    return dict(zip(found, bold([*found.values()]), strict=True))


BUCKETS = {
    f"ddp:compression=int4,cap={cap}": name for cap, name in ((1000, "one bucket"), (0.25, "0.25 MiB"), (1, "1 MiB"))
}


def waits_of_ddp(task: str, rate: float) -> tuple[float, float, list[list[float]]]:
    """Returns local steps of DDP over int4: an all-reduce on the link, the part that an ideal DDP cannot hide, and the
    runs' waiting with each of BUCKETS."""
    found = [waited(select(beside_ddp(task, rate, method), method=method)) for method in BUCKETS]
    link = fmean(a for some in found for a, _ in some)
    return link, max(0, link - regimes.BACKWARD), [[wait for _, wait in some] for some in found]


def waits_more(at: tuple[str, float]) -> float:
    """The local steps that DDP over int4, with its best buckets, waits more than an ideal DDP."""
    _, ideal, waits = waits_of_ddp(*at)
    return min(map(fmean, filter(None, waits))) - ideal


@table(" | ".join(("task, link", "all-reduce", "an ideal DDP waits", *BUCKETS.values())))
def ddp_waits() -> Cells:
    lines = Cells()
    for task, rate in DDP_LINKS:
        link, ideal, waits = waits_of_ddp(task, rate)
        lines[f"{TASK_NAMES[task]}, {rate} Mbit/s"] = [
            f"{link:.2f}",
            f"{ideal:.2f}",
            *(mean_sd(w, ".2f") for w in waits),
        ]
    return lines


def waited(runs: Iterable[Row]) -> list[tuple[float, float]]:
    """For each run the seconds of an all-reduce on the link and of waiting from step 24 on, both per step and in local
    steps."""
    found = []
    for run in runs:
        first, *_, last = [at for at in run["trajectory"] if at["step"] >= 24]
        steps = last["step"] - first["step"]
        took, wait = ((last[key] - first[key]) / steps for key in ("seconds", "exposed_seconds"))
        found.append((run["link_seconds"] / (took - wait), wait / (took - wait)))
    return found


FRAGMENTED = tuple(f"paired/fragments_{name}.json" for name in ("tuned", "text", "more", "links", "float32", "again"))


@functools.cache
def with_fragments() -> list[Row]:
    """The runs of CO2 with fragments and of other methods. Tuning seeds are left out."""
    return [run for name in FRAGMENTED for run in load(name)["runs"] if run["seed"] < TUNING_SEED]


def beside(task: str, rate: float, method: str) -> list[Row]:
    """The runs of a task and link in the files that have both the method and CO2 with fragments, or else in all."""
    files = [select(load(name)["runs"], task=task, rate_mbit=rate) for name in FRAGMENTED]
    both = [runs for runs in files if select(runs, method=method) and select(runs, method=IN_PARTS)]
    return [run for runs in both or files for run in runs if run["seed"] < TUNING_SEED]


def waits(runs: Iterable[Row]) -> str:
    """How much of the time after step 24 a method waits until the late target, in percent, mean of the runs."""
    shares = []
    for run in runs:
        line = [at for at in run["trajectory"] if at["step"] >= 24 and at["seconds"] <= run["late"]["seconds"]]
        if len(line) > 1 and "exposed_seconds" in line[0]:
            took, waited = (line[-1][key] - line[0][key] for key in ("seconds", "exposed_seconds"))
            shares.append(100 * waited / took)
    return f"{fmean(shares):.1f}" if shares else ""


def over(ours: str, links: Mapping[tuple[str, float], Sequence[str]], of: Callable[..., list[Row]]) -> Cells:
    """The seconds of a link's methods over the seconds of `ours`, seed by seed, with the seconds of `ours` itself and
    how long it waits, by link and target. `of` returns the runs of a task and rate to compare a method in."""
    places = [(at, late) for at in links for late in (False, True)]
    lines = bold([[ratio_of(of(*at, m), m, ours, late=late) for m in links[at]] for at, late in places])
    made = Cells()
    for ((task, rate), late), cells in zip(places, lines, strict=True):
        mine = select(of(task, rate, ours), task=task, rate_mbit=rate, method=ours)
        own = [seconds_cell([run["late"] if late else run for run in mine]), "" if late else waits(mine)]
        made[f"{TASK_NAMES[task]}, {rate:g} Mbit/s, {'late' if late else 'first'}"] = [*cells, *own]
    return made


@table(
    "task, link, target | without fragments | Local-SGD (blocking), tau tuned | DiLoCo (blocking) | DDP that overlaps "
    "| CO2's seconds | CO2 waits, %"
)
def fragments() -> Cells:
    """The seconds over the seconds of CO2 with fragments, all over int4."""

    def of(task: str, rate: float, method: str) -> list[Row]:
        return with_fragments() if method == IN_PARTS else beside(task, rate, method)

    links = {at: (WHOLE, local, DILOCO.get(at[0], ""), ddp) for at, (local, ddp) in TUNED.items()}
    del links["vision", 1000]  # see ddp_seconds
    return over(IN_PARTS, links, of)


@table("2 workers, link, target | Local-SGD (blocking), tau tuned | CO2's seconds | CO2 waits, %")
def uncontended() -> Cells:
    """As `fragments`, with workers that do not share cores."""
    runs = [run for more in ("", "_more") for run in load(f"paired/two_workers{more}.json")["runs"]]
    runs = [run for run in runs if run["seed"] < TUNING_SEED]
    links = {("language", rate): [TUNED["language", 10][0]] for rate in sorted({run["rate_mbit"] for run in runs})}
    lines = over(IN_PARTS, links, lambda task, rate, _: select(runs, task=task, rate_mbit=rate))
    slow = [run | {"seed": (run["rate_mbit"], run["seed"])} for run in runs if run["rate_mbit"] < 50]
    for late in (False, True):
        found = [ratio_of(slow, method, IN_PARTS, late=late) for method in links["language", 5]]
        lines[f"r of 10 and more, {'late' if late else 'first'}"] = [*bold([found])[0], "", ""]
    return lines


@table(
    "task, link, target | CO2, one worker per rank | Local-SGD (blocking), tau tuned, on nodes | DDP that overlaps, "
    "float32 inside nodes | seconds of CO2 on nodes | CO2 waits, %"
)
def nodes_seconds() -> Cells:
    """Two nodes of two ranks: the seconds over the seconds of CO2 on nodes."""
    runs = [run for name in NODES for run in load(f"paired/nodes_{name}.json")["runs"]]
    links = {(run["task"], run["rate_mbit"]): list[str]() for run in runs}
    for (task, rate), methods in links.items():
        have = {run["method"]: None for run in select(runs, task=task, rate_mbit=rate)}
        methods += (next((m for m in have if m.startswith(start)), "") for start in BESIDE_NODES)
    return over(ON_NODES, links, lambda task, rate, _: select(runs, task=task, rate_mbit=rate))


# -- loss at equal samples ------------------------------------------------------------------------------------------

HIDDEN = "co2:merge=keep_local,gap=none,beta=0,delay=1,compression=int4"
HIDDEN_DILOCO = HIDDEN.replace("beta=0", "nesterov=true,alpha=0.7,beta=0.5")
Losses = Mapping[int, float]  # by seed


def losses(
    files: str,
    task: str,
    asked: str,
    steps: int,
    tau: int = 24,
    workers: int = 4,
    batches: Sequence[int] = (1, 4, 8, 16),
    tried: int = 0,
) -> Losses:
    """Losses on the test split of a method, `asked` as on the command line, with its tuned settings, or none if it was
    not run. files: names, separated by spaces. batches: of a worker. tried: how many settings its
    tuning has tried."""
    rows = [row for file in files.split() for row in load(file)]
    same = {"task": task, "steps": steps, "tau": tau, "workers": workers, "shards": "iid"}
    choices = select((r for r in rows if r["kind"] == "choice" and r["batch"] in batches), **same)
    choices = [r for r in choices if sorted(re.split("[:,]", r["asked"])) == sorted(re.split("[:,]", asked))]
    choices = [r for r in choices if tried in (0, r["tried"])]
    if not choices:
        return {}
    choice = choices[-1]
    same = {key: choice[key] for key in ("task", "method", "lr", "workers", "batch", "steps", "shards")}
    same |= {"tau": tau} if choice["method"] != "ddp" else {}
    runs = select((row for row in rows if row["kind"] == "run"), split="test", **same)
    defaults = METHODS.get(choice["method"], Method).options  # an older row lacks a newer option
    chosen = defaults | choice["options"]
    return {run["seed"]: run["loss"] for run in runs if defaults | run["options"] == chosen}


def loss_of(found: Losses) -> str:
    return mean_sd(found.values(), ".3f")


THREE = {"bytes": "text", "gpt2": "GPT-2", "cifar": "CIFAR-10"}  # tasks
LONG = functools.partial(losses, "h100.jsonl h200.jsonl", steps=2000)
MUON = {
    "Local-SGD (blocking), tau 2": ("2.06", "local:compression=int4", 2),
    "hidden average, tau 1": ("4.12", HIDDEN, 1),
    "hidden average, tau 2": ("2.06", HIDDEN, 2),
    "hidden average, tau 6": ("0.69", HIDDEN, 6),
    "hidden average, tau 24": ("0.17", HIDDEN, 24),
    "hidden DiLoCo, tau 24": ("0.17", HIDDEN_DILOCO, 24),
    "Local-SGD (blocking), tau 24": ("0.17", "local:compression=int4", 24),
}
COSTS = {
    "Local-SGD (blocking), tau 24": ("1.33", "local", 24),
    "DiLoCo (blocking), tau 24, outer momentum 0.5": ("1.33", "diloco:beta=0.5", 24),
    "hidden average over int4, tau 24": ("0.17", HIDDEN, 24),
    "same, outer momentum 0.3": ("0.17", HIDDEN.replace("beta=0", "beta=0.3"), 24),
    "hidden DiLoCo over int4, tau 24": ("0.17", HIDDEN_DILOCO, 24),
    "Streaming DiLoCo over int4, tau 24": ("0.17", "streaming:beta=0.5,compression=int4", 24),
    "eager updates over int4, tau 24": ("0.17", "eager:beta=0.5,compression=int4", 24),
}


def change(task: str, asked: str, tau: int, of_task: str = "") -> str:
    """How much greater the loss is than DDP's after 2,000 steps, or than DDP's on another task. Empty without three
    seeds."""
    mine, other = LONG(task, asked, tau=tau), LONG(of_task or task, "ddp", tau=24 if task == "cifar" else 2)
    return against(mine, other) if len(mine.keys() & other.keys()) >= 3 else ""


def changes(methods: Mapping[str, tuple[str, str, int]], tasks: Iterable[str]) -> Cells:
    """The bits a step, and the change of the loss on each task."""
    return {name: (bits, *(change(task, asked, tau) for task in tasks)) for name, (bits, asked, tau) in methods.items()}


@table("method | bits a step | seeds | text | GPT-2 | CIFAR-10")
def cost_of_hiding() -> Cells:
    """2,000 steps: DDP's loss, and how much greater other losses are, in percent."""
    first = [LONG(task, "ddp", tau=24 if task == "cifar" else 2) for task in THREE]
    lines: Cells = {"DDP: loss": ("32", str(len(first[0])), *map(loss_of, first))}
    for name, (bits, *cells) in changes(COSTS, THREE).items():
        lines[name] = (bits, str(len(LONG("bytes", COSTS[name][1], tau=24))), *cells)
    return lines


@table("with Muon, over int4 | bits a step | text | GPT-2")
def muon() -> Cells:
    """With Muon: changes against DDP with Muon, in percent."""
    ddp = (change(f"{task}_muon", "ddp", 2, task) for task in ("bytes", "gpt2"))
    first: Cells = {"DDP in float32, against DDP with AdamW": ("32", *ddp)}
    return first | changes(MUON, ("bytes_muon", "gpt2_muon"))


def signed(change: str) -> str:
    return f"{change} %" if change else ""


OUTER_STEPS = ("beta=0", "beta=0.3", "nesterov=true,alpha=0.7,beta=0.5")  # of the hidden average
ONE, TEN, ROUND = ",delay=1", ",delay=10", ""  # steps late
RULE = "paper"  # a round late, with the penalty, and each worker restarts from the outer step's result
CUT = "cut"  # 8 fragments, one step late
HIDDEN_ROWS = {  # name -> task, tau, workers, how late
    "text": ("bytes", 24, 4, ONE),
    "text, 10 steps late": ("bytes", 24, 4, TEN), "text, a round late": ("bytes", 24, 4, ROUND),
    "text, a round late, paper's rule": ("bytes", 24, 4, RULE),
    "text, 16 workers": ("bytes", 24, 16, ONE), "text, 64 workers": ("bytes", 24, 64, ONE),
    "CIFAR-10": ("cifar", 24, 4, ONE),
    "CIFAR-10, a round late": ("cifar", 24, 4, ROUND),
    "CIFAR-10, a round late, paper's rule": ("cifar", 24, 4, RULE),
    **{f"{name}, 8 fragments": (task, 24, 4, CUT) for task, name in {**THREE, "digits": "digits"}.items()},
    "text, 8 fragments, 80 rounds": ("bytes", 12, 4, CUT),
}  # fmt: skip


@table("task | DiLoCo (blocking) | outer momentum 0 | 0.3 | hidden DiLoCo")
def hidden_diloco() -> Cells:
    """Changes of the loss in percent against Local-SGD with the same tau, over 480 steps, or 960 with tau 12."""
    lines: Cells = {}
    for name, (task, tau, workers, late) in HIDDEN_ROWS.items():
        files = "h100.jsonl" if workers > 4 else "search.jsonl controls.jsonl"
        files, steps = "fragments.jsonl" if late == CUT else files, 960 if tau == 12 else 480
        of = functools.partial(losses, files, task, steps=steps, tau=tau, workers=workers)
        of = functools.partial(of, batches=(2,)) if workers == 16 else of
        methods = [f"co2:merge=keep_local,gap=none,{step}{late},compression=int4" for step in OUTER_STEPS]
        methods = [ONE_LATE, *(f"{ONE_LATE},{step}" for step in OUTER_STEPS[1:])] if late == CUT else methods
        methods = ["diloco:beta=0.5" if late in (ONE, CUT) else "", *methods]
        methods = ["", "co2:beta=0,compression=float32", "", ""] if late == RULE else methods
        base = of(asked="local:compression=float32") or of(asked="local")
        lines[name] = [against(of(asked=method), base) for method in methods]
    return lines


@table("nodes, of how many ranks | Local-SGD (blocking): loss | CO2, % | CO2, one worker per rank, % | DDP, %")
def nodes_loss() -> Cells:
    """Losses of simulated nodes, over int4. A node is a worker with a batch of 16, shared by its ranks."""
    lines = Cells()
    of_two = [(task, nodes, 2, 480) for task in ("bytes", "cifar") for nodes in (2, 4)]
    for task, nodes, ranks, steps in (*of_two, ("bytes", 16, 8, 240)):
        of = functools.partial(losses, "fragments.jsonl", task, steps=steps, tau=12, tried=3)
        base = of("local:compression=int4", workers=nodes, batches=(16,))
        apart = of(ONE_LATE, workers=ranks * nodes, batches=(16 // ranks,))
        others = of(ONE_LATE, workers=nodes, batches=(16,)), apart
        # DDP's workers only share the batch
        every = of("ddp", workers=4, batches=(4 * nodes,))
        lines[f"{THREE[task]}, {nodes} of {ranks}"] = [loss_of(base), *(against(it, base) for it in (*others, every))]
    return lines


ONE_LATE = "fragments:fragments=8,delay=1,compression=int4"


def changes_of(file: str, task: str, tau: int, methods: Iterable[str], base: str, tried: int = 0) -> list[str]:
    """Changes of the loss after 480 steps against a method, in percent. Empty: not run."""
    of = functools.partial(losses, file, task, steps=480, tau=tau, batches=(8, 16), tried=tried)
    return [against(of(method), of(base)) for method in methods]


@table("local steps of an all-reduce | " + " | ".join(f"{name}: whole | parts | fragments" for name in THREE.values()))
def lateness() -> Cells:
    """Changes of the loss against Local-SGD with tau 24, in percent, by how late averages are merged."""
    lines, whole = Cells(), "co2:merge=keep_local,gap=none,beta=0"
    for steps, each in ((2, 1), (5, 1), (10, 2), (19, 3)):
        delays = {whole: steps, "fragments:fragments=8,together=true": steps, "fragments:fragments=8": each}
        late = [f"{asked},compression=int4,delay={delay}" for asked, delay in delays.items()]
        of = (changes_of("fragments.jsonl", task, 24, late, "local:compression=int4") for task in THREE)
        lines[str(steps)] = [*itertools.chain(*of)]
    return lines


@table("task | layers | every 8th tensor | reversed")
def cuts() -> Cells:
    """Changes of the loss against fragments cut by bytes, in percent."""
    methods = [f"{ONE_LATE},cut={cut}" for cut in ("layers", "interleaved", "reversed")]
    tasks = {"bytes": "text", "cifar": "CIFAR-10"}
    return {name: changes_of("fragments.jsonl", task, 12, methods, ONE_LATE, 1) for task, name in tasks.items()}


@table("task | DDP: loss | DDP, int4, % | 4 micro-batches, % | both, %")
def accumulation() -> Cells:
    """The loss of fewer updates with larger batches at equal samples, against DDP."""
    lines = Cells()
    for task, name, batch in (("bytes", "text", 8), ("digits", "digits", 16)):
        found = [
            losses("fragments.jsonl", task, asked, steps // k, batches=(batch * k,))
            for (steps, k), asked in itertools.product(((480, 1), (480, 4)), ("ddp", "ddp:compression=int4"))
        ]
        lines[name] = [loss_of(found[0]), *(against(other, found[0]) for other in found[1:])]
    return lines


RATE_TASKS = {"digits": ("digits, SGD", 1.0), "cifar": ("CIFAR-10, SGD", 1.0), "bytes": ("text, AdamW", 0.5)}
"""Task -> its name, and DDP's limit of the gradient norm if it clips."""


@table("task, method | learning rate x 0.5 | x 1 | x 2 | x 1, clipped at DDP's limit | at twice the limit")
def rates() -> Cells:
    """The loss against DDP at learning rate x 1 without clipping, by learning rate and by limit of the norm."""
    rows, lines = load("rates.jsonl"), Cells()
    best = {row["task"]: row["lr"] for row in rows if row["kind"] == "choice" and " 1 t" in row["tuning"]}
    for (task, (name, limit)), method in itertools.product(RATE_TASKS.items(), ("ddp", "co2")):
        columns = [(0.5, "none"), (1, "none"), (2, "none"), (1, f"{limit:g}"), (1, f"{2 * limit:g}")]
        same = {"kind": "run", "task": task}
        line = [select(rows, **same, method=method, lr=best[task] * x, clip=clip) for x, clip in columns]
        base = select(rows, **same, method="ddp", lr=best[task], clip="none")
        first, *found = ({row["seed"]: row["loss"] for row in runs} for runs in (base, *line))
        cells = [signed(against(of, first)) or "not run" for of in found]
        cells[1] = f"loss {loss_of(first)}" if method == "ddp" else cells[1]
        lines[f"{name}, {method.upper()}"] = cells
    return lines


# -- GPUs, faults, settings -------------------------------------------------------------------------------------------


@table("work | ms | share of a copy's rate | kernels")
def gpu_boundary() -> Cells:
    """An outer step and an encoded all-reduce of 350 M parameters on one H100: time on the device, and kernels."""
    names = {"restart": "restart (paper)", "keep_local": "keep_local"}
    ways, lines = {"fast": "Triton", "plain": "plain torch", "compiled": "torch.compile"}, Cells()
    for row in load("gpu.json")["rows"]:
        what, _, case = row["name"].partition(": ")
        figures, (merge, _, way) = row.get("figures") or {}, case.partition(", ")
        if what == "a boundarys bytes a parameter" and merge in names:
            name, share = f"outer step, merge {names[merge]}, {ways[way]}", f"{figures['share of copy']:.0%}"
        elif what == "a reductions bytes a parameter":
            name, share = f"encode and decode, {case}", ""
        else:
            continue
        lines[name] = (f"{figures['ms']:.2f}", share, f"{figures['kernels']:.0f}")
    return lines


@table("harm | runs | right | without a restart | hung")
def faults() -> Cells:
    """Runs that a fault disturbed: one row per kind of fault."""
    harms = {
        "a worker is killed": "kill", "killed, may come back": "rejoin", "two killed, may come back": "two kills",
        "SIGTERM, SIGINT or SIGUSR1": "stop", "stopped for 3 s": "pause",
        "output full, closed or without a reader": "stream", "killed, and files damaged": "crash",
        "etcd member killed or stopped": "etcd", "no link for 3 or 10 s": "outage", "disk full": "disk", "NaN": "nan",
        "none": "none",
    }  # fmt: skip
    columns = ({}, {"right": True}, {"attempts": 1}, {"hung": True})
    runs = load("chaos.json")
    return {name: [str(len(select(runs, harm=harm, **of))) for of in columns] for name, harm in harms.items()}


MARGIN = 0.1  # of a trivial baseline, which ignores the input or repeats it; chosen before most of the runs


def data_of(recipe: str) -> str:
    """The data of a small recipe's name, with the kind of objective of a text model."""
    family, _, rest = recipe.partition("_")
    if family in ("gpt2", "transnormer", "roberta"):
        family = ("masked " if family == "roberta" else "") + rest.partition("_")[0]
    return family + " masked" * ("mae" in recipe.split("_"))


@table(
    "table, model | metric: trivial baseline | DDP | Local-SGD (blocking) | Overlap-Local-SGD | SlowMo | CO2 | "
    "CO2, recommended"
)
def stand_ins() -> Cells:
    """Stand-ins of the paper's tables: one row per model, its metric by method, three seeds each.

    A dagger marks a cell that is not better than the first trivial baseline by the margin, and a double dagger the
    second. dropped.md names the commit whose command computes the baselines.
    """
    lines: Cells = {}
    for name in ("imagenet", "ade20k", "shapenet", "shapenet_mae", "gpt2", "transnormer", "roberta"):
        runs = load(f"tables/{name}.json")
        metric = next(key for key in runs[0] if key not in ("folder", "workers", "commit", "settings"))
        scale, more = 100 if metric == "test_top1" else 1, metric in ("test_top1", "val_mIoU")
        spec = ".2f" if scale == 100 or fmean(run[metric] for run in runs) > 0.5 else ".4f"
        for model in dict.fromkeys(run["settings"]["name"] for run in runs):
            own = [run["settings"] | {"value": run[metric]} for run in runs]
            own = [row | {"method": "recommended"} if row.get("co2.merge") == "keep_local" else row for row in own]
            trivial = select(load("tables/baselines.json"), metric=metric)
            trivial = {r["baseline"]: r["value"] for r in trivial if data_of(r["recipe"]) == data_of(model)}
            cells = []
            for method in ("ddp", "local", "overlap_local", "slowmo", "co2", "recommended"):
                values, mark = [run["value"] for run in select(own, name=model, method=method)], ""
                for sign, least in zip("†‡", trivial.values(), strict=False) if values else ():
                    better = fmean(values) >= (1 + MARGIN) * least if more else fmean(values) <= (1 - MARGIN) * least
                    mark += "" if better else sign
                cells.append(mean_sd((scale * value for value in values), spec) + mark)
            shown = ", ".join(f"{scale * value:{spec}} ({what})" for what, value in trivial.items()) or "not computed"
            lines[f"{name}: {model}"] = (f"{metric}: {shown}", *cells)
    return lines


@table("setting | digits: top-1, % | text: perplexity")
def tau_and_gap() -> Cells:
    """CO2 on the stand-ins with each tau, and without the staleness gap penalty."""
    digits, text = (load(f"tables/tau_{task}.json") for task in ("vision", "language"))
    lines: Cells = {}
    for tau in sorted({run["settings"]["co2.tau"] for run in digits + text}):
        columns = (digits, "test_top1", 100), (text, "val_perplexity", 1)
        of_tau = ([scale * r[key] for r in runs if r["settings"]["co2.tau"] == tau] for runs, key, scale in columns)
        lines[f"tau {tau}"] = [mean_sd(values, ".2f") for values in of_tau]
    gaps = [(run["settings"]["co2.gap"], run["val_perplexity"]) for run in load("tables/gap.json")]
    for gap, name in (("elementwise", "with the gap penalty"), ("none", "without it")):
        lines[name] = ("", mean_sd((value for of, value in gaps if of == gap), ".2f"))
    return lines


@table(
    "our reading: merge, outer momentum | loss with the penalty | its norm instead, % | without it, % | Local-SGD, %"
)
def reading() -> Cells:
    """Readings of the paper's rule on text: its loss, and how much greater the perplexity of others is."""
    of = functools.partial(losses, "reading.jsonl", "bytes", steps=480, tau=6)
    perplexity = lambda asked: {seed: math.exp(loss) for seed, loss in of(asked).items()}  # noqa: E731
    lines = Cells()
    for merge, beta in itertools.product(("restart", "keep_local"), (0, 0.5)):
        asked = [f"co2:beta={beta},merge={merge},gap={gap}" for gap in ("elementwise", "norm", "none")] + ["local"]
        base = perplexity(asked[0])
        lines[f"{merge}, {beta}"] = [loss_of(of(asked[0])), *(against(perplexity(other), base) for other in asked[1:])]
    return lines


@table(lambda: " | ".join(("setting", *dict.fromkeys(row["placement"] for row in load("grid.json")["rows"]))))
def grid() -> Cells:
    """CO2's settings by the places where they train. Settings that train in the same places share a line."""
    answers, lines = dict[str, list[str]](), dict[Sequence[str], list[str]]()
    for row in load("grid.json")["rows"]:  # place after place
        answers.setdefault(row["setting"], []).append("no" if row["refused"] else "yes")
    for setting, cells in answers.items():
        lines.setdefault((*cells,), []).append(setting)
    return {", ".join(settings): cells for cells, settings in lines.items()}


if __name__ == "__main__":
    launch(lambda: parse_options(fill, prog="python -m results.pages"))
