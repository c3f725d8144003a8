"""CO2 for any mmengine project, with two lines in a config:

    custom_imports = dict(imports=["co2_training.integrations.mmengine"])
    custom_hooks = [dict(type="CO2Hook", tau=48, co2=dict(outer_lr=1.0, outer_momentum=0.5))]

CO2Hook lists the settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..baselines.table import METHODS, REGISTRY, make_method
from ..compression.lgreco.choices import LGrecoConfig
from ..config import CO2Config, CompressionConfig
from ..errors import UserError
from ..groups import local_world_size
from ..guards.workers import forget
from ..nodes import node_mesh
from .common import InLoop, check_mesh, check_model, check_optimizers, config_or_recommended, logged
from .loading import shield

WHO = "CO2Hook"
LOCAL = {name: spec for name, spec in REGISTRY.items() if name in METHODS and spec.local}
OWN = {"co2": CO2Config} | {spec.settings.key: spec.settings.config for spec in LOCAL.values() if spec.settings}
INNER = {"compression": CompressionConfig, "lgreco": LGrecoConfig}  # configs inside CO2Config and CompressionConfig


@HOOKS.register_module()
class CO2Hook(InLoop, Hook):
    """Trains with CO2, or another local method, in place of DistributedDataParallel.

    The hook unwraps the model from the runner's MMDistributedDataParallel. It refuses other wrappers. SyncBN, which
    communicates in every forward pass, needs a choice in `sync_bn`. With gradient accumulation a step is one update. A
    checkpoint holds the outer state, and rank 0's inner optimizer for all workers. An EMAHook's model is averaged, too.
    Each round is logged under train/co2.

    Args:
        method: The training method. co2 without tau and settings uses CO2Config.recommended for these workers and
            iterations.
        tau: Optimizer steps per round. The default is 48 if you give other settings.
        timeout: Seconds until a missing worker is an error.
        sync_bn: "convert" makes each SyncBN a plain BatchNorm. "node" shares its statistics between the workers of a
            node, which needs GPUs. None refuses a model with SyncBN.
        **settings: A dict of config fields for co2, diloco, slowmo or overlap_local.

    Raises:
        UserError: For an unknown method or setting, a wrapped model, SyncBN, several optimizers, or a checkpoint of
            another method.
    """

    priority = "ABOVE_NORMAL"  # before whatever logs, saves or averages the new parameters

    def __init__(
        self,
        method: Literal["co2", "diloco", "local", "overlap_local", "slowmo"] = "co2",
        tau: int | None = None,
        timeout: float = 600.0,
        sync_bn: Literal["convert", "node"] | None = None,
        **settings: Mapping[str, Any] | None,
    ):
        if sync_bn not in ("convert", "node", None):
            raise UserError(f"{WHO}: sync_bn={sync_bn!r}: choose convert or node")
        if method not in LOCAL:
            raise UserError(f"{WHO}: method={method!r}: choose {', '.join(LOCAL)}; leave the hook out for ddp")
        self.method_name, self.timeout, self.sync_bn = method, timeout, sync_bn
        self.recommended = method == "co2" and tau is None and not settings
        check_mesh(WHO, settings)
        if other := settings.keys() - OWN:
            raise UserError(
                f"{WHO} has no setting {min(other)!r}: it has method, tau, timeout, sync_bn, {', '.join(OWN)}"
            )
        settings["co2"] = {"tau": 48 if tau is None else tau, **(settings.get("co2") or {})}
        self.configs = {name: _config(name, OWN[name], given or {}) for name, given in settings.items()}
        self._saved: dict[str, Any] | None = None  # the method's state in a loaded checkpoint

    def before_run(self, runner: Runner) -> None:
        for name in ("_train_loop", "_val_loop", "_test_loop"):
            loop = getattr(runner, name, None)
            shield(getattr(loop, "dataloader", None))  # a loop that is not built yet is a dict
        if isinstance(runner.model, DistributedDataParallel):  # its gradient hooks only run in its own forward pass
            runner.model = runner.model.module
        if is_model_wrapper(runner.model):
            what = type(runner.model).__name__
            raise UserError(f"{WHO}: the model is wrapped in {what}: leave model_wrapper_cfg out")
        layers = [m for m in runner.model.modules() if isinstance(m, nn.SyncBatchNorm)]
        if layers and self.sync_bn == "convert":
            # in place, because the optimizer has its parameters; mmengine's own function needs mmcv's kernels
            for layer in layers:
                layer.__class__ = _BatchNorm  # pyright: ignore[reportAttributeAccessIssue]
        elif layers and self.sync_bn == "node" and (of_node := local_world_size()) > 1:
            # one group for all layers; the workers of a node close rounds at the same steps
            group = node_mesh(next(runner.model.parameters()).device.type, of_node, self.timeout).get_group("shard")
            for layer in layers:
                layer.process_group = group
            return
        elif layers and self.sync_bn == "node":
            raise UserError(f"{WHO}: sync_bn='node' with 1 worker a node shares nothing: give sync_bn='convert'")
        check_model(WHO, runner.model)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint.get("co2")

    def before_train(self, runner: Runner) -> None:
        """Makes the method after the initial weights are loaded. Rank 0's weights go to all workers."""
        optim_wrapper: Any = runner.optim_wrapper
        check_optimizers(WHO, len(optim_wrapper) if isinstance(optim_wrapper, OptimWrapperDict) else 1)
        groups = optim_wrapper.param_groups
        if self.recommended:
            self.configs["co2"] = config_or_recommended(None, runner.max_iters)
        how: dict[str, Any] = {"timeout": self.timeout, **self.configs}
        how["average"] = next((hook.ema_model.module for hook in runner.hooks if isinstance(hook, EMAHook)), None)
        method: Any = make_method(self.method_name, runner.model, lr=lambda: groups[0]["lr"], **how)[1]
        method.on_excluded = forget(optim_wrapper.optimizer)
        if runner.iter > 0:  # resumed; with load_from, a new training starts
            if self._saved is None:
                raise UserError(f"{WHO}: the checkpoint was not trained with this hook: use load_from, without resume")
            if self._saved["name"] != self.method_name:
                raise UserError(f"{WHO}: the checkpoint was trained with {self._saved['name']}, not {self.method_name}")
            method.load_state_dict(self._saved["state"])
        self._saved = None
        self.begin_co2(method)

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        optim_wrapper: Any = runner.optim_wrapper
        ends = self._saves_now(runner, by_epoch=False) or self.is_last_train_iter(runner)
        self._is_one_model = False  # also if gradients are being accumulated: a forward pass changes buffers
        if optim_wrapper.should_update():
            self.step_co2(last=ends)
        if ends:
            self.to_one_model()
        if self._unlogged:
            runner.message_hub.update_scalars({f"train/{key}": value for key, value in logged(self._closed).items()})
            self._unlogged = False

    def after_train_epoch(self, runner: Runner) -> None:
        if self._saves_now(runner, by_epoch=True):
            self.to_one_model()

    def before_val(self, runner: Runner) -> None:
        self.to_one_model()

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        if self.co2 is not None:  # None: after training
            checkpoint["co2"] = {"name": self.method_name, "state": self.co2.state_dict()}

    def after_train(self, runner: Runner) -> None:
        self.to_one_model()
        self.end_co2()

    def _saves_now(self, runner: Runner, by_epoch: bool) -> bool:
        """Returns whether a CheckpointHook is about to save. mmengine calls before_save_checkpoint on rank 0 only."""
        every = self.every_n_epochs if by_epoch else self.every_n_train_iters
        hooks = [h for h in runner.hooks if isinstance(h, CheckpointHook) and h.by_epoch == by_epoch]
        last = by_epoch and self.is_last_train_epoch(runner)
        return any(every(runner, h.interval, h.save_begin) or last for h in hooks)


class _BatchNorm(nn.BatchNorm2d):
    """BatchNorm for inputs of all dimensions that SyncBatchNorm takes."""

    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim


def _config(name: str, kind: Any, given: Any) -> Any:
    """Returns the config that a dict describes, nested configs included."""
    if not isinstance(given, Mapping):
        raise UserError(f"{WHO}: {name}={given!r}: give a dict, such as dict(format='int8')")
    for key in given:
        if key not in (known := kind.__dataclass_fields__):
            raise UserError(f"{WHO}: {name} has no setting {key!r}: it has {', '.join(known)}")
    return kind(**{k: _config(f"{name}.{k}", INNER[k], v) if k in INNER else v for k, v in given.items()})
