"""What every train script shares around its loop: workers, model and method, the steps' logs, checkpoints, the end."""

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
from tqdm import tqdm

from core import failure
from core.errors import DivergedError
from core.hooks import forget
from core.local_update import LocalUpdateMethod
from core.methods import Method, spec_of
from training.checks import check_batch_norm, check_start
from training.elastic import Elastic
from training.fixed import Fixed
from training.folder import RoundLog, RunFolder
from training.progress import Due, Every, Progress, Trained
from training.recipe import Recipe, momentum_note
from training.script import StopSignal
from training.workers import check_compiler, has_bfloat16, pick_device, tune, world_size

T = TypeVar("T")


class Run(Progress):
    """One training run of this worker: use it as a context manager around the loop. Before the loop: shard,
    shard_optimizer, make_method, begin. After every step: after_step, which says whether an evaluation, a checkpoint
    (save) or the stop (stop) is due. After the loop: end. mesh: see Fixed."""

    mesh: DeviceMesh | None
    _trained: Trained
    _now = staticmethod(time.monotonic)

    def __init__(self, recipe: Recipe):
        check_start(recipe, world_size())
        super().__init__(recipe, pick_device(recipe.device))
        tune(self.device, tf32=recipe.tf32, cudnn_benchmark=recipe.cudnn_benchmark)
        self.folder = RunFolder(recipe.folder, -1 if recipe.elastic else self.rank, self.clock)
        self.rounds = RoundLog(recipe, self.folder, self.device)
        kind: Any = Elastic if recipe.elastic else Fixed
        if recipe.layout:  # imported here, because torch's pipelines take a second
            from training.layouts.resharded import LaidOut as kind
        self._workers = kind(self, self.folder, self.rounds)
        self._saved_at = 0.0  # seconds, by self._now
        self._stop = StopSignal()
        self._shared = True  # whether what was evaluated last is one model on all workers
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Run:
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.rank)  # rank 0's initial parameters are broadcast
        self._stop.listen()
        self._workers.meet()
        self.mesh = self._workers.mesh
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """A collective's error becomes one line that names the worker because of which it failed."""
        if self._bar is not None:
            self._bar.close()
        self._workers.leave(failed=kind is not None)
        self.folder.close()
        self._stop.ignore()
        if error is not None and (explained := failure.explain(error)):
            raise explained from None

    # -- before the loop ------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> nn.Module:
        """The model on this worker's device, with ZeRO-2 and 3 sharded; on the host where its blocks stay there."""
        check_batch_norm(self.recipe, model, self.world_size)
        if self._parted:
            return self._workers.shard(model, torch.bfloat16 if self._mixed() else torch.float32)
        streamed = spec_of(self.recipe.method).kind == "optimizer" and self.recipe.offload
        return model if streamed else model.to(self.device)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimiser, its state shared out inside the node with ZeRO-1."""
        return self._workers.shard_optimizer(optimizer) if self._parted else optimizer

    @property
    def _parted(self) -> bool:
        """Whether several workers synchronise every step, and may hold parts of one model."""
        return self.mesh is not None or bool(self.recipe.layout)

    def make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:
        """The model to call in the loop, and the recipe's method: see core.methods.make_method."""
        wrapped, method = self._workers.make_method(model, optimizer)
        if self.recipe.compile:  # the model inside keeps its parameters' names, and is evaluated as it is
            check_compiler(self.device)
            return torch.compile(wrapped), method  # pyright: ignore[reportReturnType]
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
        """Resumes where the recipe says so, and starts the clock and the progress bar; returns the steps taken so far.

        Args:
            epoch, total: optimizer steps of an epoch and of the whole run.
            samples: size of the training set, which elastic runs deal out anew.
        """
        self.total = total
        self._trained = Trained(model, optimizer, schedule, method, self.recipe.method, self.snapshots)
        if isinstance(method, LocalUpdateMethod):
            method.on_excluded = forget(optimizer)
        seconds = self._workers.begin(self._trained, samples, epoch)
        if self.rank == 0:
            self._tell_settings(total)
        self.evaluation = Every(self.recipe.eval_steps(epoch), self.step)
        self._saving = Every(epoch * self.recipe.checkpoint_every, self.step)
        self._saved_at = self._now()
        interval = 0.5 if sys.stderr.isatty() else 20.0
        label = f"{self.recipe.name} {self.recipe.method}"
        self._bar = tqdm(total=total, initial=self.step, desc=label, disable=self.rank != 0, mininterval=interval)
        self.clock.start(seconds)
        return self.step

    def _tell_settings(self, total: int) -> None:
        """On the screen: where they are not the paper's, or do not suit the run's length or the number of workers."""
        r, co2 = self.recipe, self.recipe.co2
        if r.recommended:
            told = ", ".join(f"{key} {getattr(co2, key)}" for key in ("merge", "delay", "gap", "outer_momentum"))
            tqdm.write(f"co2 with the recommended settings ({told}); --no_recommended: the paper's", file=sys.stderr)
        if spec_of(r.method).local and isinstance(co2.tau, int) and total < co2.tau:
            remedy = "give a smaller --co2.tau or more --epochs"
            tqdm.write(f"warning: {total} steps are less than a round of tau={co2.tau}: {remedy}", file=sys.stderr)
        if note := momentum_note(r, self.world_size):
            tqdm.write(note, file=sys.stderr)

    # -- in the loop ----------------------------------------------------------------------------------------

    def batches(self, make: Callable[[Any, int, int, int, int], Iterator[T]]) -> Iterator[T]:
        """This worker's training batches. make: (recipe, rank, world_size, start, total) -> those of the steps from
        `start` to `total` of a run whose workers stay the same."""
        yield from self._workers.batches(make, self.step, self.total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast to the recipe's precision where the device has it."""
        return torch.autocast(self.device.type, torch.bfloat16) if self._mixed() else contextlib.nullcontext()

    def _mixed(self) -> bool:
        return self.recipe.precision == "bfloat16" and has_bfloat16(self.device)

    @property
    def at_last_step(self) -> bool:
        """Whether the step that is being taken is the run's last."""
        return self.step + 1 == self.total

    def after_step(self, closed: bool, **scalars: Tensor) -> Due:
        """Counts the optimizer step that was just taken, moves the bar, logs, and says what is due.

        Evaluations, checkpoints and stops wait for a round's end. None is due at the run's last step.

        Args:
            closed: what method.step() returned.
            scalars: 0-d each, always the same names; metrics.jsonl gets their means over log_every steps.
        """
        assert self._bar is not None, "call begin() before the loop"
        self.step += 1
        self._bar.update(1)
        self.means.add(scalars)
        if closed:
            self.rounds.close_round(self.step, self._trained.method)
        if self.step % self.recipe.log_every == 0:
            self._log_means()
        running = self.step < self.total
        stops = running and self._granted("stop", bool(self._stop.number)) and (closed or dist.is_initialized())
        open_end = running and closed
        waited = self._now() - self._saved_at
        minutes_over = open_end and self.rank == 0 and 0 < 60 * self.recipe.save_minutes <= waited
        if minutes_over:  # the others learn it a round later
            self._saved_at += waited
        due = Due(
            evaluation=open_end and self.evaluation.due(self.step),
            checkpoint=open_end and (self._saving.due(self.step) | self._granted("save", minutes_over)),
            stop=stops,
        )
        return self._workers.come_together(due)

    def _granted(self, name: str, mine: bool) -> bool:
        """Whether a worker asked for it and all received that at the same step; a lone worker need not wait."""
        if mine and dist.is_initialized():
            self.requests.ask(name)
        return name in self.requests.granted or (mine and not dist.is_initialized())

    def _log_means(self) -> None:
        """Logs the means since the last time; on a GPU those of the time before, so that the host does not wait."""
        overlap, bar = self.rounds.overlap, self._bar
        scalars = {"lr": self._trained.schedule.get_last_lr()[0], **self.means.pop()}
        logged = self.rounds.log(self.step, scalars | {"hidden_share": overlap.hidden_share})
        if logged is not None and bar is not None and not bar.disable:
            shown = {name: f"{logged[name]:.4g}" for name in scalars}
            shown |= {"hidden": f"{overlap.hidden_share:.0%}", "link": f"{overlap.link_mbit:.4g}Mbit/s"}
            bar.set_postfix(shown, refresh=False)

    def log(self, **scalars: float | Tensor) -> None:
        """Writes one line of metrics.jsonl and TensorBoard's scalars, at the present step."""
        self.folder.log(self.step, scalars)

    def log_evaluation(self, results: dict[str, float]) -> None:
        """Logs what an evaluation measured, of the `shared` model or of each worker's `own`."""
        self.rounds.read()  # lines keep the steps' order
        own = not self._shared and self.world_size > 1 and self.step < self.total
        self.folder.log(self.step, results, of_model="own" if own else "shared")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For evaluations: the model that all workers share, where the method has one, gathered; the clock stands."""
        method = self._trained.method
        gathering = self._workers.gathered() if self._parted else contextlib.nullcontext()
        with method.averaged_model() as self._shared, self.clock.paused(), gathering:
            yield

    def sum(self, *values: float | Tensor) -> list[float]:
        """Sums over all workers, in float64; every worker must call it."""
        mine = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.device)
        return self.sum_tensor(mine).tolist()

    def sum_tensor(self, values: Tensor) -> Tensor:
        """The sum over all workers; every worker must call it."""
        return self._workers.sum(values)

    # -- checkpoints and the end ----------------------------------------------------------------------------

    def save(self) -> None:
        """Begins a checkpoint, at a round boundary or after method.finish(); every worker must call it. This copies the
        state, without an all-reduce in flight. A thread writes it during the next steps, unless a worker's model is not
        finite. UserError on all workers where the last checkpoint could not be written."""
        self._workers.save()

    def stop(self) -> None:
        """Ends the run early, in place of method.finish(), the last evaluation and end(). The checkpoint has the
        all-reduce in flight, so that the resumed run equals one that was never stopped."""
        self.save()
        number = self._workers.stopped_by(self._stop.number)
        self._trained.method.finish()  # after the checkpoint, which does not contain this
        self._workers.saved()
        self._part(lambda: self._summarise({"stopped_by_signal": number}))

    def end(self, results: dict[str, float]) -> None:
        """Call it after method.finish() and the last evaluation: saves, writes summary.json and closes the method."""

        def conclude() -> None:
            self.save()
            if not self._workers.saved():
                raise DivergedError(
                    f"{self.folder.path}: the trained model is not finite, the last checkpoint before is kept: lower "
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
