"""How the rows of bench.peers are tuned: over the same learning rates and periods, on a seed and samples that no figure
is of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.loop import EVERY_STEP, FREE
from bench.peers.model import LR

SEED = 100  # the figures are of seeds from 0 on


@dataclass(frozen=True)
class Choice:
    """lr: of the inner optimiser. tau: local steps a round."""

    lr: float
    tau: int


def choices(method: str, factors: Sequence[float], taus: Sequence[int]) -> list[Choice]:
    """What is tried: each learning rate with each period. ddp, dpu and acco have no period, co2_auto chooses
    its own."""
    taus = taus[:1] if method in (*EVERY_STEP, FREE) else taus
    return [Choice(LR * factor, tau) for factor, tau in itertools.product(factors, taus)]


def tune(
    method: str,
    options: Sequence[Choice],
    run: Callable[[str, Choice], dict[str, Any]],
    target: float,
) -> tuple[Choice, list[dict[str, Any]]]:
    """The choice that comes first to the target, or where none does, ends with the least loss; and a line each."""
    if len(options) == 1:
        return options[0], []
    tried = []
    for choice in options:
        result = run(method, choice)
        tried.append({"method": method, "lr": choice.lr, "tau": choice.tau, **score(result, target)})
        said = tried[-1].get("reason") or f"{tried[-1]['seconds']:.1f} s to the target, loss {tried[-1]['loss']:.3f}"
        print(f"tuning {method:18} lr {choice.lr:g}, tau {choice.tau}: {said}", flush=True)
    best = min(range(len(tried)), key=lambda i: (tried[i]["seconds"], tried[i]["loss"]))
    return options[best], tried


def score(result: dict[str, Any], target: float) -> dict[str, Any]:
    """seconds until the target, loss at the end; infinite where there is none."""
    if "reason" in result:
        return {"seconds": math.inf, "loss": math.inf, "reason": result["reason"]}
    last = result["losses"][-1]
    seconds = seconds_to(result["times"], result["losses"], target)
    return {"seconds": math.inf if seconds is None else seconds, "loss": last if math.isfinite(last) else math.inf}


def seconds_to(times: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Of the first snapshot whose loss is at or below the target; None: there is none."""
    return next((seconds for seconds, loss in zip(times, losses, strict=True) if loss <= target), None)


def limit(ddp: dict[str, Any], reference: dict[str, Any], target: float) -> float | None:
    """Seconds to the target of ddp whose communication takes no time: its losses, when the run without communication
    had done as many steps, by its first snapshot from there on. None: ddp, or that run, did not come so far."""
    reached = next((step for step, loss in zip(ddp["steps"], ddp["losses"], strict=True) if loss <= target), math.inf)
    return next((t for step, t in zip(reference["steps"], reference["times"], strict=True) if step >= reached), None)
