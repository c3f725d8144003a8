"""What a decoder needs: parameters, arithmetic and kept activations, from its sizes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from core.checkpoints.untrusted import parse_json, reason
from core.errors import UserError
from training.data import from_home
from training.recipe import find

FLOAT32 = 4  # bytes
# bytes that an activation keeps of each of its values beyond its input and its result
ACTIVATIONS = {"gelu": 0, "gelu_pytorch_tanh": 0, "gelu_new": 12, "silu": 0}
LARGEST = 10**7  # of a size in a config.json
FAMILIES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama"}  # by model_type in Hugging Face's config.json
# of a family there: layers, width, heads, inner width, positions, activation and its default
NAMES = {
    "gpt2": ("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "activation_function", "gelu_new"),
    "llama": (
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "hidden_act", "silu"),
    ),
}


@cache
def presets() -> dict[str, dict[str, Any]]:
    """devices, clusters and models of presets.toml, where each has its source."""
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text())


def of_preset(kind: str, name: str) -> Any:
    """One of presets.toml; else a UserError."""
    known = presets()[kind]
    return find(kind[:-1], name, known, f"choose one of {', '.join(known)}")


def formula(text: str, act: Callable[[Any], float]) -> Any:
    """A property with its formula as text."""
    return property(act, doc=text)


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder.

    family: gpt2 (GELU, biases, two layer norms, learned positions) or llama (gated SiLU, no biases, RMS norms, rotary
    positions). context: tokens of a sample. tied: embedding and head share a matrix. activation: as transformers call
    it: one of ACTIVATIONS.
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

    gated = formula("whether the MLP is", lambda m: m.family == "llama")
    kv_width = formula("h a_kv / a: of all keys, or all values, of a token", lambda m: m.width * m.kv_heads / m.heads)
    matrices = formula(
        "h (2h + 2 h_kv) + (2, gated 3) h f: weights of a layer's products; 12 h^2 for GPT's f = 4 h [N eq. 2]",
        lambda m: m.width * (2 * m.width + 2 * m.kv_width + (3 if m.gated else 2) * m.inner),
    )
    cut = formula(
        "a layer's parameters that TP cuts: its matrices, and the biases of those cut by columns",
        lambda m: m.matrices + (0 if m.gated else m.width + 2 * m.kv_width + m.inner),
    )
    whole = formula(
        "a layer's parameters that each TP rank holds: norms, and the biases of matrices cut by rows",
        lambda m: (2 if m.gated else 6) * m.width,
    )
    embedding = formula("V h", lambda m: m.vocabulary * m.width)
    positions = formula("s h where they are learned", lambda m: 0 if m.gated else m.context * m.width)
    last_norm = formula("its parameters", lambda m: (1 if m.gated else 2) * m.width)
    params = formula(
        "l (12 h^2 + 13 h) + (V + s) h for GPT [N eq. 2], and the last norm, which [N] leaves out",
        lambda m: m.layers * (m.cut + m.whole) + m.embedding * (2 - m.tied) + m.positions + m.last_norm,
    )

    # Forward FLOPs of one sample. A training step's are three times as many: [N] eq. 3 without recomputation, for GPT
    # 72 s l h^2 (1 + s / (6 h) + V / (12 l h)).
    linear_flops = formula(
        "2 s (weights of a layer's products), of a layer: 24 s h^2 for GPT [N eq. 3]",
        lambda m: 2 * m.context * m.matrices,
    )
    attention_flops = formula(
        "4 s^2 h, of a layer: Q K^T and the weighted sum of V, the mask not made use of [N eq. 3]",
        lambda m: 4 * m.context**2 * m.width,
    )
    head_flops = formula("2 s h V [N eq. 3]", lambda m: 2 * m.context * m.embedding)
    step_flops = formula(
        "3 (l (linear + attention) + head), of one sample, forward and backward: what MFU counts [K sec. 6]",
        lambda m: 3 * (m.layers * (m.linear_flops + m.attention_flops) + m.head_flops),
    )

    # What a layer keeps of one token for its backward pass.
    kept_whole = formula(
        "4 h values: the inputs of two norms, of attention and of the MLP, which TP does not cut [K eq. 2]",
        lambda m: 4 * m.width,
    )
    kept_cut = formula(
        "12 h for GPT [K eq. 2]: q, k, v, attention's result, GELU's input and result; gated: 4 f for 2 f [O]",
        lambda m: 2 * m.width + 2 * m.kv_width + (4 if m.gated else 2) * m.inner,
    )
    masks = formula("2 h bytes of dropout's masks [K eq. 2]", lambda m: 0 if m.gated else 2 * m.width)

    def in_block(self, size: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Bytes of a token, (whole, cut by TP), without dropout: kept by a block of transformers; more in its backward

        size: of a value that products take. Whole: what comes to two norms and to two sums, in float32, and the norms'
        statistics. Cut: q, k, v, attention's result and log-sum-exp, the activation's input and result [O]
        """
        if self.gated:
            kept = 24 * self.width + (2 * self.width if size < FLOAT32 else 0) + 8
            cut = 2 * size * (self.width + self.kv_width + 2 * self.inner) + 4 * self.heads
        else:
            kept = 16 * self.width + 16
            cut = 4 * size * self.width + (2 * size + ACTIVATIONS[self.activation]) * self.inner + 4 * self.heads
        steps = 10 if ACTIVATIONS[self.activation] else 0  # at most: of an activation computed in float32 by steps
        return (kept, cut), (4 * self.width, (4 if size >= FLOAT32 else steps) * self.inner)

    def scores(self, size: float) -> float:
        """a s (2 size + 1) bytes: softmax, what dropout leaves, its mask [K eq. 2]; without dropout a s size"""
        return self.heads * self.context * (size if self.gated else 2 * size + 1)


def preset_model(name: str, context: int | None) -> Model:
    """A model of presets.toml, or of a folder with Hugging Face's config.json."""
    if Path(name).is_dir() or "/" in name:
        return from_config(from_home(name), context)
    family, layers, width, heads, inner, vocabulary, length = of_preset("models", name)
    activation = presets()["activations"].get(name, NAMES[family][-1] if family == "llama" else "gelu_pytorch_tanh")
    sizes = layers, width, heads, vocabulary, context or length, inner, heads
    return Model(name, family, *sizes, tied=family == "gpt2", activation=activation)


def from_config(folder: Path, context: int | None) -> Model:
    """Of a decoder that the planner knows; else a UserError."""
    file = folder / "config.json"
    try:
        config = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {reason(error)}; give a folder with Hugging Face's config.json") from None
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
    """UserError: no such model can be, or it has parameters that are not counted."""
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
