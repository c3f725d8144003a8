"""Method zo of the train scripts."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from core.baselines.table import MethodSpec, Settings, register
from core.errors import UserError

from .blocks import BlockStream
from .order import ZerothConfig, ZerothOrder

if TYPE_CHECKING:
    from training.loop.run import Run


def of_run(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[nn.Module]) -> ZerothOrder:
    """The method of a run. The optimizer lends its learning rate.

    Offload needs the model's blocks in the order of calls. UserError if there are none.
    """
    r = run.recipe
    # the optimizer never steps, so torch's schedules would warn
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before", UserWarning)
    options: dict[str, Any] = {"lr": optimizer.param_groups[0]["lr"], "timeout": r.timeout, "link": run.link}
    if r.offload:
        if not blocks:
            raise UserError("offload: the model has no list of blocks that could be uploaded one by one: leave it out")
        options["make_forward"] = functools.partial(BlockStream, blocks=blocks, device=run.device)
    return ZerothOrder(model, r.zeroth, requests=run.requests, **options)


def _make(*_: Any) -> NoReturn:
    raise UserError("method 'zo' takes the place of an optimiser: make a ZerothOrder, and call its step")


ENTRY = MethodSpec(
    "zo", _make, "optimizer", Settings("zeroth", ZerothConfig, "Settings of method zo."), takes=frozenset({"offload"})
)
register(ENTRY)
