"""CO2 in Lightning, by one argument:

    trainer = Trainer(strategy=CO2Strategy(CO2Config(tau=48)), devices=8, num_nodes=2)
    trainer.fit(module, loader)

The workers then average their parameters in the background every tau updates, instead of their gradients at every one.

What is relied on of Lightning (2.6):
- Trainer gives samplers, process groups and launchers to a DDPStrategy; its setup() wraps the model in configure_ddp().
- Strategy.optimizer_step is called once an update, however many batches are accumulated, also where a GradScaler skips
  it. TrainingEpochLoop then calls the callbacks' on_train_batch_end, and after it _should_check_val_fx.
- ModelCheckpoint saves in _save_topk_checkpoint and _save_last_checkpoint, which call Strategy.save_checkpoint and
  remove_checkpoint on every worker. Strategy.load_checkpoint comes first in a resumed run, on_train_start last.
- TrainingEpochLoop._broadcast_sigterm_tensor makes all workers wait for rank 0 before every batch. _SignalConnector's
  handlers end or requeue a run wherever a worker is. Both are replaced by requests that travel with the reductions.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ..assembly import CO2, CO2Config
from ..errors import UserError
from ..robust.requests import Requests
from .common import check_model, leave_at_exit, load_own, logged, save_own

WHO = "CO2Strategy"
SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint")


class CO2Strategy(DDPStrategy):
    """Trains with CO2 in place of DistributedDataParallel.

        Trainer(strategy=CO2Strategy(CO2Config.recommended(workers=16)), devices=8, num_nodes=2)

    config: see core.CO2Config. process_group_backend, start_method: see Lightning's DDPStrategy. options: what core.CO2
    takes besides, as timeout (seconds until a missing worker is an error) and schedule.

    Validation and ModelCheckpoint's files that fall into a round wait for its end, where all workers hold one model. A
    validation behind an epoch's last batch ends the round itself, for callbacks such as EarlyStopping read it there. A
    round is tau updates: with accumulate_grad_batches several batches. The loggers get the last round's statistics
    under co2/ every log_every_n_steps. Beside FILE.ckpt a folder FILE.ckpt.co2 holds each worker's model, optimiser,
    schedules and outer state; fit(ckpt_path=...) goes on from it bit for bit, also where trainer.save_checkpoint() was
    called in mid-round. At SIGTERM, and at Slurm's signal before a requeue, all workers stop at the same boundary.
    Leave out self.log(sync_dist=True, on_step=True), which waits for all workers in every step.

    Attributes: co2, the core.CO2 while fit() runs, else None.

    UserError: SyncBatchNorm, models in wrappers, several optimisers, ModelCheckpoint with
    train_time_interval and Trainer's max_time, which make all workers wait in every step.
    """

    strategy_name = "co2"

    def __init__(
        self,
        config: CO2Config | None = None,
        *,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ):
        super().__init__(process_group_backend=process_group_backend, start_method=start_method)
        self._config, self._options = config, options
        self.co2: CO2 | None = None
        self._rounds = _Rounds(self)
        self._loaded = ""  # the checkpoint that this run goes on from

    def configure_ddp(self) -> None:
        """The model stays as it is."""

    def setup(self, trainer: Trainer) -> None:
        """See Strategy; rank 0's weights go to all workers."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self._check(trainer)
        super().setup(trainer)
        if not fits:
            return
        if len(self.optimizers) != 1:
            raise UserError(f"{WHO}: {len(self.optimizers)} optimisers: with one alone it is clear what a step is")
        given: dict[str, Any] = {"buffers": self._module.buffers()} | self._options
        given["riders"] = [*given.get("riders", ()), self._rounds.begin(trainer)]
        self.co2 = CO2(self._module.parameters(), self._config, **given)

    def _check(self, trainer: Trainer) -> None:
        if self._layer_sync:
            raise UserError(
                f"{WHO}: sync_batchnorm=True waits for all workers in every forward pass: leave it out; BatchNorm's "
                "statistics are averaged with the parameters"
            )
        check_model(WHO, self._module)
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
                raise UserError(f"{WHO}: train_time_interval makes all workers wait in every step: give steps")
            if isinstance(callback, Timer) and callback._interval == "step":
                raise UserError(f"{WHO}: max_time makes all workers wait in every step: give max_steps")

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._rounds.step()
        return result

    # -- each worker's own part of a checkpoint -------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.co2 is not None and "optimizer_states" in checkpoint:
            filepath = self.broadcast(str(filepath))  # Slurm's next number may be taken when a later worker looks
            save_own(f"{filepath}.co2", self.global_rank, **self._parts())

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}.co2", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded = os.path.realpath(checkpoint_path)  # last.ckpt may be a link
        return super().load_checkpoint(checkpoint_path, weights_only)

    def on_train_start(self) -> None:
        """What rank 0 has written has been loaded on all workers."""
        super().on_train_start()
        if self._loaded:
            load_own(WHO, f"{self._loaded}.co2", self.global_rank, **self._parts())
            self._loaded = ""

    def _parts(self) -> dict[str, Any]:
        schedules = {f"schedule{i}": config.scheduler for i, config in enumerate(self.lr_scheduler_configs)}
        scaler = getattr(self.precision_plugin, "scaler", None)
        parts = {"model": self._module, "optimizer": self.optimizers[0], **schedules, "scaler": scaler, "co2": self.co2}
        return {name: part for name, part in parts.items() if part is not None}

    # -- the end --------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        if self.co2 is not None:
            self.co2.leave()
            self.co2 = None
        super().on_exception(exception)

    def teardown(self) -> None:
        self._rounds.end()
        if self.co2 is not None:
            self.co2.close()
            self.co2 = None
            leave_at_exit()
        super().teardown()


