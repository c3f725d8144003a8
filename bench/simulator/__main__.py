"""Predicts throughput, exposed communication and the tau to use for a cluster.

python -m bench.simulator --preset internet-1000 [--params 125e6] [--step_ms 500] ...
python -m bench.simulator --paper                       # against the known cells of the paper's throughput table
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace

from bench.report import read_options, table
from bench.simulator import paper
from bench.simulator.events import MARGIN, QUANTILE, SSP, Outcome, Rule, Work, recommend_tau, simulate
from bench.simulator.network import Algorithm, Cluster, allreduce_seconds, fastest, preset
from core.errors import UserError
from results.paper import TAUS
from training.script import launch

DEFAULT_PRESET = "dgx-a100-tcp"
STALENESS = (1, 3, 8)
METHODS = {
    **{name: (name, Rule()) for name in ("ddp", "local", "overlap_local", "slowmo", "co2")},
    "co2, by_speed": ("co2", Rule(by_speed=True)),
    **{f"ssp, s = {s}": (SSP, Rule(staleness=s)) for s in STALENESS},
}
WARMUP = 2  # rounds until a hidden method's first all-reduce has been waited for
DDP_STEPS = 200
BYTES, WORDS = 4, 4096  # of a parameter; of a GPU and step, in the paper's table
# Ours, not the paper's and not measured: every output that uses one says so.
ASSUMED = {
    "step_spread": 0.05,
    "allreduce_spread": 0.1,
    "boundary_ms": 10.0,
    "ddp_overlap": 0.8,
    "backward_share": 2 / 3,
}
IN_MS = {name: f"{name}_ms" for name in ("latency", "intra_latency", "overhead")}  # of a cluster, as options


@dataclass(frozen=True)
class Simulate:
    """A model of rounds: how fast each method trains on a cluster. Options left out are the preset's or assumed."""

    preset: str | None = None
    """dgx-a100-roce, dgx-a100-tcp, rtx3090, internet-1000 or internet-10000; dgx-a100-tcp unless told otherwise."""
    nodes: int | None = None
    workers_per_node: int | None = None
    inter_gbps: float | None = None
    """Gbit/s of one node's network cards together."""
    latency_ms: float | None = None
    """Per hop between nodes."""
    efficiency: float | None = None
    """Share of the nominal bandwidth that an all-reduce gets."""
    params: float = 125e6
    """Of the model, float32."""
    step_ms: float = 500.0
    """Mean local step without communication."""
    step_spread: float | None = None
    """Standard deviation of a step as a share of its mean."""
    slow: tuple[float, ...] = ()
    """How many times as long the first workers' steps take; the others' 1."""
    stall_chance: float = 0.0
    """Of a step to stall, on any worker."""
    stall_ms: float = 5000.0
    """What a stalled step takes more."""
    batch: int = 8
    """Samples per worker and step."""
    boundary_ms: float | None = None
    """What closing a round costs a worker besides waiting (not ddp)."""
    ddp_overlap: float | None = None
    """Share of the backward pass that ddp's communication can run under."""
    allreduce_spread: float | None = None
    """Standard deviation of an all-reduce's time as a share of its mean."""
    tau: int | None = None
    """Local steps per round; None picks the smallest that hides the all-reduce."""
    rounds: int = 50
    seed: int = 0
    paper: bool = False
    """Compare with the known cells of the paper's throughput table."""

    def check(self) -> None:
        for name in ("params", "step_ms", "batch"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"{name}={getattr(self, name):g}: give a finite number above 0")
        if self.rounds <= WARMUP:
            raise UserError(f"rounds={self.rounds}: give {WARMUP + 1} or more; the first {WARMUP} are not counted")
        if self.tau is not None and self.tau < 1:
            raise UserError(f"tau={self.tau}: give 1 or more local steps, or leave it out to have it picked")


def main() -> None:
    options = read_options(Simulate, "bench.simulator")
    if options.paper:
        result, assumed = papers_report(options)
        title = "## The paper's throughput table, 80 Gbit/s TCP/IP (CO2, arXiv 2401.16265)"
        print(f"\n{title}\n\n{assumed}\n\n{paper.markdown(result)}\n\n{paper.remarks(result)}", flush=True)
    if options.preset or not options.paper:
        prediction(options)


Settings = dict[str, tuple[float, str]]  # by option: a number that a prediction rests on, and where it comes from


def settings(options: Simulate) -> tuple[Cluster, Settings]:
    """The cluster, and every number with its source: the command line, the preset, or assumed."""
    name = options.preset or DEFAULT_PRESET
    base, given, found = preset(name), {}, Settings()
    for field in fields(Cluster):
        option, unit = IN_MS.get(field.name, field.name), 1e-3 if field.name in IN_MS else 1
        source = f"preset {name}" if field.name in base.facts else "assumed"
        found[option] = getattr(base.cluster, field.name) / unit, source
        if (value := getattr(options, option, None)) is not None:
            given[field.name] = value * unit
    found |= {option: (value, "assumed") for option, value in ASSUMED.items()}
    asked = {option: (value, "given") for option in found if (value := getattr(options, option, None)) is not None}
    return replace(base.cluster, **given), found | asked


