"""Makes the tables of the results pages from their rows: python -m results.pages

A line `<!-- table: NAME -->` precedes a table in a page of results/, in README.md, or in one of DOCS. The command makes
the table again with TABLES[NAME] from the rows in results/*.json and *.jsonl. Figures are rounded once, here.
"""

import functools
import json
import re
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import regimes
from bench.loss.__main__ import todays_names
from bench.report import holm, mean_ratio
from bench.report import mean_sd as with_sd
from bench.report import table as markdown
from bench.time_to_loss import TimeToLoss, outcome, ratio_of
from results import baselines
from results.ddp import bold, ddp_seconds, ddp_steps, nodes_text, rule

RESULTS = Path(__file__).parent
DOCS = ("docs/from_ddp.md", "docs/choosing.md")
PAGES = (*(RESULTS.parent / name for name in ("README.md", *DOCS)), *sorted(RESULTS.glob("*.md")))
MARK = re.compile(r"(?m)^<!-- table: (\S+) -->\n(?:\n?(?:\|.*\n)+)?")
Row = dict[str, Any]
Table = list[Sequence[str]]  # its titles, then its rows


def main() -> None:
    ArgumentParser("python -m results.pages", description=__doc__).parse_args()  # refuses any option
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
    text = (RESULTS / name).read_text().replace(":wire=", ":compression=")  # the option's older name
    if not name.endswith("l"):
        return json.loads(text)
    rows = [json.loads(line) for line in text.splitlines()]
    for row in rows:
        if "options" in row:
            todays_names(row)
    return rows


def select(rows: Iterable[Row], **same: Any) -> list[Row]:
    """Returns the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in same.items())]


def mean_sd(values: Iterable[float], spec: str = ".1f") -> str:
    """Mean and sample standard deviation, or only the value if there is one."""
    return with_sd([*values], spec)


def percent(ratios: Iterable[float]) -> str:
    """Mean and standard deviation of how much greater than 1 the ratios are, in percent."""
    return f"{mean_sd((100 * (ratio - 1) for ratio in ratios), 'z.1f')} %"


# -- seconds to a loss ----------------------------------------------------------------------------------------------

TUNING_SEED = 100  # no figure uses this seed
METHOD_NAMES = {
    "ddp": "DDP",
    "local": "Local-SGD (blocking)",
    "overlap_local": "Overlap-Local-SGD",
    "slowmo": "SlowMo",
    "diloco": "DiLoCo (blocking)",
    "co2": "CO2, our reading of the paper's rule",
    "co2_auto": "CO2, recommended settings",
    "torchft_streaming": "torchft Streaming DiLoCo",
}


def seconds_cell(runs: Sequence[Row]) -> str:
    """Mean ± standard deviation of the seconds to the loss, or the limit and how many runs reached the loss."""
    reached = [run["seconds"] for run in select(runs, status="reached")]
    others = [run for run in runs if run["status"] != "reached"]
    text = mean_sd(reached) if not others else f"{len(reached)} of {len(runs)} reached it"
    if others and len(select(others, status="out of time")) == len(others):
        text = f"> {max(run['seconds'] for run in others):.0f} ({len(reached)} of {len(runs)})"
    return text


def reached(runs: Sequence[Row]) -> list[float]:
    """The seconds of each seed, empty unless every seed reached the loss."""
    return [run["seconds"] for run in runs] if runs and len(select(runs, status="reached")) == len(runs) else []


TUNED = "co2_recommended:tau=12,compression=int4,delay=auto", "local:share=0.1,compression=int4"  # on digits


TASK_NAMES = {"vision": "digits", "cifar10": "CIFAR-10", "language": "text"}


@functools.cache
def paired(task: str, rate: float) -> Row:
    """The paired series of a task and link, with outcomes by today's rule. Digits' first links are in one file."""
    name = TASK_NAMES[task].lower().replace("-", "")
    found = load(f"paired/{'time_to_loss' if task == 'vision' and rate in (10, 40) else f'{name}_{rate:g}'}.json")
    o, runs = TimeToLoss(limit_seconds=found["options"]["limit_seconds"]), found["runs"]
    again = (run | outcome(o, run, runs) | {"late": outcome(o, run, runs, late=True)} for run in runs)
    return found | {"runs": [*again] if task == "cifar10" else runs}


def of_rate(task: str, rate: float) -> list[Row]:
    return select(paired(task, rate)["runs"], rate_mbit=rate)


def tuned(task: str, rate: float) -> tuple[str, str]:
    """CO2 and Local-SGD as tuned. On text and CIFAR-10 each link has its own."""
    if task == "vision":
        return TUNED
    methods = paired(task, rate)["options"]["methods"]
    co2, local = (next(m for m in methods if m.startswith(name)) for name in ("co2_recommended:", "local:"))
    return co2, local


def series(task: str, rate: float, *, late: bool = False) -> dict[str, tuple[str, list[Row]]]:
    """The rows of README's table and picture for a task and link: title -> the method's name, and its runs.

    late: with the late target.
    """
    runs = select(paired(task, rate)["runs"], rate_mbit=float(rate))
    runs = [run | run["late"] for run in runs] if late else runs
    others = {method: select(runs, method=method) for method in dict.fromkeys(run["method"] for run in runs)}
    names = ("local", "overlap_local", "slowmo", "diloco")
    others = {m: found for m, found in others.items() if m.partition(":")[0] in names and "int4" in m}
    others = {m: found for m, found in others.items() if reached(found)}
    best = min(others, key=lambda m: statistics.fmean(reached(others[m])), default="local")
    return {
        "CO2, recommended (int4)": ("", select(runs, method="co2_auto")),
        "CO2, tau tuned, int4": ("", select(runs, method=tuned(task, rate)[0])),
        "best other, int4": (METHOD_NAMES[best.partition(":")[0]].partition(" (")[0], others.get(best, [])),
        "DDP, int4": ("", [run for run in runs if run["method"].startswith("ddp:compression=int4")]),
        "DDP, float32": ("", select(runs, method="ddp")),
    }


SHOWN = (("vision", 10), ("cifar10", 10), ("language", 40), ("language", 200))  # in README


def readme_seconds() -> Table:
    """README's table, with a row for each method and a column for each task and link rate."""
    table: Table = [("seconds to a loss", *(f"{TASK_NAMES[task]}, {rate} Mbit/s" for task, rate in SHOWN))]
    columns = [series(*place) for place in SHOWN]
    for what in ("CO2, recommended (int4)", "best other, int4", "DDP, int4"):
        cells = ((*column[what], seconds_cell(column[what][1]) if column[what][1] else "") for column in columns)
        table.append((what, *(text + (f" ({name})" if name else "") for name, _, text in cells)))
    return table


