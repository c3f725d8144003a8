"""What each worker knows of itself, told before any collective, and what is wrong or doubtful among all of them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from .. import __version__
from ..sharded.mesh import local_world_size

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TP_SOCKET_", "OMP_NUM_THREADS")
ADDRESS_OF = 0x8915  # SIOCGIFADDR of linux/sockios.h


@dataclass(frozen=True)
class Facts:
    """One worker. A host is a network namespace of a machine: what two workers need no link to cross."""

    rank: int
    host: str
    hostname: str
    local_workers: int
    versions: dict[str, str]
    device: str
    """cpu or cuda."""
    device_name: str
    memory: int
    """Bytes of its GPU, or its share of the host's."""
    problems: list[str]
    """Why this worker could not train."""
    variables: dict[str, str]
    interface: str
    """That gloo takes."""
    address: str
    interfaces: list[str]
    """With an IPv4 address, the loopback left out."""
    locked: int
    """Bytes of memory that may be locked, -1 for no limit."""
    infiniband: list[str]
    pins: bool
    """Whether the host's memory can be pinned, for copies to and from a GPU in the background."""


def own_facts(rank: int, env: Mapping[str, str] = os.environ) -> Facts:
    """This process's. With a GPU its device is set, as its local rank says."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local, found, hostname = local_world_size(env), addresses(), socket.gethostname()
    number = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", "0")))
    problems = list(_missing(device, local, env, found))
    if device == "cuda" and number < torch.cuda.device_count():
        torch.cuda.set_device(number)
    interface, address = taken(found, env, hostname)
    name, memory = _device(device, local)
    return Facts(
        rank=rank,
        host=f"{hostname} {_namespace()}",
        hostname=hostname,
        local_workers=local,
        versions=versions(device),
        device=device,
        device_name=name,
        memory=memory,
        problems=problems,
        variables={key: env[key] for key in sorted(env) if key.startswith(PREFIXES)},
        interface=interface,
        address=address,
        interfaces=[n for n, a in found.items() if not a.startswith("127.")],
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        infiniband=sorted(p.name for p in Path("/sys/class/infiniband").glob("*")),
        pins=device == "cpu" or _pins(),
    )


def versions(device: str) -> dict[str, str]:
    """Of all that must be alike on the workers."""
    found = {"python": "{}.{}".format(*sys.version_info), "torch": torch.__version__, "co2": __version__}
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def _missing(device: str, local: int, env: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    """What this worker could not train without."""
    if not dist.is_available() or not dist.is_gloo_available():
        yield "this torch has no gloo backend: install one with torch.distributed"
    if device == "cuda":
        if not dist.is_nccl_available():
            yield "this torch has no NCCL backend for its GPUs: install a CUDA build for Linux"
        if (gpus := torch.cuda.device_count()) < local:
            yield f"{local} workers on a node with {gpus} GPUs: start as many as there are GPUs"
        if env.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0"):
            yield "TORCH_NCCL_BLOCKING_WAIT is set: nothing would be hidden, and CO2 refuses it; unset it"
    for name in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if found and name not in found:
            yield f"GLOO_SOCKET_IFNAME={name}: there is no such interface with an IPv4 address, but {', '.join(found)}"


def _device(device: str, local: int) -> tuple[str, int]:
    """Its name, and the bytes that a worker may take of its memory."""
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return properties.name, properties.total_memory
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.+)", text)
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name} ({os.cpu_count()} cores)", pages // max(1, local)


def _pins() -> bool:
    try:
        return torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError:
        return False


def _namespace() -> str:
    """Of the network; two containers of one machine may have one each."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def addresses() -> dict[str, str]:
    """Interface -> its IPv4 address. Linux tells; elsewhere none."""
    found: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                reply = fcntl.ioctl(asking.fileno(), ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def taken(found: Mapping[str, str], env: Mapping[str, str], hostname: str) -> tuple[str, str]:
    """The interface that gloo takes, and its address: the one that is named, else that of the hostname's address, else
    the loopback (torch's ProcessGroupGloo::createDefaultDevice)."""
    if named := env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return named, found.get(named, "")
    address = ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(hostname)
    return next(((name, a) for name, a in found.items() if a == address), ("lo", address or "127.0.0.1"))


# -- among all workers --------------------------------------------------------------------------------------------


def nodes_of(facts: Sequence[Facts]) -> list[list[int]]:
    """Ranks by host, in the order of each one's first rank."""
    hosts: dict[str, list[int]] = {}
    for f in facts:
        hosts.setdefault(f.host, []).append(f.rank)
    return list(hosts.values())


def failures(facts: Sequence[Facts]) -> list[str]:
    """What makes a run fail, a line each."""
    found = [f"{who}: {text}" for text, who in _by_value({f.rank: p for f in facts for p in f.problems}).items()]
    names = {name: None for f in facts for name in f.versions}
    kinds = {name: {f.rank: f.versions.get(name, "none") for f in facts} for name in names}
    kinds["device"] = {f.rank: f.device for f in facts}
    for name, of_rank in kinds.items():
        if len(values := _by_value(of_rank)) > 1:
            listed = "; ".join(f"{value} on {who}" for value, who in values.items())
            found.append(f"{name} is unlike: {listed}: install the same on all nodes")
    return found


def warnings(facts: Sequence[Facts]) -> list[str]:
    """What may go wrong, or cost time, a line each."""
    nodes = nodes_of(facts)
    return [*_of_placement(facts, nodes), *_of_network(facts, nodes), *_of_variables(facts)]


def _of_placement(facts: Sequence[Facts], nodes: list[list[int]]) -> Iterator[str]:
    if any(node != list(range(node[0], node[0] + len(node))) for node in nodes):
        yield "the ranks of a node are not consecutive, as ShardedCO2's node_mesh takes them: start with torchrun"
    if len({len(node) for node in nodes}) > 1:
        yield f"the nodes have {', '.join(str(len(n)) for n in nodes)} workers: node_mesh needs equally many"
    if wrong := [f.rank for f in facts if f.local_workers != next(len(n) for n in nodes if f.rank in n)]:
        yield f"LOCAL_WORLD_SIZE is not the number of workers on the node, on {ranks_text(wrong)}: start with torchrun"
    if len(names := _by_value({f.rank: f.device_name for f in facts})) > 1:
        listed = "; ".join(f"{name} on {who}" for name, who in names.items())
        yield f"devices are unlike: {listed}: the slowest sets the pace"
    if pageable := [f.rank for f in facts if not f.pins]:
        yield f"the host's memory cannot be pinned on {ranks_text(pageable)}: offload=True would be refused there"


def _of_network(facts: Sequence[Facts], nodes: list[list[int]]) -> Iterator[str]:
    if len(nodes) == 1:
        return
    loop = [f.rank for f in facts if f.address.startswith("127.")]
    if loop:
        seen = next((f.interfaces for f in facts if f.rank == loop[0] and f.interfaces), ["eth0"])
        yield (
            f"gloo takes the loopback on {ranks_text(loop)}, which no other node reaches: set GLOO_SOCKET_IFNAME, such "
            f"as {seen[0]}, or give the hostname another address in /etc/hosts"
        )
    several = [f for f in facts if len(f.interfaces) > 1 and "GLOO_SOCKET_IFNAME" not in f.variables]
    if several and not loop:
        f = several[0]
        yield f"several interfaces ({', '.join(f.interfaces)}) and no GLOO_SOCKET_IFNAME: gloo took {f.interface}"
    if tight := [f.rank for f in facts if f.infiniband and f.locked >= 0]:
        yield f"ulimit -l is {facts[tight[0]].locked >> 10} KiB on {ranks_text(tight)}: InfiniBand needs it unlimited"


def _of_variables(facts: Sequence[Facts]) -> Iterator[str]:
    for name in sorted({name for f in facts for name in f.variables}):
        values = _by_value({f.rank: f.variables.get(name, "unset") for f in facts})
        if len(values) > 1 and not name.endswith("_IFNAME"):  # interfaces' names may differ by node
            yield f"{name} is unlike: {'; '.join(f'{value} on {who}' for value, who in values.items())}"
    handling = {f.variables.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "") for f in facts}
    if "0" in handling:
        yield "TORCH_NCCL_ASYNC_ERROR_HANDLING=0: a worker that dies would leave the others hanging; unset it"
    if any(f.variables.get("NCCL_P2P_DISABLE", "0") not in ("", "0") for f in facts):
        yield "NCCL_P2P_DISABLE is set: the GPUs of a node exchange through the host's memory"


def _by_value(of_rank: Mapping[int, str]) -> dict[str, str]:
    """Value -> the ranks that have it, as text."""
    found: dict[str, list[int]] = {}
    for rank, value in of_rank.items():
        found.setdefault(value, []).append(rank)
    return {value: ranks_text(ranks) for value, ranks in found.items()}


def ranks_text(ranks: Sequence[int]) -> str:
    """rank 0-3, 6."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return "rank " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
