"""Makes the tables of the results pages from their rows: python -m results.pages

A line `<!-- table: NAME -->` stands before a table in a page of results/, in README.md, or in docs/from_ddp.md. The
command replaces the table with what TABLES[NAME] makes of the rows in results/*.json and *.jsonl. Figures are rounded
once, here.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent
PAGES = (RESULTS.parent / "README.md", RESULTS.parent / "docs/from_ddp.md", *sorted(RESULTS.glob("*.md")))
MARK = re.compile(r"(?m)^<!-- table: (\S+) -->\n(?:\n?(?:\|.*\n)+)?")
Table = list[Sequence[str]]  # its titles, then its rows


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """The text of a page with its tables made anew."""
    return MARK.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{markdown(TABLES[found[1]]())}", text)


def markdown(table: Table) -> str:
    titles, *rows = table
    lines = [titles, ["---"] * len(titles), *([*row, *[""] * (len(titles) - len(row))] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


# -- reading rows and writing cells ---------------------------------------------------------------------------------


@functools.cache
def load(name: str) -> Any:
    text = (RESULTS / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def mean_sd(values: Sequence[float], spec: str = ".1f") -> str:
    """Mean and sample standard deviation; the value alone where there is one."""
    sd = f" ± {statistics.stdev(values):{spec}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{spec}}{sd}"


def median_range(values: Sequence[float], spec: str = ".1f") -> str:
    return f"{statistics.median(values):{spec}} ({min(values):{spec}} to {max(values):{spec}})"


def percent(ratios: Iterable[float]) -> str:
    """How much greater than 1 the ratios are: mean and standard deviation, in percent."""
    return f"{mean_sd([100 * (ratio - 1) for ratio in ratios], 'z.1f')} %"


# -- seconds to a loss ----------------------------------------------------------------------------------------------

TUNING_SEED = 100  # no figure is of this seed
RATES = (10, 40, 200, 1000)  # Mbit/s
SECONDS_TITLES = ("method", "10 Mbit/s", "40", "200", "1000")
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


def seconds_cell(runs: Sequence[dict[str, Any]], *, exposed: bool) -> str:
    """Mean ± standard deviation of the seconds to the loss, or the limit and how many runs reached the loss."""
    reached = [run["seconds"] for run in runs if run["status"] == "reached"]
    if len(reached) == len(runs):
        text = mean_sd(reached)
    elif all(run["status"] == "out of time" for run in runs if run["status"] != "reached"):
        limit = max(run["seconds"] for run in runs if run["status"] != "reached")
        text = f"> {limit:.0f} ({len(reached)} of {len(runs)})"
    else:
        text = f"{len(reached)} of {len(runs)} reached it"
    shares = [run["exposed_share"] for run in runs if run["exposed_share"] is not None]
    return f"{text}, {statistics.fmean(shares):.0%}" if exposed and shares else text


def seconds(folder: str, task: str, methods: Sequence[str], *, limit: bool = False, exposed: bool = True) -> Table:
    """A row a method, a column a link rate. methods: as in the rows; METHOD:wire=FORMAT counts as METHOD."""
    runs = [run for run in load(f"{folder}time_to_loss.json")["runs"] if run["task"] == task]
    table: Table = [SECONDS_TITLES]
    for method in methods:
        cells = [[r for r in runs if (r["method"], r["rate_mbit"]) == (method, rate)] for rate in RATES]
        table.append((METHOD_NAMES[method.partition(":")[0]], *(seconds_cell(c, exposed=exposed) for c in cells)))
    if limit:
        table.append(("DDP if its communication were free", *(mean_sd(free_ddp(runs, rate)) for rate in RATES)))
    return table


def free_ddp(runs: Sequence[dict[str, Any]], rate: float) -> list[float]:
    """DDP's steps to the loss, each as long as a step of Local-SGD without its waiting; a value a seed."""
    steps = {r["seed"]: r["steps"] for r in runs if (r["method"], r["status"]) == ("ddp", "reached")}
    local = [r for r in runs if (r["method"], r["rate_mbit"]) == ("local", rate) and r["seed"] in steps]
    return [steps[r["seed"]] * r["seconds"] * (1 - r["exposed_share"]) / r["steps"] for r in local]