def describe(method: str) -> str:
    """A method of the paired series, in words."""
    name, _, rest = method.partition(":")
    given = dict(part.split("=") for part in filter(None, rest.split(",")))
    name = {"none": "no communication", "co2_recommended": "CO2, recommended", **METHOD_NAMES}[name]
    late = {"boundary": "a round late", "auto": "on arrival"}
    tau = "tau tuned" if "share" in given else f"tau {given['tau']}" if "tau" in given else ""
    words = [tau, given.get("compression", "")]
    return ", ".join(filter(None, (name, *words, late.get(given.get("delay", ""), ""))))


def limit_of(task: str, rate: float, method: str) -> str:
    """The most that hiding can be worth at a method's tau, or nothing for DDP."""
    runs = select(paired(task, rate)["runs"], rate_mbit=rate, method=method)
    known = [run["limit"] for run in runs if "limit" in run]
    return f"{statistics.median(known):.2f}" if known and not method.startswith("ddp") else ""


def ratios(task: str, rates: Sequence[float], rows: Mapping[str, Callable[[float], str]]) -> Table:
    """Rows of a task's table: a title -> the method at each link. The last row compares the two with a tuned tau."""
    places = [(rate, late) for rate in rates for late in (False, True)]
    titles = (f"{rate:g} Mbit/s, {'late' if late else 'first'} target" for rate, late in places)
    table: Table = [("method", *titles, "limit")]
    cells = [
        [ratio_of(of_rate(task, rate), of(rate), "co2_auto", late=late) for rate, late in places]
        for of in rows.values()
    ]
    cells.append([ratio_of(of_rate(task, rate), *reversed(tuned(task, rate)), late=late) for rate, late in places])
    lines = bold(cells)
    for (title, of), line in zip(rows.items(), lines, strict=False):
        limits = ", ".join(filter(None, (limit_of(task, rate, of(rate)) for rate in rates)))
        table += [(title, *line, limits)] if any(line) else []
    return [*table, (BOTH_TUNED, *lines[-1], "")]


