"""A model under a layout: torch's tensor, pipeline and sharded data parallelism inside islands, CO2 between them.

docs/planning.md has a loop. Every rank passes the same whole model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from core import CO2, CO2Config
from core.buckets import local_shard
from core.comm import set_timeout
from core.config import named
from core.errors import UserError
from core.nodes import node_mesh
from training.layout import Layout, Place
from training.layouts.zero import shard_model


@dataclass(frozen=True)
class Family:
    """Names of a model's modules.

    Attributes:
        base: The module with the embeddings, the blocks and the last norm. The head, lm_head, is outside it.
        tokens: The token embedding.
        positions: The position embedding. Empty for rotary positions, whose frequencies all stages have.
        blocks: The list of blocks.
        norm: The last norm.
        columns: A block's linear layers that are cut by output.
        rows: A block's linear layers that are cut by input, with one all-reduce after each pair (Megatron-LM's cut,
            Shoeybi et al., 2019, section 3).
        norms: The norms of a block.
    """

    base: str
    tokens: str
    positions: str
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
    """The family of a model. Raises UserError if FAMILIES has none."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        raise UserError(f"layout: a model of type {kind} is not known how to cut: give one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def check_cut(model: nn.Module, layout: Layout) -> None:
    """Raises UserError if the layout does not fit the model."""
    family_of(model)
    c: Any = model.config
    heads, layers = c.num_attention_heads, c.num_hidden_layers
    key_heads = getattr(c, "num_key_value_heads", None) or heads
    layout.check_model(layers=layers, heads=heads, key_heads=key_heads, vocabulary=c.vocab_size)


def take_stage(model: nn.Module, layout: Layout, stage: int) -> list[Stage]:
    """Removes the modules of other stages from the whole model.

    If head and token embedding are tied, the head's stage keeps a copy of the embedding.

    Returns:
        This stage's v parts, which share the model's modules.
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
    """Whether head and token embedding of a whole model are one parameter."""
    family = family_of(model)
    return model.lm_head.weight is getattr(getattr(model, family.base), family.tokens).weight


class Stage(nn.Module):
    """Consecutive layers of a model, whose modules it shares.

    It maps int64 tokens [batch, time] (first stage) or hidden states [batch, time, width] to hidden states or logits
    [batch, time, vocabulary] (last stage).
    """

    def __init__(self, model: Any, family: Family, layers: range, first: bool, last: bool):
        super().__init__()
        base = getattr(model, family.base)
        self.first, self.last = first, last
        self.blocks = nn.ModuleList(getattr(base, family.blocks)[str(i)] for i in layers)
        self.tokens = getattr(base, family.tokens) if first or last else None  # in the last stage only if it is tied
        self.positions = getattr(base, family.positions) if first and family.positions else None
        self.dropout = getattr(base, "drop", None) if first else None
        self.rotary = getattr(base, "rotary_emb", None)
        self.norm = getattr(base, family.norm) if last else None
        self.head = model.lm_head if last else None

    @property
    def tied(self) -> bool:
        """Whether it holds token embedding and head as one parameter."""
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
    """Makes DTensors of all parameters over a mesh of one dimension.

    Parameters that are not cut become replicated DTensors, so that norms count them once.
    """
    tied = stage.tied
    plan: dict[str, ParallelStyle] = dict.fromkeys(family.norms, Replicated())
    plan |= {name: ColwiseParallel() for name in family.columns} | {name: RowwiseParallel() for name in family.rows}
    for block in stage.blocks:
        parallelize_module(block, mesh, plan)
        if hasattr(block, "attn"):  # GPT-2's, which splits the output of its joint projection
            block.attn.split_size //= mesh.size()  # pyright: ignore
    ends: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "positions": Replicated(local=True),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(stage, mesh, {name: style for name, style in ends.items() if getattr(stage, name) is not None})
    if tied:  # parallelize_module has made two parameters
        stage.head.weight = stage.tokens.weight  # pyright: ignore[reportOptionalMemberAccess]


class Replicated(ParallelStyle):
    """A module whose parameters every rank holds.

    With `local` the module returns a plain tensor, and otherwise a replicated DTensor, so that the gradients of the
    following layers are summed before one all-reduce.
    """

    def __init__(self, *, local: bool = False):
        self._local = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def give(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG001
            return output.to_local() if self._local else output

        return distribute_module(module, device_mesh, input_fn=take, output_fn=give)


class Parted(nn.Module):
    """The projections of queries, keys and values as three layers, with their outputs concatenated."""

    def __init__(self, joint: nn.Linear):
        super().__init__()
        self.q, self.k, self.v = (
            _linear(w, b) for w, b in zip(joint.weight.detach().chunk(3), joint.bias.detach().chunk(3), strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def _part_projections(blocks: nn.ModuleList) -> None:
    """Replaces Conv1D in GPT-2's blocks by nn.Linear. Conv1D is a linear layer with a transposed weight."""
    for block in blocks:
        for name, module in [*block.named_modules()]:
            if type(module).__name__ == "Conv1D":
                linear = _linear(module.weight.detach().t(), module.bias.detach())  # pyright: ignore
                block.set_submodule(name, Parted(linear) if name == "attn.c_attn" else linear)


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A linear layer with copies of the weight [out, in] and the bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = (nn.Parameter(t.clone(memory_format=torch.contiguous_format)) for t in (weight, bias))
    return made