def readme_seconds() -> Table:
    """README's table: one row for each task and rate, CO2 beside the best and DDP."""
    table: Table = [
        ("task, link", "CO2, recommended", "best other method, float32", "DDP, float32", "DDP, free communication")
    ]
    for name, task in (("digits", "vision"), ("text", "language")):
        runs = [run for run in load("time_to_loss.json")["runs"] if run["task"] == task]
        for rate in RATES:
            of = {m: [r for r in runs if (r["method"], r["rate_mbit"]) == (m, rate)] for m in METHOD_NAMES}
            done = {
                m: statistics.fmean(r["seconds"] for r in of[m])
                for m in ("local", "overlap_local", "slowmo")
                if all(r["status"] == "reached" for r in of[m])
            }
            best = min(done, key=done.__getitem__)
            cells = [seconds_cell(of[m], exposed=False) for m in ("co2_auto", best, "ddp")]
            cells[1] += f" ({METHOD_NAMES[best].partition(' (')[0]})"
            table.append((f"{name}, {rate} Mbit/s", *cells, mean_sd(free_ddp(runs, rate))))
    return table


def peers(column: str, spec: str, methods: Sequence[str]) -> Table:
    """Other packages' methods: the median and the range over three seeds, a column a link rate."""
    results = [load(f"peers_{rate}.json")["rows"] for rate in RATES]
    table: Table = [SECONDS_TITLES]
    for method in methods:
        cells = []
        for rows in results:
            values = next(row for row in rows if row["method"] == method)[column]
            known = [value for value in values if value is not None]
            if len(known) < len(values):
                cells.append(f"> 20 s in {len(values) - len(known)} of {len(values)}")
            elif column == "seconds_to_target":
                cells.append(median_range(known, spec))
            else:
                cells.append(f"{statistics.median(known):{spec}}")
        table.append((PEER_NAMES.get(method) or METHOD_NAMES[method], *cells))
    return table


PEER_NAMES = {
    "dpu": "DDP, gradients applied a step late",
    "acco": "ACCO",
    "co2_recommended": "CO2, recommended settings, tau tuned",
    "co2_auto": "CO2, recommended settings",
}
PEERS = ("ddp", "dpu", "acco", "local", "diloco", "overlap_local", "slowmo", "co2", "co2_recommended", "co2_auto")
PEERS += ("torchft_streaming",)

# -- throughput -----------------------------------------------------------------------------------------------------


def throughput() -> Table:
    """Samples a second of 8 workers, and the share of the time that a worker waits; 16 workers at 50 Mbit/s."""
    rows = load("scaling.json")["rows"]
    table: Table = [("method", "8 workers, 50 Mbit/s", "200 Mbit/s", "1 Gbit/s", "16 workers, 50 Mbit/s")]
    order = sorted(
        {(row["method"], str(row["tau_setting"])) for row in rows},
        key=lambda m: (list(METHOD_NAMES).index(m[0]), len(m[1]), m[1]),
    )
    for method, tau in order:
        cells = []
        for workers, rate in ((8, 50.0), (8, 200.0), (8, 1000.0), (16, 50.0)):
            same = (method, tau, workers, rate)
            runs = [r for r in rows if (r["method"], str(r["tau_setting"]), r["workers"], r["rate_mbit"]) == same]
            samples = statistics.median(run["samples_per_second"] for run in runs)
            waits = statistics.median(run["exposed_seconds"] / run["seconds"] for run in runs)
            cells.append(f"{samples:.0f} ({waits:.0%})")
        name = {"co2": "CO2"}.get(method) or METHOD_NAMES[method]
        table.append((f"{name}, tau {tau}" if method != "ddp" else name, *cells))
    return table


# -- loss at equal samples ------------------------------------------------------------------------------------------

HIDDEN = "co2:merge=keep,gap=none,beta=0,delay=1,wire=int4"
PAPER = "co2:beta=0.5"


