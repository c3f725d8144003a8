"""CO2 in Lightning, with one argument:

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
from types import SimpleNamespace
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ..checkpoint.runs import random_state, set_random_state
from ..checkpoint.stored import plain_values
from ..config import CO2Config
from ..errors import UserError
from ..hooks import Requests
from . import common
from .loading import shield

WHO = "CO2Strategy"


class CO2Strategy(common.InLoop, DDPStrategy):
    """Trains with CO2 in place of DistributedDataParallel. Its attribute `co2` is the core.CO2 while fit() runs.

    Before a validation or a checkpoint, finish() gives all workers the same model. A round is tau updates. With
    accumulate_grad_batches an update is several batches. The loggers get the last round's statistics under co2/ every
    log_every_n_steps.

    Next to FILE.ckpt, a folder FILE.ckpt.co2 holds each worker's optimizer, schedules, outer state and torch's random
    states. fit(ckpt_path=...) restores them exactly, and a save refuses objects there that it would not read back. The
    data is Lightning's part: docs/integrations.md says which loaders resume bit for bit.

    At SIGTERM, and at Slurm's signal before a requeue, all workers stop at the same round boundary. Loading processes
    ignore these signals, and end with their worker. After another exception, a checkpoint of
    ModelCheckpoint(save_on_exception=True) holds the model of rank 0, which no all-reduce has averaged.

    The models of WeightAveraging and EMAWeightAveraging are averaged with the model, unless you give average=.

    Do not use self.log(sync_dist=True, on_step=True), Trainer's max_time, or ModelCheckpoint's train_time_interval.
    With them all workers wait for each other in every step.

    Args:
        config: The settings. None uses CO2Config.recommended for these workers and steps.
        **options: Other arguments of core.CO2, such as timeout and schedule.

    Raises:
        UserError: For SyncBatchNorm, models in wrappers, several optimizers, StochasticWeightAveraging, and callbacks
            that unfreeze layers, such as BackboneFinetuning.
    """

    strategy_name = "co2"

    def __init__(self, config: CO2Config | None = None, **options: Any):
        super().__init__()
        common.check_mesh(WHO, options)
        self._config, self._options = config, options
        self._events: _Events | None = None
        self._loaded = ""  # the checkpoint that this run resumes from

    def configure_ddp(self) -> None:
        """Leaves the model unwrapped."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.model is not None
        common.check_model(WHO, self.model)
        common.check_optimizers(WHO, len(self.optimizers))
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, StochasticWeightAveraging):
                raise UserError(
                    f"{WHO}: StochasticWeightAveraging keeps an average of its own on each worker: use WeightAveraging"
                )
            if isinstance(callback, BaseFinetuning):
                raise UserError(
                    f"{WHO}: {type(callback).__name__} unfreezes layers during training, and CO2 averages only layers "
                    "that are trainable at the start: leave it out, and keep these layers in a parameter group whose "
                    "learning rate is 0 until they are to train"
                )
        averaged: list[Any] = [c._average_model for c in callbacks if isinstance(c, WeightAveraging)]
        self._events = _Events(self, trainer)
        steps = 0 if self._config else trainer.estimated_stepping_batches  # may build the data loaders
        options = self._options | {"hooks": [*self._options.get("hooks", ()), self._events.signals]}
        if averaged:
            options.setdefault("average", lambda: [t for m in averaged for t in (*m.parameters(), *m.buffers())])
        self.begin_co2(common.make_co2(self._module, self._config, steps, options))

    def process_dataloader(self, dataloader: object) -> object:
        _auto_add_worker_init_fn(dataloader, self.global_rank)  # Lightning calls it later, and then keeps what is set
        epoch = self._module.trainer.fit_loop.epoch_progress.current.processed
        _set_sampler_epoch(dataloader, epoch)  # Lightning sets it after loading processes have begun
        return shield(dataloader)

    @property
    def _module(self) -> Any:
        return self.lightning_module

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.step_co2()
        trainer = self._module.trainer
        every = trainer.log_every_n_steps
        if every and (trainer.global_step + 1) % every == 0:
            self.log_round()
        return result

    def log_round(self) -> None:
        """Logs the last round that closed, once."""
        trainer = self._module.trainer
        for logger in trainer.loggers if self._unlogged and self.is_global_zero else []:
            logger.log_metrics(common.logged(self._closed), trainer.global_step)
        self._unlogged = False

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights for any checkpoint, after all workers have the same model. All workers call it."""
        if not self._module.trainer.interrupted:  # after an exception the other workers may not call it
            self.to_one_model()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.co2 is not None and "optimizer_states" in checkpoint:
            own = f"{self.broadcast(str(filepath))}.co2"  # Slurm's next number may be used up when a later worker looks
            common.save_own(WHO, own, **self._parts())
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{filepath}.co2", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.co2 is None and self._module.trainer.state.fn == TrainerFn.FITTING:  # else no training resumes from it
            self._loaded = os.path.realpath(checkpoint_path)  # last.ckpt may be a link
        with plain_values():
            return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self.co2 is not None:  # the learning rate finder takes its steps back
            self.co2.resync()

    def on_train_start(self) -> None:
        """Called after all workers have loaded rank 0's checkpoint and Lightning has set its signal handlers."""
        super().on_train_start()
        assert self._events is not None
        if self._events not in self._module.trainer.callbacks:  # the learning rate finder's own loop
            return
        self._events.take_signals(self.cluster_environment)
        if self._loaded:
            common.load_own(WHO, f"{self._loaded}.co2", **self._parts())
            self._loaded = ""

    def _parts(self) -> dict[str, Any]:
        schedules = {f"schedule{i}": config.scheduler for i, config in enumerate(self.lr_scheduler_configs)}
        scaler = getattr(self.precision_plugin, "scaler", None)
        random = SimpleNamespace(  # torch's random states, which Lightning does not save
            state_dict=lambda: random_state(self.root_device),
            load_state_dict=lambda state: set_random_state(state, self.root_device),
        )
        return {"optimizer": self.optimizers[0], **schedules, "scaler": scaler, "co2": self.co2, "random": random}

    # -- the end --------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        self.end_co2(failed=True)
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._events is not None:
            self._events.leave()
            self._events = None
        self._loaded = ""
        self.end_co2()
        super().teardown()


class _Events(Callback):
    """The trainer's first callback while fit() runs. It delays signals until a round boundary."""

    def __init__(self, strategy: CO2Strategy, trainer: Trainer):
        self._strategy, self._trainer = strategy, trainer
        self.signals = Requests("stop", "requeue", lasting=("stop", "requeue"))  # also past a validation's finish()
        self._handlers: dict[str, tuple[int, Any]] = {}  # Lightning's own handlers
        self._done = set[str]()  # requests that have been answered
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def leave(self) -> None:
        for number, handler in self._handlers.values():
            signal.signal(number, handler)
        self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    def take_signals(self, environment: Any) -> None:
        """Turns a signal into a request to all workers. They call Lightning's handler at the same round boundary."""
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
        """Answers granted requests. The loops count this batch as done, so a checkpoint may be written here."""
        if not self._strategy.co2.at_boundary:
            return
        for name in ("requeue", "stop"):  # the first saves, the second ends the loop after this batch
            if name in self._handlers and name in self.signals.granted - self._done:
                self._done.add(name)
                self._strategy.to_one_model()  # Lightning saves too late for this if the handler raises
                number, handler = self._handlers[name]
                handler(number, None)  # may send the signal to other workers again, which only ask again then

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Runs before other callbacks, such as ModelCheckpoint, read the model."""
        self._strategy.to_one_model()
        self._strategy.log_round()
