"""A model under a layout: tensor parallelism, a pipeline and sharded data parallelism, all of them torch's; CO2 between
islands of it.

    parallel = Parallel(model, Layout.parse("tp2.pp2.dp2.co2x2"), torch.device("cpu"))  # on every rank, the same model
    co2 = parallel.co2(CO2Config.paper(tau=12))
    for tokens, targets in my_batches:  # of this rank's data-parallel worker
        parallel.backward(tokens, targets, loss); optimizer.step(); optimizer.zero_grad(); co2.step()
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core import CO2Config, ShardedCO2
from core.errors import UserError
from core.flat import local_shard
from core.groups import set_timeout
from core.sharded.mesh import node_mesh
from training.layouts.layout import Layout, Place
from training.layouts.stages import cut_tensors, family_of, is_tied, take_stage
from training.zero import shard_model

Loss = Callable[[Tensor, Tensor], Tensor]
AXES = ("replicate", "pp", "shard", "tp")  # of the mesh: islands, stages, data-parallel workers, tensor parallelism


class Parallel(nn.Module):
    """This rank's part of a causal language model of transformers. Make the optimizer afterwards, of parameters(),
    whose names are the same under every layout.

    Args:
        model: the whole model, the same on all ranks; this rank's part of it stays.
        compute: the dtype in which FSDP2 gathers parameters.
        timeout: seconds until a missing rank is an error.

    Attributes: place, of this rank; mesh, of dimensions AXES; island, the process group of all ranks of its island;
    parts, of the pipeline, that this rank computes.
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
        # in lists: as modules and a parameter of this one, too, they would have two names
        self.parts = parts
        self._tied = [part.tokens.weight for part in parts if tied and part.tokens is not None]  # of both end stages
        whole = not layout.is_cut and layout.dp > 1 and layout.zero < 2
        self._ddp = [DistributedDataParallel(parts[0], process_group=self.mesh.get_group("shard"))] if whole else []
        self._loss: Loss | None = None
        self._schedule = self._pipeline() if layout.pp > 1 else None

    def _pipeline(self) -> Any:
        """1F1B, or with several parts a stage the interleaved one; what each computes is in torch's documentation."""
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
        """Adds the gradients of the sum of loss(logits, targets) over the micro-batches, averaged over the island's
        data-parallel workers; returns this worker's sum, 0-d. tokens, targets: int64 [batch, time], of this worker.
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
            total = total.double()  # the other stages do not know the loss's dtype
            dist.broadcast(total, group_src=self.layout.pp - 1, group=self.mesh.get_group("pp"))
        return total

    def _accumulate(self, tokens: Tensor, targets: Tensor, losses: list[Tensor]) -> None:
        """Without a pipeline: one micro-batch after the other; gradients are averaged in the last."""
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
        """What torch leaves to do: a vocabulary-parallel embedding's gradient comes whole, the two copies of a tied
        embedding have a part each, and DTensors and stages know no DistributedDataParallel."""
        for p in self.parameters():
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        for copy in self._tied:
            own, group = local_shard(copy.grad), self.mesh.get_group("pp")
            other, peer = torch.empty_like(own), self.layout.pp - 1 - self.place.stage
            pairs = (dist.isend, own), (dist.irecv, other)
            for work in dist.batch_isend_irecv([dist.P2POp(op, t, group=group, group_peer=peer) for op, t in pairs]):
                work.wait()
            own.add_(other)  # the same sum on both, to the bit
        if self.layout.dp > 1 and self.layout.zero < 2 and not self._ddp:
            of_all = [local_shard(p.grad) for p in self.parameters() if p.grad is not None]
            group = self.mesh.get_group("shard")
            works = [dist.all_reduce(grad, group=group, async_op=True) for grad in of_all]
            for grad, work in zip(of_all, works, strict=True):
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
                grad.div_(self.layout.dp)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ over the whole model: what several ranks hold counts once. The norm before,
        0-d float64."""
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
        """For evaluations, without gradients: an object with logits, [batch, time, vocabulary], on the last stage's
        ranks; None on the others'. All ranks of a data-parallel worker must call it. tokens: int64 [batch, time]."""
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
        """Of each parameter the ranks of the island that hold what this rank holds of it, itself among them."""
        layout, here = self.layout, self.place
        found: dict[Tensor, list[int]] = {}
        for p in self.parameters():
            cut = []  # axes of the mesh over which p is cut
            if isinstance(p, DTensor):
                axes = zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)
                cut = [name for name, how in axes if not how.is_replicate()]
            stages = (0, layout.pp - 1) if any(p is copy for copy in self._tied) else (here.stage,)
            data = (here.data,) if "shard" in cut else range(layout.dp)
            tensors = (here.tensor,) if "tp" in cut else range(layout.tp)
            found[p] = [layout.rank(Place(here.island, *axes)) for axes in product(stages, data, tensors)]
        return found

    def co2(self, config: CO2Config, **options: Any) -> ShardedCO2:
        """CO2 between the islands, each of which counts as one worker. options: see core.ShardedCO2."""
        shards = self.holders() if self.layout.is_cut else False
        return ShardedCO2(self.parameters(), config, mesh=self._islands, shards=shards, **options)
