"""CO2 in Hugging Face's Trainer, by one line:

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CO2Callback(trainer, CO2Config(tau=48)))
    trainer.train()

Start it as any other training, with torchrun or alone. The workers then average their parameters in the background
every tau updates, instead of their gradients at every one.

What is relied on of transformers (5.23, trainer.py):
- Trainer._prepare_for_training calls accelerator.prepare(model, optimizer), and that prepare_model(model), whose
  evaluation_mode=True places the model, casts and compiles it, but puts it in no DistributedDataParallel.
- Trainer._save_checkpoint calls _save_optimizer_and_scheduler(folder) on every worker, unless save_only_model is set;
  there rank 0 alone writes. Trainer._load_optimizer_and_scheduler(folder) comes before on_train_begin, after the model.
- on_step_end follows every update, also one that a GradScaler skipped, and no micro-batch. What it leaves in `control`
  decides whether Trainer logs, evaluates and saves behind it. on_step_begin clears that.
- Trainer.log(logs) hands what it is given to all loggers. Its last call, with train_loss, is the last that happens
  before load_best_model_at_end, which comes before on_train_end.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..assembly import CO2, CO2Config
from ..errors import UserError
from .accelerate import agree_once
from .common import (
    check_accelerator,
    check_loader,
    check_model,
    leave_at_exit,
    load_own,
    logged,
    save_own,
)

WHO = "CO2Callback"
HELD = ("should_log", "should_evaluate", "should_save")  # each makes workers wait for each other
WAITS = "makes all workers wait for each other in every step"
REFUSED: dict[str, tuple[Any, str]] = {  # argument -> the value that is allowed, and why no other is
    "include_num_input_tokens_seen": ("no", WAITS),
    "auto_find_batch_size": (False, "lets workers find unlike sizes"),
    "enable_jit_checkpoint": (False, "saves at unlike steps of the workers"),
}
logger = logging.get_logger(__name__)


class CO2Callback(TrainerCallback):
    """Trains with CO2 in place of DistributedDataParallel.

        trainer.add_callback(CO2Callback(trainer, CO2Config.recommended(workers=8)))

    trainer: before train() is called. config: see core.CO2Config. options: what core.CO2 takes besides, as timeout and
    schedule. Add it behind callbacks of your own that ask for an evaluation or a checkpoint.

    Logs, evaluations and checkpoints that fall into a round wait for its end, where all workers hold one model. A round
    is tau updates: with gradient accumulation several batches. Each log of the loss has the last round's statistics
    under co2/. A checkpoint's folder holds, beside the Trainer's files, co2/rankN.pt: each worker's model, optimiser,
    schedule and outer state; resume_from_checkpoint goes on from it bit for bit. BatchNorm's statistics are averaged.
    average_tokens_across_devices is switched off, for it makes all workers wait in every step; so the loss of a batch
    is normalised by the worker's own tokens.

    Attributes: co2, the core.CO2 while train() runs, else None.

    UserError: DeepSpeed, FSDP, DataParallel, SyncBatchNorm, dispatched batches, and the arguments
    include_num_input_tokens_seen, auto_find_batch_size and enable_jit_checkpoint.
    """

    def __init__(self, trainer: Trainer, config: CO2Config | None = None, **options: Any):
        self.trainer, self.config, self.options = trainer, config, options
        self.co2: CO2 | None = None
        self._resumed = ""  # the folder that the Trainer has loaded
        self._due: set[str] = set()
        self._ended = False
        check_accelerator(WHO, trainer.accelerator)
        args: Any = trainer.args
        for name, (allowed, why) in REFUSED.items():
            if args.world_size > 1 and getattr(args, name) != allowed:
                raise UserError(f"{WHO}: {name}={getattr(args, name)!r} {why}: set it to {allowed!r}")
        if args.world_size > 1 and args.average_tokens_across_devices:
            args.average_tokens_across_devices = False
            if args.process_index == 0:
                logger.warning(f"{WHO} switches average_tokens_across_devices off: it {WAITS}")
        accelerator: Any = trainer.accelerator
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        around: Any = trainer
        around.log = functools.partial(self._log, around.log)
        around._inner_training_loop = functools.partial(self._train, around._inner_training_loop)
        around._save_optimizer_and_scheduler = functools.partial(self._save, around._save_optimizer_and_scheduler)
        around._load_optimizer_and_scheduler = functools.partial(self._load, around._load_optimizer_and_scheduler)

    # -- what Trainer's own calls do besides ----------------------------------------------------------------------

    def _train(self, train: Any, *args: Any, **kwargs: Any) -> Any:
        """After an exception the group is left, and nobody is waited for: Trainer calls no callback then."""
        try:
            return train(*args, **kwargs)
        except BaseException:
            if self.co2 is not None:
                self.co2.leave()
                self.co2 = None
            raise

    def _log(self, log: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "train_loss" in logs:  # the last call before load_best_model_at_end, whatever has ended the training
            self._end()
        if self.co2 is not None and "loss" in logs:
            logs |= logged(self._closed)
        log(logs, *args, **kwargs)

    def _save(self, save: Any, folder: str) -> None:
        save(folder)
        if self.co2 is not None:
            save_own(f"{folder}/co2", self.trainer.args.process_index, co2=self.co2, **self._parts())

    def _load(self, load: Any, folder: str | None) -> None:
        load(folder)
        self._resumed = folder or ""

    def _parts(self) -> dict[str, Any]:
        """What is each worker's own besides CO2's state."""
        t: Any = self.trainer
        parts = {"model": t.model, "optimizer": t.optimizer, "schedule": t.lr_scheduler, "scaler": t.accelerator.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    # -- events ---------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Built here, when the model to start from is in place; rank 0's goes to all workers."""
        model: nn.Module = kwargs["model"]
        for one in (self.trainer.model_wrapped, model):
            check_model(WHO, one)  # pyright: ignore[reportArgumentType]
        check_loader(WHO, kwargs["train_dataloader"])  # accelerator_config={"dispatch_batches": False} is the remedy
        agree_once(kwargs["train_dataloader"])
        self._due, self._ended = set(), False
        given: dict[str, Any] = {"buffers": model.buffers()} | self.options
        self.co2 = CO2(model.parameters(), self.config, **given)
        self._closed = self.co2.stats
        if self._resumed:
            load_own(WHO, f"{self._resumed}/co2", args.process_index, **self._parts(), co2=self.co2)
            self._resumed = ""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.co2 is not None
        last = state.global_step >= state.max_steps or control.should_training_stop
        if self.co2.step(last=last):
            self._closed = self.co2.stats  # of the round that closed last: of later ones only a part is known
        if last:
            self._end()
        self._hold(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_training_stop:
            self._end()
        self._hold(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Not finish(): it would undo what load_best_model_at_end has loaded."""
        if self.co2 is not None:
            self.co2.close()
            self.co2 = None
            leave_at_exit()

    def _hold(self, control: TrainerControl) -> None:
        """Logs, evaluations and checkpoints wait for the next boundary."""
        assert self.co2 is not None
        self._due |= {name for name in HELD if getattr(control, name)}
        now = self.co2.at_boundary
        for name in HELD:
            setattr(control, name, now and name in self._due)
        if now and self._due & {"should_evaluate", "should_save"}:
            self.co2.settle()
        if now:
            self._due.clear()

    def _end(self) -> None:
        if self.co2 is not None and not self._ended:
            self.co2.finish()
            self._ended = True