def losses(file: str, task: str, asked: str, steps: int, tau: int = 24, tuning: str | None = None) -> dict[int, float]:
    """Seed -> held-out loss on the test split of a method as its tuning chose it. tuning: how its line begins."""
    rows = load(file)
    same = {"task": task, "asked": asked, "steps": steps, "tau": tau, "workers": 4, "shards": "iid"}
    choices = [
        row
        for row in rows
        if row["kind"] == "choice"
        and all(row[key] == value for key, value in same.items())
        and (tuning is None or row["tuning"].startswith(tuning))
        and row["batch"] != 2
    ]
    choice = choices[-1]
    keys = ("task", "method", "lr", "workers", "batch", "steps", "shards")
    rounds = choice["method"] != "ddp"
    found = {}
    for row in rows:
        if row["kind"] == "run" and row["split"] == "test" and all(row[key] == choice[key] for key in keys):
            shared = row["options"].keys() & choice["options"].keys()
            same_options = all(row["options"][key] == choice["options"][key] for key in shared)
            if same_options and (not rounds or row["tau"] == tau):
                found[row["seed"]] = row["loss"]
    return found


def against(mine: dict[int, float], other: dict[int, float]) -> str:
    """How much greater the loss is, over the seeds that both have."""
    return percent(mine[seed] / other[seed] for seed in sorted(mine.keys() & other.keys()))


def cost_of_hiding() -> Table:
    """2,000 steps of the byte model: loss, and what it is against the two baselines."""
    of = lambda asked, tau=24, tuning="learning rate 1, 0.5": losses("search.jsonl", "bytes", asked, 2000, tau, tuning)  # noqa: E731
    ddp, local = of("ddp"), of("local")
    rows = {
        "DDP": (ddp, "32"),
        "Local-SGD (blocking), tau 24": (local, "1.33"),
        "hidden average over int4, tau 24": (of(HIDDEN), "0.17"),
        "hidden average over int4, tau 2": (of(HIDDEN, 2), "2.06"),
    }
    table: Table = [("method", "bits a step", "loss", "against Local-SGD, tau 24", "against DDP")]
    for name, (found, bits) in rows.items():
        line = (name, bits, mean_sd(list(found.values()), ".3f"))
        table.append(
            (*line, "" if found is local else against(found, local), "" if found is ddp else against(found, ddp))
        )
    return table


def larger_models() -> Table:
    """Loss of Local-SGD against DDP, and of the hidden average and the paper's rule against Local-SGD, by size."""
    table: Table = [
        ("parameters, steps", "DDP", "Local-SGD", "Local-SGD against DDP", "hidden, int4, against Local-SGD")
        + ("paper's rule against Local-SGD",)
    ]
    for name, file, task, steps, paper in (
        ("0.02 M, 240", "large.jsonl", "bytes_narrow", 240, None),
        ("0.07 M, 240", "large.jsonl", "bytes", 240, None),
        ("0.25 M, 240", "large.jsonl", "bytes_wide", 240, None),
        ("3.2 M, 240", "large.jsonl", "bytes_3m", 240, "co2"),
        ("3.2 M, 1,000", "large.jsonl", "bytes_3m", 1000, "co2"),
        ("10.5 M, 240", "large.jsonl", "bytes_10m", 240, "co2:beta=0"),
        ("10.5 M, 500", "large.jsonl", "bytes_10m", 500, None),
        ("124 M (GPT-2 Small), 1,000", "gpu_search.jsonl", "gpt2_small", 1000, PAPER),
    ):
        ddp, local, hidden = (losses(file, task, asked, steps) for asked in ("ddp", "local", HIDDEN))
        rule = against(losses(file, task, paper, steps), local) if paper else "not run"
        cells = (mean_sd(list(ddp.values()), ".3f"), mean_sd(list(local.values()), ".3f"))
        table.append((name, *cells, against(local, ddp), against(hidden, local), rule))
    return table


def gpt2_small() -> Table:
    """GPT-2 Small on one GPU: the loss by method, and each seed's change against Local-SGD."""
    of = functools.partial(losses, "gpu_search.jsonl", "gpt2_small", steps=1000)
    local = of("local")
    table: Table = [("method", "seeds", "held-out loss", "against Local-SGD")]
    for name, asked in {
        "DDP": "ddp",
        "Local-SGD (blocking)": "local",
        "Local-SGD over int4": "local:wire=int4",
        "hidden average over int4": HIDDEN,
        "paper's rule, outer momentum 0.5": PAPER,
        "paper's rule, outer momentum 0": "co2:gap=elementwise,beta=0.0",
    }.items():
        found = of(asked)
        change = "" if asked == "local" else against(found, local)
        table.append((name, str(len(found)), mean_sd(list(found.values()), ".3f"), change))
    return table


