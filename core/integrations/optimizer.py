"""CO2 behind any torch optimizer's step, with one line around the loop:

    with attach(optimizer, model.parameters(), CO2Config.recommended(steps=steps), buffers=model.buffers()) as co2:
        for batch in loader:
            loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()

The loop itself stays as it is.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..co2 import CO2
from ..config import CO2Config
from ..errors import UserError
from .common import config_or_recommended


@contextlib.contextmanager
def attach(
    optimizer: torch.optim.Optimizer, params: Iterable[Tensor], config: CO2Config | None = None, **options: Any
) -> Iterator[CO2]:
    """Calls co2.step() after each optimizer.step() of the block, and finish() and close() at its end.

    Gradient accumulation is supported. After an exception the worker leaves the group without waiting for others.

    Args:
        optimizer: Any torch optimizer.
        params: As for CO2.
        config: The settings. None uses CO2Config.recommended for these workers.
        **options: As for CO2, such as mesh.

    Yields:
        The CO2 object.

    Raises:
        UserError: With a GradScaler (torch.amp). If gradients overflow on one worker, it skips that worker's
            optimizer.step(), and torch calls no hook. Make CO2 yourself, and call co2.step() once an update, after
            scaler.update(). Optimizers that handle the overflow inside their step (fused=True) are accepted.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise UserError(
            f"optimizer: a {type(optimizer).__name__} is given: give a torch optimizer, or make CO2 and call "
            "co2.step() after its step"
        )
    config = config_or_recommended(config)
    method = CO2(params, config, **options)

    def stepped(*_: Any) -> None:
        frame: Any = inspect.currentframe()
        while frame := frame.f_back:
            code = frame.f_code
            if code.co_name == "_maybe_opt_step" and code.co_filename.endswith("grad_scaler.py"):
                raise UserError(
                    "attach() with a GradScaler: torch calls no hook for a skipped step, so workers would count their "
                    "steps differently: make CO2 itself, and call co2.step() after scaler.update()"
                )
        method.step()

    with method:
        hook = optimizer.register_step_post_hook(stepped)
        try:
            yield method
        finally:
            hook.remove()
