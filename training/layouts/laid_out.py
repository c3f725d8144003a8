"""A run under a layout: what Run asks of its workers (training/fixed.py), where several ranks hold one model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from core.methods import DDP, Method
from training.config import settings
from training.fixed import Fixed
from training.layouts.layout import Layout
from training.layouts.parallel import Parallel
from training.layouts.resharded import Resharded
from training.progress import Trained
from training.sampling import mix
from training.workers import join
from training.zero import gathered, group_settings, shard_optimizer

T = TypeVar("T")


class LaidOut(Fixed):
    """One rank's part. A data-parallel worker, to whom batches are dealt out, is tp * pp ranks."""

    parallel: Parallel
    _held: Resharded

    def meet(self) -> None:
        """Joins the other ranks and opens the run folder. Then all draw the same weights."""
        run, r = self.run, self.run.recipe
        self.layout, self._finite = Layout.parse(r.layout), True
        self._made_group = join(run.device, r.timeout, settings(r))
        self.folder.open(r, run.world_size, run.device)
        place = self.layout.place(run.rank)
        run.data_rank = place.island * self.layout.dp + place.data
        run.data_workers = self.layout.data_workers
        torch.manual_seed(r.seed * 1_000_003)

    def shard(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        """This rank's part of the whole model. compute: in what FSDP2 gathers parameters."""
        run = self.run
        self.parallel = Parallel(model, self.layout, run.device, compute=compute, timeout=run.recipe.timeout)
        self._draw_anew()
        return self.parallel

    def _draw_anew(self) -> None:
        """Random numbers, such as dropout's, of each stage of a data-parallel worker; over tp all draw alike."""
        run = self.run
        torch.manual_seed(mix(run.recipe.seed, run.data_rank, self.parallel.place.stage, run.step))

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return shard_optimizer(optimizer, self.parallel.mesh, 1) if self.layout.zero == 1 else optimizer

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keeps FSDP2's parameters whole, for evaluations, in which workers may see different numbers of batches."""
        zero: Any = self.layout.zero
        return gathered(nn.ModuleList(self.parallel.parts), zero)

    def make_method(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
    ) -> tuple[nn.Module, Method]:
        """CO2 between islands; of one island what only counts steps, for its ranks are synchronous by themselves."""
        run, r = self.run, self.run.recipe
        options: dict[str, Any] = {"timeout": r.timeout, "link": run.link}
        if self.layout.islands == 1:
            return model, DDP(model, average_buffers=False, synchronous=True, riders=[run.requests], **options)
        return model, self.parallel.co2(r.co2, riders=[run.requests, run.snapshots], **options)

    def begin(self, trained: Trained, samples: int, epoch: int) -> float:
        self._held = Resharded(self.parallel, trained.optimizer, trained.method)
        return super().begin(trained, samples, epoch)

    def batches(self, make: Callable[[Any, int, int, int, int], Iterator[T]], start: int, total: int) -> Iterator[T]:
        """Those of this rank's data-parallel worker."""
        return make(self.run.recipe, self.run.data_rank, self.run.data_workers, start, total)

    def sum(self, values: Tensor) -> Tensor:
        """Over the data-parallel workers, of values that the ranks of a last stage have, and the others have zeros."""
        return super().sum(values) / self.layout.tp

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint, and waits for what is in flight and until it is written."""
        run, trained = self.run, self._trained
        with run.clock.paused():
            self.rounds.read()
            groups = [group_settings(group) for group in trained.optimizer.param_groups]
            others = self._counted() | {"schedule": trained.schedule.state_dict(), "groups": groups}
            self._finite = self._held.save(self.folder.checkpoints, run.step, self.folder.attempt, others)

    def saved(self) -> bool:
        return self._finite

    def _resume(self) -> float:
        """Restores the newest checkpoint, of this layout or another; returns the seconds of training that led to it."""
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
