"""The model, the cluster and the layouts to plan, and the quantities that memory and time share."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.checkpoint.stored import parse_json
from core.errors import UserError
from training.recipe import find
from training.start.errors import explained
from training.start.script import from_home
from training.start.workers import least_seconds

# bytes per value that an activation function keeps in addition to its input and its result
ACTIVATIONS = {"gelu": 0, "gelu_pytorch_tanh": 0, "gelu_new": 12, "silu": 0}
LARGEST = 10**7  # the largest size in a config.json
FAMILIES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama"}  # by model_type in Hugging Face's config.json
# their names for layers, width, heads, inner width, positions, activation; and the default activation
NAMES = {
    "gpt2": ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "activation_function", "gelu_new"),
    "llama": (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "hidden_act", "silu"),
    ),
}


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The devices, clusters and models of presets.toml, which has their sources."""
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text())


def of_preset(kind: str, name: str) -> Any:
    """An entry of presets.toml, or a UserError that lists them."""
    known = presets()[kind]
    return find(kind[:-1], name, known, f"choose one of {', '.join(known)}")


def formula(text: str, act: Callable[[Any], float]) -> Any:
    """A property whose docstring is its formula."""
    return property(act, doc=text)


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    Attributes:
        family: gpt2 (GELU, biases, two layer norms, learned positions) or llama (gated SiLU, no biases, RMS norms,
            rotary positions).
        context: Tokens of a sample.
        tied: Whether embedding and head share a matrix.
        activation: The activation function, one of ACTIVATIONS, by transformers' name.
    """

    name: str
    family: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    inner: int
    kv_heads: int
    tied: bool
    activation: str = "gelu_pytorch_tanh"

    gated = formula("whether the MLP is gated", lambda m: m.family == "llama")
    kv_width = formula("h a_kv / a: width of a token's keys, or values", lambda m: m.width * m.kv_heads / m.heads)
    matrices = formula(
        "h (2h + 2 h_kv) + (2, gated 3) h f: weights of a layer's products; 12 h^2 for GPT's f = 4 h [N eq. 2]",
        lambda m: m.width * (2 * m.width + 2 * m.kv_width + (3 if m.gated else 2) * m.inner),
    )
    cut = formula(
        "a layer's parameters that TP cuts: its matrices, and the biases of matrices cut by columns",
        lambda m: m.matrices + (0 if m.gated else m.width + 2 * m.kv_width + m.inner),
    )
    whole = formula(
        "a layer's parameters that each TP rank holds: norms, and the biases of matrices cut by rows",
        lambda m: (2 if m.gated else 6) * m.width,
    )
    embedding = formula("V h", lambda m: m.vocabulary * m.width)
    positions = formula("s h if they are learned", lambda m: 0 if m.gated else m.context * m.width)
    last_norm = formula("parameters of the last norm", lambda m: (1 if m.gated else 2) * m.width)
    params = formula(
        "l (12 h^2 + 13 h) + (V + s) h for GPT [N eq. 2], and the last norm, which [N] leaves out",
        lambda m: m.layers * (m.cut + m.whole) + m.embedding * (2 - m.tied) + m.positions + m.last_norm,
    )

    # Forward FLOPs of one sample. A training step has three times as many: [N] eq. 3 without recomputation, for GPT
    # 72 s l h^2 (1 + s / (6 h) + V / (12 l h)).
    linear_flops = formula(
        "2 s (weights of a layer's products), per layer: 24 s h^2 for GPT [N eq. 3]",
        lambda m: 2 * m.context * m.matrices,
    )
    attention_flops = formula(
        "4 s^2 h per layer: Q K^T and the weighted sum of V, without using the mask [N eq. 3]",
        lambda m: 4 * m.context**2 * m.width,
    )
    head_flops = formula("2 s h V [N eq. 3]", lambda m: 2 * m.context * m.embedding)
    step_flops = formula(
        "3 (l (linear + attention) + head) per sample, forward and backward, as MFU counts [K sec. 6]",
        lambda m: 3 * (m.layers * (m.linear_flops + m.attention_flops) + m.head_flops),
    )

    def in_block(self, size: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Bytes per token, as (whole, cut by TP), that a block of transformers keeps, and adds in its backward [O].

        Without dropout. Whole: the inputs of two norms and two sums in float32, and the norms' statistics. Cut: q, k,
        v, attention's result and log-sum-exp, and the activation's input and result. Values of products have `size`
        bytes.
        """
        if self.gated:
            kept = 24 * self.width + (2 * self.width if size < 4 else 0) + 8
            cut = 2 * size * (self.width + self.kv_width + 2 * self.inner) + 4 * self.heads
        else:
            kept = 16 * self.width + 16
            cut = 4 * size * self.width + (2 * size + ACTIVATIONS[self.activation]) * self.inner + 4 * self.heads
        steps = 10 if ACTIVATIONS[self.activation] else 0  # at most, of an activation computed in float32 in steps
        return (kept, cut), (4 * self.width, (4 if size >= 4 else steps) * self.inner)


