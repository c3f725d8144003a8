"""CO2 for any mmengine project: two lines in a config.

    custom_imports = dict(imports=["co2_training.integrations.mmengine"])
    custom_hooks = [dict(type="CO2Hook", tau=48, co2=dict(outer_lr=1.0, outer_momentum=0.5))]

The workers then average their parameters in the background every tau optimiser steps instead of their gradients at
every one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mmengine.hooks import CheckpointHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..checkpoints.saved import Saved
from ..flat import read_blocks
from ..methods import (
    METHODS,
    CO2Config,
    DelayedConfig,
    LGrecoConfig,
    OverlapLocalConfig,
    SlowMoConfig,
    UserError,
    WireConfig,
    make_method,
)
from ..robust.guard import Guard, forget
from ..stats import RoundStats
from .common import leave_at_exit

Settings = Mapping[str, Any] | None


@HOOKS.register_module()
class CO2Hook(Hook):
    """Trains with CO2, or another local method, in place of DistributedDataParallel.

    method: co2, delayed, local, overlap_local or slowmo. tau: optimiser steps per round. co2, delayed, slowmo,
    overlap_local: fields of CO2Config (wire: of WireConfig), DelayedConfig, SlowMoConfig and
    OverlapLocalConfig, as dicts. average_buffers: BatchNorm statistics are averaged with the parameters. timeout:
    seconds until a missing worker is an error.

    The model is taken out of the MMDistributedDataParallel that the runner wraps it in; other wrappers and SyncBN,
    which communicate in every forward pass, are refused. With gradient accumulation a step is one update. Before a
    validation or a checkpoint of CheckpointHook, and at the end, all workers are brought to equal parameters; a
    checkpoint holds the outer state, and rank 0's inner optimiser for all. Each round is logged under train/co2.
    """

    priority = "ABOVE_NORMAL"  # before whatever logs, saves or averages the new parameters

    def __init__(
        self,
        method: Literal["co2", "delayed", "local", "overlap_local", "slowmo"] = "co2",
        tau: int = 48,
        co2: Settings = None,
        delayed: Settings = None,
        slowmo: Settings = None,
        overlap_local: Settings = None,
        average_buffers: bool = True,
        timeout: float = 600.0,
    ):
        if method not in METHODS or method == "ddp":
            raise UserError(
                f"CO2Hook: method={method!r}: choose co2, delayed, local, overlap_local or slowmo; leave out for ddp"
            )
        self.method_name, self.average_buffers, self.timeout = method, average_buffers, timeout
        co2 = dict(co2 or {})
        if "wire" in co2:
            if not isinstance(co2["wire"], Mapping):
                raise UserError(f"CO2Hook: co2.wire={co2['wire']!r}: give a dict, such as dict(format='int8')")
            wire = dict(co2["wire"])
            lgreco = _config("wire.lgreco", LGrecoConfig, wire.pop("lgreco", None))
            co2["wire"] = _config("wire", WireConfig, wire | {"lgreco": lgreco})
        self.configs = {
            "co2": _config("co2", CO2Config, {"tau": tau} | co2),
            "delayed": _config("delayed", DelayedConfig, delayed),
            "slowmo": _config("slowmo", SlowMoConfig, slowmo),
            "overlap_local": _config("overlap_local", OverlapLocalConfig, overlap_local),
        }
        self.method: Any = None
        self._unread: list[RoundStats] = []
        self._resumed: dict[str, Any] | None = None

    def before_run(self, runner: Runner) -> None:
        if isinstance(runner.model, DistributedDataParallel):
            # Its gradient hooks do nothing until its own forward is called, which from here on nobody does.
            runner.model = runner.model.module
        if is_model_wrapper(runner.model):
            raise UserError(
                f"CO2Hook: the model is wrapped in {type(runner.model).__name__}: leave model_wrapper_cfg out"
            )
        for name, module in runner.model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"CO2Hook: {name} is SyncBN, which waits for all workers in every forward pass: set norm_cfg to "
                    "dict(type='BN'); its statistics are averaged with the parameters"
                )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        if runner._resume:  # not for load_from, which starts a new training
            self._resumed = checkpoint.get("co2")
            if self._resumed is None:
                raise UserError("CO2Hook: the checkpoint was not trained with this hook: use load_from, without resume")

    def before_train(self, runner: Runner) -> None:
        """Built here, when the weights to start from are in place; rank 0's go to all workers."""
        optim_wrapper: Any = runner.optim_wrapper
        groups = optim_wrapper.param_groups
        self.method = make_method(
            self.method_name,
            runner.model,
            lr=lambda: groups[0]["lr"],
            average_buffers=self.average_buffers,
            timeout=self.timeout,
            **self.configs,
        )[1]
        if isinstance(self.method, Saved):
            self.method.rider(Guard).on_left_out = forget(optim_wrapper.optimizer)
        if self._resumed is not None:
            if self._resumed["name"] != self.method_name:
                raise UserError(
                    f"CO2Hook: the checkpoint was trained with {self._resumed['name']}, not {self.method_name}"
                )
            self.method.load_state_dict(self._resumed["state"])

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        optim_wrapper: Any = runner.optim_wrapper
        if not optim_wrapper.should_update():  # gradients are being accumulated
            return
        ends = self._saves_now(runner, by_epoch=False) or self.is_last_train_iter(runner)
        if self.method.step(last=ends):
            self._unread.append(self.method.stats)
            self._tell(runner, leave=int(read_blocks(next(runner.model.parameters()))))
        if ends:
            self.method.finish()

    def _tell(self, runner: Runner, leave: int = 0) -> None:
        """Logs all rounds but the newest `leave`: on a GPU each when the next one closes, so that nothing waits."""
        while len(self._unread) > leave:
            stats = self._unread.pop(0).as_dict()
            runner.message_hub.update_scalars({f"train/co2/{key}": value for key, value in stats.items()})

    def after_train_epoch(self, runner: Runner) -> None:
        if self._saves_now(runner, by_epoch=True):
            self.method.finish()

    def before_val(self, runner: Runner) -> None:
        if self.method is not None:  # None: validation without training
            self.method.finish()

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        checkpoint["co2"] = {"name": self.method_name, "state": self.method.state_dict()}

    def after_train(self, runner: Runner) -> None:
        self._tell(runner)
        self.method.finish()
        self.method.close()
        self.method = None
        leave_at_exit()

    def _saves_now(self, runner: Runner, by_epoch: bool) -> bool:
        """Whether a CheckpointHook is about to save, which only rank 0 is told of."""
        every = self.every_n_epochs if by_epoch else self.every_n_train_iters
        hooks = [h for h in runner.hooks if isinstance(h, CheckpointHook) and h.by_epoch == by_epoch]
        last = by_epoch and self.is_last_train_epoch(runner)
        return any(every(runner, h.interval, h.save_begin) or last for h in hooks)


def _config(name: str, cls: Any, settings: Settings) -> Any:
    """The config that the dict describes."""
    known = cls.__dataclass_fields__
    for key in settings or {}:
        if key not in known:
            raise UserError(f"CO2Hook: {name} has no setting {key!r}: it has {', '.join(known)}")
    return cls(**(settings or {}))
