"""Bytes on a device, by part. Of the first or the last stage, whichever needs more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from training.plan.case import MERGES, RECOMPUTE, WIRES, Case
from training.plan.clusters import Numbers

FLOAT32 = 4  # bytes of an element of CO2's outer state, and of the logits that the loss is computed from


def parameters(c: Case, last: bool) -> Numbers:
    """parameter bytes * own, over d with z >= 3, and z = 2 as FSDP2 keeps them [R sec. 5.3, M]"""
    return c.software.parameter * c.own(last) / np.where(c.layout.zero >= 2, c.layout.dp, 1)


def gradients(c: Case, last: bool) -> Numbers:
    """gradient bytes * own, over d with z >= 2 and one micro-batch [R sec. 5.2]; of several the sum is whole [O]"""
    shared = (c.layout.zero >= 2) & (c.micro_batches == 1)
    return c.software.gradient * c.own(last) / np.where(shared, c.layout.dp, 1)


def optimizer(c: Case, last: bool) -> Numbers:
    """optimizer bytes * own, over d with z >= 1 [R sec. 5.1]"""
    return c.software.optimizer * c.own(last) / np.where(c.layout.zero >= 1, c.layout.dp, 1)


def buckets(c: Case, last: bool) -> Numbers:
    """gradient bytes * own where z < 2, d > 1, t = p = 1: DDP's copy of the gradients [M]"""
    x = c.layout
    by_ddp = (x.zero < 2) & (x.dp > 1) & (x.tp * x.pp == 1)
    return np.where(by_ddp & c.software.overlap, c.software.gradient * c.own(last), 0.0)


def casts(c: Case, last: bool) -> Numbers:
    """size * own where z < 2 and a value is narrower than a parameter: autocast's copies of the weights [M]"""
    narrow = (c.layout.zero < 2) & (c.software.value < c.software.parameter)
    return np.where(narrow, c.software.value * c.own(last), 0.0)


def gathered(c: Case, last: bool) -> Numbers:
    """size * (own with z = 2, few with z = 3) + (size + 4) * few, few = 2 blocks and the ends; d > 1 [M]"""
    own, size, zero = c.own(last), c.software.value, c.layout.zero
    few = own - np.maximum(0, c.layers - 2) * c.block
    whole = size * np.where(zero == 2, own, few) + (size + FLOAT32) * few
    return np.where((zero >= 2) & (c.layout.dp > 1), whole, 0.0)


def activations(c: Case, last: bool) -> Numbers:
    """layers * kept by one * micro-batches in flight: min(m, p) in the first stage, 1 in the last [N sec. 2.2]

    Interleaved: 1 + (p - 1) / (p v) times as much in the first stage [K]. Kept by one layer: `kept` and the scores;
    selective: `kept`; full: its input, 2 b s h [K sec. 5], and one layer is there while it is computed again.
    """
    x, size = c.layout, c.software.value
    flying = np.minimum(c.micro_batches, 1 if last else x.pp)
    again = 1 + np.where(x.v > 1, (x.pp - 1) / (x.pp * x.v), 0.0) if not last else 1.0
    given = size * x.micro * c.model.context * c.model.width
    full = x.recompute == RECOMPUTE.index("full")
    layer = np.where(full, given, c.kept + np.where(x.recompute == 0, c.scores, 0.0))
    return c.layers * layer * flying * again + np.where(full, c.kept + c.scores, 0.0)


def received(c: Case, last: bool) -> Numbers:
    """m b s h size where p > 1: a buffer of torch's stages for what each micro-batch receives [O]"""
    x = c.layout
    size = c.software.value * x.micro * c.model.context * c.model.width
    return np.where((x.pp > 1) & (not c.software.megatron), c.micro_batches * size, 0.0)


def logits(c: Case, last: bool) -> Numbers:
    """b s V (size + 4 + 4) in the last stage: logits, float32 log-softmax, its gradient [O]; Megatron-LM's over t"""
    cut = c.layout.tp if c.software.megatron else 1
    all_of_them = c.layout.micro * c.model.context * c.model.vocabulary * (c.software.value + 2 * FLOAT32) / cut
    return all_of_them if last else np.where(c.layout.pp == 1, all_of_them, 0.0)


def co2(c: Case, last: bool) -> Numbers:
    """4 own' (payload + (x + m) / shares), own' the device's shard, shares d with z < 2; offloaded: 0 [M]

    An island of one device: 3 copies, 1 more with merge keep, 1 + 1/I more over a narrow wire [M].
    """
    x = c.layout
    cut = np.where(x.zero >= 2, x.dp, 1)
    shares = x.dp / cut
    alone = 3.0 + (x.merge == MERGES.index("keep")) + np.where(x.wire > 0, 1 + 1 / np.maximum(x.islands, 1), 0.0)
    copies = np.where(c.island == 1, alone, 1 + 2 / shares)
    return np.where((x.islands > 1) & (x.offload == 0), FLOAT32 * c.own(last) / cut * copies, 0.0)


def reserve(c: Case, last: bool) -> Numbers:
    """1.5 GiB on a GPU: context, buffers of libraries, fragmentation [M]"""
    return c.software.reserve + 0.0 * c.layout.tp


PARTS: tuple[Callable[[Case, bool], Numbers], ...] = (
    parameters, gradients, optimizer, buckets, casts, gathered, activations, received, logits, co2, reserve,
)  # fmt: skip
assert list(WIRES)[0] == "float32"  # which a wire above 0 is narrower than


def of_stage(c: Case, last: bool) -> dict[str, Numbers]:
    return {part.__name__: part(c, last) for part in PARTS}


def memory(c: Case) -> dict[str, Numbers]:
    """Bytes by part, of the stage that needs more."""
    first, last = of_stage(c, False), of_stage(c, True)
    more = sum(last.values()) > sum(first.values())
    return {name: np.where(more, last[name], first[name]) for name in first}