def preset_model(name: str, context: int | None) -> Model:
    """A model of presets.toml, or from a folder with Hugging Face's config.json."""
    if Path(name).is_dir() or "/" in name:
        return from_config(from_home(name), context)
    family, layers, width, heads, inner, vocabulary, length, activation = of_preset("models", name)
    sizes = layers, width, heads, vocabulary, context or length, inner, heads
    return Model(name, family, *sizes, tied=family == "gpt2", activation=activation)


def from_config(folder: Path, context: int | None) -> Model:
    """The model of a folder with a config.json. Raises UserError if the planner does not support it."""
    file = folder / "config.json"
    with explained(f"{file} cannot be read", "give a folder with Hugging Face's config.json"):
        config = parse_json(file.read_text())
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"{file}: model_type {kind!r} is no decoder that the planner knows: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    layers, width, heads, inner, positions, activation, usual = NAMES[family]

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
            raise UserError(f"{file}: {name}={value!r}: the planner needs a whole number from 1 to {LARGEST}")
        return value

    if size(width) % size(heads):
        raise UserError(f"{file}: {heads}={size(heads)} does not divide {width}={size(width)}")
    model = Model(
        *(folder.resolve().name, family, size(layers), size(width), size(heads)),
        *(size("vocab_size"), context or size(positions)),
        inner=size(inner, 4 * size(width) if family == "gpt2" else None),
        kv_heads=size("num_key_value_heads", size(heads)),
        tied=bool(config.get("tie_word_embeddings", family == "gpt2")),
        activation=str(config.get(activation, usual)),
    )
    check_counted(file, model, config)
    return model


def check_counted(file: Path, m: Model, config: dict[str, Any]) -> None:
    """Raises UserError if the model is impossible, or has parameters that the formulas do not count."""
    find("activation", m.activation, ACTIVATIONS, f"the planner knows {', '.join(ACTIVATIONS)}")
    if m.heads % m.kv_heads:
        raise UserError(f"{file}: num_key_value_heads={m.kv_heads} does not divide num_attention_heads={m.heads}")
    each = m.width // m.heads
    if m.gated and each % 2:
        raise UserError(f"{file}: hidden_size / num_attention_heads is {each}: rotary positions need an even number")
    of_llama = {"head_dim": each, "attention_bias": False, "mlp_bias": False}
    others = of_llama if m.gated else {"add_cross_attention": False}
    for name, counted in others.items():
        if (value := config.get(name)) not in (None, counted):
            raise UserError(f"{file}: {name}={value!r}: the planner counts {counted} alone: give a model that has it")


# -- devices and clusters ---------------------------------------------------------------------------------------------


Numbers = Any  # a number, or an array with a number for each layout
BITS = 8
SMALLEST, GREATEST = 1e-12, 1e18  # of the numbers that describe a cluster; products of others overflow
REPEATS = 4  # timings of each measurement
DOCTOR = "run co2_training.doctor under torchrun with --out NEW_FILE, and give that file"


