"""Counts the bytes that are alive: of a method, of a training step, and of one block of a decoder."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.layout import Layout
from training.layouts.parallel import FAMILIES, take_stage
from training.plan.case import NAMES, Model

# what CUDA's autocast computes in float32 and the CPU's does not
IN_FLOAT32 = (
    *((F, name) for name in ("layer_norm", "group_norm", "softmax")),
    *((owner, name) for owner in (torch, Tensor) for name in ("softmax", "pow")),
)


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operators make, as long as they live; `held` were there before."""

    def __init__(self, held: list[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (storage := t.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """What autocast computes in float32 on a GPU alone."""

    def in_float32(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return function(*args, **kwargs)

    with contextlib.ExitStack() as patches:
        for owner, name in IN_FLOAT32:
            original = getattr(owner, name)
            # a function, not a partial: as a method of Tensor it must take self
            patched = functools.wraps(original)(lambda *a, _f=original, **k: in_float32(_f, *a, **k))
            patches.enter_context(mock.patch.object(owner, name, patched))
        yield


def of_block(model: Model, value: int, tp: int) -> tuple[float, float]:
    """Bytes of a token that a block keeps, and that its backward pass has more at its peak.

    value: bytes of a number that products take; 2: under autocast. By samples: what does not grow with them, such as
    autocast's copies of the weights, is none of a token's.
    """
    one, two = (_kept_and_peak(model, samples, value, tp) for samples in (1, 2))
    kept, peak = ((more - fewer) / model.context for fewer, more in zip(one, two, strict=True))
    return kept, peak - kept


def _kept_and_peak(model: Model, samples: int, value: int, tp: int) -> tuple[int, int]:
    """Kept after the forward pass, and the peak of both passes, without the weights' gradients."""
    stage = _stage(model)
    _cut(stage.blocks[0], model.family, tp)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=value == 2)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu(), autocast:
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


def _stage(model: Model) -> Any:
    """One layer between small ends, on the meta device."""
    import training.prepared  # noqa: F401

    # isort: split
    from transformers import AutoConfig, AutoModelForCausalLM

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
    """Leaves of the block's matrices what one of tp devices holds (training.layouts.parallel.cut_tensors)."""
    cuts = FAMILIES[family]
    for names, by_rows in ((cuts.columns, False), (cuts.rows, True)):
        for name in names:
            linear = block.get_submodule(name)
            rows, columns = linear.weight.shape
            size = (columns // tp, rows) if by_rows else (columns, rows // tp)
            block.set_submodule(name, nn.Linear(*size, bias=linear.bias is not None, device="meta"))
    if hasattr(block, "attn"):  # GPT-2's, which cuts what comes of its joint projection
        block.attn.split_size //= tp
