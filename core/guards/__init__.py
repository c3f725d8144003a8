"""Hooks that watch over a run: outliers, checksums, misuse, failed workers, averages at the end."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError, shown
from ..hooks import GUARDS, Hook
from . import failure, inputs, uncaught  # noqa: F401 - uncaught prints mistakes that nobody catches
from .extra import ExtraAverage, MasterWeightSync
from .inputs import tensors_of
from .usage import UsageChecks
from .workers import NodeCheck, OutlierFilter, ReplicaChecksum


def make_hooks(outlier: float | None, choosing: Sequence[Hook], args: Mapping[str, Any]) -> list[Hook]:
    """Returns a method's hooks, in the order in which they are called.

    Args:
        outlier: See CO2Config.
        choosing: The hook that chooses tau, if any.
        args: See CommonArgs.
    """
    average = args.get("average")
    masters = tensors_of(args["model_params"], "model_params") if "model_params" in args else []
    if not isinstance(more := args.get("hooks", ()), Sequence):
        raise UserError(f"{shown('hooks', more)}: give a list of them")
    hooks: list[Hook] = [OutlierFilter(outlier), *choosing, ReplicaChecksum(), *more]
    hooks += [MasterWeightSync(masters)] if masters else []
    if average is not None and not (isinstance(average, list | tuple) and not average):
        hooks.append(ExtraAverage(average))
    inputs.check_hooks(hooks := [*hooks, NodeCheck(), UsageChecks(masters)])
    return hooks


GUARDS.make_hooks, GUARDS.failure, GUARDS.inputs = make_hooks, failure, inputs
