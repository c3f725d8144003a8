"""GB/s of each way to send a layer, beside a memory copy: python -m bench.codecs [--threads 1] [--device cpu|cuda]

A rate is float32 bytes that go in (encode) or come out (decode) a second; copies are taken in between, of as many
bytes, so that whatever else the machine does falls on both; on a CPU with one thread it is that thread's time that
counts, not the clock's. int formats and floats are encoded in segments as
core/wires/quantized.py does, by hand and by torch.compile; top-k and low rank on a matrix [2048, 2048], low rank as one
power iteration with its orthogonalisation. Writes codecs.json and codecs.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bench import report
from bench.boundary import timed as by_the_clock
from bench.report import Asked, Spread, require, require_device
from core.lgreco.senders import largest, product
from core.wires import formats as wire
from core.wires import quantized
from training.script import launch

SIDE = 2048
NUMEL = SIDE * SIDE  # 16 MiB: beyond a core's own cache
DENSITIES, RANKS = (0.001, 0.01, 0.1), (1, 4, 32)


@dataclass(frozen=True)
class Codecs(Asked):
    """The rate of every wire format."""

    threads: int = 1
    repeats: int = 9
    compiled: bool = True
    """Also by torch.compile; it takes half a minute, and a C++ compiler on a CPU."""
    device: Literal["cpu", "cuda"] = "cpu"

    def check(self) -> None:
        require(self, ones="threads repeats")
        require_device(self)


Way = tuple[str, Callable[[], Any], Callable[[], Any] | None]


def ways(o: Codecs, x: Tensor) -> list[Way]:
    """(name, encode, decode) of everything that is measured."""
    segment = quantized.GPU_SEGMENT if x.is_cuda else quantized.SEGMENT
    pieces = x.split(segment)
    found: list[Way] = []
    for name in wire.WIRES[1:]:
        sent = [wire.encode(piece, name) for piece in pieces]
        found.append((name, each(wire.encode, pieces, name), each(wire.decode, sent, name)))
        if o.compiled:
            encode, decode = (torch.compile(f, dynamic=False) for f in (wire.encode, wire.decode))
            found.append((f"{name}, compiled", each(encode, pieces, name), each(decode, sent, name)))
    for density in DENSITIES:
        k = round(density * NUMEL)
        where = largest(x.abs(), k)
        values, zeros = x[where], torch.zeros_like(x)
        encode = lambda k=k: x[largest(x.abs(), k)]  # noqa: E731
        found.append((f"top{density:g}", encode, lambda w=where, v=values, z=zeros: z.zero_().index_add_(0, w, v)))
    matrix = x.view(SIDE, SIDE)
    for rank in RANKS:
        q = torch.randn(SIDE, rank, device=x.device)
        p = torch.linalg.qr(product(matrix, q)).Q
        encode = lambda q=q: product(matrix.T, torch.linalg.qr(product(matrix, q)).Q)  # noqa: E731
        found.append((f"rank{rank}", encode, lambda p=p, q=q: p @ q.T))
    return found


def each(f: Callable[..., Any], pieces: Any, name: str) -> Callable[[], None]:
    """f(piece, name) of every piece, one after the other."""

    def once() -> None:
        for piece in pieces:
            f(piece, name)

    return once


def measure(o: Codecs) -> list[dict[str, Any]]:
    """GB/s of every way, in turns, so that no way has a moment of its own."""
    torch.set_num_threads(o.threads)
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(o.device)
    target = torch.empty_like(x)
    everything = ways(o, x)
    rows = {name: {"way": name, "encode": [], "decode": [], "copy": []} for name, *_ in everything}
    for repeat in range(o.repeats + 1):  # the first one warms up, and compiles
        for name, encode, decode in everything:
            seconds = {"copy": timed(lambda: target.copy_(x), o), "encode": timed(encode, o)}
            seconds |= {"decode": timed(decode, o)} if decode else {}
            for what, took in seconds.items() if repeat else ():
                rows[name][what].append(x.nbytes / took / 1e9)
    return list(rows.values())


def timed(f: Callable[[], Any], o: Codecs) -> float:
    """Seconds; of one thread on a CPU its own, without those in which others had the core."""
    if o.device == "cuda" or o.threads > 1:
        return by_the_clock(f, o.device)
    began = time.thread_time()
    f()
    return time.thread_time() - began


TITLES = ("format", "encode, GB/s, median (range)", "decode", "copy", "encode / copy")


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    spreads = [Spread.of(row[what]) for what in ("encode", "decode", "copy")]
    return [row["way"], *(s.show(".2f") for s in spreads), f"{spreads[0].median / spreads[2].median:.2f}"]


def text(result: dict[str, Any]) -> str:
    o, versions = result["options"], result["versions"]
    source = f"{o['device']}, {o['threads']} threads, torch {versions['torch']}; {report.source(result)}"
    rest = "\n\nCUDA: [gpu.md](gpu.md).\n" * (o["device"] == "cpu")
    return f"{source}\n\n{report.table(TITLES, map(cells, result['rows']))}{rest}"


def main() -> None:
    report.run(Codecs, "codecs", lambda o, session: session.result.update(rows=measure(o)), text)


if __name__ == "__main__":
    launch(main)
