"""Are the hops of ring attention hidden under its blocks? python -m bench.ring [--delays 0 30 100] [--clock real]

Each rank is a process of this machine. A stand-in link holds every exchange back until the delay is over, counted from
the moment in which the sender posts it. Overlapped: language/lengths/ring.py as it is. At once: each exchange is waited
for where it is posted. A time is that of the slowest rank.

With --clock counted a block takes --block ms and an exchange its delay, which each rank adds up instead of letting them
pass: the schedule of the real code on real processes, whatever else the machine does. With --clock real they pass, or,
with --block 0, blocks are computed on this machine's cores, which have to be quiet, as many as ranks and some to spare;
cells are then measured in turns, so that a change of the machine's load falls on all. Writes ring.json and ring.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench import report
from bench.report import Asked, mean_sd, require, require_company
from core.errors import UserError
from core.testing import run_distributed
from core.testing.link import Link
from language.lengths import ring
from language.lengths.ring import Piece, Shares, Waited, ring_attention
from training.script import launch

HEADS, WIDTH = 4, 64


@dataclass(frozen=True)
class Ring(Asked):
    """One document over all ranks, and one on each rank."""

    workers: int = 2
    delays: tuple[float, ...] = (0.0, 30.0, 100.0)
    """Milliseconds from posting an exchange to its arrival."""
    clock: Literal["counted", "real"] = "counted"
    block: float = 60.0
    """Milliseconds that a block takes, forward and backward alike; 0: as long as this machine needs."""
    split: int = 64
    """Tokens of the document over all ranks; 4096 where this machine computes the blocks."""
    whole: int = 0
    """Tokens of each rank's own document; 0: none."""
    repeats: int = 5

    def check(self) -> None:
        require_company(self)
        require(self, once="delays", ones="split repeats")
        for value in (*self.delays, self.block, self.whole):
            if not 0 <= value < float("inf"):
                raise UserError(f"{value}: delays, block and whole are 0 or more")
        if not self.block and self.clock == "counted":
            raise UserError("block=0: give the time of a block, or --clock real")


# -- the stand-in -----------------------------------------------------------------------------------------------------


class Clock:
    """The machine's, which all its processes share."""

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, due: float) -> None:
        time.sleep(max(0.0, due - self.now()))


class Counted(Clock):
    """A clock that goes on only where something is waited for."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, due: float) -> None:
        self.time = max(self.time, due)


class Delay:
    """A link that carries any number of bytes in the same time."""

    def __init__(self, seconds: float, clock: Clock):
        self.seconds, self.clock = seconds, clock

    def reserve(self, nbytes: float) -> float:
        return self.clock.now() + self.seconds


class Held:
    """Exchanges, and stamps of the moments until which their senders' links carry them."""

    def __init__(self, works: list[Waited], stamps: list[Tensor], clock: Clock):
        self.works, self.stamps, self.clock = works, stamps, clock

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()
        self.clock.wait_until(max((stamp.item() for stamp in self.stamps), default=0.0))


class SlowShares(Shares):
    """Shares whose exchanges cross a stand-in link. With each goes the moment, by the sender's clock, until which the
    receiver has to wait. at_once: wait where it is posted."""

    def __init__(
        self, documents: Tensor, rings: Sequence[Sequence[int]], link: Link, clock: Clock, at_once: bool = False
    ):
        super().__init__(documents, rings)
        self.link, self.clock, self.at_once, self.first_tag = link, clock, at_once, 2 * len(rings)

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
        held = Held(works, stamps, self.clock)
        if not self.at_once:
            return [held]
        held.wait()
        return []


def paced(fn: Callable[..., Any], seconds: float, clock: Clock) -> Callable[..., Any]:
    """fn, whose result is there no earlier than after so long."""

    def run(*args: Any, **how: Any) -> Any:
        due = clock.now() + seconds
        result = fn(*args, **how)
        clock.wait_until(due)
        return result

    return run


