"""A run under a layout: the group of its ranks, the parts of its model, its batches and checkpoints."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
from training.loop.progress import TrainState
from training.loop.static_run import StaticRun
from training.start.workers import join

T = TypeVar("T")


class LayoutRun(StaticRun):
    """One rank of a run under a layout. A data-parallel worker, which gets its own batches, is tp * pp ranks."""

    parallel: Parallel
    _held: Resharded

    def meet(self) -> None:
        """Joins the other ranks, opens the run folder, and seeds all ranks for the same weights."""
        run, r = self.run, self.run.recipe
        self.layout, self._finite = Layout.parse(r.layout), True
        self._made_group = join(run.device, r.timeout, settings(r))
        self.folder.open(r, run.world_size, run.device)
        place = self.layout.place(run.rank)
        run.data_rank = place.island * self.layout.dp + place.data
        run.data_workers = self.layout.data_workers
        torch.manual_seed(r.seed * 1_000_003)

    def shard(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        """This rank's part of the whole model. FSDP2 gathers parameters in dtype `compute`."""
        run = self.run
        self.parallel = Parallel(model, self.layout, run.device, compute=compute, timeout=run.recipe.timeout)
        self._draw_anew()
        return self.parallel

    def _draw_anew(self) -> None:
        """Seeds random numbers, such as dropout's, by data-parallel worker and stage. Ranks of tp draw alike."""
        run = self.run
        torch.manual_seed(mix(run.recipe.seed, run.data_rank, self.parallel.place.stage, run.step))

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return shard_optimizer(optimizer, self.parallel.mesh, 1) if self.layout.zero == 1 else optimizer

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keeps FSDP2's parameters gathered for evaluations, where workers may have different numbers of batches."""
        zero: Any = self.layout.zero
        return gathered(nn.ModuleList(self.parallel.parts), zero)

    def make_method(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
    ) -> tuple[nn.Module, Method]:
        """CO2 between islands. With one island, whose ranks are synchronous, a method that only counts steps."""
        run, r = self.run, self.run.recipe
        options: dict[str, Any] = {"timeout": r.timeout, "link": run.link}
        if self.layout.islands == 1:
            return model, DDP(model, synchronous=True, hooks=[run.requests], **options)
        return model, self.parallel.co2(r.co2, hooks=[run.requests, run.snapshots], **options)

    def begin(self, trained: TrainState, samples: int, epoch: int) -> float:
        self._held = Resharded(self.parallel, trained.optimizer, trained.method)
        return super().begin(trained, samples, epoch)

    def batches(self, make: Callable[[Any, int, int, int, int], Iterator[T]], start: int, total: int) -> Iterator[T]:
        """The batches of this rank's data-parallel worker."""
        return make(self.run.recipe, self.run.data_rank, self.run.data_workers, start, total)

    def sum(self, values: Tensor) -> Tensor:
        """Sums over data-parallel workers. Ranks outside the last stage pass zeros."""
        return super().sum(values) / self.layout.tp

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint. Waits for the all-reduce in flight, and until the files are written."""
        run, trained = self.run, self._trained
        with run.clock.paused():
            self.rounds.read()
            groups = [group_settings(group) for group in trained.optimizer.param_groups]
            others = self._counted() | {"schedule": trained.schedule.state_dict(), "groups": groups}
            self._finite = self._held.save(self.folder.checkpoints, run.step, self.folder.attempt, others)

    def saved(self) -> bool:
        return self._finite

    def _resume(self) -> float:
        """Restores the newest checkpoint, of any layout. Returns the seconds of training before it."""
        trained = self._trained
        found = self._held.load(self.folder.checkpoints)
        if found is None:
            return 0.0
        trained.schedule.load_state_dict(found["schedule"])
        for group, saved in zip(trained.optimizer.param_groups, found["groups"], strict=False):
            group.update(saved)
        seconds = self._count_on(found)
        self._draw_anew()
        return seconds
