"""The command: torchrun ... -m core.doctor --params 125e6 [--step_ms 80] [--out cluster.json].

Exit status: 0; 1 where a run would fail, or the measurement itself has; 2 for a mistake in an option.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ..errors import UserError
from . import report as reports
from .choose import STEPS, choose, memory, recommended
from .facts import Facts, failures, nodes_of, own_facts, ranks_text, warnings
from .measure import Wire, boundary, links, sound, wires


class Unfit(Exception):
    """Why there is nothing to measure, in one line."""


class Parser(argparse.ArgumentParser):
    """Mistakes are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the options)")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """UserError names the first option that cannot be."""
    parser = Parser(prog="doctor", description="Measures these nodes, and says which settings CO2 would take on them.")
    add = parser.add_argument
    add("--params", required=True, type=whole, metavar="N", help="trained parameters of the model, such as 125e6")
    add("--step_ms", "--step-ms", type=positive, metavar="MS", help="of a whole local step; else several lengths")
    add("--tau_max", "--tau-max", type=whole, metavar="N", help="never more local steps than this (192)")
    add("--memory_gb", "--memory-gb", type=positive, metavar="GB", help="GiB a worker may take, else what is found")
    add("--timeout", default=60.0, type=positive, metavar="S", help="seconds until a missing rank is an error (60)")
    add("--out", type=Path, metavar="FILE", help="writes what was found there as JSON, such as cluster.json")
    return parser.parse_args(argv)


def positive(given: str, *, is_whole: bool = False) -> float:
    kind = "a whole number, 1 or more, such as 125e6" if is_whole else "a number above 0, such as 80"
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf or (is_whole and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"{given}: give {kind}")
    return value


def whole(given: str) -> int:
    return int(positive(given, is_whole=True))


def main() -> None:
    """Ends the process."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        asked = options(sys.argv[1:])
        if rank == 0 and asked.out is not None and not asked.out.absolute().parent.is_dir():
            raise UserError(f"--out {asked.out}: there is no folder {asked.out.parent}: make it first")
    except UserError as error:
        _end(f"error: {error}" if rank == 0 else "", 2)
    try:
        found = diagnose(asked, rank)
    except Unfit as error:
        _end(f"error: {error}" if str(error) else "", 1)
    if rank == 0:
        print(reports.screen(found), flush=True)
        if asked.out is not None:
            try:
                asked.out.write_text(json.dumps(found, indent=1) + "\n")
            except OSError as error:
                _end(f"error: --out {asked.out}: {error.strerror}; choose another file", 1)
    _end("", 1 if found["failures"] else 0)


def _end(line: str, status: int) -> NoReturn:
    """At once: a thread of a broken collective would keep the process, and peers may wait for its connections."""
    if line:
        print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if status == 0:
        sys.exit(0)
    os._exit(status)


def diagnose(asked: argparse.Namespace, rank: int) -> dict[str, Any]:
    """The report, equal on all ranks but for what rank 0 alone knows."""
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    facts = [own_facts(rank)]
    store = None
    if workers > 1:
        store = meet(rank, workers, asked.timeout)
        facts = tell(store, facts[0], workers, asked.timeout)
    if asked.memory_gb is not None:
        facts = [replace(f, memory=int(asked.memory_gb * (1 << 30))) for f in facts]
    found = reports.header(facts, asked.params)
    found["failures"], found["warnings"] = failures(facts), warnings(facts)
    if found["failures"]:
        _leave(store, rank, workers)
        return found
    device = torch.device("cuda", torch.cuda.current_device()) if facts[0].device == "cuda" else torch.device("cpu")
    try:
        if store is not None:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            members = {"store": PrefixStore("group", store), "rank": rank, "world_size": workers}
            dist.init_process_group(backend, timeout=timedelta(seconds=max(60.0, asked.timeout)), **members)
        measured(found, asked, nodes_of(facts), device)
    except (RuntimeError, UserError) as error:  # of a collective, or what CO2 refuses
        found["failures"].append(f"rank {rank}: {textwrap.shorten(str(error), 300, placeholder=' ...')}")
        return found
    if store is not None:
        _leave(store, rank, workers)
        dist.destroy_process_group()
    return found


def meet(rank: int, workers: int, timeout: float) -> Store:
    """The workers' store, without waiting for all: torchrun serves it, or rank 0 does."""
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            None if served else workers,
            is_master=rank == 0 and not served,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=not served,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        who = "torchrun's store" if served else "rank 0"
        raise Unfit(f"rank {rank}: no {who} at {host}:{port} within {timeout:g} s: is it up? ({reason})") from None
    return PrefixStore(f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def tell(store: Store, own: Facts, workers: int, timeout: float) -> list[Facts]:
    """Everybody's facts, by rank; Unfit names the ranks that do not come."""
    store.set(str(own.rank), json.dumps(asdict(own)))
    until = time.monotonic() + timeout
    missing = list(range(workers))
    while missing := [rank for rank in missing if not store.check([str(rank)])]:
        if time.monotonic() > until:
            first = min(set(range(workers)) - {*missing})
            text = f"{ranks_text(missing)} of {workers} did not come within {timeout:g} s: look at what it printed"
            raise Unfit(text if own.rank == first else "")
        time.sleep(0.05)
    return [Facts(**json.loads(store.get(str(rank)))) for rank in range(workers)]


def _leave(store: Store | None, rank: int, workers: int) -> None:
    """Rank 0, which may serve the store, goes last."""
    if store is None:
        return
    left = store.add("left", 1)
    until = time.monotonic() + 10.0
    while rank == 0 and left < workers and time.monotonic() < until:
        time.sleep(0.02)
        left = store.add("left", 0)


def measured(found: dict[str, Any], asked: argparse.Namespace, nodes: list[list[int]], device: torch.device) -> None:
    """Puts into the report what takes time."""
    workers, timeout = found["workers"], max(60.0, asked.timeout)
    if workers > 1 and (wrong := sound(device)):
        found["failures"].append(wrong)
        return
    found["boundary_seconds"], copies = boundary(asked.params, device, timeout)
    if workers > 1:
        of_links = links(nodes, device)
        found["links"] |= {name: reports.of_link(link) for name, link in of_links.items()}
        of_wires = dict(wires(asked.params, of_links["all"], device, timeout))
        found["wires"] = {name: reports.of_wire(wire, asked.params) for name, wire in of_wires.items()}
        copies = _choose(found, asked, of_wires)
    needed = memory(copies, asked.params, found["device"]["memory_bytes_per_worker"])
    found["memory"] = asdict(needed)
    fails, warns = needed.judge()
    found["failures"] += fails
    found["warnings"] += warns


def _choose(found: dict[str, Any], asked: argparse.Namespace, of_wires: dict[str, Wire]) -> float:
    """Puts the settings into the report; the copies that CO2 then holds."""
    workers, steps = found["workers"], STEPS if asked.step_ms is None else (asked.step_ms / 1e3,)
    config = recommended(workers, asked.tau_max)
    choices = [choose(config, workers, step, of_wires, found["boundary_seconds"], asked.params) for step in steps]
    found["settings"] = [asdict(c) for c in choices]
    if asked.step_ms is not None and choices[0].exposed_share > 0.05:
        found["warnings"].append(
            f"the link is too slow for tau_max={config.tau_max}: {choices[0].exposed_share:.0%} of the time stays "
            "exposed; a larger tau_max, steps over more samples, or a smaller model hide it"
        )
    return max(of_wires[c.wire].copies for c in choices)
