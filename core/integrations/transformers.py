"""CO2 in Hugging Face's Trainer, with one line:

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CO2Callback(trainer))
    trainer.train()

Start it as any other training, with torchrun or as a single process.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..checkpoint.stored import plain_values
from ..config import CO2Config
from ..errors import UserError
from . import common

WHO = "CO2Callback"
WAITS = "makes all workers wait for each other in every step"
REFUSED: dict[str, tuple[Any, str]] = {  # argument -> the value that is allowed, and the reason
    "include_num_input_tokens_seen": ("no", WAITS),
    "auto_find_batch_size": (False, "lets workers choose different batch sizes"),
    "enable_jit_checkpoint": (False, "saves at different steps on different workers"),
}
logger = logging.get_logger(__name__)


class CO2Callback(common.InLoop, TrainerCallback):
    """Trains with CO2 in place of DistributedDataParallel. Its attribute `co2` is the core.CO2 while train() runs.

    Before an evaluation or a checkpoint, finish() gives all workers the same model. A log waits for the round's end,
    and has the last round's statistics under co2/. A round is tau updates. With gradient accumulation an update is
    several batches. BatchNorm's statistics are averaged.

    A checkpoint's folder also holds each worker's optimizer, schedule and outer state, in the folder co2.
    resume_from_checkpoint resumes from it bit for bit.

    average_tokens_across_devices is switched off, because it makes all workers wait in every step. Each worker then
    normalizes its loss by its own tokens.

    Args:
        trainer: The Trainer, before train() is called. Add this callback after callbacks that request a log.
        config: The settings. None uses CO2Config.recommended for these workers and steps.
        **options: Other arguments of core.CO2, such as timeout and schedule.

    Raises:
        UserError: For DeepSpeed, FSDP, DataParallel, SyncBatchNorm and dispatched batches. Also for the arguments
            include_num_input_tokens_seen, auto_find_batch_size and enable_jit_checkpoint, for a schedule-free `optim`
            without average=, and for hyperparameter_search with several workers.
    """

    def __init__(self, trainer: Trainer, config: CO2Config | None = None, **options: Any):
        self.trainer, self.config, self.options = trainer, config, options
        self._resumed = ""  # the folder that train() resumes from
        common.check_accelerator(WHO, trainer.accelerator)
        common.check_mesh(WHO, options)
        args: Any = trainer.args
        for name, (allowed, why) in REFUSED.items():
            if args.world_size > 1 and getattr(args, name) != allowed:
                raise UserError(f"{WHO}: {name}={getattr(args, name)!r} {why}: set it to {allowed!r}")
        if args.world_size > 1 and args.optim.startswith("schedule_free") and "average" not in options:
            remedy = 'give CO2Callback average=lambda: [s["z"] for s in trainer.optimizer.state.values()]'
            raise UserError(f"{WHO}: optim={args.optim.value!r} keeps weights that need an average, too: {remedy}")
        if args.world_size > 1 and args.average_tokens_across_devices:
            args.average_tokens_across_devices = False
            if args.process_index == 0:
                logger.warning(f"{WHO} switches average_tokens_across_devices off: it {WAITS}")
        accelerator: Any = trainer.accelerator  # the next line keeps it from wrapping the model
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        common.shield_loaders(accelerator)
        around: Any = trainer
        around.train = functools.partial(self._train, around.train)
        around.log = functools.partial(self._log, around.log)
        for name in ("evaluate", "_save_checkpoint"):
            setattr(around, name, functools.partial(self._of_one_model, getattr(around, name)))

    def _train(self, train: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Runs Trainer.train. After an exception, for which Trainer calls no callback, leaves the group at once."""
        trial, workers = kwargs.get("trial", args[0] if args else None), self.trainer.args.world_size
        if trial is not None and workers > 1:  # each trial makes another accelerator
            remedy = "search with one process, or make a new Trainer and CO2Callback for each trial"
            raise UserError(f"{WHO}: hyperparameter_search with {workers} workers: {remedy}")
        if self not in self.trainer.callback_handler.callbacks:
            remedy = "add it with trainer.add_callback(), or make a new Trainer to train without it"
            raise UserError(f"{WHO} is not among the trainer's callbacks, so nothing averages the workers: {remedy}")
        folder = resume_from_checkpoint
        self._resumed = (get_last_checkpoint(self.trainer.args.output_dir) if folder is True else folder) or ""
        try:
            with plain_values():
                return train(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            self.end_co2(failed=True)
            raise

    def _log(self, log: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Runs Trainer.log with the last round's statistics."""
        if self.co2 is not None and "train_loss" in logs:  # training has ended; load_best_model_at_end comes next
            self.to_one_model()
        if self.co2 is not None and "loss" in logs:
            logs |= common.logged(self._closed)
        log(logs, *args, **kwargs)

    def _of_one_model(self, act: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs an evaluation or a save of Trainer, which callbacks may request at any step."""
        self.to_one_model()
        return act(*args, **kwargs)

    def _parts(self) -> dict[str, Any]:
        t: Any = self.trainer
        return {"optimizer": t.optimizer, "schedule": t.lr_scheduler, "scaler": t.accelerator.scaler, "co2": self.co2}

    # -- events ---------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        for one in (self.trainer.model_wrapped, model):
            common.check_model(WHO, one)  # pyright: ignore[reportArgumentType]
        common.check_loader(WHO, kwargs["train_dataloader"], "accelerator_config")
        self.begin_co2(common.make_co2(model, self.config, state.max_steps, self.options))
        self._log_due = False
        if self._resumed:
            common.load_own(WHO, f"{self._resumed}/co2", **self._parts())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Runs after every update, before Trainer does what `control` requests."""
        last = state.global_step >= state.max_steps or control.should_training_stop
        meet = last or control.should_evaluate or control.should_save
        self.step_co2(last=meet)
        if meet:
            self.to_one_model()
        self._log_due |= control.should_log  # a log waits for all workers, so it is written at a round boundary
        control.should_log = self._log_due and self.co2.at_boundary
        self._log_due &= not control.should_log

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not args.save_only_model:
            folder = f"{args.output_dir}/checkpoint-{state.global_step}/co2"
            common.save_own(WHO, folder, **self._parts())

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.end_co2()  # without finish(), which would overwrite the weights that load_best_model_at_end loaded