LINKS = {"vision": (10, 40, 200), "cifar10": (10, 40), "language": (10, 40, 200)}
BOTH_TUNED = "both with tau tuned: Local-SGD over CO2"


def pooled() -> Table:
    """Estimates over all measured links, which count alike, with an interval by t over the links' averages.

    The last column counts the links and targets that differ from 1 after Holm's correction within the row.
    """
    table: Table = [("seconds over CO2's", "links", "first target", "late target", "differ after Holm's correction")]
    automatic = lambda of: lambda task, rate: (of(task, rate), "co2_auto")  # noqa: E731
    both = lambda task, rate: (*reversed(tuned(task, rate)),)  # noqa: E731
    ddp = lambda task, rate: tuned_rows(task)["DDP, int4"](rate)  # noqa: E731
    for name, methods, tasks in (
        ("Local-SGD, tau tuned, over CO2, recommended", automatic(lambda *place: tuned(*place)[1]), LINKS),
        ("both with tau tuned: Local-SGD over CO2", both, LINKS),
        ("same, without text, whose tuning is broken", both, ("vision", "cifar10")),
        ("DDP, int4, one bucket, over CO2, recommended", automatic(ddp), LINKS),
    ):
        places = [(task, float(rate)) for task in tasks for rate in LINKS[task]]
        found = [[ratio_of(of_rate(*at), *methods(*at), late=late) for at in places] for late in (False, True)]
        means = (mean_ratio([each["ratio"] for each in row if each]) for row in found)
        corrected = holm([each["p"] for row in found for each in row if each])
        cells = (f"{mean.ratio:.2f} ({mean.low:.2f}–{mean.high:.2f})" for mean in means)
        table.append((name, str(len(places)), *cells, f"{sum(p < 0.05 for p in corrected)} of {len(corrected)}"))
    return table


def paired_seconds() -> Table:
    """Digits: the seconds of each method over CO2's, seed by seed, with the 95 % interval, by link and target."""
    methods = [m for m in paired("vision", 10)["options"]["methods"] if "tau=6" not in m]  # the waterfall has these
    return ratios("vision", (10.0, 40.0, 200.0), {describe(m): lambda _, m=m: m for m in methods if m != "co2_auto"})


def tuned_rows(task: str) -> dict[str, Callable[[float], str]]:
    """CO2, Local-SGD and DDP over int4, with a tuned tau for each link."""
    return {
        "CO2, tau tuned, int4, on arrival": lambda rate: tuned(task, rate)[0],
        "Local-SGD (blocking), tau tuned, int4": lambda rate: tuned(task, rate)[1],
        "DDP, int4": lambda rate: next(m for m in paired(task, rate)["options"]["methods"] if m.startswith("ddp:")),
    }


def paired_text() -> Table:
    """Text: the same, with a tuned tau for each link."""
    return ratios("language", (10.0, 40.0, 200.0), tuned_rows("language"))


def paired_cifar10() -> Table:
    """CIFAR-10: the same."""
    return ratios("cifar10", (10.0, 40.0), tuned_rows("cifar10"))


def regime_map() -> Table:
    """The best hidden run against the best blocking run, by task and r."""
    titles = ("task, r", "blocking tau", "hidden tau, delay", *regimes.TITLES[5:7])
    table: Table = [titles]
    for cell in regimes.cells():
        task, *_, blocking, ddp, _, _ = regimes.line(cell)
        taus = str(cell.blocking.tau), f"{cell.hidden.tau}, {cell.hidden.delay}"
        table.append((task, *taus, blocking, ddp))
    return table


def throughput() -> Table:
    """Samples a second, and the share of the time that a worker waits, for 8 workers and for 16 at 50 Mbit/s."""
    rows = [row | {"tau_setting": str(row["tau_setting"])} for row in load("scaling.json")["rows"]]
    table: Table = [("method", "8 workers, 50 Mbit/s", "200 Mbit/s", "1 Gbit/s", "16 workers, 50 Mbit/s")]
    lines = {(row["method"], row["tau_setting"]) for row in rows}
    for method, tau in sorted(lines, key=lambda m: (list(METHOD_NAMES).index(m[0]), len(m[1]), m[1])):
        cells = []
        for workers, rate in ((8, 50.0), (8, 200.0), (8, 1000.0), (16, 50.0)):
            runs = select(rows, method=method, tau_setting=tau, workers=workers, rate_mbit=rate)
            samples = statistics.median(run["samples_per_second"] for run in runs)
            waits = statistics.median(run["exposed_seconds"] / run["seconds"] for run in runs)
            cells.append(f"{samples:.0f} ({waits:.0%})")
        name = "CO2" if method == "co2" else METHOD_NAMES[method]
        table.append((f"{name}, tau {tau}" if method != "ddp" else name, *cells))
    return table


