"""The recommended settings that follow from the measured times, and the screen that shows them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import CO2Config, tuner_for
from ..tau import smallest_tau

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0)  # seconds of a local step, if the user gives none
ROUNDS = 40  # rounds after which a tuner that always gets the same times has settled
WIDTH, FIRST = 100, 13  # columns of the screen, and of a line's name
COLUMNS = "        {:<11}{:<4}{:<12}{:<13}{:<8}{:<9}{:<7}{:<10}{:<9}{}"
TITLES = ("local step", "tau", "compression", "fragments", "exposed", "boundary", "DDP", "DDP int4", "r", "take")
LINKS = {"within": "in a node", "across": "across nodes", "all": "all workers"}


def choose(
    config: CO2Config, workers: int, step: float, seconds: Mapping[str, float], boundary: float
) -> dict[str, Any]:
    """Returns the settings that the tuner of tau auto settles on.

    Args:
        config: The recommended config.
        workers: Number of workers.
        step: Seconds of the slowest worker's local step.
        seconds: Seconds of an all-reduce, by format.
        boundary: Seconds of the work at a round boundary.
    """
    tuner = tuner_for(config, workers)
    assert tuner is not None and workers > 1, "one worker has nothing to send"
    for number in range(ROUNDS):
        tuner.receive(number, [step], [seconds[tuner.compression]], [boundary])
    tau, took, float32 = tuner.tau, seconds[tuner.compression], seconds["float32"]
    exposed, own = max(0.0, 1 - tau * step / took), boundary / (max(tau * step, took) + boundary)
    losses = {"CO2": exposed + own}
    for name, kind in (("DDP", "float32"), ("DDP, int4", "int4")):  # hidden by the backward pass, 2/3 of a step
        wait = max(0.0, seconds[kind] - 2 / 3 * step)
        losses[name] = wait / (step + wait)
    return {
        "step_seconds": step,
        "tau": tau,
        "compression": tuner.compression,
        "merge": config.merge,
        "fragments": tuner.fragments,
        "late": took / tuner.fragments / step,  # local steps that the all-reduce of a fragment takes
        "allreduce_seconds": took,
        "exposed_share": exposed,  # share of the time, as are the next two
        "boundary_share": own,
        "ddp_share": losses["DDP"],
        "ddp_int4_share": losses["DDP, int4"],
        "take": min(("DDP", "DDP, int4", "CO2"), key=losses.__getitem__),
        "float32_ratio": float32 / step,
        "float32_tau": smallest_tau(float32, step, config.tau_margin),
        "reason": tuner.decisions[-1].reason,
    }


def place(nodes: dict[str, Any], alone: dict[str, Any], inside: float) -> dict[str, Any]:
    """Returns the settings with a node as a worker. "take" is "nodes" if they lose less time than single ranks and DDP.

    Args:
        nodes: Settings from `choose`, with a node as a worker.
        alone: Settings from `choose`, with a rank as a worker and the same local step.
        inside: Seconds of a float32 all-reduce in a node, where DDP averages gradients in every step.
    """
    step = nodes["step_seconds"]
    wait = max(0.0, inside - 2 / 3 * step)
    loses = nodes["exposed_share"] + nodes["boundary_share"] + (share := wait / (step + wait))
    others = alone["exposed_share"] + alone["boundary_share"], alone["ddp_share"], alone["ddp_int4_share"]
    return {**nodes, "inside_share": share, "take": "nodes" if loses < min(others) else alone["take"]}


def screen(report: Mapping[str, Any]) -> str:
    """Returns the report as some 30 lines of WIDTH columns at most."""
    lines: list[str] = []

    def line(name: str, text: str) -> None:
        first, rest = name.ljust(FIRST), " " * FIRST
        lines.extend(textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False))

    def rows(choices: Sequence[dict[str, Any]], titles: Sequence[str], *names: str) -> None:
        lines.append(COLUMNS.format(*titles))
        for c in choices:
            shares = [f"{c[f'{name}_share']:.1%}" for name in ("exposed", "boundary", *names)]
            late = f"{c['fragments']}, {c['late']:.1f} late"
            row = (c["tau"], c["compression"], late, *[*shares, ""][:4], f"{c['float32_ratio']:.3g}", c["take"])
            lines.append(COLUMNS.format(_time(c["step_seconds"]), *row))

    n, nodes = report["workers"], report["nodes"]
    many = f"{n} on {len(nodes)} node{'s' * (len(nodes) > 1)}" if n > 1 else "one process"
    names = textwrap.shorten(", ".join(dict.fromkeys(node["hostname"] for node in nodes)), 60, placeholder=" ...")
    line("workers", f"{many} ({names}), {report['backend']}")
    if n == 1:
        line("", "links and tau are measured with several processes, started by torchrun (docs/clusters.md)")
    kinds = ", ".join(dict.fromkeys(node["device"] for node in nodes))
    line("device", f"{kinds}, {report['device']['memory_bytes_per_worker'] / (1 << 30):.3g} GiB a worker")
    if report["infiniband"]:
        line("InfiniBand", f"{report['infiniband']}; NCCL uses TCP there")
    links = dict(report["links"])
    if report["workers_per_node"] == 1 or len(nodes) == 1:
        del links["all"]  # it equals one of the other two links
    for key, link in links.items():
        if link is not None:
            rate, most = _rate(link["bandwidth_bits_per_second"]), link["allreduce"][-1]
            took = f"an all-reduce of {most['bytes'] / (1 << 20):.3g} MiB takes {_time(most['seconds'])}"
            line(LINKS[key], f"{link['workers']} workers: {rate}, latency {_time(link['latency_seconds'])}; {took}")
    if report["compressions"]:
        line("all-reduce", f"of {report['params']:.4g} parameters, among all workers")
        for name, compression in report["compressions"].items():
            sample = (
                f"from {compression['sample_params']:.4g} parameters, measured: {_time(compression['sample_seconds'])}"
            )
            line(f"  {name}", f"{_time(compression['seconds'])}, {sample}")
        line("  boundary", f"{_time(report['boundary_seconds'])} of its own work, once in tau steps")
    if choices := report["settings"]:
        line("settings", "of CO2Config.recommended, with the times above:")
        rows(choices, TITLES, "ddp", "ddp_int4")
        line("", "r: a float32 all-reduce over a local step; take: the method that loses the least time")
        if of_nodes := report.get("node_settings", ()):
            line("  nodes", f"of {report['per_node']}, with DDP inside, which waits for the share of time in `inside`:")
            rows(of_nodes, (*TITLES[:6], "inside", "", *TITLES[8:]), "inside")
        reason = f"{choices[0]['reason']}; with float32 {choices[0]['float32_tau']} steps"
        line("  why", reason if len(choices) == 1 else "--step_ms gives your own step, and says why")
        given = "CO2(model.parameters(), CO2Config.recommended(steps=N), buffers=model.buffers()"
        taken = sum(c["take"] == "nodes" for c in of_nodes)
        given += f', mesh=node_mesh("{report["device"]["type"]}", {report["per_node"]})' if taken else ""
        line("  call", f"{given}){', with mesh= where nodes are taken' * (0 < taken < len(of_nodes))}")
    for text in report["failures"]:
        line("FAILS", text)
    line("result", "a run would fail" if report["failures"] else "nothing found that would make a run fail")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"
