"""The rest of Zeppelin as a study: a node's traffic over several NICs, and tokens dealt anew for the linear layers.

    python -m bench.lengths_routes                    # both by the model of language/lengths/plan.py, no seconds
    python -m bench.lengths_routes --nics 1 2 4       # and the routing measured on the emulated cluster

Routing: where a ring crosses from a node to the next, one rank sends to one rank, over one of the nodes' NICs. With
proxies the sender deals its message out to the ranks of its node, each sends its part over its own NIC to the rank in
the same place of the other node, and these hand the parts to the receiver. Remapping: between attention and linear
layers tokens move until every rank has equally many, by the transfer matrix whose slowest rank is fastest, and back.
The layers then wait for one another: a layer takes the slowest attention, the mean of linear layers, and the moves.
Each is one switch here; neither is in the train scripts. Writes lengths_routes.json and lengths_routes.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench import report
from bench.cluster import Cluster, run_ranks
from bench.lengths_plans import TOKENS, drawn, even, island, planned, zones
from bench.report import Asked, mean_sd, require
from core.errors import UserError
from language.lengths import laws
from language.lengths.plan import Island, Loads, Ring, layer_seconds
from training.script import launch

NICS = 4  # of a node of the paper
MEGABYTES = 2.0  # of the message that is timed
HIDDEN = 0.5  # bytes of a token's hidden states, to and fro, forward and backward, of those that a hop of a ring sends


@dataclass(frozen=True)
class Routes(Asked):
    """What routing and remapping bring."""

    laws: tuple[str, ...] = tuple(laws.LAWS)
    draws: int = 20
    """Sets of documents, seeds 0 to draws - 1, for each law."""
    nics: tuple[int, ...] = ()
    """Measure on an emulated cluster of two nodes with so many links each, and a rank for each link."""
    rate: float = 100.0
    """Mbit/s of a link."""
    repeats: int = 5

    def check(self) -> None:
        require(self, positive="rate", ones="draws repeats", laws=laws.LAWS)
        for nics in self.nics:
            if not 1 <= nics <= 16:
                raise UserError(f"nics={nics}: give 1 to 16")


# -- remapping --------------------------------------------------------------------------------------------------------


def transfer(have: Sequence[float], want: Sequence[float], i: Island) -> np.ndarray:
    """How many tokens each rank sends to each, float64 [ranks, ranks]; the diagonal stays. Fractions are not rounded.

    The least time in which the slowest rank can be done, sending and receiving at once, is found by bisection. A node
    that has too many tokens sends the difference across from all its ranks, each as much as that time allows: those
    that hold too few send tokens, too, and get others inside the node. Needs links inside that are no slower.
    """
    excess = (np.array(have, dtype=float) - want).reshape(i.nodes, i.devices)
    surplus = excess.sum(axis=1)
    sends = surplus[:, None] > 0
    own = np.where(sends, *(np.reshape(tokens, excess.shape) for tokens in (have, want)))
    low, high = 0.0, float(np.abs(excess).sum()) * i.across[1]
    for _ in range(60):
        middle = (low + high) / 2
        most = across_within(middle, np.where(sends, excess, -excess), own, i)
        enough = (most >= 0).all() and (most.sum(axis=1) >= np.abs(surplus)).all()
        low, high = (low, middle) if enough else (middle, high)
    most = across_within(high, np.where(sends, excess, -excess), own, i)
    crossing = most * (surplus / np.maximum(most.sum(axis=1), 1e-300))[:, None]  # > 0: sent, < 0: received
    result = np.zeros((i.size, i.size))
    for node in range(i.nodes):
        mine = slice(node * i.devices, (node + 1) * i.devices)
        result[mine, mine] = corner(excess[node] - crossing[node])
    result += corner(crossing.ravel())
    return result + np.diag(np.array(have) - result.sum(axis=1))


def across_within(seconds: float, excess: np.ndarray, own: np.ndarray, i: Island) -> np.ndarray:
    """How many of its own tokens each rank can send across in a time, what it has too many or too few going inside its
    node; negative where that alone takes longer."""
    (_, inside), (_, across) = i.inside, i.across
    both = (seconds - excess * inside) / max(across - inside, 1e-300)
    enough = np.minimum(np.minimum(seconds / across, excess + seconds / inside), own)
    return np.where(seconds / across >= excess, enough, both)


def corner(excess: np.ndarray) -> np.ndarray:
    """A matrix that sends what some have too many of to those that have too few, by the north-west corner rule."""
    left = excess.copy()
    result = np.zeros((len(left), len(left)))
    givers, takers = (list(np.flatnonzero(sign * left > 0)) for sign in (1, -1))
    while givers and takers:
        a, b = givers[0], takers[0]
        amount = min(left[a], -left[b])
        result[a, b] += amount
        left[a] -= amount
        left[b] += amount
        givers, takers = givers[int(left[a] <= 0) :], takers[int(left[b] >= 0) :]
    return result


def transfer_seconds(matrix: np.ndarray, i: Island) -> float:
    """Of the slowest rank, which sends and receives at once."""
    node = np.arange(i.size) // i.devices
    price = np.where(node[:, None] == node, i.inside[1], i.across[1]) * (1 - np.eye(i.size))
    return float(max((matrix * price).sum(axis=1).max(), (matrix * price).sum(axis=0).max()))


def remapped_seconds(lengths: Sequence[int], rings: Sequence[Ring], i: Island) -> float:
    """Of a layer whose tokens are dealt anew before the linear layers, and back after them."""
    loads = Loads.of(lengths, rings, i)
    mean = sum(loads.tokens) / i.size
    moves = HIDDEN * transfer_seconds(transfer(loads.tokens, [mean] * i.size, i), i)
    return max(map(max, loads.work, loads.hops)) + i.linear * mean + moves


# -- routing ----------------------------------------------------------------------------------------------------------


def routed(i: Island, nics: int = NICS) -> Island:
    """The same devices where a hop across goes over so many NICs, by two more hops inside. As long as no other ring
    crosses: all share the NICs."""
    (wait, inside), (far, across) = i.inside, i.across
    return replace(i, across=(far + 2 * wait, across / nics + 2 * inside * (nics - 1) / nics))


def send_direct(x: Tensor, nodes: int, rank: int) -> None:
    """From rank 0 to the first rank of the second node, by one message."""
    half = dist.get_world_size() // nodes
    if rank in (0, half):
        (dist.send(x, half) if rank == 0 else dist.recv(x, 0))


def send_by_proxies(x: Tensor, nodes: int, rank: int) -> None:
    """The same over all ranks of both nodes: dealt out, sent over every NIC, put together."""
    half = dist.get_world_size() // nodes
    parts, place = list(x.tensor_split(half)), rank % half
    part = parts[place]
    if rank == 0:
        works = [dist.isend(parts[to], to) for to in range(1, half)]
        works.append(dist.isend(part, half))
    elif rank < half:
        dist.recv(part, 0)
        works = [dist.isend(part, half + place)]
    elif rank > half:
        dist.recv(part, place)
        works = [dist.isend(part, half)]
    else:
        works = [dist.irecv(part, 0), *(dist.irecv(parts[at], half + at) for at in range(1, half))]
    for work in works:
        assert work is not None
        work.wait()


WAYS = {"direct": send_direct, "proxies": send_by_proxies}


def timed_ways(repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, of all ranks, on one rank of the cluster; the ways take turns."""
    dist.init_process_group("gloo")
    rank, took = int(os.environ["RANK"]), {way: [] for way in WAYS}
    x = torch.zeros(int(MEGABYTES * 250_000))
    for repeat in range(repeats + 1):  # the first one connects
        for way, send in WAYS.items():
            x.copy_(torch.arange(len(x)) % 1000 if rank == 0 else torch.zeros(len(x)))
            dist.barrier()
            began = time.perf_counter()
            send(x, 2, rank)
            dist.barrier()
            if repeat:
                took[way].append(time.perf_counter() - began)
            if rank == dist.get_world_size() // 2:
                assert torch.equal(x, torch.arange(len(x)) % 1000), f"{way} has lost something"
    dist.barrier()
    return took