EFFECTS = {  # what changes -> from which method to which
    "local steps: DDP to Local-SGD": ("ddp:wire=float32", "local:wire=float32"),
    "compression: Local-SGD to int4": ("local:wire=float32", "local:wire=int4"),
    "hiding for one step, over int4": ("local:wire=int4", HIDDEN),
    "hiding for a whole round, float32": ("local:wire=float32", "co2:merge=keep,gap=none,beta=0,wire=float32"),
    "merge rule, a round late: paper's to keep": (
        "co2:beta=0,wire=float32",
        "co2:merge=keep,gap=none,beta=0,wire=float32",
    ),
    "outer momentum 0.5 in the paper's rule": ("co2:beta=0,wire=float32", "co2:beta=0.5,wire=float32"),
    "outer momentum 0.3 in the hidden average": (HIDDEN, "co2:merge=keep,gap=none,beta=0.3,delay=1,wire=int4"),
}


def effects() -> Table:
    """What one change of the method does to the loss: mean ± standard deviation of the seeds' own changes."""
    columns = [(task, tau) for tau in (24, 6) for task in ("bytes", "cifar")]
    names = {"bytes": "text", "cifar": "CIFAR-10"}
    table: Table = [("change", *(f"{names[task]}, tau {tau}" for task, tau in columns))]
    for what, (before, after) in EFFECTS.items():
        of = lambda asked, task, tau: losses("controls.jsonl", task, asked, 480, tau)  # noqa: E731
        table.append((what, *(against(of(after, task, tau), of(before, task, tau)) for task, tau in columns)))
    return table


# -- learning rate and gradient clipping ----------------------------------------------------------------------------

RATE_TASKS = {"digits": ("digits, SGD", 1.0), "cifar": ("CIFAR-10, SGD", 1.0), "bytes": ("text, AdamW", 0.5)}
"""Task -> its name and the limit of the gradient's norm that DDP has where it has one."""


def rates() -> Table:
    """The loss against DDP at learning rate x 1 without clipping, by learning rate and by limit of the norm."""
    rows = [row for row in load("rates.jsonl") if row["kind"] == "run"]
    best = {
        row["task"]: row["lr"] for row in load("rates.jsonl") if row["kind"] == "choice" and " 1 t" in row["tuning"]
    }
    titles = ("task, method", "learning rate x 0.5", "x 1", "x 2", "x 1, clipped at DDP's limit", "at twice the limit")
    table: Table = [titles]
    for task, (name, limit) in RATE_TASKS.items():

        def of(method: str, factor: float, clip: str, task: str = task) -> dict[int, float]:
            same = {"task": task, "method": method, "lr": best[task] * factor, "clip": clip}
            return {row["seed"]: row["loss"] for row in rows if all(row[key] == same[key] for key in same)}

        base = of("ddp", 1, "none")
        for method, called in {"ddp": "DDP", "local": "Local-SGD", "co2": "CO2"}.items():
            columns = [(0.5, "none"), (1, "none"), (2, "none"), (1, f"{limit:g}"), (1, f"{2 * limit:g}")]
            found = [of(method, *column) for column in columns]
            table.append((f"{name}, {called}", *(against(losses, base) if losses else "not run" for losses in found)))
        table[-3] = (table[-3][0], table[-3][1], f"loss {mean_sd(list(base.values()), '.3f')}", *table[-3][3:])
    return table


# -- compression, lengths, gradient-free ----------------------------------------------------------------------------

SLOW_LINKS = {
    "ddp": "DDP, float32",
    "ddp_int4": "DDP, int4",
    "lgreco_int4": "DDP, L-GreCo at int4's error",
    "ddp_rank4": "DDP, rank 4",
    "torch_powersgd": "DDP, torch's PowerSGD, rank 4",
    "accordion_rank4": "DDP, Accordion, rank 2 or 8",
    "lgreco_rank4": "DDP, L-GreCo at rank 4's error",
    "ddp_top1": "DDP, top-k 1 %",
    "lgreco_top1": "DDP, L-GreCo at top-k's error",
    "co2": "CO2, recommended settings (int4)",
    "co2_lgreco_rank4": "CO2, L-GreCo at rank 4's error",
}


