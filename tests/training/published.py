"""Published figures that the planner is held against, as data, and what the planner's formulas give for them.

What a constant was fitted to and what is predicted stand apart. Megatron-LM: configurations of its repository's
examples/sc21/run_table_1.sh, TFLOP/s of a device of its images/cases_april2021.png [N table 1]. CO2: words/s that its
paper gives, as in results/paper.py. Frontier: "Optimizing Distributed Training on Frontier for Large Language Models",
shares of the peak and scaling of its abstract, whose configurations are not recovered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from training.plan.case import MEGATRON, RECOMPUTE, Case, Cluster, Layouts, Model, preset
from training.plan.time import seconds

FULL = RECOMPUTE.index("full")
VOCABULARY, CONTEXT = 51200, 2048
# name, layers, width, heads, TP, PP, micro-batch, batch, nodes, chunks of a stage, TFLOP/s of a device
MEGATRON_CELLS = (
    ("1.7B", 24, 2304, 24, 1, 1, 16, 512, 4, 1, 137),
    ("3.6B", 30, 3072, 32, 2, 1, 16, 512, 8, 1, 138),
    ("7.5B", 36, 4096, 32, 4, 1, 16, 512, 16, 1, 142),
    ("18B", 40, 6144, 48, 8, 1, 8, 1024, 32, 1, 135),
    ("39B", 48, 8192, 64, 8, 2, 4, 1536, 64, 1, 138),
    ("76B", 60, 10240, 80, 8, 4, 2, 1792, 128, 3, 140),
    ("145B", 80, 12288, 96, 8, 8, 2, 2304, 192, 2, 148),
    ("310B", 96, 16384, 128, 8, 16, 1, 2160, 240, 2, 155),
    ("530B", 105, 20480, 128, 8, 35, 1, 2520, 315, 3, 163),
    ("1T", 128, 25600, 160, 8, 64, 1, 3072, 384, 1, 163),
)
FITTED = (0, 3, 6, 9)
CONSTANT = 146  # TFLOP/s for all cells: their mean
WORDS = {"1 node": 18_444, "2 nodes": 3_488, "16 nodes": 22_810, "16 nodes, CO2": 304_736}
GPUS = 8  # of a node


def share(m: Model, layout: Layouts, batch: int, nodes: int, cluster: Cluster) -> float:
    """Of the peak that a run gets, recomputation counted as work: [N] eq. 3."""
    c = Case(m, replace(cluster, nodes=nodes), MEGATRON, batch, layout)
    flops = 4 / 3 * m.step_flops - m.head_flops  # the head is not computed again
    return batch * flops / (float(sum(seconds(c).values())) * c.cluster.devices * cluster.device.peak)


def gpt(name: str, layers: int, width: int, heads: int) -> Model:
    return Model(name, "gpt2", layers, width, heads, VOCABULARY, CONTEXT, 4 * width, heads, True)


def tflops(cell: tuple[Any, ...], cluster: Cluster) -> float:
    """Of a device, in one of Megatron-LM's cells."""
    *model, tp, pp, micro, batch, nodes, v, _ = cell
    layout = Layouts(tp, pp, nodes * GPUS // (tp * pp), 1, micro, v, 0, FULL)
    return share(gpt(*model), layout, batch, nodes, cluster) * cluster.device.peak / 1e12


def with_constants(c: Cluster, top: float, passes: float, inside: float) -> Cluster:
    return replace(c, device=replace(c.device, top=top, passes=passes), inside=inside)


def fit(cells: Sequence[tuple[Any, ...]], cluster: Cluster) -> Cluster:
    """Least squares of log ratios: the device's two constants and the bandwidth in a node, within what can be."""
    from scipy.optimize import least_squares

    def off(logs: Iterable[float]) -> list[float]:
        changed = with_constants(cluster, *(math.exp(x) for x in logs))
        return [math.log(tflops(cell, changed) / cell[-1]) for cell in cells]

    bounds = np.log([(0.3, 0.1, 50e9), (1.0, 10.0, 300e9)])
    found = least_squares(off, np.log([0.7, 2.0, 200e9]), bounds=bounds)
    return with_constants(cluster, *np.exp(found.x).tolist())


def co2() -> dict[str, float]:
    """CO2 against AdamW on 16 nodes over 80 Gbit/s, all of CO2's communication hidden.

    A step takes 1 on one node and 1 + A on two, where A is an all-reduce: A = 2 one / two - 1. On 16 nodes a flat ring
    over n devices takes A (2 (127 / 128)) / (2 (15 / 16)) [P].
    """
    allreduce = 2 * WORDS["1 node"] / WORDS["2 nodes"] - 1
    n = 16 * GPUS
    slow = 1 + allreduce * ((n - 1) / n) / ((2 * GPUS - 1) / (2 * GPUS))
    published = WORDS["16 nodes, CO2"] / WORDS["16 nodes"]
    return {"allreduce_steps": allreduce, "predicted": slow, "published": published, "off": slow / published - 1}


# -- Frontier ---------------------------------------------------------------------------------------------------------

SIZES = {"22B": (48, 6144, 48), "175B": (96, 12288, 96), "1T": (128, 25600, 128)}
SHARES = {"22B": 0.3838, "175B": 0.3614, "1T": 0.3196}
# assumed: TP, PP, micro-batch, micro-batches of a replica. The first of each is olcf/ai-training-series' TP, PP and
# micro-batch: demonstrations, not the tuned runs
ASSUMED = {
    "22B": ((4, 8, 2, 10), (4, 8, 2, 80), (8, 1, 8, 4), (2, 8, 2, 64)),
    "175B": ((8, 12, 1, 40), (4, 16, 1, 40), (8, 8, 1, 80)),
    "1T": ((8, 64, 1, 128), (8, 64, 1, 1024), (8, 32, 1, 512)),
}
SCALED = {"175B": 1024, "1T": 3072}  # GCDs
STRONG = {"175B": 0.89, "1T": 0.87}
FRACTIONS = (8, 4, 2)  # the smallest run that strong scaling counts from has so many times fewer replicas: assumed


def frontier_share(name: str, assumed: tuple[int, int, int, int], replicas: int, c: Cluster) -> float:
    tp, pp, micro, m = assumed
    layout = Layouts(tp, pp, replicas, 1, micro, 1, min(1, replicas - 1), FULL)
    return share(gpt(name, *SIZES[name]), layout, m * micro * replicas, max(1, tp * pp * replicas // GPUS), c)


def fitted_to_22b(assumed: tuple[int, int, int, int]) -> Cluster:
    """Frontier with the `top` under which the 22B run has its published share; 2 is more than can be, and is told."""
    from scipy.optimize import brentq

    base = preset("frontier")

    def at(top: float) -> Cluster:
        return replace(base, device=replace(base.device, top=top))

    found: Any = brentq(lambda top: frontier_share("22B", assumed, 1, at(top)) - SHARES["22B"], 0.1, 2.0, xtol=1e-12)
    return at(found)


def frontier() -> dict[str, Any]:
    """Spans over all that is assumed; no fit is claimed."""
    fitted = [fitted_to_22b(assumed) for assumed in ASSUMED["22B"]]
    spanned: dict[str, Any] = {}
    for name, gpus in SCALED.items():
        found, weak, strong = [], [], []
        for (tp, pp, micro, m), c in product(ASSUMED[name], fitted):
            n = max(1, gpus // (tp * pp))
            found.append(frontier_share(name, (tp, pp, micro, m), n, c))
            weak.append(found[-1] / frontier_share(name, (tp, pp, micro, m), 1, c))
            # at one batch, against fewer replicas, which have more micro-batches each
            fewer = ((n // k, (tp, pp, micro, m * k)) for k in FRACTIONS if n % k == 0)
            strong += [found[-1] / frontier_share(name, assumed, few, c) for few, assumed in fewer]
        spans = {"span": found, "weak": weak, "strong": strong}
        spanned[name] = {key: [min(x), max(x)] if x else None for key, x in spans.items()}
        spanned[name] |= {"published": SHARES[name], "published_strong": STRONG[name]}
    return {"tops": [c.device.top for c in fitted], "spans": spanned, "assumed": ASSUMED}
