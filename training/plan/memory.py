"""Bytes on a device, by part, in the first or the last stage, whichever needs more."""

from collections.abc import Callable

import numpy as np

from training.checks import RESERVE
from training.plan.case import MERGES, RECOMPUTE, WORD, Case, Numbers


def parameters(c: Case, last: bool) -> Numbers:
    """`4 own`, over d with z = 3 [R sec. 5.3], and with z = 2 because FSDP2 stores them so [M]"""
    return WORD * c.own(last) / np.where(c.layout.zero >= 2, c.layout.dp, 1)


def gradients(c: Case, last: bool) -> Numbers:
    """`4 own`, over d with z >= 2 and m = 1 [R sec. 5.2]; minus a micro-batch's kept if m <= in flight [O]

    With several micro-batches the sum is whole. If no micro-batch begins after the first gradients exist, they reuse
    the memory of the activations.
    """
    shared = (c.layout.zero >= 2) & (c.micro_batches == 1)
    whole = WORD * c.own(last) / np.where(shared, c.layout.dp, 1)
    instead = np.where(c.micro_batches <= in_flight(c, last), c.layers * layer(c), 0.0)
    return np.maximum(0.0, whole - instead)


def optimizer(c: Case, last: bool) -> Numbers:
    """`8 own`, over d with z >= 1 [R sec. 5.1]"""
    return 2 * WORD * c.own(last) / np.where(c.layout.zero >= 1, c.layout.dp, 1)


def buckets(c: Case, last: bool) -> Numbers:
    """`4 own` if z < 2, d > 1 and t = p = 1: DDP's copy of the gradients [M]"""
    x = c.layout
    by_ddp = (x.zero < 2) & (x.dp > 1) & (x.tp * x.pp == 1)
    return np.where(by_ddp, WORD * c.own(last), 0.0)


def casts(c: Case, last: bool) -> Numbers:
    """`value own` if z < 2 and a value is narrower than a parameter: autocast's copies of the weights [M]"""
    narrow = (c.layout.zero < 2) & (c.value < WORD)
    return np.where(narrow, c.value * c.own(last), 0.0)


def gathered(c: Case, last: bool) -> Numbers:
    """`value (z = 2: own, z = 3: 2 blocks + ends)` if d > 1: parameters that FSDP2 has gathered [M]"""
    own, size, zero = c.own(last), c.value, c.layout.zero
    few = own - np.maximum(0, c.layers - 2) * c.block
    return np.where((zero >= 2) & (c.layout.dp > 1), size * np.where(zero == 2, own, few), 0.0)


def in_flight(c: Case, last: bool) -> Numbers:
    """`min(m, p)` micro-batches in the first stage, 1 in the last [N sec. 2.2]"""
    return np.minimum(c.micro_batches, 1 if last else c.layout.pp)


def layer(c: Case) -> Numbers:
    """Bytes that a block keeps per micro-batch"""
    return np.where(c.layout.recompute == RECOMPUTE.index("full"), c.given, c.of_block[0])


def activations(c: Case, last: bool) -> Numbers:
    """`(l/p kept + ends) n`, n = `min(m, p)` [N], or `min(m, p (1 + (p - 1) / (p v)))` with v > 1 [K] [M]

    This n is for the first stage. In the last stage it is 1. With full recomputation a block keeps only its input [K
    sec. 5]. Ends: the outputs of the embedding and of the last norm, in the stages that have them.
    """
    x = c.layout
    again = 1 + np.where(x.v > 1, (x.pp - 1) / (x.pp * x.v), 0.0) if not last else 1.0
    ends = c.given * np.where(x.pp == 1, 2, 1)
    return (c.layers * layer(c) + ends) * np.minimum(in_flight(c, last) * again, c.micro_batches)


def received(c: Case, last: bool) -> Numbers:
    """`m (2 v - 1) 4 b s h` if p > 1: torch's buffers for tensors that the two passes receive [O]"""
    x = c.layout
    return np.where(x.pp > 1, c.micro_batches * (2 * x.v - 1) * c.given, 0.0)


def passing(c: Case, last: bool) -> Numbers:
    """`max(logits, block)`, for a moment [M]

    Logits, in the last stage: `b s V (value + 4 + 4)` with a float32 log-softmax and its gradient. With two
    or more stages `b s V value` more, because torch's pipelining keeps the last stage's output.

    Block: the peak of its backward pass, and its gradients. With z >= 2 the gradients count again in float32, for their
    reduction. With full recomputation its kept activations count as well.
    """
    x, size = c.layout, c.value
    logits = c.tokens * c.model.vocabulary * (size + 2 * WORD + size * (x.pp > 1))
    reduced = np.where((x.zero >= 2) & (x.dp > 1), WORD, 0)
    again = np.where(x.recompute == RECOMPUTE.index("full"), c.of_block[0], 0.0)
    block = c.of_block[1] + again + (WORD + reduced) * c.block
    return np.maximum(logits if last else np.where(x.pp == 1, logits, 0.0), block)


def co2(c: Case, last: bool) -> Numbers:
    """`4 own (1 + held/shares)`, with z >= 2 `4 own (1/d + held/shares)`: payload, and a rank's share of the rest [M]

    `held` is 2, for x and m. Merge keep_local adds 1, and compression `1 + 1/I`. With offload the device needs nothing.
    """
    x = c.layout
    cut = np.where(x.zero >= 2, x.dp, 1)
    errors = np.where(x.compression > 0, 1 + 1 / np.maximum(x.islands, 1), 0.0)
    copies = 1 / cut + (2.0 + (x.merge == MERGES.index("keep_local")) + errors) / c.shares
    return np.where((x.islands > 1) & (x.offload == 0), WORD * c.own(last) * copies, 0.0)


def reserve(c: Case, last: bool) -> Numbers:
    """1.5 GiB on a GPU for context, library buffers and fragmentation [M]"""
    return RESERVE * c.gpu + 0.0 * c.layout.tp


PARTS: tuple[Callable[[Case, bool], Numbers], ...] = (
    parameters, gradients, optimizer, buckets, casts, gathered, activations, received, passing, co2, reserve,
)  # fmt: skip


def memory(c: Case) -> dict[str, Numbers]:
    """Bytes by part, in the stage that needs more."""
    first, last = ({part.__name__: part(c, last) for part in PARTS} for last in (False, True))
    more = sum(last.values()) > sum(first.values())
    return {name: np.where(more, last[name], first[name]) for name in first}
