"""The command `torchrun ... -m core.doctor --params 125e6 [--step_ms 80] [--out cluster.json]`.

The exit status is 0 if all is well, 1 if a run would fail or the measurement failed, and 2 for a wrong option.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import socket
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .. import __version__
from ..config import CO2Config
from ..errors import UserError, env_number
from ..groups import local_world_size, of_all
from ..guards.inputs import check_env
from ..nodes import node_mesh
from . import report as reports
from .measure import boundary, compressions, links, sound


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, without the usage text
        raise UserError(f"{message} (--help lists the options)")


def options(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options. Raises UserError for the first option that is wrong."""
    parser = Parser(
        prog="python -m co2_training.doctor",
        description="Measures these nodes, and prints the settings that CO2 uses on them.",
    )
    add = parser.add_argument
    add("--params", required=True, type=positive, metavar="N", help="trained parameters of the model, such as 125e6")
    add("--step_ms", "--step-ms", type=positive, metavar="MS", help="milliseconds of a local step; else several")
    add("--per_node", "--per-node", type=int, metavar="N", help="also tries nodes of N ranks as workers, DDP inside")
    add("--timeout", default=60.0, type=positive, metavar="S", help="seconds until a missing rank is an error (60)")
    add("--out", type=Path, metavar="FILE", help="writes the report there as JSON, such as cluster.json")
    return parser.parse_args(argv)


def positive(given: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(given)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{given}: give a number above 0")


def main() -> None:
    """Runs the doctor and ends the process."""
    rank = 0
    try:
        rank = env_number("RANK", 0)
        asked = options(sys.argv[1:])
        if rank == 0 and (out := asked.out) is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
            is_folder, absent = "it is a folder: name a file in it", f"there is no folder {out.parent}: make it first"
            raise UserError(f"--out {out}: {is_folder if out.is_dir() else absent}")
        nodes, rest = divmod(workers := env_number("WORLD_SIZE", 1), max(1, asked.per_node or workers))
        if asked.per_node is not None and (asked.per_node < 2 or rest or nodes < 2):
            raise UserError(
                f"--per_node {asked.per_node} with {workers} workers: give 2 or more ranks of a node, so that the "
                "workers are two or more equal nodes"
            )
    except UserError as error:
        _end(f"error: {error}" if rank == 0 else "", 2)
    try:
        check_env()
        found = diagnose(asked)
        if rank == 0:
            print(reports.screen(found), flush=True)
            if asked.out is not None:
                asked.out.write_text(json.dumps(found, indent=1) + "\n")
    except (UserError, OSError) as error:
        _end(f"error: rank {rank}: {_short(error)}", 1)
    _end("", 1 if found["failures"] else 0)


def _short(error: Exception) -> str:
    return textwrap.shorten(str(error), 300, placeholder=" ...")


def _end(line: str, status: int) -> NoReturn:
    print(line, end="\n" if line else "", file=sys.stderr, flush=True)
    if status:  # at once: a thread of a broken collective would keep the process alive while peers wait for it
        os._exit(status)
    sys.exit(0)


def diagnose(asked: argparse.Namespace) -> dict[str, Any]:
    """Returns the report. It is equal on all ranks except for the times that each rank measures."""
    try:
        own = own_facts()
        if env_number("WORLD_SIZE", 1) == 1:
            return header([own], asked.params)
        backend = "cpu:gloo,cuda:nccl" if own["alike"]["device"] == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=asked.timeout))
        facts = of_all(own)
    except UserError:
        raise
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{_short(error)}: look at what other ranks print, and set GLOO_SOCKET_IFNAME") from None
    found = header(facts, asked.params)
    try:
        if not found["failures"]:
            measure(found, asked, nodes_of(facts))
        of_all(None)  # rank 0, which holds the store, must not leave first
    except (RuntimeError, UserError) as error:  # a failed collective, or settings that CO2 refuses
        found["failures"].append(f"rank {own['rank']}: {_short(error)}")
    else:
        dist.destroy_process_group()
    return found


def measure(found: dict[str, Any], asked: argparse.Namespace, nodes: list[list[int]]) -> None:
    """Adds the measured times to the report."""
    device = torch.device("cuda", torch.cuda.current_device()) if found["backend"] == "nccl" else torch.device("cpu")
    if wrong := sound(device):
        found["failures"].append(wrong)
        return
    params, workers = found["params"], found["workers"]
    found["boundary_seconds"] = own = boundary(params, device, asked.timeout)
    of_links = links(nodes, device)
    found["links"] |= {name: link.as_dict() for name, link in of_links.items()}
    found["compressions"] = compressions(params, of_links["all"], device, asked.timeout)
    config, steps = CO2Config.recommended(), [asked.step_ms / 1e3] if asked.step_ms else reports.STEPS
    seconds = {name: compression["seconds"] for name, compression in found["compressions"].items()}
    found["settings"] = [reports.choose(config, workers, step, seconds, own) for step in steps]
    if asked.per_node is None:
        return
    mesh = node_mesh(device.type, asked.per_node, asked.timeout)
    across, within = (of_links.get(name, of_links["all"]) for name in ("across", "within"))
    inside = min(within.seconds(4 * params), seconds["float32"])  # no slower than among all
    of_nodes = compressions(params, across, device, asked.timeout, mesh)
    seconds = {name: compression["seconds"] for name, compression in of_nodes.items()}
    found["per_node"], found["node_compressions"], found["node_settings"] = mesh.size(1), of_nodes, []
    for alone in found["settings"]:
        of_step = reports.choose(config, mesh.size(0), alone["step_seconds"], seconds, own)
        found["node_settings"].append(reports.place(of_step, alone, inside))


