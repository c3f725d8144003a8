"""CO2 with Hugging Face's accelerate, in the style of accelerate's own LocalSGD:

    accelerator = Accelerator(gradient_accumulation_steps=4)
    optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
    with CO2Training(accelerator, model, optimizer) as co2:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(x), y))
                optimizer.step(); schedule.step(); optimizer.zero_grad()
                co2.step()

Prepare everything but the model, which CO2Training prepares.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ..checkpoint.stored import plain_values
from ..co2 import CO2
from ..config import CO2Config
from ..errors import UserError
from . import common

WHO = "CO2Training"


class CO2Training(CO2):
    """A core.CO2 that supports accelerate's gradient accumulation and checkpoints.

    Call step() after every batch and finish() before an evaluation. Log what metrics() returns. Inside the block,
    save_state() first calls finish(). save_state() and load_state() also write and read each worker's own optimizer,
    schedules and outer state, in the folder co2. save_state() refuses objects there that load_state() would not read
    back. docs/integrations.md says which settings of a loader resume bit for bit. Loading processes ignore stop
    signals, and end with their worker.

    Args:
        accelerator: The accelerator that prepared the optimizer.
        model: The bare model. It is prepared here, without DistributedDataParallel. Call `co2.model` if accelerate
            compiles the model.
        optimizer: The optimizer that accelerator.prepare() returned.
        config: The settings. None uses CO2Config.recommended for these workers.
        **options: Other arguments of core.CO2. The default of `buffers` is the model's buffers.

    Raises:
        UserError: For DeepSpeed, FSDP, Megatron and a parallelism_config. Also for a model in DistributedDataParallel
            or with SyncBatchNorm, for an optimizer that was not prepared, and for dispatched batches.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        config: CO2Config | None = None,
        **options: Any,
    ):
        common.check_accelerator(WHO, accelerator)
        common.check_model(WHO, model)
        common.check_mesh(WHO, options)
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise UserError(f"{WHO}: the optimizer is a bare {type(optimizer).__name__}: give what prepare() returned")
        self.accelerator, self.optimizer = accelerator, optimizer
        common.shield_loaders(accelerator)
        self.model = accelerator.prepare_model(model, evaluation_mode=True)  # without DistributedDataParallel
        given: dict[str, Any] = {"buffers": model.buffers()} | options
        super().__init__(model.parameters(), common.config_or_recommended(config), **given)
        self._closed = self.stats  # statistics of the last round that closed
        # accelerate's own files are as without CO2, so that an evaluation without CO2Training can load them
        on_save = accelerator.register_save_state_pre_hook(self._save_own)
        self._own_hooks = [on_save, accelerator.register_load_state_pre_hook(self._remember)]
        self._load_state: Any = accelerator.load_state
        accelerator.load_state = self._load_own  # accelerate has no hook behind it

    def step(self, *, last: bool = False) -> bool:
        """Calls core.CO2.step() if this batch ended an optimizer update.

        Returns:
            Whether a round closed.
        """
        common.check_loader(WHO, self.accelerator.gradient_state.active_dataloader, "DataLoaderConfiguration")
        closed = self.accelerator.sync_gradients and super().step(last=last)
        self._closed = self.stats if closed else self._closed  # the statistics of an open round are incomplete
        return closed

    def metrics(self) -> dict[str, float]:
        """Returns the last round's statistics for accelerator.log(). On a GPU the host waits for them."""
        return common.logged(self._closed)

    def close(self) -> None:
        """Calls core.CO2.close(). Then accelerate's save_state() and load_state() are its own again."""
        super().close()
        common.leave_at_exit()

    def _end(self) -> None:
        super()._end()
        self.accelerator.load_state = self._load_state
        for hook in self._own_hooks:
            hook.remove()

    def _save_own(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        self.finish()  # rank 0 writes the weights next; they share the parameters' memory
        common.save_own(WHO, f"{folder}/co2", **self._parts())

    def _remember(self, models: list[nn.Module], folder: str) -> None:
        self._folder = folder

    def _load_own(self, *args: Any, **kwargs: Any) -> None:
        """Runs load_state(), which loads rank 0's model and optimizer, and then loads this worker's own state."""
        with plain_values():
            self._load_state(*args, **kwargs)
        common.load_own(WHO, f"{self._folder}/co2", **self._parts())

    def _parts(self) -> dict[str, Any]:
        schedules = {f"schedule{i}": schedule for i, schedule in enumerate(self.accelerator._schedulers)}
        return {"optimizer": self.optimizer, **schedules, "scaler": self.accelerator.scaler, "co2": self}