@dataclass(frozen=True)
class Device:
    """A GPU, or the share of a CPU that a rank has.

    Attributes:
        peak: FLOP/s of matrix products at most.
        memory: Bytes.
        bandwidth: Bytes/s of its memory.
        host: Bytes/s to host memory.
        top: The share of the peak that products reach.
        passes: How often the other operations move the kept values of a layer forward. Backward is twice as often [O].
        calls: Seconds of host Python for a block's forward, backward and update, more with TP, and more with FSDP2.
        gpu: Whether it is a GPU, which computes while its host runs Python.
    """

    name: str
    peak: float
    memory: float
    bandwidth: float
    host: float
    top: float = 0.69  # these three as presets.toml says
    passes: float = 2.48
    calls: tuple[float, float, float] = (1e-3, 3e-3, 2e-3)
    gpu: bool = True


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    Attributes:
        inside: Bytes/s of a device inside its node.
        across: Bytes/s out of a node, for all its devices together.
        latency: Seconds of a hop between nodes.
        inside_latency: Seconds of a hop inside a node.
    """

    name: str
    device: Device
    nodes: int
    per_node: int
    inside: float
    across: float
    latency: float
    inside_latency: float

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def crosses(self, ranks: Numbers, stride: Numbers) -> Numbers:
        """Whether a group of `ranks` ranks, `stride` devices apart, spans nodes."""
        return ranks * stride > self.per_node

    def hop(self, ranks: Numbers, stride: Numbers) -> Numbers:
        """Seconds of a hop in such a group."""
        return np.where(self.crosses(ranks, stride), self.latency, self.inside_latency)

    def rate(self, ranks: Numbers, stride: Numbers) -> Numbers:
        """Bytes/s of each ring that starts in a node. Rings that leave the node share its network cards [N sec. 3]."""
        shared = self.across / np.minimum(stride, self.per_node)
        return np.where(self.crosses(ranks, stride), np.minimum(shared, self.inside), self.inside)

    def allreduce(self, size: Numbers, ranks: Numbers, stride: Numbers) -> Numbers:
        """`min(2 (n-1)/n S/B + 2 (n-1) A, 2 S/B + 2 ceil(log2 n) A)` seconds: a ring [P], or two trees [T].

        S bytes travel among n ranks, which are `stride` devices apart.
        """
        return collective(size / self.rate(ranks, stride), ranks, self.hop(ranks, stride))


def collective(seconds: Numbers, ranks: Numbers, hop: Numbers, *, trees: bool = True) -> Numbers:
    """The formula of Cluster.allreduce, from the seconds S/B of the bytes over one link, and A of a hop.

    Trees are available in NCCL.
    """
    n = np.maximum(ranks, 1)
    found = 2 * (n - 1) / n * seconds + 2 * (n - 1) * hop
    if trees:
        found = np.minimum(found, np.where(n > 2, 2, 1) * seconds + 2 * np.ceil(np.log2(n)) * hop)
    return np.where(n > 1, found, 0.0)


def device(key: str) -> Device:
    """A device of presets.toml."""
    return Device(**of_preset("devices", key))


def preset(name: str, *, probe: bool = False) -> Cluster:
    """A cluster of presets.toml. With `probe`, its device is measured on this machine."""
    kind, nodes, per_node, inside, across, latency, inside_latency, efficiency = of_preset("clusters", name)
    if probe and not torch.cuda.is_available():
        raise UserError(f"preset={name}: --probe would measure a GPU, this machine has none: leave --probe out")
    found = probed(device(kind).name) if probe else device(kind)
    return Cluster(name, found, nodes, per_node, inside, across * efficiency, latency, inside_latency)


# -- the doctor's -----------------------------------------------------------------------------------------------------


def from_doctor(file: Path, *, probe: bool) -> Cluster:
    """The cluster of a report by core.doctor (docs/clusters.md). Without `probe`, its device is looked up by name.

    Raises:
        UserError: If the report is invalid, or the device is unknown.
    """
    with explained(f"{file} is no report of the doctor", DOCTOR):
        report = parse_json(file.read_text())
        if not isinstance(report, dict) or report.get("format") != 1:
            raise UserError(f"{file} is no report of the doctor (format 1): {DOCTOR}")
        if (per_node := report["workers_per_node"]) is None:
            raise UserError(f"{file}: its nodes have different numbers of workers: run the doctor with as many on each")
        nodes, device = report["nodes"], report["device"]
        (inside, inside_latency), (across, latency) = (
            _link(report["links"][name]) if many else (math.inf, 0.0)
            for name, many in (("within", per_node > 1), ("across", len(nodes) > 1))
        )
        name, memory, gpu = str(device["name"]), _number(device["memory_bytes_per_worker"]), device["type"] != "cpu"
        hosts = Counter(str(node.get("hostname", number)) for number, node in enumerate(nodes))
        if not isinstance(per_node, int) or len(nodes) * per_node != report["workers"]:
            raise ValueError(f"workers={report['workers']!r}, but {len(nodes)} nodes of {per_node}")
    crowd = 1 if gpu else per_node * max(hosts.values())  # also if nodes are emulated on one machine
    found = probed(name, crowd) if probe else known(name)
    found = replace(found, memory=memory, gpu=gpu)
    return Cluster(file.stem, found, len(nodes), per_node, inside, across, latency, inside_latency)


def _number(value: Any) -> float:
    """The value, if a cluster may have it. Otherwise raises ValueError or TypeError."""
    if not SMALLEST <= value <= GREATEST:
        raise ValueError(f"{value!r} is no number of a cluster")
    return value


def _link(link: Any) -> tuple[float, float]:
    """Bytes/s, and seconds of a hop. The doctor's latency is for an all-reduce of 2 (n - 1) hops in a ring [P]."""
    hops = max(1, 2 * (_number(link["workers"]) - 1))
    return _number(link["bandwidth_bits_per_second"]) / BITS, _number(link["latency_seconds"]) / hops


