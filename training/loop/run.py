"""The part of a train script around its loop: workers, model and method, logs, checkpoints and the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from core.baselines.table import Method, spec_of
from core.checkpoint.runs import with_versions
from core.errors import DivergedError
from core.guards import failure
from core.guards.workers import forget
from core.local_update import LocalUpdateMethod
from training.checks import check_batch_norm, check_start
from training.counters import Period
from training.elastic import Elastic
from training.folder.rounds import RoundLog
from training.folder.run_folder import RunFolder
from training.loop.progress import Actions, Progress, TrainState
from training.loop.static_run import StaticRun
from training.optim import clip_gradients, evaluating
from training.recipe import Recipe, momentum_note
from training.start.script import StopSignal, lost_output
from training.start.workers import pick_device, tune, world_size

T = TypeVar("T")


class Run(Progress):
    """One training run of this worker. Use it as a context manager around the loop.

    Call shard, shard_optimizer, make_method and begin before the loop. Call after_step after every step. It returns
    whether an evaluation, a checkpoint (save) or a stop (stop) is due. Call end after the loop.

    Attributes:
        mesh: [nodes, workers per node] if the workers of a node synchronize every step, else None.
    """

    mesh: DeviceMesh | None
    _trained: TrainState
    _now = staticmethod(time.monotonic)

    def __init__(self, recipe: Recipe):
        check_start(recipe, world_size())
        super().__init__(recipe, pick_device(recipe.device))
        tune(self.device, tf32=recipe.tf32)
        self.folder = RunFolder(recipe.folder, -1 if recipe.elastic else self.rank, self.clock)
        self.rounds = RoundLog(recipe, self.folder, self.device)
        kind: Any = Elastic if recipe.elastic else StaticRun
        if recipe.layout:  # imported here, because torch's pipelines take a second
            from training.loop.layout_run import LayoutRun as kind
        self._workers = kind(self, self.folder, self.rounds)
        self._stop = StopSignal()
        self._shared = True  # whether the last evaluation was of one model on all workers
        self._bar: tqdm[Any] | None = None
        self._ema: AveragedModel | None = None

    def __enter__(self) -> Run:
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.rank)  # rank 0's initial parameters go to all workers
        self._stop.listen()
        self._workers.meet()
        self.mesh = self._workers.mesh
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the run. A collective's error becomes one line with the worker that caused it."""
        if self._bar is not None:
            self._bar.close()
            with contextlib.suppress(OSError):  # a run that ends with an error shows that one
                self._note_lost_output()
        self._workers.leave(failed=kind is not None)
        self.folder.close()
        self._stop.ignore()
        if error is not None and (explained := failure.explain(error)):
            raise explained from None

    # -- before the loop ------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> nn.Module:
        """Returns the model on this worker's device, sharded with ZeRO-2 and 3, or on the host for zeroth order."""
        check_batch_norm(self.recipe, model, self.world_size)
        if self._parted:
            return self._workers.shard(model, torch.bfloat16 if self._mixed() else torch.float32)
        streamed = spec_of(self.recipe.method).kind == "optimizer" and self.recipe.offload
        return model if streamed else model.to(self.device)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer, with its state sharded inside the node with ZeRO-1."""
        return self._workers.shard_optimizer(optimizer) if self._parted else optimizer

    @property
    def _parted(self) -> bool:
        """Whether several workers synchronize every step, and may hold parts of one model."""
        return self.mesh is not None or bool(self.recipe.layout)

    def make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:
        """Returns the model to call in the loop, and the recipe's method. See core.baselines.table.make_method."""
        wrapped, method = self._workers.make_method(model, optimizer)
        if self.recipe.ema is not None:  # its first update copies the model
            self._ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.recipe.ema), use_buffers=True)
        return wrapped, method

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LRScheduler,
        method: Method,
        *,
        epoch: int,
        total: int,
        samples: int = 0,
    ) -> int:
        """Resumes if the recipe says so, and starts the clock and the progress bar.

        An epoch has `epoch` of the run's `total` optimizer steps. Elastic runs share out the training set's `samples`
        anew.

        Returns:
            The number of steps taken so far.
        """
        self.total = total
        extra = {"ema": self._ema, "scaler": self.scaler}
        extra = {name: part for name, part in extra.items() if part is not None}
        self._trained = TrainState(model, optimizer, schedule, method, self.recipe.method, self.snapshots, extra)
        if isinstance(method, LocalUpdateMethod):
            method.on_excluded = forget(optimizer)
        seconds = self._workers.begin(self._trained, samples, epoch)
        if self.rank == 0:
            self._tell_settings(total)
        evaluate, save = (self.recipe.interval(f"{what}_every", epoch) for what in ("eval", "checkpoint"))
        self.evaluation, self._saving = Period(evaluate[0], self.step), Period(save[0], self.step)
        self._minutes = {"evaluate": evaluate[1], "save": save[1]}  # 0: by steps
        self._asked_at = dict.fromkeys(self._minutes, self._now())
        interval = 0.5 if sys.stderr.isatty() else 20.0
        label = f"{self.recipe.name} {self.recipe.method}"
        self._bar = tqdm(total=total, initial=self.step, desc=label, disable=self.rank != 0, mininterval=interval)
        self.clock.start(seconds)
        return self.step

    def _tell_settings(self, total: int) -> None:
        """Prints settings that differ from the paper's, or do not suit the run's length or number of workers."""
        r, co2 = self.recipe, self.recipe.co2
        if r.recommended:
            told = ", ".join(f"{key} {getattr(co2, key)}" for key in ("merge", "delay", "gap", "outer_momentum"))
            tqdm.write(f"co2 with the recommended settings ({told}); --no_recommended: the paper's", file=sys.stderr)
        if spec_of(r.method).local and isinstance(co2.tau, int) and total < co2.tau:
            remedy = "give a smaller --co2.tau or more --epochs"
            tqdm.write(f"warning: {total} steps are less than a round of tau={co2.tau}: {remedy}", file=sys.stderr)
        if note := momentum_note(r, self.world_size):
            tqdm.write(note, file=sys.stderr)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Clips gradients, takes an optimizer step, and removes gradients. float16 skips a step that overflows."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        clip_gradients(model, self.recipe.optim)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    # -- in the loop ----------------------------------------------------------------------------------------

    def batches(self, make: Callable[[Any, int, int, int, int], Iterator[T]]) -> Iterator[T]:
        """Yields this worker's training batches.

        `make` returns the batches of fixed workers, from (recipe, rank, world_size, first step, last step).
        """
        yield from self._workers.batches(make, self.step, self.total)

    @property
    def at_last_step(self) -> bool:
        """Whether the current step is the run's last."""
        return self.step + 1 == self.total

    def after_step(self, closed: bool, **scalars: Tensor) -> Actions:
        """Counts the optimizer step that was just taken, updates the progress bar, and logs.

        Evaluations, checkpoints and stops wait for a round's end. None is due at the run's last step.

        Args:
            closed: The result of method.step().
            **scalars: 0-d values, always with the same names. metrics.jsonl gets their averages over log_every steps.

        Returns:
            The actions that are due.
        """
        assert self._bar is not None, "call begin() before the loop"
        self.step += 1
        self._bar.update(1)
        self._note_lost_output()
        if self._ema is not None:
            self._ema.update_parameters(self._trained.model)
        self.means.add(scalars)
        if closed:
            self.rounds.close_round(self.step, self._trained.method)
        if self.step % self.recipe.log_every == 0:
            self._log_means()
        running = self.step < self.total
        stops = running and self._granted("stop", bool(self._stop.number)) and (closed or dist.is_initialized())
        open_end = running and closed
        due = Actions(
            evaluation=open_end and (self.evaluation.due(self.step) | self._minutes_over("evaluate")),
            checkpoint=open_end and (self._saving.due(self.step) | self._minutes_over("save")),
            stop=stops,
        )
        return self._workers.come_together(due)

    def _note_lost_output(self) -> None:
        """Says once, on what is left and in metrics.jsonl, that a standard stream is lost."""
        for text in lost_output():
            self.folder.note(self.step, "output", text)

    def _minutes_over(self, name: str) -> bool:
        """Returns whether a request that repeats by time is due on all workers. Rank 0's clock decides."""
        now = self._now()
        over = self.rank == 0 and 0 < 60 * self._minutes[name] <= now - self._asked_at[name]
        if over:  # the other workers learn it a round later
            self._asked_at[name] = now
        return self._granted(name, over)

    def _granted(self, name: str, mine: bool) -> bool:
        """Returns whether a worker asked for it and all received that at the same step. A single worker never waits."""
        if mine and dist.is_initialized():
            self.requests.ask(name)
        return name in self.requests.granted or (mine and not dist.is_initialized())

    def _log_means(self) -> None:
        """Logs the averages since the last call, or on a GPU the averages before these, so the host does not wait."""
        overlap, bar = self.rounds.overlap, self._bar
        scalars = {"lr": self._trained.schedule.get_last_lr()[0], **self.means.pop()}
        logged = self.rounds.log(self.step, scalars | {"hidden_share": overlap.hidden_share})
        if logged is not None and bar is not None and not bar.disable:
            shown = {name: f"{logged[name]:.4g}" for name in scalars}
            shown |= {"hidden": f"{overlap.hidden_share:.0%}", "link": f"{overlap.link_mbit:.4g}Mbit/s"}
            bar.set_postfix(shown, refresh=False)

    def log_evaluation(self, results: dict[str, float]) -> None:
        """Logs the results of an evaluation, of the `shared` model or of each worker's `own`."""
        self.rounds.read()  # keeps the lines in the order of steps
        own = not self._shared and self.world_size > 1 and self.step < self.total
        self.folder.log(self.step, results, of_model="own" if own else "shared")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Provides the model in eval mode, averaged over workers if the method allows it, and stops the clock."""
        method, eval_mode = self._trained.method, evaluating(self._trained.model)
        gathering = self._workers.gathered() if self._parted else contextlib.nullcontext()
        with (
            method.averaged_model() as self._shared,
            self.clock.paused(),
            gathering,
            self.averaged_weights(),
            eval_mode,
        ):
            yield

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Puts the running average of the weights, averaged over the workers, into the model. Does nothing without.

        Every worker must call it.
        """
        if self._ema is None:
            yield
            return
        ema, model = self._ema.module, self._trained.model
        for t in ema.state_dict().values():
            if t.is_floating_point():
                t.copy_(self.sum_tensor(t.double()) / self.world_size)
        held = model.state_dict()
        weights = with_versions({name: t.clone() for name, t in held.items()}, held)
        model.load_state_dict(ema.state_dict())
        try:
            yield
        finally:
            model.load_state_dict(weights)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Returns the sum over all workers. Every worker must call it."""
        return self._workers.sum(values)

    # -- checkpoints and the end ----------------------------------------------------------------------------

    def save(self) -> None:
        """Starts a checkpoint, at a round boundary or after method.finish(). Every worker must call it.

        It copies the state, except an all-reduce in flight. A thread writes it during the next steps, unless a worker's
        model is not finite.

        Raises:
            UserError: On all workers, if the last checkpoint could not be written.
        """
        self._workers.save()

    def stop(self) -> None:
        """Ends the run early, instead of method.finish(), the last evaluation and end().

        The checkpoint has the all-reduce in flight, so the resumed run equals a run that was never stopped.
        """
        self.save()
        number = self._workers.stopped_by(self._stop.number)
        self._trained.method.finish()  # after the checkpoint, which must not contain this
        self._workers.saved()
        self._part(lambda: self._summarise({"stopped_by_signal": number}))

    def end(self, results: dict[str, float]) -> None:
        """Saves, writes summary.json and closes the method. Call it after method.finish() and the last evaluation."""

        def conclude() -> None:
            self.save()
            if not self._workers.saved():
                raise DivergedError(
                    f"{self.folder.path}: the trained model is not finite, the checkpoint before it is kept: lower "
                    "the learning rate, clip gradients, or look at the data"
                )
            self._summarise(results)

        self._part(conclude)

    def _part(self, conclude: Callable[[], None]) -> None:
        """Concludes the run, and leaves the other workers."""
        with self.clock.paused():
            self.rounds.finish(self.step)
        self._workers.conclude(conclude)

    def _summarise(self, results: dict[str, float]) -> None:
        seconds = self.clock.seconds
        summary = {
            **results,
            "steps": self.step,
            "seconds": seconds,
            "steps_per_second": self.step / seconds if seconds else 0.0,
            **self.rounds.overlap.summary(),
        }
        if self._bar is not None:
            self._bar.close()  # before the table is printed
        self.folder.summarise(self.recipe, summary)