def build(options: Simulate) -> tuple[Cluster, Algorithm, Work, Settings]:
    """All that the model needs, and the settings to print."""
    cluster, found = settings(options)
    v = {option: value for option, (value, _) in found.items()}
    nbytes = options.params * BYTES
    algorithm = fastest(cluster, nbytes)
    step = options.step_ms / 1e3
    work = Work(
        workers=cluster.workers,
        step=step,
        spread=v["step_spread"] * step,
        allreduce=allreduce_seconds(cluster, nbytes, algorithm),
        allreduce_spread=v["allreduce_spread"],
        boundary=v["boundary_ms"] / 1e3,
        backward_share=v["backward_share"],
        overlap=v["ddp_overlap"],
        slow=options.slow,
        stall_chance=options.stall_chance,
        stall=options.stall_ms / 1e3,
    )
    return cluster, algorithm, work, found


@dataclass(frozen=True)
class Line:
    """One prediction."""

    method: str
    tau: int
    samples_per_second: float
    share_of_ideal: float
    """Of workers x batch / step."""
    exposed_share: float
    allreduce_seconds: float


def predict(options: Simulate, work: Work, method: str, tau: int) -> Line:
    """Simulates one of METHODS."""
    name, rule = METHODS[method]
    if method == "ddp":
        tau, work = 1, replace(work, boundary=0.0)
    rounds = max(DDP_STEPS, options.rounds) if method == "ddp" else options.rounds
    lead = 2 * rule.staleness  # clocks after which a worker at twice the speed is as far ahead as it may be
    outcome: Outcome = simulate(name, work, tau, rounds + lead, seed=options.seed, warmup=WARMUP + lead, rule=rule)
    speed = work.workers * options.batch / outcome.step_seconds
    ideal = work.workers * options.batch / work.step
    return Line(method, tau, speed, speed / ideal, outcome.exposed_share, outcome.allreduce_seconds)


def prediction(options: Simulate) -> list[Line]:
    """Prints the methods at one tau, then taus for CO2 and Local-SGD; returns the first."""
    cluster, algorithm, work, found = build(options)
    best = recommend_tau(work, options.seed)
    tau = best if options.tau is None else options.tau
    started = time.perf_counter()
    methods = [predict(options, work, method, tau) for method in METHODS]
    taus = [predict(options, work, m, t) for t in sorted({*TAUS, best, tau}) for m in ("co2", "local")]
    seconds = time.perf_counter() - started
    print(
        f"\n## {options.preset or DEFAULT_PRESET}: {cluster.workers} workers in {cluster.nodes} nodes "
        "(predicted by a model, not run)\n"
    )
    print(settings_markdown(options, found))
    print(f"\nall-reduce: {work.allreduce:.4g} s = {work.allreduce / work.step:.3g} steps, {algorithm}")
    print(
        f"tau to use: {best}, the smallest whose steps last {1 + MARGIN:g} times the all-reduce's "
        f"{QUANTILE:.0%} quantile\n"
    )
    print(lines_markdown(methods))
    print(f"\nOver tau:\n\n{lines_markdown(taus)}\n")
    print("Of ideal: of workers x batch / step. Exposed: waiting for the link or for slower workers, of the time.")
    print(f"\n(simulated in {seconds:.1f} s)", flush=True)
    return methods


def settings_markdown(options: Simulate, found: Settings) -> str:
    """What the prediction rests on, by source."""
    workload = ["params", "step_ms", "batch", "stall_chance"]
    workload += ["stall_ms"] if options.stall_chance else []
    usual, by_source = Simulate(), dict[str, list[str]]()
    for name in workload:
        value = getattr(options, name)
        found[name] = value, "assumed" if value == getattr(usual, name) else "given"
    for name, (value, source) in found.items():
        by_source.setdefault(source, []).append(f"{name} {value:g}")
    return "\n".join(f"- {source}: {', '.join(items)}" for source, items in by_source.items())


def lines_markdown(lines: list[Line]) -> str:
    def cells(x: Line) -> tuple[object, ...]:
        shares = (f"{share:.1%}" for share in (x.share_of_ideal, x.exposed_share))
        return x.method, x.tau, f"{x.samples_per_second:,.1f}", *shares

    return table(["method", "tau", "samples/s", "of ideal", "exposed"], map(cells, lines))


def papers_report(options: Simulate) -> tuple[paper.Report, str]:
    """The comparison, and what it assumes in words."""
    cluster, _, work, _ = build(replace(options, preset=DEFAULT_PRESET, nodes=None, workers_per_node=None))
    shares = work.backward_share, work.overlap, work.allreduce_spread
    return paper.report(cluster, options.params * BYTES, WORDS, *shares), (
        f"Assumed or given: {options.params:g} parameters of {BYTES} bytes, {WORDS} words per GPU and step, "
        f"backward pass {work.backward_share:.2g} of a step, ddp's overlap {work.overlap:g} of it, an "
        f"all-reduce's standard deviation {work.allreduce_spread:g} of its mean, {cluster.latency * 1e3:g} ms a "
        "hop. Which model the table is of is not known here: size and words only scale the fitted constants, apart "
        "from latency and the traffic inside a node."
    )


if __name__ == "__main__":
    launch(main)
