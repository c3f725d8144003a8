"""The part of a train script around its loop: workers, model and method, logs, checkpoints and the end."""

from __future__ import annotations

import contextlib
import functools
import re
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

from core.baselines.table import Method, make_method, spec_of
from core.checkpoint import runs as checkpoint
from core.checkpoint import stored
from core.checkpoint.runs import load_model, load_optimizer, of_optimizer, random_state, set_random_state, with_versions
from core.errors import DivergedError, UserError
from core.guards import failure
from core.guards.workers import forget
from core.local_update import LocalUpdateMethod
from training.checks import check_batch_norm, check_start
from training.counters import Period
from training.data.samples import mix
from training.folder.rounds import RoundLog
from training.folder.run_folder import RunFolder
from training.folder.settings import settings
from training.loop.progress import Actions, Progress
from training.optim import clip_gradients, evaluating
from training.recipe import Recipe, momentum_note
from training.start.script import StopSignal, lost_output
from training.start.workers import join, largest_of_workers, make_mesh, pick_device, tune, world_size

T = TypeVar("T")
NEEDS = {"node": int, "rng": dict, "means": dict, "totals": dict}  # what _resume reads, see load_newest


class Run(Progress):
    """One training run of this worker, with a fixed set of workers. Use it as a context manager around the loop.

    training.loop.kinds.open_run makes it, or its subclass for a layout or for elastic workers. Call shard,
    shard_optimizer, make_method and begin before the loop. Call after_step after every step. It returns whether an
    evaluation, a checkpoint (save) or a stop (stop) is due. Call end after the loop.

    Attributes:
        mesh: [nodes, workers per node] if the workers of a node synchronize every step, else None.
        model, optimizer, schedule, method: The arguments of begin().
    """

    mesh: DeviceMesh | None = None
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    method: Method
    _saver: checkpoint.Saver | None = None
    _made_group = False
    _total_before: int | None = None  # of the checkpoint that the run resumes
    _now = staticmethod(time.monotonic)

    def __init__(self, recipe: Recipe):
        check_start(recipe, world_size())
        super().__init__(recipe, pick_device(recipe.device))
        tune(self.device, tf32=recipe.tf32)
        self.folder = RunFolder(recipe.folder, -1 if recipe.elastic else self.rank, self.clock)
        self.rounds = RoundLog(recipe, self.folder, self.device)
        self._stop = StopSignal()
        self._shared = True  # whether the last evaluation was of one model on all workers
        self._bar: tqdm[Any] | None = None
        self._ema: AveragedModel | None = None

    def __enter__(self) -> Run:
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.rank)  # rank 0's initial parameters go to all workers
        self._stop.listen()
        self._meet()
        return self

    def _meet(self) -> None:
        """Joins the other workers, opens the run folder, and groups the workers of a node."""
        r = self.recipe
        self._made_group = join(self.device, r.timeout, settings(r))
        self.folder.open(r, self.world_size, self.device)
        if spec_of(r.method).kind != "optimizer":  # zeroth order has no gradients to synchronize
            self.mesh = make_mesh(self.device, r.per_node, r.zero, r.timeout)
        place = self.rank, self.world_size
        first = self.rank % self._per_node if r.light_checkpoints else None
        self._saver = checkpoint.Saver(self.folder.checkpoints, *place, self.folder.attempt, r.timeout, light=first)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Ends the run. A collective's error becomes one line with the worker that caused it."""
        if self._bar is not None:
            self._bar.close()
            with contextlib.suppress(OSError):  # a run that ends with an error shows that one
                self._note_lost_output()
        self._leave(failed=kind is not None)
        self.folder.close()
        self._stop.ignore()
        if error is not None and (explained := failure.explain(error)):
            raise explained from None

    def _leave(self, failed: bool) -> None:
        """Waits for the checkpoint that is being written, unless the run failed, and leaves the other workers."""
        if self._saver is not None and not failed:
            if isinstance(getattr(self, "method", None), LocalUpdateMethod):
                self.snapshots.hand_over()  # if the loop ended without stop() or end()
            self._saver.close()
        elif self._saver is not None:
            self._saver.abandon()
        if self._made_group and not failed:
            dist.destroy_process_group()

    # -- before the loop ------------------------------------------------------------------------------------

    def shard(self, model: nn.Module) -> nn.Module:
        """Returns the model on this worker's device, sharded with ZeRO-2 and 3, or on the host for zeroth order."""
        check_batch_norm(self.recipe, model, self.world_size)
        if self._parted:
            return self._shard(model, torch.bfloat16 if self._mixed() else torch.float32)
        streamed = spec_of(self.recipe.method).kind == "optimizer" and self.recipe.offload
        return model if streamed else model.to(self.device)

    def _shard(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        """Returns the model on the device, sharded with ZeRO-2 and 3. `compute` is the dtype of gathered parameters."""
        model, everywhere = model.to(self.device), self.recipe.method == "ddp"
        return _zero().shard_model(model, self.mesh, self.recipe.zero, everywhere=everywhere, compute=compute)

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns the optimizer, with its state sharded inside the node with ZeRO-1."""
        return _zero().shard_optimizer(optimizer, self.mesh, self.recipe.zero) if self._parted else optimizer

    @property
    def _parted(self) -> bool:
        """Whether several workers synchronize every step, and may hold parts of one model."""
        return self.mesh is not None or bool(self.recipe.layout)

    def make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:
        """Returns the model to call in the loop, and the recipe's method. See core.baselines.table.make_method."""
        made = self._make_method(model, optimizer)
        if self.recipe.ema is not None:  # its first update copies the model
            self._ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.recipe.ema), use_buffers=True)
        return made

    def _make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:
        r = self.recipe
        return make_method(
            r.method,
            model,
            co2=r.co2,
            lr=lambda: optimizer.param_groups[0]["lr"],
            mesh=self.mesh,
            shard=r.shard,
            offload=r.offload,
            timeout=r.timeout,
            link=self.link,
            hooks=[self.requests, self.snapshots],
            **r.own_settings,
        )

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
        self.model, self.optimizer, self.schedule, self.method = model, optimizer, schedule, method
        if isinstance(method, LocalUpdateMethod):
            method.on_excluded = forget(optimizer)
        seconds = self._begin(samples, epoch)
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

    def _begin(self, samples: int, epoch: int) -> float:  # noqa: ARG002
        """Resumes if the recipe says so. Returns the seconds of training that led to the state."""
        seconds = self._resume() if self.recipe.resume else 0.0
        self.folder.begin(self.step, self.total, self._total_before)
        return seconds

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
        return make(self.recipe, self.data_rank, self.data_workers, self.step, self.total)

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
            self._ema.update_parameters(self.model)
        self.means.add(scalars)
        if closed:
            self.rounds.close_round(self.step, self.method)
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
        return self._agree(due)

    def _agree(self, due: Actions) -> Actions:
        """Returns the same `due` on all workers.

        In a node a worker only receives requests from workers with the same place in other nodes.
        """
        method = self.method
        if isinstance(method, LocalUpdateMethod) and method.total_world_size < self.world_size and method.at_boundary:
            assert self.mesh is not None
            return Actions(*map(bool, largest_of_workers([*vars(due).values()], self.mesh.get_group(1))))
        return due

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
        scalars = {"lr": self.schedule.get_last_lr()[0], **self.means.pop()}
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
        gathered = self._gathered() if self._parted else contextlib.nullcontext()
        shared, weights, eval_mode = self.method.averaged_model(), self.averaged_weights(), evaluating(self.model)
        with shared as self._shared, self.clock.paused(), gathered, weights, eval_mode:
            yield

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the model's parameters gathered, for evaluations."""
        return _zero().gathered(self.model, self.recipe.zero)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Puts the running average of the weights, averaged over the workers, into the model. Does nothing without.

        Every worker must call it.
        """
        if self._ema is None:
            yield
            return
        ema, model = self._ema.module, self.model
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

    # -- checkpoints and the end ----------------------------------------------------------------------------

    def save(self) -> None:
        """Starts a checkpoint, at a round boundary or after method.finish(). Every worker must call it.

        It copies the state, except an all-reduce in flight. A thread writes it during the next steps, unless a worker's
        model is not finite.

        Raises:
            UserError: On all workers, if the last checkpoint could not be written.
        """
        self._save()

    def _save(self) -> None:
        assert self._saver is not None
        with self.clock.paused():
            self._saver.wait()
            self.rounds.read()
            whole = not isinstance(self.method, LocalUpdateMethod)
            if whole:
                self.method.sync_for_eval()
            live = self.state_dict() | self._counted() | {"node": self._per_node, "rng": random_state(self.device)}
            write = functools.partial(self._write, time.monotonic(), stored.on_host(live))
            if whole:
                write(self.method.state_dict())
            else:  # once the all-reduce in flight has arrived
                self.snapshots.ask(write)

    def _write(self, begun: float, state: dict[str, Any], method: dict[str, Any]) -> None:
        """Writes a checkpoint once the method's part is complete. An all-reduce in flight delays it to a boundary."""
        assert self._saver is not None
        self._saver.start(state["step"], state | self.state_of_method(method), begun)

    def _saved(self) -> bool:
        """Waits until the last checkpoint is written. Returns False if it was not, because the model is not finite."""
        assert self._saver is not None
        return self._saver.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of what is trained, without the method's part, which may come later (state_of_method)."""
        return {
            "model": self.model.state_dict(),
            "optimizer": of_optimizer(self.optimizer, self.model),
            "schedule": self.schedule.state_dict(),
        } | {name: part.state_dict() for name, part in self._extra.items()}

    def state_of_method(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"method": {"name": self.recipe.method, "state": state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, self.model, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.method.load_state_dict(state["method"]["state"])
        for name, part in self._extra.items():
            part.load_state_dict(state[name])

    @property
    def _extra(self) -> dict[str, Any]:
        """More parts of a checkpoint, by name."""
        parts = {"ema": self._ema, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def _needs(self) -> dict[str, type]:
        """The keys of a checkpoint that load_state_dict reads, with the types of their values."""
        return dict.fromkeys(("model", "optimizer", "schedule", "method", *self._extra), dict)

    def _counted(self) -> dict[str, Any]:
        """Returns a checkpoint's counters of the loop and the log."""
        totals = vars(self.rounds.overlap) | {"seconds": self.clock.seconds}
        return {"step": self.step, "total": self.total, "means": self.means.state_dict(), "totals": totals}

    def _count_on(self, state: dict[str, Any]) -> float:
        """Continues from those counters. Returns the seconds of training that led to them."""
        vars(overlap := self.rounds.overlap).update({name: state["totals"][name] for name in vars(overlap)})
        self.means.load_state_dict(state["means"])
        self.step = int(state["step"])
        self._total_before = state.get("total")
        return state["totals"]["seconds"]

    def _resume(self) -> float:
        """Restores the newest checkpoint, if there is one. Returns the seconds of training that led to it."""
        folder = self.folder
        found = checkpoint.load_newest(folder.checkpoints, rank=self.rank, needs=self._needs | NEEDS)
        if found is None:
            if self.rank == 0:
                tqdm.write(f"{folder.path} has no checkpoint: training begins at step 0", file=sys.stderr)
            return 0.0
        state, workers = found
        if (was := state["method"]["name"]) != self.recipe.method:
            raise UserError(f"{folder.path} was trained with {was}, not {self.recipe.method}")
        if state["node"] != self._per_node:
            raise UserError(
                f"{folder.path} was trained with {state['node']} workers per node, this run has {self._per_node}: "
                f"resume with --per_node {state['node']}"
            )
        try:
            self.load_state_dict(state)
        except RuntimeError as error:  # the data sets a classifier's width
            if not (sizes := re.search("size mismatch.*", str(error))):
                raise
            remedy = "restore the data that it began with, or choose another --out"
            raise UserError(f"{folder.path} is a run of another model ({sizes[0]}): {remedy}") from None
        seconds = self._count_on(state)
        if workers == self.world_size:
            set_random_state(state["rng"], self.device)
        else:
            self._change_workers(workers)
        return seconds

    def _change_workers(self, before: int) -> None:
        """Gives all workers new random states, and warns which parts of the checkpoint are kept."""
        torch.manual_seed(mix(self.recipe.seed, self.rank, self.step))
        if self.rank > 0:
            return
        now, its = self.world_size, "the optimizer's states"
        rest = f"{its} of rank {now} and above are dropped" if now < before else f"rank {before} and above copy {its}"
        tqdm.write(
            f"warning: {before} workers wrote the checkpoint, {now} go on: the parameters, {self.recipe.method}'s "
            f"state and what was in flight carry over; {rest}; random states begin anew",
            file=sys.stderr,
        )

    @property
    def _per_node(self) -> int:
        """Number of workers that synchronize every step."""
        return self.mesh.size(1) if self.mesh is not None else 1

    def stop(self) -> None:
        """Ends the run early, instead of method.finish(), the last evaluation and end().

        The checkpoint has the all-reduce in flight, so the resumed run equals a run that was never stopped.
        """
        self.save()
        number = self._stopped_by(self._stop.number)
        self.method.finish()  # after the checkpoint, which must not contain this
        self._saved()
        self._part(lambda: self._summarise({"stopped_by_signal": number}))

    def _stopped_by(self, number: int) -> int:
        """Returns the signal that stops the run, on all workers. It may have reached one worker only."""
        return largest_of_workers([number])[0]

    def end(self, results: dict[str, float]) -> None:
        """Saves, writes summary.json and closes the method. Call it after method.finish() and the last evaluation."""

        def conclude() -> None:
            self.save()
            if not self._saved():
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
        self._conclude(conclude)

    def _conclude(self, act: Callable[[], None]) -> None:
        """Runs `act` on every worker, and closes the method."""
        act()
        self.method.close()

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


def _zero() -> Any:
    """Returns layouts/zero.py. It is imported on first use, because FSDP takes half a second to import."""
    from training.layouts import zero

    return zero
