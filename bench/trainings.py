"""What commands that train over slow links have in common: the network, what ranks log, and options."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.cluster import Cluster

FAST = 10_000.0  # Mbit/s: a link that does not slow, over which learning rates are chosen
TUNING_SEED = 100  # of the runs that choose them: no figure is of it


def network(throttle: bool, workers: int, rate_mbit: float) -> contextlib.AbstractContextManager[Cluster | None]:
    """A node for each worker; None where the train script itself throttles the link in software."""
    return contextlib.nullcontext() if throttle else Cluster(workers, rate_mbit)


def of_link(throttle: bool) -> dict[str, Any]:
    """What the JSON of a measurement says of it; verified_mbit: rate -> what a transfer between two nodes measured."""
    return {"link": "throttled in software" if throttle else "namespaces + tbf", "verified_mbit": {}}


def flags(values: Mapping[str, Any]) -> list[str]:
    """As on a command line."""
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]


def write_to(log: Path) -> None:
    """What this rank, a forked process, prints goes to the file, with what libraries print."""
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


class Metrics:
    """The rows of a metrics.jsonl that may still be written."""

    def __init__(self, folder: Path):
        self._path = folder / "metrics.jsonl"
        self._at = 0
        self.rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All rows so far; a line that is not complete is left for the next time."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                complete, end, _ = file.read().rpartition(b"\n")
            self._at += len(complete + end)
            rows = [json.loads(line) for line in complete.splitlines()]
            self.rows += [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]
        return self.rows