def known(name: str) -> Device:
    """The device of presets.toml whose name is part of `name`."""
    for key, found in presets()["devices"].items():
        if found["name"].lower() in name.lower():
            return replace(device(key), name=name)
    raise UserError(f"device {name!r} is not known to the planner: add --probe where such a one is, which measures it")


def probed(name: str, ranks: int = 1) -> Device:
    """Measures this machine: products, in float32 on a CPU and bfloat16 on a GPU, and a copy.

    Programs reach the measured rate, so top is 1. We assume the A100's passes. `ranks` share the device.
    """
    gpu = torch.cuda.is_available()
    where, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    width = 8192 if gpu else 1024
    a, b = (torch.ones(width, width, device=where, dtype=dtype) for _ in range(2))
    product = least_seconds(lambda: a @ b, where, REPEATS)
    copied = torch.ones(1 << 26 if gpu else 1 << 23, device=where)
    target = torch.empty_like(copied)
    moved = least_seconds(lambda: target.copy_(copied), where, REPEATS)
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else math.inf
    host = device("a100").host if gpu else 2 * copied.nbytes / moved
    rate, bandwidth = 2 * width**3 / product / ranks, 2 * copied.nbytes / moved / ranks
    return Device(name, rate, memory, bandwidth, host / ranks, top=1.0)


# -- layouts ----------------------------------------------------------------------------------------------------------


RECOMPUTE = ("none", "full")
FORMATS = {"float32": 4.0, "int8": 260 / 256, "int4": 132 / 256}  # bytes per element: core/compression/formats.py
MERGES = ("keep_local", "restart")
WORD = 4  # bytes of a parameter, a gradient, and each of the optimizer's two moments


@dataclass(frozen=True)
class Layouts:
    """One layout, or an array of layouts in each field.

    Attributes:
        tp, pp, dp: Ranks of an island.
        islands: The number of islands. 1 means ddp.
        micro: Samples of a micro-batch.
        v: Chunks of a stage's layers.
        zero: ZeRO's stage.
        recompute, compression, merge: Indices of RECOMPUTE, FORMATS and MERGES.
        tau: Local steps per round.
        offload: 1 if CO2's outer state is in host memory.
    """

    tp: Numbers
    pp: Numbers
    dp: Numbers
    islands: Numbers
    micro: Numbers
    v: Numbers = 1
    zero: Numbers = 0
    recompute: Numbers = 0
    tau: Numbers = 1
    compression: Numbers = 0
    merge: Numbers = 0
    offload: Numbers = 0

    def __getitem__(self, k: Any) -> Layouts:
        """Layout k, or the layouts of a mask."""
        return Layouts(*(np.broadcast_to(getattr(self, name), self.shape)[k] for name in AXES))

    @property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(np.shape(getattr(self, name)) for name in AXES))

    @property
    def ranks(self) -> Numbers:
        return self.tp * self.pp * self.dp * self.islands