def slow_links() -> Table:
    """Training a small GPT-2 over slow links: speed, final loss and bytes by compression."""
    rows = load("slow_links.json")["rows"]
    table: Table = [("method", "samples/s, 50 Mbit/s", "200 Mbit/s", "final loss", "MB a step and worker")]
    for method, name in SLOW_LINKS.items():
        slow, fast = ([r for r in rows if (r["method"], r["rate_mbit"]) == (method, rate)] for rate in (50.0, 200.0))
        speeds = (mean_sd([r["samples_per_second"] for r in runs], ".0f") for runs in (slow, fast))
        megabytes = statistics.fmean(r["bytes_a_step"] for r in slow) / 1e6
        table.append((name, *speeds, mean_sd([r["loss"] for r in slow], ".3f"), f"{megabytes:.3f}"))
    return table


def bytes_to_a_loss() -> Table:
    """Bytes of uniform and L-GreCo's compression until both have reached the higher of their last losses; one seed."""
    rows = {row["method"]: row for row in load("slow_links_bytes.json")["rows"]}
    table: Table = [
        ("compression", "last loss: uniform", "L-GreCo", "MB to the higher loss: uniform", "L-GreCo", "ratio")
    ]
    for name, uniform, chosen in (
        ("int4", "ddp_int4", "lgreco_int4"),
        ("rank 4", "ddp_rank4", "lgreco_rank4"),
        ("top-k 1 %", "ddp_top1", "lgreco_top1"),
    ):
        pair = [rows[method]["evaluations"][:-1] for method in (uniform, chosen)]  # the last is of another text
        last = [evaluated[-1][2] for evaluated in pair]
        sent = [bytes_until(evaluated, max(last)) / 1e6 for evaluated in pair]
        cells = (*(f"{loss:.3f}" for loss in last), *(f"{mb:.1f}" for mb in sent), f"{sent[0] / sent[1]:.2f}")
        table.append((name, *cells))
    return table


def bytes_until(evaluated: Sequence[Sequence[float]], loss: float) -> float:
    """Bytes until the held-out loss is `loss`, interpolated. evaluated: step, bytes sent and loss of each."""
    for (_, sent, before), (_, later, after) in zip(evaluated, evaluated[1:], strict=False):
        if before > loss >= after:
            return sent + (later - sent) * (before - loss) / (before - after)
    raise ValueError(f"the run never reaches a loss of {loss}")


def zo_speed() -> Table:
    """Steps a second of DistZO2 against one process, without its delayed form."""
    rows = [row for row in load("zeroth.json")["speed"] if not row.get("delay")]
    times = (500.0, 60.0)
    table: Table = [("workers", "forward pass of 500 ms", "60 ms")]
    for mesh in dict.fromkeys(row["mesh"] for row in rows):
        found = [{r["mesh"]: r["steps_per_second"] for r in rows if r["forward_ms"] == ms} for ms in times]
        if all(mesh in of for of in found):
            table.append((mesh, *(f"{of[mesh] / of['one process']:.2f} x" for of in found)))
    return table


def zo_memory() -> Table:
    """The memory in which each method trains a 12-layer GPT-2, and what it reaches on a 6-layer one."""
    result = load("zeroth_limit.json")
    table: Table = [
        ("method", "memory, 12 layers", "CPU seconds a step", "held-out loss, 6 layers", "next token right")
    ]
    for memory in result["memory"]:
        if memory["shape"][0] == 12:
            rows = [row for row in result["rows"] if row["way"] == memory["way"] and row["seed"] != TUNING_SEED]
            learnt = (
                (mean_sd([r["loss"] for r in rows], ".3f"), f"{mean_sd([100 * r['accuracy'] for r in rows])} %")
                if rows
                else ()
            )
            fits = f"{memory['weights_mb'] * memory['limit']:.0f} MB"
            table.append((memory["way"], fits, f"{memory['cpu_seconds_a_step']:.2f}", *learnt))
    return table


def lengths() -> Table:
    """Share of a round that the average worker waits for the slowest one, by how documents are dealt."""
    ways = ("counts", "tokens", "cut packing", "round")
    titles = ("equal counts", "equal tokens", "cut packing", "equal work over a round (ours)")
    table: Table = [("documents", "workers", *titles)]
    for row in load("lengths.json")["rows"]:
        if row["tau"] == 24 and row["width"] == 768:
            table.append(
                (f"{row['documents']}, at most {row['positions']:,} tokens", str(row["workers"]))
                + tuple(
                    f"{100 * statistics.fmean(m[w] for m in row['mean']):.2f} %" if w in row["mean"][0] else ""
                    for w in ways
                )
            )
    return table


