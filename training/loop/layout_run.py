"""A run under a layout: the group of its ranks, the parts of its model, its batches and checkpoints."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from core.baselines.ddp import DDP
from core.baselines.table import Method
from training.data.samples import mix
from training.folder.settings import settings
from training.layout import Layout
from training.layouts.parallel import Parallel
from training.layouts.resharded import Resharded
from training.layouts.zero import gathered, group_settings, shard_optimizer
from training.loop.run import Run
from training.start.workers import join


class LayoutRun(Run):
    """One rank of a run under a layout. A data-parallel worker, which gets its own batches, is tp * pp ranks."""

    parallel: Parallel
    _held: Resharded
    _finite = True

    def _meet(self) -> None:
        """Joins the other ranks, opens the run folder, and seeds all ranks for the same weights."""
        r = self.recipe
        self.layout = Layout.parse(r.layout)
        self._made_group = join(self.device, r.timeout, settings(r))
        self.folder.open(r, self.world_size, self.device)
        place = self.layout.place(self.rank)
        self.data_rank = place.island * self.layout.dp + place.data
        self.data_workers = self.layout.data_workers
        torch.manual_seed(r.seed * 1_000_003)

    def _shard(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        """This rank's part of the whole model. FSDP2 gathers parameters in dtype `compute`."""
        self.parallel = Parallel(model, self.layout, self.device, compute=compute, timeout=self.recipe.timeout)
        self._draw_anew()
        return self.parallel

    def _draw_anew(self) -> None:
        """Seeds random numbers, such as dropout's, by data-parallel worker and stage. Ranks of tp draw alike."""
        torch.manual_seed(mix(self.recipe.seed, self.data_rank, self.parallel.place.stage, self.step))

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return shard_optimizer(optimizer, self.parallel.mesh, 1) if self.layout.zero == 1 else optimizer

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keeps FSDP2's parameters gathered for evaluations, where workers may have different numbers of batches."""
        zero: Any = self.layout.zero
        return gathered(nn.ModuleList(self.parallel.parts), zero)

    def _make_method(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
    ) -> tuple[nn.Module, Method]:
        """CO2 between islands. With one island, whose ranks are synchronous, a method that only counts steps."""
        options: dict[str, Any] = {"timeout": self.recipe.timeout, "link": self.link}
        if self.layout.islands == 1:
            return model, DDP(model, synchronous=True, hooks=[self.requests], **options)
        return model, self.parallel.co2(self.recipe.co2, hooks=[self.requests, self.snapshots], **options)

    def _begin(self, samples: int, epoch: int) -> float:
        self._held = Resharded(self.parallel, self.optimizer, self.method)
        return super()._begin(samples, epoch)

    def _sum(self, total: Tensor) -> Tensor:
        """Sums over data-parallel workers. Ranks outside the last stage pass zeros."""
        return super()._sum(total) / self.layout.tp

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Writes a checkpoint. Waits for the all-reduce in flight, and until the files are written."""
        with self.clock.paused():
            self.rounds.read()
            groups = [group_settings(group) for group in self.optimizer.param_groups]
            others = self._counted() | {"schedule": self.schedule.state_dict(), "groups": groups}
            self._finite = self._held.save(self.folder.checkpoints, self.step, self.folder.attempt, others)

    def _saved(self) -> bool:
        return self._finite

    def _resume(self) -> float:
        """Restores the newest checkpoint, of any layout. Returns the seconds of training before it."""
        found = self._held.load(self.folder.checkpoints)
        if found is None:
            return 0.0
        self.schedule.load_state_dict(found["schedule"])
        for group, saved in zip(self.optimizer.param_groups, found["groups"], strict=False):
            group.update(saved)
        seconds = self._count_on(found)
        self._draw_anew()
        return seconds