def own_facts(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the facts about this process, and sets its GPU by its local rank. Raises UserError if it has no such GPU.

    `host` is the machine's name and network namespace: workers on the same host need no link. `alike` must be equal on
    all workers. `memory` has the bytes of its GPU, or of its share of the host's memory.
    """
    hostname, device, namespace = socket.gethostname(), "cuda" if torch.cuda.is_available() else "cpu", ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    if device == "cuda":
        index, count = env_number("LOCAL_RANK", env_number("SLURM_LOCALID", 0, env), env), torch.cuda.device_count()
        if index >= count:
            raise UserError(f"LOCAL_RANK={index}: torch sees {count} CUDA devices here; start as many workers a node")
        torch.cuda.set_device(index)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = properties.name, properties.total_memory
    else:
        name = f"{os.uname().machine} ({os.cpu_count()} cores)"
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, local_world_size(env))
    return {
        "rank": env_number("RANK", 0, env),
        "host": f"{hostname} {namespace}",
        "hostname": hostname,
        "alike": {"torch": torch.__version__, "co2": __version__, "device": device},
        "device": name,
        "memory": memory,
        "infiniband": no_infiniband(env) if device == "cuda" else "",
    }


def no_infiniband(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev/infiniband")) -> str:
    """Returns why NCCL finds no InfiniBand or RoCE device.

    NCCL loads libibverbs and asks it for the devices; this function does the same. Without a device NCCL silently uses
    TCP. The result is "" if there is a device, or if NCCL_IB_DISABLE is set.
    """
    if env.get("NCCL_IB_DISABLE", "0") != "0":
        return ""
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "libibverbs.so.1 is missing: install libibverbs1 and ibverbs-providers, or rdma-core"
    count = ctypes.c_int(0)
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    if not verbs.ibv_get_device_list(ctypes.byref(count)) or not count.value:
        return "libibverbs finds no device"
    if not [*devices.glob("uverbs*")]:
        return f"no {devices}/uverbs*: in a container, pass the devices in (enroot: MELLANOX_VISIBLE_DEVICES=all)"
    return ""


def nodes_of(facts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Returns the ranks grouped by host, in the order of each host's first rank."""
    hosts = dict.fromkeys(f["host"] for f in facts)
    return [[f["rank"] for f in facts if f["host"] == host] for host in hosts]


def failures(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the reasons why a run would fail, one line each."""
    found = []
    for name in facts[0]["alike"]:
        ranks: dict[str, list[str]] = {}
        for f in facts:
            ranks.setdefault(f["alike"][name], []).append(str(f["rank"]))
        listed = "; ".join(f"{value} on rank {', '.join(of)}" for value, of in ranks.items())
        found += [f"{name} differs: {listed}: use the same on all nodes"] if len(ranks) > 1 else []
    return found


def header(facts: Sequence[dict[str, Any]], params: float) -> dict[str, Any]:
    """Returns the part of the report that needs no measurement."""
    nodes, first = [[facts[rank] for rank in node] for node in nodes_of(facts)], facts[0]
    sizes, kind, memory = {len(node) for node in nodes}, first["alike"]["device"], min(f["memory"] for f in facts)
    named = [(n[0]["hostname"], [f["rank"] for f in n], n[0]["device"]) for n in nodes]
    return {
        "format": 1,  # raise it if a key that the planner reads changes
        "params": max(1, round(params)),
        "workers": len(facts),
        "workers_per_node": sizes.pop() if len(sizes) == 1 else None,
        "nodes": [dict(zip(("hostname", "ranks", "device"), node, strict=True)) for node in named],
        "backend": "nccl" if kind == "cuda" else "gloo",
        "device": {"type": kind, "name": first["device"], "memory_bytes_per_worker": memory},
        "links": {"within": None, "across": None, "all": None},
        "compressions": {},
        "boundary_seconds": None,
        "settings": [],
        "infiniband": next((f"on rank {f['rank']}, {f['infiniband']}" for f in facts if f["infiniband"]), ""),
        "failures": failures(facts),
    }


if __name__ == "__main__":
    main()
