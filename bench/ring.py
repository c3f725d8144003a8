"""Are the hops of ring attention hidden under its blocks? python -m bench.ring [--delays 0 30 100] [--block 60]

Each rank is a process of this machine. A stand-in link holds every exchange back until the delay is over, counted from
the moment in which the sender posts it. Overlapped: training/ring.py as it is. At once: each exchange is waited for
where it is posted. All cells are measured in turns, repeat by repeat, so that a change of the machine's load falls on
all of them; a time is that of the slowest rank. With --block every block takes so long, by a deadline, as on a device
of its own; then a schedule says what to expect, and little depends on the machine. --block 0 computes on this machine's
cores, which have to be quiet, as many as ranks and some to spare. Writes ring.json and ring.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench import report
from bench.report import mean_sd, read_options, require_company, require_each_once, require_one_or_more
from core.errors import UserError
from core.testing import run_distributed
from core.testing.link import Link
from training import ring
from training.ring import Piece, Shares, Waited, ring_attention
from training.script import launch

NAME = "ring"
HEADS, WIDTH = 4, 64


@dataclass(frozen=True)
class Ring:
    """One document over all ranks, and one on each rank."""

    workers: int = 2
    delays: tuple[float, ...] = (0.0, 30.0, 100.0)
    """Milliseconds from posting an exchange to its arrival."""
    block: float = 60.0
    """Milliseconds that a block takes, forward and backward alike; 0: as long as this machine needs."""
    split: int = 4096
    """Tokens of the document over all ranks; 64 are plenty where a block's time is given."""
    whole: int = 0
    """Tokens of each rank's own document; 0: none."""
    repeats: int = 5
    out: Path | None = None
    """Where to write; runs/ring-DATE by default."""

    def check(self) -> None:
        """A UserError names the first option that cannot be."""
        require_company(self)
        require_each_once(self, "delays")
        require_one_or_more(self, "split", "repeats")
        for value in (*self.delays, self.block, self.whole):
            if not 0 <= value < float("inf"):
                raise UserError(f"{value}: delays, block and whole are 0 or more")


# -- the stand-in -----------------------------------------------------------------------------------------------------


class Delay:
    """A link that carries any number of bytes in the same time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def reserve(self, nbytes: float) -> float:
        return time.perf_counter() + self.seconds


class Held:
    """Exchanges, and stamps of the moments until which their senders' links carry them."""

    def __init__(self, works: list[Waited], stamps: list[Tensor]):
        self.works, self.stamps = works, stamps

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()
        until = max((stamp.item() for stamp in self.stamps), default=0.0)
        time.sleep(max(0.0, until - time.perf_counter()))


class SlowShares(Shares):
    """Shares whose exchanges cross a stand-in link. The receiver waits by the sender's clock, which is its own: all
    processes of a machine share it. at_once: wait where it is posted."""

    def __init__(self, documents: Tensor, rings: Sequence[Sequence[int]], link: Link, at_once: bool = False):
        super().__init__(documents, rings)
        self.link, self.at_once, self.first_tag = link, at_once, 2 * len(rings)

    def exchange(
        self, pieces: Sequence[Piece], outgoing: dict[int, Tensor], incoming: dict[int, Tensor], lane: int
    ) -> list[Waited]:
        crossed = self.link.reserve(sum(outgoing[p.number].nbytes for p in pieces))
        stamp = torch.tensor([crossed], dtype=torch.float64)
        targets = sorted({p.next for p in pieces if outgoing[p.number].numel()})
        sources = sorted({p.previous for p in pieces if incoming[p.number].numel()})
        stamps = [torch.zeros_like(stamp) for _ in sources]
        works = super().exchange(pieces, outgoing, incoming, lane)
        tag = self.first_tag + lane
        works += [dist.isend(stamp, group=self.group, group_dst=to, tag=tag) for to in targets]  # type: ignore[misc]
        pairs = zip(stamps, sources, strict=True)
        works += [dist.irecv(s, group=self.group, group_src=at, tag=tag) for s, at in pairs]  # type: ignore[misc]
        held = Held(works, stamps)
        if not self.at_once:
            return [held]
        held.wait()
        return []


