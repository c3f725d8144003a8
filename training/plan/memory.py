"""Bytes on a device, by part. Of the first or the last stage, whichever needs more."""

from collections.abc import Callable

import numpy as np

from training.plan.case import MERGES, RECOMPUTE, Case, Numbers

FLOAT32 = 4  # bytes of an element of CO2's outer state, and of the logits that the loss is computed from


def parameters(c: Case, last: bool) -> Numbers:
    """parameter bytes * own, over d with z >= 3, and z = 2 as FSDP2 keeps them [R sec. 5.3, M]"""
    return c.software.parameter * c.own(last) / np.where(c.layout.zero >= 2, c.layout.dp, 1)


def gradients(c: Case, last: bool) -> Numbers:
    """gradient bytes * own, over d with z >= 2 and m = 1 [R sec. 5.2]; m <= in flight: less a micro-batch's kept [O]

    Of several micro-batches the sum is whole. But where none begins once the first one's gradients are there, they take
    the place of what it kept.
    """
    shared = (c.layout.zero >= 2) & (c.micro_batches == 1)
    whole = c.software.gradient * c.own(last) / np.where(shared, c.layout.dp, 1)
    instead = np.where(c.micro_batches <= in_flight(c, last), c.layers * layer(c), 0.0)
    return np.maximum(0.0, whole - instead)


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
    """size * (own with z = 2, 2 blocks and the ends with z = 3), d > 1: parameters that FSDP2 has gathered [M]"""
    own, size, zero = c.own(last), c.software.value, c.layout.zero
    few = own - np.maximum(0, c.layers - 2) * c.block
    return np.where((zero >= 2) & (c.layout.dp > 1), size * np.where(zero == 2, own, few), 0.0)


def in_flight(c: Case, last: bool) -> Numbers:
    """min(m, p) micro-batches in the first stage, 1 in the last [N sec. 2.2]"""
    return np.minimum(c.micro_batches, 1 if last else c.layout.pp)


def layer(c: Case) -> Numbers:
    """Kept by a block, of one micro-batch."""
    return np.where(c.layout.recompute == RECOMPUTE.index("full"), c.given, c.of_block[0])


def activations(c: Case, last: bool) -> Numbers:
    """(l/p kept + ends) n: n = min(m, p) [N], in the last stage 1; v > 1: min(m, n (1 + (p - 1) / (p v))) [K] [M]

    The second is the first stage's. Kept: a block's; with full recomputation what it is given [K sec. 5].
    Ends: what the embedding gives, what the last norm gives, each of a stage that has it.
    """
    x = c.layout
    again = 1 + np.where(x.v > 1, (x.pp - 1) / (x.pp * x.v), 0.0) if not last else 1.0
    ends = c.given * np.where(x.pp == 1, 2, 1) * (not c.software.megatron)
    return (c.layers * layer(c) + ends) * np.minimum(in_flight(c, last) * again, c.micro_batches)


def received(c: Case, last: bool) -> Numbers:
    """m (2 v - 1) b s h stream where p > 1: torch's buffers for what each micro-batch's two passes receive [O]"""
    x = c.layout
    here = (x.pp > 1) & (not c.software.megatron)
    return np.where(here, c.micro_batches * (2 * x.v - 1) * c.given, 0.0)


def passing(c: Case, last: bool) -> Numbers:
    """max(last stage's b s V (size + 8), p > 1: + size; more, again: + kept, + (4, z >= 2: 8) block): for a moment [M]

    Logits, of the last stage: b s V (size + 4 + 4), with a float32 log-softmax and its gradient; Megatron-LM's over t.
    Of two stages and more: size more, for torch's pipelining keeps what the last one gives.
    A block: what it has beyond what it keeps, its gradients, with z >= 2 once more in float32 for their reduction,
    and with full recomputation what it keeps.
    """
    x, size, cut = c.layout, c.software.value, c.layout.tp if c.software.megatron else 1
    kept = size * (x.pp > 1) * (not c.software.megatron)
    logits = c.tokens * c.model.vocabulary * (size + 2 * FLOAT32 + kept) / cut
    reduced = np.where((x.zero >= 2) & (x.dp > 1), FLOAT32, 0)
    again = np.where(x.recompute == RECOMPUTE.index("full"), c.of_block[0], 0.0)
    block = c.of_block[1] + again + (c.software.gradient + reduced) * c.block
    return np.maximum(logits if last else np.where(x.pp == 1, logits, 0.0), block)


def co2(c: Case, last: bool) -> Numbers:
    """4 own (1, z >= 2: 1/d; + 2 / shares); island of 1: 4 own (3, keep_local: + 1, narrow + 1 + 1/I); offloaded: 0 [M]

    Copies: payload, x and m; on one device also what merge keep_local and a narrow wire add.
    """
    x = c.layout
    cut = np.where(x.zero >= 2, x.dp, 1)
    alone = (
        3.0
        + (x.merge == MERGES.index("keep_local"))
        + np.where(x.compression > 0, 1 + 1 / np.maximum(x.islands, 1), 0.0)
    )
    copies = np.where(c.island == 1, alone, 1 / cut + 2 / c.shares)
    return np.where((x.islands > 1) & (x.offload == 0), FLOAT32 * c.own(last) * copies, 0.0)


def reserve(c: Case, last: bool) -> Numbers:
    """1.5 GiB on a GPU: context, buffers of libraries, fragmentation [M]"""
    return c.software.reserve + 0.0 * c.layout.tp


PARTS: tuple[Callable[[Case, bool], Numbers], ...] = (
    parameters, gradients, optimizer, buckets, casts, gathered, activations, received, passing, co2, reserve,
)  # fmt: skip


def of_stage(c: Case, last: bool) -> dict[str, Numbers]:
    return {part.__name__: part(c, last) for part in PARTS}


def memory(c: Case) -> dict[str, Numbers]:
    """Bytes by part, of the stage that needs more."""
    first, last = of_stage(c, False), of_stage(c, True)
    more = sum(last.values()) > sum(first.values())
    return {name: np.where(more, last[name], first[name]) for name in first}