# -- loss at equal samples ------------------------------------------------------------------------------------------

HIDDEN = "co2:merge=keep_local,gap=none,beta=0,delay=1,compression=int4"
HIDDEN_DILOCO = HIDDEN.replace("beta=0", "nesterov=true,alpha=0.7,beta=0.5")
PAPER = "co2:beta=0.5"
Losses = Mapping[int, float]  # by seed


def losses(
    files: str,
    task: str,
    asked: str,
    steps: int,
    tau: int = 24,
    tuning: str = "",
    workers: int = 4,
    batch: int | None = None,
) -> Losses:
    """Losses on the test split of a method with its tuned settings, or none if it was not run.

    Args:
        files: Names, separated by spaces.
        task: The task.
        asked: The method, as on the command line.
        steps: Local steps of a run.
        tau: Local steps per round.
        tuning: How the line of its tuning begins.
        workers: Number of workers.
        batch: Samples per worker and step. The default is 2 with 16 workers, and else any number but 2.
    """
    rows = [row for file in files.split() for row in load(file)]
    same = {"task": task, "steps": steps, "tau": tau, "workers": workers, "shards": "iid"}
    fits = lambda r: r["batch"] == batch if batch else (r["batch"] == 2) == (workers == 16)  # noqa: E731
    choices = (r for r in rows if r["kind"] == "choice" and fits(r))
    choices = select((r for r in choices if r["tuning"].startswith(tuning)), **same)
    choices = [r for r in choices if sorted(re.split("[:,]", r["asked"])) == sorted(re.split("[:,]", asked))]
    if not choices:
        return {}
    choice = choices[-1]
    same = {key: choice[key] for key in ("task", "method", "lr", "workers", "batch", "steps", "shards")}
    same |= {"tau": tau} if choice["method"] != "ddp" else {}
    runs = select((row for row in rows if row["kind"] == "run"), split="test", **same)
    both = lambda run: run["options"].keys() & choice["options"].keys()  # noqa: E731
    return {r["seed"]: r["loss"] for r in runs if all(r["options"][k] == choice["options"][k] for k in both(r))}


def against(mine: Losses, other: Losses) -> str:
    """How much greater the loss is, over the seeds that both have."""
    both = sorted(mine.keys() & other.keys())
    return percent(mine[seed] / other[seed] for seed in both) if both else ""


def loss_of(found: Losses) -> str:
    return mean_sd(found.values(), ".3f")


THREE = {"bytes": "text", "gpt2": "GPT-2", "cifar": "CIFAR-10"}  # tasks
LONG = functools.partial(losses, "h100.jsonl h200.jsonl", steps=2000)


def change(task: str, asked: str, tau: int, of_task: str = "") -> str:
    """How much greater the loss is than DDP's after 2,000 steps, or than DDP's on another task. Empty without three
    seeds."""
    mine, other = LONG(task, asked, tau=tau), LONG(of_task or task, "ddp", tau=24 if task == "cifar" else 2)
    return against(mine, other).removesuffix(" %") if len(mine.keys() & other.keys()) >= 3 else ""


def cost_of_hiding() -> Table:
    """2,000 steps: DDP's loss, and how much greater other losses are, in percent."""
    table: Table = [("method", "bits a step", "seeds", *THREE.values())]
    first = [LONG(task, "ddp", tau=24 if task == "cifar" else 2) for task in THREE]
    table.append(("DDP: loss", "32", str(len(first[0])), *map(loss_of, first)))
    for name, bits, asked, tau in (
        ("Local-SGD (blocking), tau 24", "1.33", "local", 24),
        ("DiLoCo (blocking), tau 24, outer momentum 0.5", "1.33", "diloco:beta=0.5", 24),
        ("same, outer momentum 0.9", "1.33", "diloco:beta=0.9", 24),
        ("hidden average over int4, tau 24", "0.17", HIDDEN, 24),
        ("same, outer momentum 0.3", "0.17", HIDDEN.replace("beta=0", "beta=0.3"), 24),
        ("hidden DiLoCo over int4, tau 24", "0.17", HIDDEN_DILOCO, 24),
        ("Streaming DiLoCo over int4, tau 24", "0.17", "streaming:beta=0.5,compression=int4", 24),
        ("eager updates over int4, tau 24", "0.17", "eager:beta=0.5,compression=int4", 24),
    ):
        seeds = len(LONG("bytes", asked, tau=tau))
        table.append((name, bits, str(seeds), *(change(task, asked, tau) for task in THREE)))
    return table