def rings() -> Table:
    """Seconds of a layer by other ways of splitting documents over an island, as multiples of the plan's."""
    rows = load("lengths_rings.json")["rows"]
    ways = {"even": "even context parallelism", "grouped": "groups (FlexSP)", "whole": "whole documents"}
    ways |= {"cut": "cut packing", "thresholds": "thresholds (Zeppelin)"}
    table: Table = [("link, Gbit/s", "documents", *ways.values())]
    for link, law in dict.fromkeys((row["link"], row["law"]) for row in rows):
        runs = [row["seconds"] for row in rows if (row["link"], row["law"]) == (link, law)]
        table.append((f"{link:g}", law, *(mean_sd([run[way] / run["plan"] for run in runs], ".2f") for way in ways)))
    return table


# -- costs, GPUs, faults --------------------------------------------------------------------------------------------


def boundary_cpu() -> Table:
    """One outer step on a CPU core."""
    table: Table = [("parameters", "ms a boundary", "share of copy bandwidth")]
    for row in load("boundary.json")["rows"]:
        if row["way"] == "co2" and "seconds" in row:
            ms = 1e3 * statistics.median(row["seconds"])
            rate = row["bytes_moved"] / statistics.median(row["seconds"])
            table.append(
                (f"{row['parameters'] / 1e6:,.0f} M", f"{ms:,.1f}", f"{rate / row['copy_bytes_per_second']:.0%}")
            )
    return table


def nccl(part: str) -> dict[str, Any]:
    return next(row for row in load("nccl.jsonl") if row["part"] == part)["figures"]


def nccl_hidden() -> Table:
    """Two NCCL ranks on one GPU: how long an all-reduce takes and how much of it a step of the loop waits for."""
    found = nccl("c")
    cases = {
        "free link, Local-SGD": found["local"],
        "free link, CO2, paper's rule": found["co2 paper"],
        "free link, CO2, recommended": found["recommended"],
        "10 Gbit/s, CO2, paper's rule": found["links"]["10"],
        "1 Gbit/s, CO2, paper's rule": found["links"]["1"],
    }
    table: Table = [
        ("link, method", "tau", "all-reduce, ms", "exposed, ms", "hidden, by CO2's statistics", "by CUDA events")
    ]
    for name, case in cases.items():
        shares = (f"{100 * case[key]:.1f} %" for key in ("hidden_share", "hidden_share_by_events"))
        table.append((name, str(case["tau"]), f"{case['reduction_ms']:.0f}", f"{case['exposed_ms']:.1f}", *shares))
    return table


def nccl_blocks() -> Table:
    """A matrix product beside an NCCL kernel that waits for its peer, by the kernel's thread blocks."""
    cases = nccl("d")["cases"]
    table: Table = [("thread blocks of the waiting kernel", "matrix product, ms", "slower")]
    for name, case in cases.items():
        slower = f"{100 * case['matmul_slowdown']:.1f} %" if name != "none" else ""
        table.append((name, f"{case['matmul_ms']:.2f}", slower))
    return table


def gpu_boundary() -> Table:
    """An outer step and an encoded all-reduce of 350 M parameters on one H200: time on the device, and kernels."""
    names = {"outer": "restart (paper)", "keep": "keep"}
    ways = {"fast": "Triton", "plain": "plain torch", "compiled": "torch.compile"}
    table: Table = [("work", "ms", "share of a copy's rate", "kernels")]
    for row in load("gpu.json")["rows"]:
        what, _, case = row["name"].partition(": ")
        figures = row.get("figures") or {}
        if what == "a boundarys bytes a parameter" and (rule := case.partition(", ")[0]) in names:
            name = f"outer step, merge {names[rule]}, {ways[case.partition(', ')[2]]}"
            table.append((name, f"{figures['ms']:.2f}", f"{figures['share of copy']:.0%}", f"{figures['kernels']:.0f}"))
        elif what == "a reductions bytes a parameter":
            table.append((f"encode and decode, {case}", f"{figures['ms']:.2f}", "", f"{figures['kernels']:.0f}"))
    return table