def paced(fn: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """fn, whose result is there no earlier than after so long."""

    def run(*args: Any, **how: Any) -> Any:
        due = time.perf_counter() + seconds
        result = fn(*args, **how)
        time.sleep(max(0.0, due - time.perf_counter()))
        return result

    return run


def expected(ranks: int, delay: float, block: float, at_once: bool, whole: bool = False) -> tuple[float, float]:
    """What forward and backward take by the schedule of training/ring.py, in the unit of delay and block.

    whole: whether each rank has a document of its own, too, which is a block.
    """
    hops, own = ranks - 1, block if whole else 0.0
    if at_once:
        return ranks * block + own + hops * delay, ranks * block + own + 2 * hops * delay
    hop = max(block, delay)
    forward = max(block + own, delay) + (hops - 1) * hop + block
    backward = hops * hop + (hop if hops > 1 else block)  # in the last block's time only gradients travel, if any do
    return forward, backward + max(own, delay)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(rank: int, ranks: int, o: Ring) -> list[dict[str, Any]]:
    """A row for each delay and way, with the seconds of all repeats."""
    lengths = [o.split, *[o.whole] * (ranks if o.whole else 0)]
    documents, rings = torch.tensor([0, *lengths]).cumsum(0), [tuple(range(ranks)), *((r,) for r in range(ranks))]
    cells = [(delay, at_once) for delay in o.delays for at_once in (False, True)]
    rows = [dict(delay=delay, at_once=at_once, forward=[], backward=[]) for delay, at_once in cells]
    with (
        mock.patch.object(ring, "flash", paced(ring.flash, o.block / 1e3)),
        mock.patch.object(ring, "flash_backward", paced(ring.flash_backward, o.block / 1e3)),
    ):
        for repeat in range(o.repeats + 1):  # the first one warms up
            for row, (delay, at_once) in zip(rows, cells, strict=True):
                shares = SlowShares(documents, rings[: len(lengths)], Delay(delay / 1e3), at_once)
                forward, backward = seconds(shares)
                if repeat:
                    row["forward"].append(forward)
                    row["backward"].append(backward)
    return rows


def seconds(shares: Shares) -> tuple[float, float]:
    """Of a forward and a backward pass, on the slowest rank."""
    q, k, v = (torch.randn(len(shares.indices), HEADS, WIDTH, requires_grad=True) for _ in range(3))
    marks = []
    dist.barrier()
    marks.append(time.perf_counter())
    out = ring_attention(q, k, v, shares)
    marks.append(time.perf_counter())
    dist.barrier()
    marks.append(time.perf_counter())
    out.sum().backward()
    marks.append(time.perf_counter())
    took = torch.tensor([marks[1] - marks[0], marks[3] - marks[2]], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took[0].item(), took[1].item()


# -- the table --------------------------------------------------------------------------------------------------------

TITLES = ("delay, ms", "way", "forward, ms", "expected", "backward, ms", "expected")


def cells_of(row: dict[str, Any], o: Ring) -> list[str]:
    told = expected(o.workers, row["delay"], o.block, row["at_once"], bool(o.whole)) if o.block else ("", "")
    took = [mean_sd([1e3 * s for s in row[which]], ".0f") for which in ("forward", "backward")]
    way = "at once" if row["at_once"] else "overlapped"
    numbers = [took[0], f"{told[0]:.0f}" if o.block else "", took[1], f"{told[1]:.0f}" if o.block else ""]
    return [f"{row['delay']:g}", way, *numbers]


def caption(result: dict[str, Any], o: Ring) -> str:
    computed = f"each block takes {o.block:g} ms, by a deadline" if o.block else "blocks are computed by this machine"
    own = f", and one of {o.whole} on each" if o.whole else ""
    return (
        f"Ring attention on {o.workers} ranks, a document of {o.split} tokens over all{own}, {HEADS} heads of width "
        f"{WIDTH}, float32, random values; {computed}. Mean ± standard deviation of {o.repeats} repeats, the slowest "
        f"rank's; {report.source(result)}\n\n"
    )


def main() -> None:
    o = read_options(Ring, "bench.ring")
    folder = report.new_folder(NAME, o.out)
    rows = run_distributed(measure, o.workers, o, timeout=3600.0)[0]
    result = report.header("bench.ring", o) | {"rows": rows}
    text = caption(result, o) + report.table(TITLES, (cells_of(row, o) for row in rows)) + "\n"
    report.conclude(folder, NAME, result, text)


if __name__ == "__main__":
    launch(main)