INGREDIENTS = {  # name -> bits a step, method, tau
    "DDP over int4": ("4.12", "ddp:compression=int4", 2),
    "Local-SGD (blocking), tau 2": ("2.06", "local:compression=int4", 2),
    "Local-SGD, largest 3 % of the entries": ("", "local:compression=top3", 2),
    "hidden average, tau 2": ("2.06", HIDDEN, 2),
    "tau 1": ("4.12", HIDDEN, 1),
    "tau 1 over int2": ("2.12", HIDDEN.replace("int4", "int2"), 1),
    "tau 6": ("0.69", HIDDEN, 6),
    "tau grows from 1 to 5": ("1.88", HIDDEN + ",grow=400", 6),
    "DDP for the first 5 % of the steps": ("2.17", HIDDEN + ",sync_steps=100", 2),
    "for the first 20 %": ("2.48", HIDDEN + ",sync_steps=400", 2),
    "moments averaged every 24 rounds, in float32": ("3.40", HIDDEN + ",moments=24", 2),
    "outer momentum 0.2": ("2.06", HIDDEN.replace("beta=0", "beta=0.2"), 2),
}
MUON = {
    "Local-SGD (blocking), tau 2": ("2.06", "local:compression=int4", 2),
    "hidden average, tau 1": ("4.12", HIDDEN, 1),
    "tau 1 over int2": ("2.12", HIDDEN.replace("int4", "int2"), 1),
    "hidden average, tau 2": ("2.06", HIDDEN, 2),
    "tau grows from 1 to 5": ("1.88", HIDDEN + ",grow=400", 6),
    "DDP for the first 5 % of the steps": ("2.17", HIDDEN + ",sync_steps=100", 2),
    "hidden average, tau 6": ("0.69", HIDDEN, 6),
    "hidden average, tau 24": ("0.17", HIDDEN, 24),
    "hidden DiLoCo, tau 24": ("0.17", HIDDEN_DILOCO, 24),
    "Local-SGD (blocking), tau 24": ("0.17", "local:compression=int4", 24),
}


def ingredients() -> Table:
    """Changes of the method that might close the gap to DDP's loss, with AdamW, in percent."""
    table: Table = [("change", "bits a step", "text", "GPT-2")]
    for name, (bits, asked, tau) in INGREDIENTS.items():
        table.append((name, bits, *(change(task, asked, tau) for task in ("bytes", "gpt2"))))
    of = functools.partial(losses, "h100.jsonl", steps=1000)
    pairs = ((of(task, HIDDEN, tau=2), of(task, "ddp", tau=2)) for task in ("bytes", "gpt2"))
    cells = (against(*pair).removesuffix(" %") for pair in pairs)
    table.append(("batch 16 and 1,000 steps, against DDP with these", "2.06", *cells))
    return table


def muon() -> Table:
    """With Muon: changes against DDP with Muon, in percent."""
    table: Table = [("with Muon, over int4", "bits a step", "text", "GPT-2")]
    tasks = ("bytes_muon", "gpt2_muon")
    ddp = (change(task, "ddp", 2, task.removesuffix("_muon")) for task in tasks)
    table.append(("DDP in float32, against DDP with AdamW", "32", *ddp))
    for name, (bits, asked, tau) in MUON.items():
        table.append((name, bits, *(change(task, asked, tau) for task in tasks)))
    return table


def larger_models() -> Table:
    """Loss of Local-SGD against DDP, and of the hidden average against Local-SGD, by size."""
    titles = ("parameters, steps", "DDP", "Local-SGD", "Local-SGD against DDP", "hidden, int4, against Local-SGD")
    table: Table = [titles]
    for name, task, steps in (
        ("3.2 M, 240", "bytes_3m", 240),
        ("3.2 M, 1,000", "bytes_3m", 1000),
        ("10.5 M, 500", "bytes_10m", 500),
    ):
        ddp, local, hidden = (losses("large.jsonl", task, asked, steps) for asked in ("ddp", "local", HIDDEN))
        table.append((name, loss_of(ddp), loss_of(local), against(local, ddp), against(hidden, local)))
    return table