AXES = tuple(field.name for field in dataclasses.fields(Layouts))


@dataclass(frozen=True)
class Case:
    """A model, a cluster and layouts. `batch` is the samples of a step over all replicas.

    GPUs train under autocast in 16 bits over NCCL. CPUs train in float32 over gloo, where FSDP2 does not communicate
    during computation, and a reduce-scatter is an all-reduce.
    """

    model: Model
    cluster: Cluster
    batch: int
    layout: Layouts

    @property
    def gpu(self) -> bool:
        return self.cluster.device.gpu

    @property
    def value(self) -> int:
        """Bytes of a value in matrix products."""
        return 2 if self.gpu else 4

    @cached_property
    def micro_batches(self) -> Numbers:
        """`m = batch / (d I b)`"""
        x = self.layout
        return self.batch // (x.dp * x.islands * x.micro)

    @cached_property
    def layers(self) -> Numbers:
        """`l / p`: layers of a stage"""
        return self.model.layers / self.layout.pp

    @cached_property
    def block(self) -> Numbers:
        """`cut / t + whole`: parameters of a layer on one device, without ZeRO"""
        return self.model.cut / self.layout.tp + self.model.whole

    def own(self, last: bool) -> Numbers:
        """`l/p block + V h/t + (first stage: positions, last stage: last norm)`: parameters of a device

        With two or more stages, a tied head is a copy of the embedding [N].
        """
        m, x = self.model, self.layout
        ends = m.embedding / x.tp
        alone = ends * (1 if m.tied else 2) + m.positions + m.last_norm
        of_end = ends + m.last_norm if last else ends + m.positions
        return self.layers * self.block + np.where(x.pp == 1, alone, of_end)

    @cached_property
    def largest(self) -> Numbers:
        """`max(first, last)`: parameters of a device of the largest stage"""
        return np.maximum(self.own(False), self.own(True))

    @cached_property
    def kept(self) -> Numbers:
        """`b s (4 h size + masks + 12 h size / t)`: bytes that a layer moves, as [K eq. 2] counts them

        4 h are the inputs of two norms, of attention and of the MLP. The masks are dropout's, of 2 h bytes. 12 h are q,
        k, v, attention's result, and GELU's input and result, which are 2 f. A gated MLP has 4 f in their place [O].
        """
        m, x, size = self.model, self.layout, self.value
        whole = 4 * m.width * size + (0 if m.gated else 2 * m.width)
        cut = 2 * m.width + 2 * m.kv_width + (4 if m.gated else 2) * m.inner
        return x.micro * m.context * (whole + cut * size / x.tp)

    @property
    def tokens(self) -> Numbers:
        """`b s`: tokens of a micro-batch"""
        return self.layout.micro * self.model.context

    @cached_property
    def given(self) -> Numbers:
        """`4 b s h`: bytes of a block's input, which autocast leaves in float32"""
        return WORD * self.tokens * self.model.width

    @cached_property
    def of_block(self) -> tuple[Numbers, Numbers]:
        """`b s (whole + cut / t)`: bytes that a block keeps, and that its backward pass adds at its peak [O]"""
        sizes = self.model.in_block(self.value)
        kept, more = (self.tokens * (whole + cut / self.layout.tp) for whole, cut in sizes)
        return kept, more

    @cached_property
    def shares(self) -> Numbers:
        """d, but 1 with z < 2 and TP or stages: replicas of an island over which CO2's outer state is sharded [C]"""
        x = self.layout
        return np.where((x.zero >= 2) | (x.tp * x.pp == 1), x.dp, 1)

    @cached_property
    def island(self) -> Numbers:
        """`t p d`: devices of an island"""
        return self.layout.tp * self.layout.pp * self.layout.dp
