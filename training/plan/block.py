"""Bytes that one block keeps for its backward pass, measured as a dry run measures them (training/memory.py): fake
tensors go through the block of transformers that one device of t holds."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from core.errors import UserError
from training.layouts.layout import Layout
from training.plan.model import NAMES, Model

if TYPE_CHECKING:
    from training.layouts.stages import Stage


@dataclass(frozen=True)
class Block:
    """Of one sample, whole + cut / t: bytes kept, and what its backward pass has more at its peak."""

    kept: tuple[float, float]
    more: tuple[float, float]


@cache
def measured(model: Model, value: int) -> Block:
    """value: bytes of a number that is kept; 2: under autocast."""
    at = [_slopes(model, value, t) for t in ((1, 2) if model.heads % 2 == model.kv_heads % 2 == 0 else (1, 1))]
    (kept, more), (kept_half, more_half) = at
    return Block(*((2 * half - whole, 2 * (whole - half)) for whole, half in ((kept, kept_half), (more, more_half))))


def _slopes(model: Model, value: int, tp: int) -> tuple[float, float]:
    """By samples: what does not grow with them, autocast's copies of the weights, is counted elsewhere."""
    one, two = (_bytes(model, samples, value, tp) for samples in (1, 2))
    kept, peak = two[0] - one[0], two[1] - one[1]
    return kept, peak - kept


def _stage(model: Model) -> Stage:
    """One layer between small ends, on the meta device."""
    with contextlib.suppress(ImportError):
        import training.prepared  # noqa: F401, transformers imports torchvision when it is installed
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.activations import ACT2FN

    from training.layouts.stages import take_stage

    if model.activation not in ACT2FN:
        raise UserError(f"model {model.name}: activation {model.activation!r}: transformers knows {', '.join(ACT2FN)}")
    found = (1, model.width, model.heads, model.inner, model.context, model.activation)
    sizes: dict[str, Any] = dict(zip(NAMES[model.family], found, strict=False)) | {"vocab_size": 8}
    if model.gated:
        sizes["num_key_value_heads"] = model.kv_heads
    else:
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = AutoConfig.for_model(model.family, bos_token_id=None, eos_token_id=None, **sizes)
    with torch.device("meta"):
        return take_stage(AutoModelForCausalLM.from_config(config), Layout(), 0)[0]


def _cut(block: Any, family: str, tp: int) -> None:
    """Leaves of the block's matrices what one of tp devices holds (training.layouts.stages.cut_tensors)."""
    from training.layouts.stages import FAMILIES

    cuts = FAMILIES[family]
    for names, by_rows in ((cuts.columns, False), (cuts.rows, True)):
        for name in names:
            linear = block.get_submodule(name)
            rows, columns = linear.weight.shape
            size = (columns // tp, rows) if by_rows else (columns, rows // tp)
            block.set_submodule(name, nn.Linear(*size, bias=linear.bias is not None, device="meta"))
    if hasattr(block, "attn"):  # GPT-2's, which cuts what comes of its joint projection
        block.attn.split_size //= tp


def _bytes(model: Model, samples: int, value: int, tp: int) -> tuple[int, int]:
    """Kept after the forward pass, and the peak of both passes, without the weights' gradients."""
    from training.memory import Live, as_on_gpu

    stage = _stage(model)
    _cut(stage.blocks[0], model.family, tp)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        as_on_gpu(),
        torch.autocast("cpu", torch.bfloat16, enabled=value == 2),
    ):
        stage = stage.to_empty(device="cpu").train()
        x, places = torch.empty(samples, model.context, model.width, requires_grad=True), torch.arange(model.context)
        more = {} if stage.rotary is None else {"position_embeddings": stage.rotary(x, places[None])}
        for p in stage.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with Live([x, *stage.parameters(), *stage.buffers()]) as live:
            y = stage.blocks[0](x, **more)
            kept = live.now
            y.backward(torch.empty_like(y))
    return kept, live.peak