def gpt2_small() -> Table:
    """GPT-2 Small on one GPU: the loss by method, and each seed's change against Local-SGD."""
    of = functools.partial(losses, "gpu_search.jsonl", "gpt2_small", steps=1000)
    table: Table = [("method", "seeds", "held-out loss", "against Local-SGD")]
    for name, asked in {
        "DDP": "ddp",
        "Local-SGD (blocking)": "local",
        "Local-SGD over int4": "local:compression=int4",
        "hidden average over int4": HIDDEN,
        "DiLoCo (blocking), outer momentum 0.5": "diloco:beta=0.5",
        "keep_local, a round late": "co2:merge=keep_local,gap=none,beta=0.0,delay=round",
        "paper's rule, outer momentum 0.5": PAPER,
    }.items():
        found = of(asked)
        change = "" if asked == "local" else against(found, of("local"))
        table.append((name, str(len(found)), loss_of(found), change))
    return table


LOCAL = "local:compression=float32"
OUTER_STEPS = ("beta=0", "beta=0.3", "nesterov=true,alpha=0.7,beta=0.5")  # of the hidden average
ONE, TEN, ROUND = ",delay=1", ",delay=10", ""  # steps late
RULE = "paper"  # a round late, with the penalty, and each worker restarts from the outer step's result
HIDDEN_ROWS = {  # name -> task, tau, workers, how late, how the tuning begins
    "text": ("bytes", 24, 4, ONE, ""),
    "text, tau 6": ("bytes", 6, 4, ONE, ""),
    "text, 10 steps late": ("bytes", 24, 4, TEN, ""),
    "text, a round late": ("bytes", 24, 4, ROUND, ""),
    "text, a round late, paper's rule": ("bytes", 24, 4, RULE, ""),
    "text, 16 workers": ("bytes", 24, 16, ONE, ""),
    "text, 64 workers": ("bytes", 24, 64, ONE, ""),
    "GPT-2": ("gpt2", 24, 4, ONE, "learning rate 0.5"),
    "CIFAR-10": ("cifar", 24, 4, ONE, ""),
    "CIFAR-10, tau 6": ("cifar", 6, 4, ONE, ""),
    "CIFAR-10, a round late": ("cifar", 24, 4, ROUND, ""),
    "CIFAR-10, a round late, paper's rule": ("cifar", 24, 4, RULE, ""),
    "digits": ("digits", 24, 4, ONE, "learning rate 0.25"),
}


def hidden_diloco() -> Table:
    """Changes of the loss in percent against Local-SGD with the same tau, over 480 steps. Empty if not run."""
    table: Table = [("task", "DiLoCo (blocking)", "outer momentum 0", "0.3", "hidden DiLoCo")]
    for name, (task, tau, workers, late, tuning) in HIDDEN_ROWS.items():
        files = "h100.jsonl" if workers > 4 else "search.jsonl controls.jsonl"
        of = functools.partial(losses, files, task, steps=480, tau=tau, tuning=tuning, workers=workers)
        methods = [f"co2:merge=keep_local,gap=none,{step}{late},compression=int4" for step in OUTER_STEPS]
        methods = ["diloco:beta=0.5" if late == ONE else "", *methods]
        methods = ["", "co2:beta=0,compression=float32", "", ""] if late == RULE else methods
        base = of(asked=LOCAL) or of(asked="local")
        table.append((name, *(against(of(asked=method), base).removesuffix(" %") for method in methods)))
    return table


RATE_TASKS = {"digits": ("digits, SGD", 1.0), "cifar": ("CIFAR-10, SGD", 1.0), "bytes": ("text, AdamW", 0.5)}
"""Task -> its name, and DDP's limit of the gradient norm if it clips."""


