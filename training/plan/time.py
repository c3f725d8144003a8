"""Seconds of a step, by part."""

from collections.abc import Callable

import numpy as np

from training.plan.case import FORMATS, RECOMPUTE, WORD, Case, Numbers

ADAMW = 28  # bytes moved per parameter: gradient, 16-bit copy, itself, two moments read; the last four written
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of DistributedDataParallel's buckets by default
BACKWARD = 2 / 3  # share of a step's compute in the backward pass
BOUNDARY = 32  # bytes per element: parameter, payload, x and m, read and written in one pass (docs/design.md)

Part = Callable[[Case], Numbers]


def again(c: Case) -> Numbers:
    """1 if blocks are recomputed, else 0"""
    return (c.layout.recompute == RECOMPUTE.index("full")) * 1.0


def products(c: Case) -> Numbers:
    """`m b (l/p ((3 + again) linear + (3.5 + again) attention) + 3 head) / (t top peak)`, in the last stage [N eq. 3]

    Fused attention computes 3.5 forward passes in a step [F sec. 3.1].
    """
    m, x, device = c.model, c.layout, c.cluster.device
    stage = c.layers * ((3 + again(c)) * m.linear_flops + (3.5 + again(c)) * m.attention_flops)
    flops = c.micro_batches * x.micro * (stage + 3 * m.head_flops) / x.tp
    return flops / (device.top * device.peak)


def head(c: Case) -> Numbers:
    """`3 m b head / (t top peak)`: the head's part of the products"""
    device = c.cluster.device
    return 3 * c.micro_batches * c.layout.micro * c.model.head_flops / c.layout.tp / (device.top * device.peak)


def passes(c: Case) -> Numbers:
    """`m l/p (3 + again) passes kept / bandwidth`: norms, GELU, dropout, residuals [O]"""
    device = c.cluster.device
    moved = (3 + again(c)) * device.passes * c.kept
    return c.micro_batches * c.layers * moved / device.bandwidth


def host(c: Case) -> Numbers:
    """`max(0, m l/p calls - (products + passes))`: a GPU computes while its host runs Python, a CPU does not [O]"""
    x, (plain, cut, sharded) = c.layout, c.cluster.device.calls
    calls = plain + np.where(x.tp > 1, cut, 0.0) + np.where(x.zero >= 2, sharded, 0.0)
    hidden = (products(c) + passes(c)) * c.cluster.device.gpu
    return np.maximum(0.0, c.micro_batches * c.layers * calls - hidden)


def tensor(c: Case) -> Numbers:
    """`m l/p (4 + 2 again) allreduce(value b s h, t ranks)` [N sec. 3.2]"""
    x, size = c.layout, c.value * c.tokens * c.model.width
    return c.micro_batches * c.layers * (4 + 2 * again(c)) * c.cluster.allreduce(size, x.tp, 1)


def ends(c: Case) -> Numbers:
    """`m (allreduce(value b s V, t) / 2 + (p > 1: 1, else 2) allreduce(value b s h, t))` [O]

    DTensor gathers the logits, and sums the head's gradients over its columns and the embedding's output over its rows.
    """
    x, size = c.layout, c.value * c.tokens
    logits, hidden = (c.cluster.allreduce(size * n, x.tp, 1) for n in (c.model.vocabulary, c.model.width))
    return c.micro_batches * (logits / 2 + np.where(x.pp > 1, 1, 2) * hidden)


def hop(c: Case) -> Numbers:
    """`4 b s h / B + A`: from a stage to the next"""
    return sent(c, c.given, c.layout.pp, c.layout.tp * c.layout.dp)


def sent(c: Case, size: Numbers, ranks: Numbers, stride: Numbers) -> Numbers:
    """Seconds to send bytes from one rank to another rank of its group."""
    return size / c.cluster.rate(ranks, stride) + c.cluster.hop(ranks, stride)


def pipeline(c: Case) -> Numbers:
    """`(2 (p - 1) + (m - 1) (1 + (p > 2: 1 - head / (m hop)))) hop`, with v > 1 `2 (p - 1 + m v) hop` [N sec. 2.2, O]

    A stage sends in one direction and receives from the other at the same time (1F1B). The first and the last stage do
    so once per micro-batch, and inner stages twice, while the last stage computes its head.
    """
    x, m, one = c.layout, c.micro_batches, hop(c)
    inner = np.where(x.pp > 2, np.maximum(0.0, one - head(c) / m), 0.0)
    steady = np.where(x.v > 1, 2 * m * x.v * one, (m - 1) * (one + inner))
    return np.where(x.pp > 1, 2 * (x.pp - 1) * one + steady, 0.0)


def tied(c: Case) -> Numbers:
    """`4 V h / (t B) + A` if p > 1: the end stages exchange the gradients of a tied embedding [O]"""
    x, size = c.layout, WORD * c.model.embedding / c.layout.tp
    return np.where((x.pp > 1) & c.model.tied, sent(c, size, x.pp, x.tp * x.dp), 0.0)