class _Rounds(Callback):
    """Has what a Trainer does wait for a round's end."""

    def __init__(self, strategy: CO2Strategy):
        self._strategy = strategy
        self._trainer: Any = None

    def begin(self, trainer: Any) -> Requests:
        """fit() begins. Returns what carries requests to stop."""
        self._trainer, self._finished, self._unlogged, self._validates = trainer, False, False, False
        self._saves: dict[tuple[Callback, str], Any] = {}
        self._requests = Requests("stop", "requeue")
        self._requeue, self._changed = trainer._signal_connector._slurm_sigusr_handler_fn, list[tuple[Any, str]]()
        trainer.callbacks.insert(0, self)
        self._check = trainer.fit_loop.epoch_loop._should_check_val_fx
        self._around(trainer.fit_loop.epoch_loop, "_should_check_val_fx", self._should_check_val)
        self._around(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda broadcast: None)
        self._around(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
        self._around(trainer._signal_connector, "_slurm_sigusr_handler_fn", self._on_requeue)
        for callback in trainer.checkpoint_callbacks:
            for name in SAVES if isinstance(callback, ModelCheckpoint) else ():
                self._around(callback, name, functools.partial(self._save, callback, name))
        return self._requests

    def end(self) -> None:
        """fit() has ended: everything is as before."""
        if self._trainer is not None:
            for owner, name in self._changed:
                vars(owner).pop(name, None)
            self._trainer.callbacks.remove(self)
            self._trainer = None

    def _around(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._changed.append((owner, name))
        setattr(owner, name, functools.partial(ours, getattr(owner, name)))

    @property
    def _co2(self) -> CO2:
        assert self._strategy.co2 is not None
        return self._strategy.co2

    def step(self) -> None:
        """After an update. A validation that follows an epoch's last one does not wait: what an epoch's end calls, as
        EarlyStopping, takes it to be done."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        last = trainer.global_step + 1 == trainer.max_steps
        if loop.epoch_loop._num_ready_batches_reached():
            last |= loop.max_epochs == trainer.current_epoch + 1 or self._check(loop._data_fetcher)
        self._finished = False
        if self._co2.step(last=last):
            self._closed, self._unlogged = self._co2.stats, True  # of later rounds only a part is known
        if last:
            self._finish()

    def _finish(self) -> None:
        if not self._finished:
            self._co2.finish()
            self._finished = True

    # -- what waits for a boundary --------------------------------------------------------------------------------

    def _should_check_val(self, check: Callable[..., bool], *args: Any) -> bool:
        if check(*args):
            self._validates = True
            if self._trainer.should_stop and self._trainer.fit_loop._can_stop_early:  # no step follows
                self._finish()
        if not (self._validates and self._co2.at_boundary):
            return False
        self._validates = False
        self._co2.settle()
        return True

    def _save(
        self, callback: Any, name: str, save: Callable[..., None], trainer: Any, metrics: Mapping[str, Any]
    ) -> None:
        if self._co2.at_boundary:
            self._co2.settle()
            save(trainer, metrics)
        else:
            self._saves[callback, name] = save

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Where a checkpoint may be written: the loops count this batch as done."""
        if trainer.global_step and self._co2.at_boundary:
            self._save_due()
            self._grant()
        if self._trainer._logger_connector.should_update_logs:
            self._log()

    def _save_due(self) -> None:
        due, self._saves = self._saves, {}
        for (callback, name), save in due.items():
            any_callback: Any = callback
            self._save(callback, name, save, self._trainer, any_callback._monitor_candidates(self._trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before ModelCheckpoint's, which is among the last."""
        self._finish()
        self._save_due()
        self._log()

    def _log(self) -> None:
        if self._unlogged and self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                logger.log_metrics(logged(self._closed), self._trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._unlogged = False

    # -- signals --------------------------------------------------------------------------------------------------

    def _on_sigterm(self, handle: Callable[..., None], number: int, *_: Any) -> None:
        if "stop" not in self._requests.asked and self._strategy.launcher is not None:
            launcher: Any = self._strategy.launcher
            launcher.kill(number)  # as Lightning's handler
        self._requests.ask("stop")

    def _on_requeue(self, handle: Callable[..., None], *_: Any) -> None:
        self._requests.ask("requeue")

    def _grant(self) -> None:
        """What any worker has asked for, on all of them at this boundary."""
        if "requeue" in self._requests.granted:
            self._requeue(signal.SIGUSR1, None)  # which saves
        if "stop" in self._requests.granted:
            self._trainer._signal_connector.received_sigterm = True  # the loop ends behind this batch
