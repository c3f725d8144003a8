"""Seconds of a step, by part."""

from collections.abc import Callable

import numpy as np

from training.plan.case import RECOMPUTE, WIRES, Case, Numbers

ADAMW = 28  # bytes moved for a parameter: gradient, 16-bit copy, itself, two moments read; the last four written
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of DistributedDataParallel's by default
BACKWARD = 2 / 3  # of a step's computing is its backward pass
BOUNDARY = 32  # of an element: parameter, payload, x and m, read and written in one pass (docs/design.md)

Part = Callable[[Case], Numbers]


def again(c: Case) -> Numbers:
    """1 where blocks are computed again, else 0"""
    return (c.layout.recompute == RECOMPUTE.index("full")) * 1.0


def attention_passes(c: Case) -> Numbers:
    """Forward passes' worth of attention in a step: 3, 3.5 fused [F sec. 3.1], 1 more where it is computed again [K]"""
    return (3.5 if c.software.fused else 3.0) + (c.layout.recompute > 0)


def products(c: Case) -> Numbers:
    """m b (l/p ((3 + again) linear + passes attention) + 3 head) / (t top peak), of the last stage [N eq. 3]

    For GPT, p = 1 and full recomputation 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)).
    """
    m, x, device = c.model, c.layout, c.cluster.device
    stage = c.layers * ((3 + again(c)) * m.linear_flops + attention_passes(c) * m.attention_flops)
    flops = c.micro_batches * x.micro * (stage + 3 * m.head_flops) / x.tp
    return flops / (device.top * device.peak)


def head(c: Case) -> Numbers:
    """3 m b head / (t top peak): its part of the products"""
    device = c.cluster.device
    return 3 * c.micro_batches * c.layout.micro * c.model.head_flops / c.layout.tp / (device.top * device.peak)


def passes(c: Case) -> Numbers:
    """m l/p (3 + again) passes (kept + scores) / bandwidth: norms, GELU, softmax, dropout, residuals [O]"""
    device = c.cluster.device
    moved = (3 + again(c)) * device.passes * (c.kept + c.scores)
    return c.micro_batches * c.layers * moved / device.bandwidth


def host(c: Case) -> Numbers:
    """m l/p calls - (products + passes), not below 0: a GPU computes beneath its host's Python, a CPU does not [O]"""
    x, (plain, cut, sharded) = c.layout, c.cluster.device.calls
    calls = plain + np.where(x.tp > 1, cut, 0.0) + np.where(x.zero >= 2, sharded, 0.0)
    beneath = (products(c) + passes(c)) * c.cluster.device.gpu
    return np.maximum(0.0, c.micro_batches * c.layers * calls * (not c.software.megatron) - beneath)


def tensor(c: Case) -> Numbers:
    """m l/p (4 + 2 again) allreduce(size b s h, t ranks) [N sec. 3.2]"""
    x, size = c.layout, c.software.value * c.tokens * c.model.width
    return c.micro_batches * c.layers * (4 + 2 * again(c)) * c.cluster.allreduce(size, x.tp, 1)


def ends(c: Case) -> Numbers:
    """m (allreduce(size b s V, t) / 2 + 2 allreduce(size b s h, t)), 1 where p > 1: logits, head, embedding [O]

    DTensor gathers logits, and adds what the head's columns give back and what the embedding's rows give.
    """
    x, size = c.layout, c.software.value * c.tokens
    logits, hidden = (c.cluster.allreduce(size * n, x.tp, 1) for n in (c.model.vocabulary, c.model.width))
    return c.micro_batches * (logits / 2 + np.where(x.pp > 1, 1, 2) * hidden) * (not c.software.megatron)


def hop(c: Case) -> Numbers:
    """stream b s h / B + A: from a stage to the next; over t if scattered [N sec. 4.1]"""
    x = c.layout
    return sent(c, c.given / (x.tp if c.software.megatron else 1), x.pp, x.tp * x.dp)


def sent(c: Case, size: Numbers, ranks: Numbers, stride: Numbers) -> Numbers:
    """Seconds of bytes from one rank to another of its group."""
    return size / c.cluster.rate(ranks, stride) + c.cluster.hop(ranks, stride)


def pipeline(c: Case) -> Numbers:
    """(2 (p - 1) + (m - 1) (1, + 1 - head / (m hop) where p > 2)) hop; v > 1: 2 (p - 1 + m v) hop [N sec. 2.2, O]

    A stage sends one way and receives the other at once (1F1B): the first and the last once a micro-batch, the others
    twice, while the last one has its head to compute.
    """
    x, m, one = c.layout, c.micro_batches, hop(c)
    inner = np.where(x.pp > 2, np.maximum(0.0, one - head(c) / m), 0.0)
    steady = np.where(x.v > 1, 2 * m * x.v * one, (m - 1) * (one + inner))
    return np.where(x.pp > 1, 2 * (x.pp - 1) * one + steady, 0.0)


def tied(c: Case) -> Numbers:
    """gradient V h / (t B) + A where p > 1: the first and the last stage send each other a tied embedding's [O]"""
    x, size = c.layout, c.software.gradient * c.model.embedding / c.layout.tp
    there = (x.pp > 1) & (c.model.tied and not c.software.megatron)
    return np.where(there, sent(c, size, x.pp, x.tp * x.dp), 0.0)


def bubble(c: Case) -> Numbers:
    """(p - 1) / (v m) of products but the head's, passes, tensor [N sec. 2.2]: other stages have no head"""
    busy = products(c) - head(c) + passes(c) + tensor(c)
    return busy * (c.layout.pp - 1) / (c.layout.v * c.micro_batches)