def bubble(c: Case) -> Numbers:
    """`(p - 1) / (v m) (products - head + passes + tensor)`, because other stages have no head [N sec. 2.2]"""
    busy = products(c) - head(c) + passes(c) + tensor(c)
    return busy * (c.layout.pp - 1) / (c.layout.v * c.micro_batches)


def data(c: Case) -> Numbers:
    """`reduce - hidden + gather - hidden` [R sec. 7, O]

    Reduce: a ring over the gradients once a step, half of it with z >= 2. The last micro-batch's backward pass hides
    it, if DDP or FSDP2 reduces. With DDP this begins at the first full bucket, and nothing hides the last bucket. TP or
    stages with z < 2 hide nothing.

    Gather: half a ring, once with z = 1 and 2, and 2 m times with z = 3. It gathers parameters with z = 1, and their
    values with z >= 2. All compute hides it with z >= 2.
    """
    m, x, by_zero = c.micro_batches, c.layout, c.layout.zero >= 2
    by_ddp, prefetch = ~by_zero & (x.tp * x.pp == 1), by_zero & c.gpu
    compute, size = products(c) + passes(c), WORD * c.largest
    reduced = ring(c, size) * np.where(prefetch, 0.5, 1.0)
    hidden = np.where(by_ddp, under_backward(size), prefetch * BACKWARD) * compute / m
    left = np.where(by_ddp, ring(c, last_bucket(size)), 0.0)
    values = np.where(by_zero, c.value, WORD) * c.largest
    gathered = np.where(x.zero == 3, 2.0 * m, np.where(x.zero > 0, 1.0, 0.0)) / 2 * ring(c, values)
    return np.maximum(left, reduced - hidden) + np.maximum(0.0, gathered - prefetch * compute)


def under_backward(size: Numbers) -> Numbers:
    """`2/3 (1 - first bucket / size)`: share of a step's compute that follows DDP's first full bucket [O]"""
    return BACKWARD * np.maximum(0.0, 1 - FIRST_BUCKET / size)


def last_bucket(size: Numbers) -> Numbers:
    """Bytes of DDP's last bucket, whose all-reduce nothing hides."""
    return np.where(size > FIRST_BUCKET, (size - FIRST_BUCKET) % BUCKET, size)


def ring(c: Case, size: Numbers) -> Numbers:
    """`n allreduce(size / n, d ranks, t apart)` [O]

    n is 1 for DDP, the number of blocks + 1 with z >= 2, and else `12 l/p`, one per tensor.
    """
    x = c.layout
    many = np.where(x.zero >= 2, c.layers + 1, np.where(x.tp * x.pp > 1, 12 * c.layers, 1))
    return many * c.cluster.allreduce(size / many, x.dp, x.tp)


def optimizer(c: Case) -> Numbers:
    """`28 own / bandwidth`, over d with z >= 1: AdamW's passes over memory [O]"""
    return ADAMW * c.largest / np.where(c.layout.zero >= 1, c.layout.dp, 1) / c.cluster.device.bandwidth


INSIDE: tuple[Part, ...] = (products, passes, host, tensor, ends, pipeline, tied, bubble, data, optimizer)


def outer_allreduce(c: Case) -> Numbers:
    """`allreduce(format bytes own / shares, I ranks an island apart) + allreduce(4 own, d) / 2` [C step 3, O]

    Each device sends its share to the other islands. With z < 2 the island then gathers the result, in the background.
    """
    compression = np.array(list(FORMATS.values()))[np.asarray(c.layout.compression)]
    gather = np.where((c.layout.zero >= 2) | (c.shares == 1), 0.0, 0.5 * ring(c, 4 * c.largest))
    return c.cluster.allreduce(compression * c.largest / c.shares, c.layout.islands, c.island) + gather


def waiting(c: Case) -> Numbers:
    """`max(0, outer all-reduce / tau - T)`: the part that tau steps of T seconds without CO2 do not hide [C]"""
    step = sum(part(c) for part in INSIDE)
    return np.where(c.layout.islands > 1, np.maximum(0.0, outer_allreduce(c) / c.layout.tau - step), 0.0)


def boundary(c: Case) -> Numbers:
    """`(32 own / (shares bandwidth) + (offloaded: 8 own / (shares host))) / tau` [O]

    A step is `(max(tau T, all-reduce) + boundary) / tau` [C].
    """
    x, device = c.layout, c.cluster.device
    share = c.largest / c.shares
    whole = BOUNDARY * share / device.bandwidth + np.where(x.offload == 1, 8 * share / device.host, 0.0)
    return np.where(x.islands > 1, whole / x.tau, 0.0)


PARTS = (*INSIDE, waiting, boundary)
COMMUNICATION = ("tensor", "ends", "pipeline", "tied", "data", "waiting")  # parts that are exposed communication


def seconds(c: Case) -> dict[str, Numbers]:
    return {part.__name__: part(c) for part in PARTS}