def faults() -> Table:
    """What a cluster does to a run: every row one kind of harm."""
    runs = load("chaos.json")
    calm: dict[str, list[float]] = {}
    for run in runs:
        if run["harm"] == "none":
            calm.setdefault(run["config"], []).append(run["test_loss"])
    limit = {name: statistics.fmean(of) + 3 * statistics.stdev(of) for name, of in calm.items()}
    groups = {
        "a worker is killed": ("kill",),
        "a worker is killed and comes back (elastic)": ("rejoin",),
        "no link for 3 or 10 s": ("outage",),
        "a worker computes NaN": ("nan",),
        "the disk is full": ("disk",),
        "none": ("none",),
    }
    table: Table = [("harm", "runs", "ended", "without a restart", "hung", "loss as undisturbed")]
    for name, harms in groups.items():
        mine = [run for run in runs if run["harm"].partition(",")[0].partition("_")[0] in harms]
        ended = [run for run in mine if run["status"] == 0]
        alone = sum(run["attempts"] == 1 for run in ended)
        fine = sum(run["test_loss"] <= limit[run["config"]] for run in ended)
        counts = (len(mine), len(ended), alone, sum(run["hung"] for run in mine), fine)
        table.append((name, *map(str, counts)))
    return table


# -- stand-ins for the paper's tables -------------------------------------------------------------------------------

METHODS = ("ddp", "local", "overlap_local", "slowmo", "co2")


def stand_ins() -> Table:
    """A row a model: its metric by method, three seeds each."""
    table: Table = [("table, model", "metric", *(METHOD_NAMES[m].partition(",")[0] for m in METHODS))]
    for name in ("imagenet", "ade20k", "shapenet", "gpt2", "transnormer", "roberta"):
        runs = load(f"tables/{name}.json")
        metric = next(key for key in runs[0] if key not in ("folder", "workers", "commit", "settings"))
        spec = ".2f" if statistics.fmean(run[metric] for run in runs) > 0.5 else ".4f"
        scale = 100 if metric in ("test_top1", "val_miou", "miou") else 1
        for model in dict.fromkeys(run["settings"]["name"] for run in runs):
            of = {m: [] for m in METHODS}
            for run in runs:
                if run["settings"]["name"] == model and run["settings"]["method"] in of:
                    of[run["settings"]["method"]].append(scale * run[metric])
            cells = (mean_sd(values, ".2f" if scale == 100 else spec) if values else "" for values in of.values())
            table.append((f"{name}: {model}", metric, *cells))
    return table


FLOAT32 = ("ddp", "local", "overlap_local", "slowmo", "co2", "co2_auto")
INT4 = ("ddp:wire=int4", "local:wire=int4", "overlap_local:wire=int4", "co2:wire=int4", "co2_auto")
TABLES: dict[str, Callable[[], Table]] = {
    "readme_seconds": readme_seconds,
    "digits_float32": lambda: seconds("", "vision", FLOAT32, limit=True),
    "text_float32": lambda: seconds("", "language", FLOAT32, limit=True),
    "digits_int4": lambda: seconds("int4/", "vision", INT4),
    "text_int4": lambda: seconds("int4/", "language", INT4),
    "cifar10_int4": lambda: seconds("int4_cifar10/", "cifar10", INT4),
    "peers_seconds": lambda: peers("seconds_to_target", ".1f", PEERS),
    "peers_exposed": lambda: peers("exposed", ".0%", PEERS),
    "throughput": throughput,
    "cost_of_hiding": cost_of_hiding,
    "larger_models": larger_models,
    "gpt2_small": gpt2_small,
    "rates": rates,
    "effects": effects,
    "slow_links": slow_links,
    "bytes_to_a_loss": bytes_to_a_loss,
    "zo_speed": zo_speed,
    "zo_memory": zo_memory,
    "lengths": lengths,
    "rings": rings,
    "boundary_cpu": boundary_cpu,
    "gpu_boundary": gpu_boundary,
    "nccl_hidden": nccl_hidden,
    "nccl_blocks": nccl_blocks,
    "faults": faults,
    "stand_ins": stand_ins,
}

if __name__ == "__main__":
    main()