def rates() -> Table:
    """The loss against DDP at learning rate x 1 without clipping, by learning rate and by limit of the norm."""
    rows = [row for row in load("rates.jsonl") if row["kind"] == "run"]
    choices = [row for row in load("rates.jsonl") if row["kind"] == "choice" and " 1 t" in row["tuning"]]
    best = {row["task"]: row["lr"] for row in choices}
    titles = ("task, method", "learning rate x 0.5", "x 1", "x 2", "x 1, clipped at DDP's limit", "at twice the limit")
    table: Table = [titles]
    for task, (name, limit) in RATE_TASKS.items():
        columns = [(0.5, "none"), (1, "none"), (2, "none"), (1, f"{limit:g}"), (1, f"{2 * limit:g}")]
        base: Losses = {}
        for method, called in {"ddp": "DDP", "co2": "CO2"}.items():
            line = [select(rows, task=task, method=method, lr=best[task] * x, clip=clip) for x, clip in columns]
            found = [{row["seed"]: row["loss"] for row in runs} for runs in line]
            base = base or found[1]
            cells = [against(of, base) if of else "not run" for of in found]
            cells[1] = f"loss {loss_of(base)}" if method == "ddp" else cells[1]
            table.append((f"{name}, {called}", *cells))
    return table


# -- compression, gradient-free ----------------------------------------------------------------------------

# -- costs, GPUs, faults --------------------------------------------------------------------------------------------


def nccl_hidden() -> Table:
    """Two NCCL ranks on one GPU: how long an all-reduce takes and how much of it a step of the loop waits for."""
    (found,) = (row["figures"] for row in select(load("nccl.jsonl"), part="c"))
    titles = ("link, method", "tau", "all-reduce, ms", "exposed, ms", "hidden, by CO2's statistics", "by CUDA events")
    titles += ("step, ms", "round, ms")
    table: Table = [titles]
    for name, case in {
        "free link, Local-SGD": found["local"],
        "free link, CO2, paper's rule": found["co2 paper"],
        "free link, CO2, recommended": found["recommended"],
        "10 Gbit/s, CO2, paper's rule": found["links"]["10"],
        "1 Gbit/s, CO2, paper's rule": found["links"]["1"],
    }.items():
        shares = (f"{100 * case[key]:.1f} %" for key in ("hidden_share", "hidden_share_by_events"))
        times = (f"{case['step_ms']:.0f}", f"{case['round_wall_ms']:.0f}")
        table.append(
            (name, str(case["tau"]), f"{case['reduction_ms']:.0f}", f"{case['exposed_ms']:.1f}", *shares, *times)
        )
    return table


def gpu_boundary() -> Table:
    """An outer step and an encoded all-reduce of 350 M parameters on one H200: time on the device, and kernels."""
    names = {"restart": "restart (paper)", "keep_local": "keep_local"}
    ways = {"fast": "Triton", "plain": "plain torch", "compiled": "torch.compile"}
    table: Table = [("work", "ms", "share of a copy's rate", "kernels")]
    for row in load("gpu.json")["rows"]:
        what, _, case = row["name"].partition(": ")
        figures, (rule, _, way) = row.get("figures") or {}, case.partition(", ")
        if what == "a boundarys bytes a parameter" and rule in names:
            name, share = f"outer step, merge {names[rule]}, {ways[way]}", f"{figures['share of copy']:.0%}"
            table.append((name, f"{figures['ms']:.2f}", share, f"{figures['kernels']:.0f}"))
        elif what == "a reductions bytes a parameter":
            table.append((f"encode and decode, {case}", f"{figures['ms']:.2f}", "", f"{figures['kernels']:.0f}"))
    return table


def faults() -> Table:
    """Runs that a fault disturbed: one row per kind of fault."""
    runs = load("chaos.json")
    table: Table = [("harm", "runs", "right", "without a restart", "hung")]
    for name, harm in {
        "a worker is killed": "kill",
        "killed, may come back": "rejoin",
        "two killed, may come back": "two kills",
        "SIGTERM, SIGINT or SIGUSR1": "stop",
        "stopped for 3 s": "pause",
        "output full, closed or without a reader": "stream",
        "killed, and files damaged": "crash",
        "etcd member killed or stopped": "etcd",
        "no link for 3 or 10 s": "outage",
        "disk full": "disk",
        "NaN": "nan",
        "none": "none",
    }.items():
        mine = select(runs, harm=harm)
        counts = (len(mine), *(len(select(mine, **of)) for of in ({"right": True}, {"attempts": 1}, {"hung": True})))
        table.append((name, *map(str, counts)))
    return table