def expected(ranks: int, delay: float, block: float, at_once: bool, whole: bool = False) -> tuple[float, float]:
    """What forward and backward take by the schedule of language/lengths/ring.py, in the unit of delay and block.

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
    clock = Counted() if o.clock == "counted" else Clock()
    lengths = [o.split, *[o.whole] * (ranks if o.whole else 0)]
    documents, rings = torch.tensor([0, *lengths]).cumsum(0), [tuple(range(ranks)), *((r,) for r in range(ranks))]
    cells = [(delay, at_once) for delay in o.delays for at_once in (False, True)]
    rows = [dict(delay=delay, at_once=at_once, forward=[], backward=[]) for delay, at_once in cells]
    with (
        mock.patch.object(ring, "flash", paced(ring.flash, o.block / 1e3, clock)),
        mock.patch.object(ring, "flash_backward", paced(ring.flash_backward, o.block / 1e3, clock)),
    ):
        for repeat in range(o.repeats + 1 if o.clock == "real" else 1):
            for row, (delay, at_once) in zip(rows, cells, strict=True):
                link = Delay(delay / 1e3, clock)
                shares = SlowShares(documents, rings[: len(lengths)], link, clock, at_once)
                took = seconds(shares, clock)
                if repeat or o.clock == "counted":  # else the first one warms up
                    row["forward"].append(took[0])
                    row["backward"].append(took[1])
    return rows


def seconds(shares: Shares, clock: Clock) -> list[float]:
    """Of a forward and a backward pass, on the slowest rank."""
    q, k, v = (torch.randn(len(shares.indices), HEADS, WIDTH, requires_grad=True) for _ in range(3))
    out, forward = timed(lambda: ring_attention(q, k, v, shares), clock)
    _, backward = timed(out.sum().backward, clock)
    slowest = torch.tensor([forward, backward], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def timed(fn: Callable[[], Any], clock: Clock) -> tuple[Any, float]:
    """fn(), which all ranks begin together, and its seconds on this one."""
    dist.barrier()
    if isinstance(clock, Counted):
        clock.time = 0.0
    began = clock.now()
    return fn(), clock.now() - began


# -- the table --------------------------------------------------------------------------------------------------------

TITLES = ("delay, ms", "way", "forward, ms", "expected", "backward, ms", "expected")


def cells_of(row: dict[str, Any], o: dict[str, Any]) -> list[str]:
    block = o["block"]
    told = expected(o["workers"], row["delay"], block, row["at_once"], bool(o["whole"])) if block else ("", "")
    took = [mean_sd([1e3 * s for s in row[which]], ".0f") for which in ("forward", "backward")]
    way = "at once" if row["at_once"] else "overlapped"
    numbers = [took[0], f"{told[0]:.0f}" if block else "", took[1], f"{told[1]:.0f}" if block else ""]
    return [f"{row['delay']:g}", way, *numbers]


def text(result: dict[str, Any]) -> str:
    o = result["options"]
    computed = f"each block takes {o['block']:g} ms" if o["block"] else "blocks are computed by this machine"
    own = f", and one of {o['whole']} on each" if o["whole"] else ""
    how = f"mean ± standard deviation of {o['repeats']} repeats" if o["clock"] == "real" else "counted, not measured"
    return (
        f"- Ring attention on {o['workers']} ranks, a document of {o['split']} tokens over all{own}, {HEADS} heads of "
        f"width {WIDTH}, float32, random values; {computed}; the slowest rank's time, {how}; "
        f"{report.source(result)}\n\n"
        f"{report.table(TITLES, (cells_of(row, o) for row in result['rows']))}\n"
    )


def main() -> None:
    ranks = lambda o: run_distributed(measure, o.workers, o, timeout=3600.0)  # noqa: E731
    report.run(Ring, "ring", lambda o, session: session.result.update(rows=ranks(o)[0]), text)


if __name__ == "__main__":
    launch(main)