def data(c: Case) -> Numbers:
    """ring(gradients) [half with z >= 2] - hidden, + half rings of z = 1: 1, z = 2: 1, z = 3: 2 m - hidden [R sec. 7]

    The first reduces gradients, once a step; the second gathers: parameters (z = 1), or values of theirs (z >= 2).
    Hidden: the first under the last micro-batch's backward pass, 2/3 of its compute, where DDP or FSDP2 reduces (not z
    < 2 with TP or stages); DDP's from its first full bucket on, but for its last one; the second under all compute with
    z >= 2 [O].
    """
    m, x, by_zero, s = c.micro_batches, c.layout, c.layout.zero >= 2, c.software
    by_ddp, prefetch = ~by_zero & (x.tp * x.pp == 1), by_zero & s.overlap & (not s.gloo)
    compute, size = products(c) + passes(c), s.gradient * c.largest
    reduced = ring(c, size) * np.where(by_zero & (not s.gloo), 0.5, 1.0)
    beneath = np.where(by_ddp & s.overlap, under_backward(size), prefetch * BACKWARD) * compute / m
    left = np.where(by_ddp, ring(c, last_bucket(size)), 0.0)
    values = np.where(by_zero, s.value, s.parameter) * c.largest
    gathered = np.where(x.zero == 3, 2.0 * m, np.where(x.zero > 0, 1.0, 0.0)) / 2 * ring(c, values)
    gathered = np.where((x.zero == 1) & s.gloo, broadcasts(c, values), gathered)
    return np.maximum(left, reduced - beneath) + np.maximum(0.0, gathered - prefetch * compute)


def under_backward(size: Numbers) -> Numbers:
    """2/3 (1 - first bucket / size): of a step's computing, the rest of the backward pass once DDP can reduce [O]"""
    return BACKWARD * np.maximum(0.0, 1 - FIRST_BUCKET / size)


def last_bucket(size: Numbers) -> Numbers:
    """Bytes of the last of DDP's buckets, whose all-reduce nothing hides."""
    return np.where(size > FIRST_BUCKET, (size - FIRST_BUCKET) % BUCKET, size)


def ring(c: Case, size: Numbers) -> Numbers:
    """n allreduce(size / n, d ranks, t apart), n: 1 for DDP, blocks + 1 with z >= 2, else 12 l/p, one a tensor [O]"""
    x = c.layout
    alone = (x.tp * x.pp > 1) & (not c.software.megatron)
    many = np.where(x.zero >= 2, c.layers + 1, np.where(alone, 12 * c.layers, 1))
    return many * c.cluster.allreduce(size / many, x.dp, x.tp)


def broadcasts(c: Case, size: Numbers) -> Numbers:
    """log2(q) size / inside + log2(d / q) q size / B + log2(d) 12 l/p A: ZeroRedundancyOptimizer's, one a tensor [O]

    Along gloo's binomial trees: first among the q ranks of a node, which then share its card.
    """
    x, k = c.layout, c.cluster
    q = np.minimum(x.dp, np.maximum(1, k.per_node // x.tp))
    wide = np.ceil(np.log2(x.dp / q)) * sent(c, q * size, x.dp, x.tp)
    each = np.ceil(np.log2(x.dp)) * 12 * c.layers * k.hop(x.dp, x.tp)
    return np.log2(q) * size / k.inside + wide + each


def optimizer(c: Case) -> Numbers:
    """28 own / bandwidth, over d with z >= 1: AdamW's passes over memory [O]"""
    return ADAMW * c.largest / np.where(c.layout.zero >= 1, c.layout.dp, 1) / c.cluster.device.bandwidth


INSIDE: tuple[Part, ...] = (products, passes, host, tensor, ends, pipeline, tied, bubble, data, optimizer)


def outer_allreduce(c: Case) -> Numbers:
    """allreduce(wire bytes own / shares, I ranks an island apart): each device sends its share [C step 3]"""
    compression = np.array(list(WIRES.values()))[np.asarray(c.layout.compression)]
    return c.cluster.allreduce(compression * c.largest / c.shares, c.layout.islands, c.island)


def waiting(c: Case) -> Numbers:
    """max(0, outer all-reduce / tau - T), T a step's seconds before CO2: what tau steps do not hide [C]"""
    step = sum(part(c) for part in INSIDE)
    return np.where(c.layout.islands > 1, np.maximum(0.0, outer_allreduce(c) / c.layout.tau - step), 0.0)


def boundary(c: Case) -> Numbers:
    """(32 own / (shares bandwidth) + allreduce(4 own, d) / 2, offloaded + 8 own / (shares host)) / tau [O]

    A step is (max(tau T, all-reduce) + boundary) / tau [C].
    """
    x, device = c.layout, c.cluster.device
    share = c.largest / c.shares
    gather = np.where((x.zero >= 2) | (c.shares == 1), 0.0, 0.5 * ring(c, 4 * c.largest))
    whole = BOUNDARY * share / device.bandwidth + gather + np.where(x.offload == 1, 8 * share / device.host, 0.0)
    return np.where(x.islands > 1, whole / x.tau, 0.0)


PARTS = (*INSIDE, waiting, boundary)
COMMUNICATION = ("tensor", "ends", "pipeline", "tied", "data", "waiting")  # parts that are exposed communication


def seconds(c: Case) -> dict[str, Numbers]:
    return {part.__name__: part(c) for part in PARTS}