def stand_ins() -> Table:
    """Stand-ins of the paper's tables: one row per model, its metric by method, three seeds each.

    A dagger marks a cell that is not better than the first trivial baseline by the margin.
    """
    methods = ("ddp", "local", "overlap_local", "slowmo", "co2", "recommended")
    titles = (*(METHOD_NAMES[m].partition(",")[0] for m in methods[:5]), "CO2, recommended")
    table: Table = [("table, model", "metric: trivial baseline", *titles)]
    for name in ("imagenet", "ade20k", "shapenet", "shapenet_mae", "gpt2", "transnormer", "roberta"):
        runs = load(f"tables/{name}.json")
        metric = next(key for key in runs[0] if key not in ("folder", "workers", "commit", "settings"))
        scale = 100 if metric == "test_top1" else 1
        spec = ".2f" if scale == 100 or statistics.fmean(run[metric] for run in runs) > 0.5 else ".4f"
        for model in dict.fromkeys(run["settings"]["name"] for run in runs):
            own = [run["settings"] | {"value": run[metric]} for run in runs]
            own = [row | {"method": "recommended"} if row.get("co2.merge") == "keep_local" else row for row in own]
            trivial = baselines.of(model, metric)
            least = next(iter(trivial.values()), None)
            cells = []
            for method in methods:
                values = [run["value"] for run in select(own, name=model, method=method)]
                mark = "" if not values or least is None or baselines.beats(values, metric, least) else "†"
                cells.append(mean_sd((scale * value for value in values), spec) + mark if values else "")
            shown = ", ".join(f"{scale * value:{spec}} ({what})" for what, value in trivial.items()) or "not computed"
            table.append((f"{name}: {model}", f"{metric}: {shown}", *cells))
    return table


def tau_and_clip() -> Table:
    """CO2 on the stand-ins with each tau, and with each clip of the outer momentum."""
    table: Table = [("setting", "digits: top-1, %", "clipped", "text: perplexity")]
    of = {f"{key}_{task}": load(f"tables/{key}_{task}.json") for key, task in SEARCHED}
    for key in ("tau", "clip"):
        runs = [run for name in of if name.startswith(key) for run in of[name]]
        for value in sorted({run["settings"][f"co2.{key}"] for run in runs} - {None}):  # without a clip: as with 1
            digits, text = (
                [run for run in of.get(f"{key}_{task}", ()) if run["settings"][f"co2.{key}"] == value]
                for task in ("vision", "language")
            )
            share = f"{statistics.fmean(run['clipped_share'] for run in digits):.1%}" if digits else ""
            top1 = mean_sd((100 * run["test_top1"] for run in digits), ".2f") if digits else ""
            perplexity = mean_sd((run["val_perplexity"] for run in text), ".2f") if text else ""
            table.append((f"{key} {value:g}", top1, share, perplexity))
    gaps = [(run["settings"]["co2.gap"], run["val_perplexity"]) for run in load("tables/gap.json")]
    for gap, name in (("elementwise", "with the gap penalty"), ("none", "without it")):
        table.append((name, "", "", mean_sd((value for of, value in gaps if of == gap), ".2f")))
    return table


def grid() -> Table:
    """CO2's settings by the places where they train; a number says why CO2 refuses a cell."""
    rows, reasons = load("grid.json")["rows"], refusals_by_number()
    places = [*dict.fromkeys(row["placement"] for row in rows)]
    cells = {(row["setting"], row["placement"]): row["refused"] for row in rows}
    numbers = {why: f"no ({number})" for number, why in reasons.items()} | {"": "yes"}
    settings = dict.fromkeys(row["setting"] for row in rows)
    return [("setting", *places), *((s, *(numbers[cells[s, place]] for place in places)) for s in settings)]


def refusals() -> Table:
    return [("no", "CO2's line"), *((str(number), why) for number, why in refusals_by_number().items())]


def refusals_by_number() -> dict[int, str]:
    return dict(enumerate(dict.fromkeys(row["refused"] for row in load("grid.json")["rows"] if row["refused"]), 1))


SEARCHED = (("tau", "vision"), ("tau", "language"), ("clip", "vision"))
MADE = (readme_seconds, throughput, cost_of_hiding, ingredients, larger_models, gpt2_small, rates)
MADE += (
    grid,
    refusals,
    rule,
    ddp_steps,
    ddp_seconds,
    nccl_hidden,
    gpu_boundary,
)
TABLES: dict[str, Callable[[], Table]] = {
    **{make.__name__: make for make in (*MADE, hidden_diloco, muon, nodes_text, faults, stand_ins, tau_and_clip)},
    "pooled": pooled,
    "paired_seconds": paired_seconds,
    "paired_text": paired_text,
    "paired_cifar10": paired_cifar10,
    "regimes": regime_map,
}

if __name__ == "__main__":
    main()
