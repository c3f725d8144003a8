"""What was found, as JSON for other tools (docs/doctor.md says what stands in it) and as one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .choose import gib
from .facts import Facts, nodes_of
from .measure import Link, Wire

FORMAT = 1  # of the file; a key that is added leaves it, one that is changed or taken away raises it
WIDTH, FIRST = 100, 13  # columns of the screen, and of a line's name
SHOWN = 5  # sizes of a link


def header(facts: Sequence[Facts], params: int) -> dict[str, Any]:
    """What is known before anything is measured."""
    nodes, first = nodes_of(facts), facts[0]
    of_node = [[f for f in facts if f.rank in node] for node in nodes]
    sizes = {len(node) for node in nodes}
    return {
        "format": FORMAT,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "params": params,
        "workers": len(facts),
        "workers_per_node": sizes.pop() if len(sizes) == 1 else None,
        "nodes": [
            {"hostname": n[0].hostname, "ranks": [f.rank for f in n], "device": n[0].device_name} for n in of_node
        ],
        "backend": "nccl" if first.device == "cuda" else "gloo",
        "device": {
            "type": first.device,
            "name": first.device_name,
            "memory_bytes_per_worker": min(f.memory for f in facts),
        },
        "versions": first.versions,
        "variables": first.variables,
        "interface": {"name": first.interface, "address": first.address},
        "links": {"within": None, "across": None, "all": None},
        "wires": {},
        "boundary_seconds": None,
        "settings": [],
        "memory": None,
        "failures": [],
        "warnings": [],
    }


def of_link(link: Link) -> dict[str, Any]:
    return {
        "workers": link.workers,
        "latency_seconds": link.latency,
        "bandwidth_bits_per_second": link.bandwidth,
        "allreduce": [{"bytes": nbytes, "seconds": seconds} for nbytes, seconds in link.points],
    }


def of_wire(wire: Wire, params: int) -> dict[str, Any]:
    return {
        "seconds": wire.seconds(params),
        "extrapolated": wire.params < params,
        "copies": wire.copies,
        "measured": {"params": wire.params, "seconds": wire.measured},
    }


# -- one screen -----------------------------------------------------------------------------------------------------


def screen(report: Mapping[str, Any]) -> str:
    """At most some 45 lines of WIDTH columns."""
    parts = (_cluster, _links, _wires, _settings, _memory, _judgement)
    return "\n".join(line for part in parts for line in part(report))


def _line(name: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=name.ljust(FIRST), subsequent_indent=" " * FIRST, break_on_hyphens=False
    )


def _cluster(report: Mapping[str, Any]) -> Iterator[str]:
    n, nodes, device = report["workers"], report["nodes"], report["device"]
    many = f"{n} on {len(nodes)} node{'s' * (len(nodes) > 1)}" if n > 1 else "one process"
    names = ", ".join(dict.fromkeys(node["hostname"] for node in nodes))
    yield from _line("workers", f"{many} ({textwrap.shorten(names, 60, placeholder=' ...')}), {report['backend']}")
    if n == 1:
        yield from _line("", "alone: links and tau are measured with several, started by torchrun (docs/doctor.md)")
    kinds = ", ".join(dict.fromkeys(node["device"] for node in nodes))
    yield from _line("device", f"{kinds}, {gib(device['memory_bytes_per_worker'])} a worker")
    known = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    alike = " on all ranks" if n > 1 and not any(" is unlike: " in text for text in report["failures"]) else ""
    yield from _line("versions", known + alike)
    taken = report["interface"]
    chosen = "NCCL_SOCKET_IFNAME or NCCL's own choice for the GPUs" if report["backend"] == "nccl" else ""
    yield from _line("interface", f"{taken['name']} {taken['address']} for gloo{chosen and ', ' + chosen}")
    variables = " ".join(f"{name}={value}" for name, value in report["variables"].items()) or "none set"
    yield from _line("variables", textwrap.shorten(variables, 2 * (WIDTH - FIRST), placeholder=" ..."))


def _links(report: Mapping[str, Any]) -> Iterator[str]:
    found = report["links"]
    names = {"within": "in a node", "across": "across nodes", "all": "all workers"}
    twins = report["workers_per_node"] == 1 or len(report["nodes"]) == 1  # then all is one of the two
    for key, name in names.items():
        link = found[key]
        if link is None or (twins and key == "all"):
            continue
        step = max(1, -(-len(link["allreduce"]) // SHOWN))
        some = link["allreduce"][::-1][::step][::-1]
        times = ", ".join(f"{_bytes(p['bytes'])} {_time(p['seconds'])}" for p in some)
        rate = f"{_rate(link['bandwidth_bits_per_second'])}, latency {_time(link['latency_seconds'])}"
        yield from _line(name, f"{link['workers']} workers: {rate}; all-reduces: {times}")


def _wires(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["wires"]:
        return
    yield from _line("CO2's mean", f"of {report['params']:.4g} parameters, among all workers")
    for name, wire in report["wires"].items():
        sample = wire["measured"]
        how = f"extrapolated by the link's rate: {sample['params']:.3g} parameters took {_time(sample['seconds'])}"
        yield from _line(f"  {name}", f"{_time(wire['seconds'])}, {how if wire['extrapolated'] else 'measured'}")
    yield from _line("  boundary", f"{_time(report['boundary_seconds'])} of its own work, once in tau steps")


COLUMNS = "{:<12}{:<5}{:<9}{:<13}{:<9}{:<17}{}"


def _settings(report: Mapping[str, Any]) -> Iterator[str]:
    if not (choices := report["settings"]):
        return
    titles = ("local step", "tau", "wire", "mean after", "exposed", "boundary's work", "DDP exposed, at least")
    yield from _line("settings", "of CO2Config.recommended, with the times above:")
    yield " " * FIRST + COLUMNS.format(*titles)
    for c in choices:
        shares = (f"{c[name]:.1%}" for name in ("exposed_share", "boundary_share", "ddp_share"))
        steps = f"{c['awaited']} step{'s' * (c['awaited'] > 1)}"
        yield " " * FIRST + COLUMNS.format(_time(c["step_seconds"]), c["tau"], c["wire"], steps, *shares)
    first, n, per_node = choices[0], report["workers"], report["workers_per_node"]
    wider = f"; over float32 it would take {first['float32_tau']}" if first["wire"] != "float32" else ""
    why = first["reason"] + wider if len(choices) == 1 else "--step_ms gives your own step, and says why"
    yield from _line("  why", why)
    kept = f"merge {first['merge']}: a worker keeps its own progress since the sending"
    yield from _line("  call", f"CO2(model.parameters(), CO2Config.recommended({n}), buffers=model.buffers()); {kept}")
    links, rate = report["links"], "bandwidth_bits_per_second"
    if per_node and per_node > 1 and len(report["nodes"]) > 1 and links["within"][rate] > 4 * links["across"][rate]:
        yield from _line(
            "  or",
            f"nodes as workers: gradients averaged in each step in a node of {per_node}, CO2 across: ShardedCO2(model."
            f"parameters(), CO2Config.recommended({n // per_node}, mesh=mesh), mesh=mesh)",
        )


def _memory(report: Mapping[str, Any]) -> Iterator[str]:
    if (m := report["memory"]) is not None:
        copies = f"CO2 {gib(m['co2_bytes'])} ({m['copies']:.4g} float32 copies of the parameters)"
        model = f"parameters and gradients {gib(m['parameters_and_gradients_bytes'])}, AdamW {gib(m['adam_bytes'])}"
        yield from _line("memory", f"{copies}, {model}; a worker has {gib(m['worker_bytes'])}; activations come on top")


def _judgement(report: Mapping[str, Any]) -> Iterator[str]:
    for text in report["failures"]:
        yield from _line("FAILS", text)
    for text in report["warnings"]:
        yield from _line("warning", text)
    if report["workers"] > 1:
        yield from _line(
            "look for",
            "DistributedDataParallel around the model, which averages gradients in every step, and SyncBatchNorm, "
            "which waits for all in every layer: CO2 needs neither, and the doctor cannot see them",
        )
    yield from _line("result", "a run would fail" if report["failures"] else "nothing found that would make a run fail")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes >> (20 if unit == 'MiB' else 10)} {unit}"
    return f"{nbytes} B"


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.4g} Mbit/s"
