"""From measured times to the settings: asks the same TauTuner that tau auto asks while training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..adaptive.tau import smallest_tau
from ..assembly import CO2Config, tuned_for
from .measure import Wire

STEPS = (0.01, 0.03, 0.1, 0.3, 1.0)  # seconds of a local step, where the user gives none
HEARD = 40  # rounds, after which a tuner that always hears the same has settled
TRAINED = 8  # bytes a parameter: itself and its gradient, float32
ADAM = 8  # its two moments


@dataclass(frozen=True)
class Choice:
    """What CO2Config.recommended settles on."""

    step_seconds: float
    tau: int
    wire: str
    merge: str
    awaited: int
    """Local steps after its sending after which a mean is waited for."""
    allreduce_seconds: float
    exposed_share: float
    """Of the time, which the all-reduce does not fit under tau local steps."""
    boundary_share: float
    """Of the time, which a boundary's own work takes."""
    ddp_share: float
    """Of the time, which at least is exposed where float32 gradients are averaged in every step, all of it hidden."""
    float32_tau: int
    """That its all-reduce would need over float32."""
    reason: str


def recommended(workers: int, tau_max: int | None) -> CO2Config:
    """CO2Config.recommended, with the user's tau_max."""
    config = CO2Config.recommended(workers)
    return config if tau_max is None else replace(config, tau_max=tau_max)


def choose(
    config: CO2Config, workers: int, step: float, wires: Mapping[str, Wire], boundary: float, params: int
) -> Choice:
    """step: seconds of a local step of the slowest worker. boundary: those of a boundary's own work."""
    tuned = tuned_for(config, workers)
    assert tuned is not None and workers > 1, "one worker has nothing to send"
    tuner = tuned.tuner
    seconds = {name: wire.seconds(params) for name, wire in wires.items()}
    for number in range(HEARD):
        tuner.hear(number, [step], [seconds[tuner.wire]], [boundary])
    tau, took = tuner.tau, seconds[tuner.wire]
    return Choice(
        step_seconds=step,
        tau=tau,
        wire=tuner.wire,
        merge=config.merge,
        awaited=min(tau, tuner.needed or tau),
        allreduce_seconds=took,
        exposed_share=exposed(took, tau * step),
        boundary_share=boundary / (max(tau * step, took) + boundary),
        ddp_share=exposed(seconds["float32"], step),
        float32_tau=smallest_tau(seconds["float32"], step, config.tau_margin),
        reason=tuner.decisions[-1].reason,
    )


def exposed(allreduce: float, under: float) -> float:
    """The share of the time that an all-reduce outlasts what it runs under."""
    return max(0.0, 1 - under / allreduce) if allreduce > 0 else 0.0


@dataclass(frozen=True)
class Memory:
    """Of one worker. copies: float32 copies of the parameters that CO2 holds; worker_bytes: what there is."""

    copies: float
    co2_bytes: float
    parameters_and_gradients_bytes: float
    adam_bytes: float
    worker_bytes: float

    def judge(self) -> tuple[list[str], list[str]]:
        """Why training cannot fit, and what fits without an optimiser alone."""
        least, has = self.co2_bytes + self.parameters_and_gradients_bytes, gib(self.worker_bytes)
        remedy = "merge='mix' or wire float32 take fewer copies, ShardedCO2 shares them out or offloads them"
        if least > self.worker_bytes:
            return [f"a worker has {has}, but parameters, gradients and CO2 take {gib(least)}: {remedy}"], []
        if least + self.adam_bytes > self.worker_bytes:
            return [], [f"with AdamW's moments {gib(least + self.adam_bytes)} of {has}: {remedy}"]
        return [], []


def memory(copies: float, params: int, has: float) -> Memory:
    """Of a model trained in float32."""
    return Memory(copies, 4 * copies * params, TRAINED * params, ADAM * params, has)


def gib(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.3g} MiB"