# -- the model under a layout -----------------------------------------------------------------------------------------


Loss = Callable[[Tensor, Tensor], Tensor]
AXES = ("replicate", "pp", "shard", "tp")  # of the mesh: islands, stages, data-parallel workers, tensor parallelism


class Parallel(nn.Module):
    """This rank's part of a causal language model of transformers.

    Make the optimizer afterwards, from parameters(). Their names are the same under every layout.

    Args:
        model: The whole model, the same on all ranks. This rank keeps its part.
        layout: The layout.
        device: This rank's device.
        compute: The dtype in which FSDP2 gathers parameters.
        timeout: Seconds until a missing rank is an error.

    Attributes:
        place: This rank's place in the layout.
        mesh: A device mesh with the dimensions AXES.
        island: The process group of all ranks of this island.
        parts: The parts of the pipeline that this rank computes.

    Raises:
        UserError: If the layout cannot run, or does not fit the model or the number of processes.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        *,
        compute: torch.dtype = torch.float32,
        timeout: float = 600.0,
    ):
        super().__init__()
        layout.check_runs()
        layout.check_devices(dist.get_world_size() if dist.is_initialized() else 1)
        self.layout, self.place, self._device = layout, layout.place(dist.get_rank()), device
        tied = layout.pp > 1 and is_tied(model)
        parts = take_stage(model, layout, self.place.stage)
        self.model = model.to(device)
        sizes = layout.islands, layout.pp, layout.dp, layout.tp
        self.mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self._islands = node_mesh(device.type, layout.island_size)
        for group in (*self.mesh.get_all_groups(), *self._islands.get_all_groups()):
            set_timeout(group, timeout)
        self.island = self._islands.get_group("shard")
        for part in parts:
            if layout.tp > 1:
                cut_tensors(part, family_of(model), self.mesh["tp"])
            if layout.zero >= 2:
                warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)  # of logits
                shard_model(part, self.mesh, layout.zero, compute=compute)  # pyright: ignore[reportArgumentType]
        # in lists, because as attributes of this module they would have second names
        self.parts = parts
        self._tied = [part.tokens.weight for part in parts if tied and part.tokens is not None]  # in both end stages
        whole = not layout.is_cut and layout.dp > 1 and layout.zero < 2
        self._ddp = [DistributedDataParallel(parts[0], process_group=self.mesh.get_group("shard"))] if whole else []
        self._loss: Loss | None = None
        self._schedule = self._pipeline() if layout.pp > 1 else None

    def _pipeline(self) -> Any:
        """torch's 1F1B schedule, or its interleaved schedule if a stage has several parts."""
        group, count = self.mesh.get_group("pp"), self.layout.pp * self.layout.v
        numbers = range(self.place.stage, count, self.layout.pp)
        pairs = zip(self.parts, numbers, strict=True)
        stages = [PipelineStage(part, i, count, self._device, group=group) for part, i in pairs]
        how: dict[str, Any] = {"loss_fn": lambda x, y: self._loss(x, y), "scale_grads": False}  # pyright: ignore
        if len(stages) == 1:
            return Schedule1F1B(stages[0], self.layout.parts, **how)
        return ScheduleInterleaved1F1B(stages, self.layout.parts, **how)  # pyright: ignore[reportArgumentType]

    # -- in the loop ----------------------------------------------------------------------------------------

    def backward(self, tokens: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        """Runs forward and backward, and adds the gradients, averaged over the island's data-parallel workers.

        Args:
            tokens, targets: This worker's batch, int64 [batch, time].
            loss: From logits and targets of a micro-batch to its loss. The batch's loss is their sum.

        Returns:
            The loss of this worker's batch, 0-d.
        """
        if len(tokens) % self.layout.parts:
            near = max(1, round(len(tokens) / self.layout.parts)) * self.layout.parts
            raise UserError(f"a batch of {len(tokens)} in {self.layout.parts} micro-batches: give {near} samples")
        self._loss, losses = loss, list[Tensor]()
        if self._schedule is None:
            self._accumulate(tokens, targets, losses)
        else:
            given = [tokens] if self.place.stage == 0 else []
            # with return_outputs the last stage would keep the logits of all micro-batches
            self._schedule.step(*given, target=targets, losses=losses, return_outputs=False)
        self._finish_gradients()
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)
        if self.layout.pp > 1:
            total = total.double()  # because other stages do not have the loss's dtype
            dist.broadcast(total, group_src=self.layout.pp - 1, group=self.mesh.get_group("pp"))
        return total

    def _accumulate(self, tokens: Tensor, targets: Tensor, losses: list[Tensor]) -> None:
        """Runs the micro-batches without a pipeline. The last one averages the gradients."""
        (part,), many = self.parts, self.layout.parts
        pairs = zip(tokens.chunk(many), targets.chunk(many), strict=True)
        for number, (x, y) in enumerate(pairs, start=1):
            assert self._loss is not None
            if self.layout.zero >= 2:
                part.set_requires_gradient_sync(number == many)  # pyright: ignore
            for ddp in self._ddp:
                ddp.require_backward_grad_sync = number == many
            losses.append(self._loss([part, *self._ddp][-1](x), y))
            losses[-1].backward()

    def _finish_gradients(self) -> None:
        """Completes the gradients after torch's backward.

        It redistributes the gradient of a vocabulary-parallel embedding, sums the gradients of a tied embedding's two
        copies, and averages over dp, because DDP does not support DTensors and stages.
        """
        for p in self.parameters():
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        for copy in self._tied:
            own, group = local_shard(copy.grad), self.mesh.get_group("pp")
            other, peer = torch.empty_like(own), self.layout.pp - 1 - self.place.stage
            pairs = (dist.isend, own), (dist.irecv, other)
            for work in dist.batch_isend_irecv([dist.P2POp(op, t, group=group, group_peer=peer) for op, t in pairs]):
                work.wait()
            own.add_(other)  # the same bits on both stages
        if self.layout.dp > 1 and self.layout.zero < 2 and not self._ddp:
            of_all = [local_shard(p.grad) for p in self.parameters() if p.grad is not None]
            group = self.mesh.get_group("shard")
            works = [dist.all_reduce(grad, group=group, async_op=True) for grad in of_all]
            for grad, work in zip(of_all, works, strict=True):
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
                grad.div_(self.layout.dp)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Clips gradients by the norm of the whole model, where replicated elements count once.

        Returns:
            The norm before clipping, 0-d float64.
        """
        of_all = {p: local_shard(p.grad) for p in self.parameters() if p.grad is not None}
        holders = self.holders()
        norms = torch._foreach_norm(list(of_all.values()))  # pyright: ignore[reportPrivateImportUsage]
        squares = [n.double().square() / len(holders[p]) for p, n in zip(of_all, norms, strict=True)]
        total = torch.stack(squares).sum()
        dist.all_reduce(total, group=self.island)
        norm = total.sqrt()
        share = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in of_all.values():
            grad.mul_(share.to(grad.dtype))
        return norm

    def forward(self, tokens: Tensor) -> Any:
        """Runs the model for evaluation on int64 tokens [batch, time]. A data-parallel worker's ranks must all call it.

        Returns:
            On the last stage an object with logits [batch, time, vocabulary]. None on all other stages.
        """
        pp, group = self.layout.pp, self.mesh.get_group("pp")
        x, dtype = tokens, next(self.parameters()).dtype
        for number in range(pp * self.layout.v):
            if number % pp != self.place.stage:
                continue
            part = self.parts[number // pp]
            if number and pp > 1:
                width = self.model.config.hidden_size  # pyright: ignore
                x = torch.empty(*tokens.shape, width, dtype=dtype, device=self._device)
                dist.recv(x, group=group, group_src=(number - 1) % pp)
            x = part(x)
            if part.last:
                return SimpleNamespace(logits=x)
            dist.send(x.to(dtype).contiguous(), group=group, group_dst=(number + 1) % pp)
        return None

    # -- between islands ------------------------------------------------------------------------------------

    def holders(self) -> dict[Tensor, list[int]]:
        """For each parameter, the ranks of the island that hold the same part of it, including this rank."""
        layout, here = self.layout, self.place
        found: dict[Tensor, list[int]] = {}
        for p in self.parameters():
            cut = []  # axes of the mesh over which p is sharded
            if isinstance(p, DTensor):
                axes = zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)
                cut = [name for name, how in axes if not how.is_replicate()]
            stages = (0, layout.pp - 1) if any(p is copy for copy in self._tied) else (here.stage,)
            data = (here.data,) if "shard" in cut else range(layout.dp)
            tensors = (here.tensor,) if "tp" in cut else range(layout.tp)
            found[p] = [layout.rank(Place(here.island, *axes)) for axes in product(stages, data, tensors)]
        return found

    def co2(self, config: CO2Config, **options: Any) -> CO2:
        """CO2 between the islands, where each island is one worker. For options see core.CO2."""
        shards = self.holders() if self.layout.is_cut else False
        return CO2(self.parameters(), named(config), mesh=self._islands, shards=shards, **options)
