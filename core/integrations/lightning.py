"""CO2 in Lightning, by one argument:

    trainer = Trainer(strategy=CO2Strategy(), devices=8, num_nodes=2)
    trainer.fit(module, loader)

Lightning 2.6 broadcasts rank 0's SIGTERM flag before every batch, so that workers start each batch together.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ..assembly import CO2, CO2Config
from ..errors import UserError
from ..robust.requests import Requests
from .common import check_model, config_or_recommended, leave_at_exit, load_own, logged, save_own

WHO = "CO2Strategy"


class CO2Strategy(DDPStrategy):
    """Trains with CO2 in place of DistributedDataParallel.

    config: see core.CO2Config; without it CO2Config.recommended for these workers and steps. process_group_backend,
    start_method: see Lightning's DDPStrategy. options: what core.CO2 takes besides, as timeout (seconds until a missing
    worker is an error) and schedule.

    Before a validation or a checkpoint finish() brings all workers to one model. A round is tau updates: with
    accumulate_grad_batches several batches. The loggers get the last round's statistics under co2/ every
    log_every_n_steps. Beside FILE.ckpt a folder FILE.ckpt.co2 holds each worker's model, optimizer, schedules and outer
    state; fit(ckpt_path=...) goes on from it bit for bit. At SIGTERM, and at Slurm's signal before a requeue, all
    workers stop at the same boundary. Leave out self.log(sync_dist=True, on_step=True), Trainer's max_time and
    ModelCheckpoint's train_time_interval: all workers wait for them in every step.

    Attributes: co2, the core.CO2 while fit() runs, else None.

    UserError: SyncBatchNorm, models in wrappers, several optimizers.
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
        self._events: _Events | None = None
        self._loaded = ""  # the checkpoint that this run goes on from

    def configure_ddp(self) -> None:
        """The model stays as it is."""

    def setup(self, trainer: Trainer) -> None:
        """See Strategy; rank 0's weights go to all workers."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        check_model(WHO, self.model)
        if len(self.optimizers) != 1:
            raise UserError(f"{WHO}: {len(self.optimizers)} optimisers: with one alone it is clear what a step is")
        self._events = _Events(self, trainer)
        given: dict[str, Any] = {"buffers": self._module.buffers()} | self._options
        given["riders"] = [*given.get("riders", ()), self._events.signals]
        config = self._config or config_or_recommended(None, trainer.estimated_stepping_batches)
        self.co2 = CO2(self._module.parameters(), config, **given)
        self._closed, self._unlogged, self._is_one_model = self.co2.stats, False, False

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Once an update, however many batches are accumulated, also where a GradScaler skips it."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.co2 is not None
        trainer, self._is_one_model = self._module.trainer, False
        if self.co2.step():
            self._closed, self._unlogged = self.co2.stats, True  # of later rounds only a part is known
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (trainer.global_step + 1) % every == 0:
            self.log_round()
        return result

    def to_one_model(self) -> None:
        """All workers hold the same model afterwards; every worker must call it."""
        if self.co2 is not None and not self._is_one_model:
            self.co2.finish()
            self._closed, self._unlogged, self._is_one_model = self.co2.stats, True, True

    def log_round(self) -> None:
        """Of the round that closed last, unless it has been logged."""
        trainer = self._module.trainer
        for logger in trainer.loggers if self._unlogged and self.is_global_zero else []:
            logger.log_metrics(logged(self._closed), trainer.global_step)
        self._unlogged = False

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of every checkpoint, whoever asks for it; all workers come here."""
        if not self._module.trainer.interrupted:  # after an exception nobody else may come
            self.to_one_model()
        return super().lightning_module_state_dict()

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
        """What rank 0 has written has been loaded on all workers, and Lightning has set its handlers of signals."""
        super().on_train_start()
        assert self._events is not None
        self._events.take_signals(self.cluster_environment)
        if self._loaded:
            load_own(WHO, f"{self._loaded}.co2", self.global_rank, **self._parts())
            self._loaded = ""

    def _parts(self) -> dict[str, Any]:
        """What is each worker's own."""
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
        if self._events is not None:
            self._events.leave()
            self._events = None
        if self.co2 is not None:
            self.co2.close()
            self.co2 = None
            leave_at_exit()
        super().teardown()


class _Signals(Requests):
    """What a signal asks for: sent until it is granted. A validation's finish() does not answer it."""

    granted: set[str]

    def take(self) -> list[float]:
        return [float(name in self.asked) for name in self.shared]

    def end(self) -> None:
        self.granted |= self._heard

    def finished(self) -> None:
        pass


class _Events(Callback):
    """The first of the trainer's callbacks while fit() runs. It has signals wait for a boundary."""

    def __init__(self, strategy: CO2Strategy, trainer: Trainer):
        self._strategy, self._trainer = strategy, trainer
        self.signals = _Signals("stop", "requeue")
        self._handlers: dict[str, tuple[int, Any]] = {}  # Lightning's own
        self._done = set[str]()  # the requests that have been answered
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def leave(self) -> None:
        for number, handler in self._handlers.values():
            signal.signal(number, handler)
        self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    def take_signals(self, environment: Any) -> None:
        """From here on a signal is a request to all workers, who call Lightning's handler at one boundary."""
        if threading.current_thread() is not threading.main_thread():
            return
        numbers = {"stop": signal.SIGTERM}
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            numbers["requeue"] = environment.requeue_signal
        for name, number in numbers.items():
            self._handlers[name] = (number, signal.getsignal(number))
            signal.signal(number, lambda *_, name=name: self.signals.ask(name))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._strategy.to_one_model()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Where a checkpoint may be written: the loops count this batch as done."""
        assert self._strategy.co2 is not None
        if not self._strategy.co2.at_boundary:
            return
        for name in ("requeue", "stop"):  # the first saves, the second ends the loop behind this batch
            if name in self._handlers and name in self.signals.granted - self._done:
                self._done.add(name)
                self._strategy.to_one_model()  # an exception's checkpoint comes too late for that
                number, handler = self._handlers[name]
                handler(number, None)  # which may send the signal to other workers again: there it is only asked for

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before other callbacks, such as ModelCheckpoint, look at the model."""
        self._strategy.to_one_model()
        self._strategy.log_round()
