"""CO2 with Hugging Face's accelerate, after its own LocalSGD:

accelerator = Accelerator(gradient_accumulation_steps=4)
optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)  # all but the model
with CO2Training(accelerator, model, optimizer) as co2:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model(x), y))
            optimizer.step(); schedule.step(); optimizer.zero_grad()
            co2.step()
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ..co2 import CO2
from ..config import CO2Config
from ..errors import UserError
from .common import check_accelerator, check_model, config_or_recommended, leave_at_exit, load_own, logged, save_own

WHO = "CO2Training"


class CO2Training(CO2):
    """A core.CO2 that supports accelerate's updates and checkpoints.

    Call step() after every batch, and finish() before an evaluation; log what metrics() returns. Inside the block
    save_state() calls finish(), and save_state() and load_state() also write and read each worker's own model,
    optimizer and outer state, in co2/rankN.pt. A run goes on bit for bit if schedules are equal on all workers.

    Args:
        model: The bare model, prepared here without DistributedDataParallel; call `co2.model` if accelerate compiles.
        optimizer: What accelerator.prepare() returned.
        config: None takes CO2Config.recommended for these workers.
        options: What core.CO2 takes besides; buffers: the model's, if no others are given.

    Raises:
        UserError: For DeepSpeed, FSDP, Megatron, a parallelism_config, a model in DistributedDataParallel or with
            SyncBatchNorm, and an optimizer that was not prepared.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: AcceleratedOptimizer,
        config: CO2Config | None = None,
        **options: Any,
    ):
        check_accelerator(WHO, accelerator)
        check_model(WHO, model)
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise UserError(f"{WHO}: the optimizer is a bare {type(optimizer).__name__}: give what prepare() returned")
        self.accelerator, self.optimizer, self._bare = accelerator, optimizer, model
        self.model = accelerator.prepare_model(model, evaluation_mode=True)  # in no DistributedDataParallel
        given: dict[str, Any] = {"buffers": model.buffers()} | options
        super().__init__(model.parameters(), config_or_recommended(config), **given)
        self._closed = self.stats  # of the last round
        self._checkpoint = _Checkpoint(self)

    def step(self, *, last: bool = False) -> bool:
        """Calls core.CO2.step() if the batch ended an update."""
        closed = self.accelerator.sync_gradients and super().step(last=last)
        self._closed = self.stats if closed else self._closed  # of later ones only a part is known
        return closed

    def metrics(self) -> dict[str, float]:
        """Returns the last round's statistics for accelerator.log(); on a GPU the host waits for them."""
        return logged(self._closed)

    def close(self) -> None:
        """Calls core.CO2.close(); save_state() is accelerate's own again."""
        self._checkpoint.leave()
        super().close()
        leave_at_exit()

    def leave(self) -> None:
        self._checkpoint.leave()
        super().leave()


class _Checkpoint:
    """Each worker's own part of save_state() and load_state()."""

    def __init__(self, co2: CO2Training):
        self._co2, self._folder, accelerator = co2, "", co2.accelerator
        on_save = accelerator.register_save_state_pre_hook(self._save)
        self._hooks = [on_save, accelerator.register_load_state_pre_hook(self._remember)]
        accelerator.register_for_checkpointing(self)

    def leave(self) -> None:
        """Stays registered, because accelerate lets nothing go, but does nothing any more."""
        self._folder = ""
        for hook in self._hooks:
            hook.remove()

    def _save(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        self._co2.finish()  # the weights that rank 0 writes next share the parameters' memory
        save_own(f"{folder}/co2", self._co2.accelerator.process_index, **self._parts())

    def _remember(self, models: list[nn.Module], folder: str) -> None:
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        """Returns what rank 0 writes of this object: each worker's own part lies next to it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called last in load_state(), when all workers have loaded rank 0's model and optimizer."""
        if self._folder:
            load_own(WHO, f"{self._folder}/co2", self._co2.accelerator.process_index, **self._parts())

    def _parts(self) -> dict[str, Any]:
        co2 = self._co2
        return {"model": co2._bare, "optimizer": co2.optimizer, "scaler": co2.accelerator.scaler, "co2": co2}