def measure(o: Routes) -> list[dict[str, Any]]:
    rows = []
    for nics in o.nics:
        with Cluster(2, o.rate, nics=nics) as cluster:
            took = run_ranks(timed_ways, cluster, nics, 2, o.repeats, timeout=600.0)[0]
        rows += [dict(nics=nics, way=way, seconds=seconds) for way, seconds in took.items()]
    return rows


# -- the tables -------------------------------------------------------------------------------------------------------


def prices(lengths: Sequence[int], i: Island) -> dict[str, float]:
    """Seconds of a layer, in the order of the paper's ablation and then with the plan."""
    zoned, ours = zones(lengths, i), planned(lengths, i)
    return {
        "even": even(lengths, i),
        "even, routed": even(lengths, routed(i)),
        "thresholds, routed": layer_seconds(lengths, zoned, routed(i)),
        "thresholds, routed, remapped": remapped_seconds(lengths, zoned, routed(i)),
        "plan": layer_seconds(lengths, ours, i),
        "plan, routed": layer_seconds(lengths, planned(lengths, routed(i)), routed(i)),
        "plan, remapped": remapped_seconds(lengths, ours, i),
    }


def modelled(o: Routes) -> list[dict[str, Any]]:
    """For each link and law how many times the throughput of even context parallelism each has."""
    rows = []
    for link, i in (("200 Gbit/s", island(200e9)), ("25 Gbit/s", island(25e9))):
        for law in o.laws:
            row: dict[str, Any] = dict(link=link, law=law)
            for seed in range(o.draws):
                found = prices(drawn(law, seed, 4000, TOKENS * i.size), i)
                for name, seconds in found.items():
                    row.setdefault(name, []).append(found["even"] / seconds)
            rows.append(row)
    return rows


def text_of(result: dict[str, Any]) -> str:
    o = result["options"]
    names = [name for name in result["modelled"][0] if name not in ("link", "law", "even")]
    rows = ([r["link"], r["law"], *(mean_sd(r[name], ".2f") for name in names)] for r in result["modelled"])
    text = (
        "- Times the throughput of even context parallelism, by the model alone, in the order of Zeppelin's ablation, "
        f"then with the plan of language/lengths/plan.py; 2 nodes of 8 A800 with {NICS} NICs, links of a flow as said, "
        f"{TOKENS} tokens a device, laws with parameters of ours, seeds 0 to {o['draws'] - 1}; "
        f"{report.source(result)}\n\n"
    )
    text += report.table(("link", "law", *names), rows) + "\n\n"
    if not result["measured"]:
        return text + "The routing on the emulated cluster: not run.\n"
    text += (
        f"- A message of {MEGABYTES:g} MB from a rank to one of the other node, links of {o['rate']:g} Mbit/s, "
        f"{o['repeats']} repeats in turns; {report.source(result)}\n\n"
    )
    cells = ([r["nics"], r["way"], mean_sd([1e3 * s for s in r["seconds"]], ".0f")] for r in result["measured"])
    return text + report.table(("NICs of a node", "way", "ms"), cells) + "\n"


def main() -> None:
    both = lambda o, session: session.result.update(measured=measure(o), modelled=modelled(o))  # noqa: E731
    report.run(Routes, "lengths_routes", both, text_of, forks=lambda o: bool(o.nics))


if __name__ == "__main__":
    launch(main)
