"""Where a family's model is cut: into stages of a pipeline, and each block's matrices over tensor parallelism.

A cut model keeps the whole model's names, so that checkpoints of all layouts have the same ones. GPT-2's joint
projection of queries, keys and values becomes three layers under every layout, because a cut would cross the three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from core.errors import UserError
from training.layouts.layout import Layout


@dataclass(frozen=True)
class Family:
    """Names of modules. base: what holds the embeddings, the blocks and the last norm; the head, lm_head, is beside it.
    columns, rows: a block's linear layers that are cut by output and by input, which needs one all-reduce behind each
    pair (Megatron-LM's cut, Shoeybi et al., 2019, section 3); norms: those of a block."""

    base: str
    tokens: str
    positions: str  # learned; "" for rotary ones, whose frequencies all stages have
    blocks: str
    norm: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    norms: tuple[str, ...]


FAMILIES = {
    "gpt2": Family(
        base="transformer",
        tokens="wte",
        positions="wpe",
        blocks="h",
        norm="ln_f",
        columns=("attn.c_attn.q", "attn.c_attn.k", "attn.c_attn.v", "mlp.c_fc"),
        rows=("attn.c_proj", "mlp.c_proj"),
        norms=("ln_1", "ln_2"),
    ),
    "llama": Family(
        base="model",
        tokens="embed_tokens",
        positions="",
        blocks="layers",
        norm="norm",
        columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        rows=("self_attn.o_proj", "mlp.down_proj"),
        norms=("input_layernorm", "post_attention_layernorm"),
    ),
}


def family_of(model: nn.Module) -> Family:
    """UserError for a model that nobody has said how to cut."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise UserError(f"layout: a model of type {kind} is not known how to cut: give one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def check_cut(model: nn.Module, layout: Layout) -> None:
    """UserError where the layout does not fit the model."""
    family_of(model)
    c: Any = model.config
    heads, layers = c.num_attention_heads, c.num_hidden_layers
    key_heads = getattr(c, "num_key_value_heads", None) or heads
    layout.check_model(layers=layers, heads=heads, key_heads=key_heads, vocabulary=c.vocab_size)


def take_stage(model: nn.Module, layout: Layout, stage: int) -> list[Stage]:
    """Removes from the whole model what other stages hold; returns this stage's v parts, which share its modules.

    The head's stage holds a copy of the token embedding where they are tied.
    """
    check_cut(model, layout)
    family, tied = family_of(model), is_tied(model)
    root: Any = model
    base = getattr(root, family.base)
    if family.positions:
        _part_projections(getattr(base, family.blocks))
    numbers = layout.layers_of(stage, root.config.num_hidden_layers)
    first, last = stage == 0, stage == layout.pp - 1
    blocks = {str(i): getattr(base, family.blocks)[i] for own in numbers for i in own}
    setattr(base, family.blocks, nn.ModuleDict(blocks))
    if not last:
        root.lm_head = None
        setattr(base, family.norm, None)
    if not first:
        if family.positions:
            setattr(base, family.positions, None)
        if not (last and tied):
            setattr(base, family.tokens, None)
    n = len(numbers)
    return [Stage(root, family, own, first and i == 0, last and i == n - 1) for i, own in enumerate(numbers)]


def is_tied(model: Any) -> bool:
    """Whether head and token embedding are one parameter, of a whole model."""
    family = family_of(model)
    return model.lm_head.weight is getattr(getattr(model, family.base), family.tokens).weight


class Stage(nn.Module):
    """Consecutive layers of a model, whose modules it shares: int64 tokens [batch, time], or hidden states [batch,
    time, width], -> hidden states, or logits [batch, time, vocabulary]."""

    def __init__(self, model: Any, family: Family, layers: range, first: bool, last: bool):
        super().__init__()
        base = getattr(model, family.base)
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(getattr(base, family.blocks)[str(i)] for i in layers)
        self.tokens = getattr(base, family.tokens) if first or last else None  # of the last one, where it is tied
        self.positions = getattr(base, family.positions) if first and family.positions else None
        self.dropout = getattr(base, "drop", None) if first else None
        self.rotary = getattr(base, "rotary_emb", None)
        self.norm = getattr(base, family.norm) if last else None
        self.head = model.lm_head if last else None

    @property
    def tied(self) -> bool:
        """Whether it holds the token embedding and the head, as one parameter."""
        return self.head is not None and self.tokens is not None and self.head.weight is self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        if self.first:
            assert self.tokens is not None
            x = self.tokens(x)
            x = x if self.positions is None else x + self.positions(places)
            x = x if self.dropout is None else self.dropout(x)
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(x, position_ids=places)}
        for block in self.blocks:
            x = block(x, **more)
        if self.head is not None:
            assert self.norm is not None
            x = self.head(self.norm(x))
        return x


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def cut_tensors(stage: Stage, family: Family, mesh: DeviceMesh) -> None:
    """Makes DTensors of all parameters over the mesh, of one dimension. What no rank shares is replicated, so that
    norms count it once."""
    tied = stage.tied
    plan: dict[str, ParallelStyle] = dict.fromkeys(family.norms, Replicated())
    plan |= {name: ColwiseParallel() for name in family.columns} | {name: RowwiseParallel() for name in family.rows}
    for block in stage.blocks:
        parallelize_module(block, mesh, plan)
        if hasattr(block, "attn"):  # GPT-2's, which cuts what comes of its joint projection
            block.attn.split_size //= mesh.size()  # pyright: ignore
    ends: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "positions": Replicated(local=True),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(stage, mesh, {name: style for name, style in ends.items() if getattr(stage, name) is not None})
    if tied:  # parallelize_module has made a parameter of each
        stage.head.weight = stage.tokens.weight  # pyright: ignore[reportOptionalMemberAccess]


class Replicated(ParallelStyle):
    """Every rank holds the module's parameters. local: it returns a plain tensor; else a replicated DTensor, so that
    the gradients of the layers that follow are added before one all-reduce."""

    def __init__(self, *, local: bool = False):
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG001
            return output.to_local() if self._local else output

        return distribute_module(module, device_mesh, input_fn=take, output_fn=give)


class Parted(nn.Module):
    """The projections of queries, keys and values, of one input, side by side."""

    def __init__(self, joint: nn.Linear):
        super().__init__()
        self.q, self.k, self.v = (
            _linear(w, b) for w, b in zip(joint.weight.detach().chunk(3), joint.bias.detach().chunk(3), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def _part_projections(blocks: nn.ModuleList) -> None:
    """Of GPT-2's blocks: transformers' Conv1D, a linear layer with its weight transposed, becomes nn.Linear."""
    for block in blocks:
        for name, module in [*block.named_modules()]:
            if type(module).__name__ == "Conv1D":
                linear = _linear(module.weight.detach().t(), module.bias.detach())  # pyright: ignore
                block.set_submodule(name, Parted(linear) if name == "attn.c_attn" else linear)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A copy. weight: [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = (nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in (weight, bias))
    return made
