"""What else holds or writes a model's weights: the 16-bit model of float32 masters, a checkpoint that is loaded under a
method that trains them, and DistributedDataParallel, which averages their gradients as well.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UserError
from ..flat import copy, local_shard, views
from ..groups import is_alive
from ..outer import norm
from ..rounds import Rider, Rounds

# Of a tensor's norm. Weights that were swapped for an evaluation come back as they were, or nearly so; where a worker
# begins a round with progress of its own, that is no reason to warn, while loaded weights are farther off.
TOLERANCE, ROUGHLY = 1e-3, 0.3
FIRST = 2  # rounds in which optimizers are looked at for parameters that no method averages


class Watch(Rider):
    """Warns when parameters were written to between a round's end and the optimiser's first step after it.

    model_params: see Masters; here for DistributedDataParallel's sake. torch counts what is written to a tensor, and
    torch's optimisers call before their step: so it costs nothing a step. Weights written through `.data` are noticed
    where their memory is another one. Warns, too, where DistributedDataParallel averages their gradients.

    In the first rounds it looks for optimizers of parameters that no method averages: an error if none of the method's
    own parameters has changed in the round, else a warning.
    """

    def __init__(self, model_params: Sequence[Tensor] = ()):
        self._model_params = model_params
        self._looked = False  # for what else averages the parameters
        self._unchecked: dict[int, tuple[int, int]] = {}
        self._began: list[tuple[int, int]] = []  # each parameter's writes before the round's first step
        self._moves: bool | None = None  # whether a step of this round has changed one; None: not known
        self._rounds = 0
        self._strangers: dict[int, tuple[int, ...]] = {}  # shapes of optimizers' parameters that no method averages

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        self._params = method.params
        self._number = {id(p): i for i, p in enumerate(method.trained)}
        _watches.add(self)
        _listen()
        self.moved(at_boundary=True)

    def pack(self) -> None:
        if not self._looked:
            warn_of_ddp([*self.method.trained, *self._model_params], self.method.flight.group)
            self._looked = True
        self._rounds += 1
        if self._strangers:
            self._tell_of_strangers()

    def _tell_of_strangers(self) -> None:
        shapes, self._strangers = [*self._strangers.values()], {}
        what = f"{len(shapes)} parameters that no method averages, the first of shape {list(shapes[0])}"
        if self._moves is False:
            raise UserError(
                f"the optimizer trains {what}, and none of the {len(self._params)} given to {self.method.name} has "
                "changed: make the method after whatever replaces parameters (load_state_dict(assign=True), deepcopy, "
                "to_empty, a wrapper), and give it the parameters that the optimizer has"
            )
        warnings.warn(
            f"an optimizer trains {what}: workers will differ in them; give the method all parameters that are trained",
            stacklevel=2,
        )

    def moved(self, *, at_boundary: bool) -> None:
        """A round begins with the parameters as they are; in mid-round nothing is known of its start."""
        self._unchecked = {i: _writes(p) for i, p in enumerate(self._params)} if at_boundary else {}
        self._began, self._moves = [], None

    def finishing(self) -> None:
        if not self.method.local_steps:  # else the optimiser's first step has looked
            self.check(self.method.trained)

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        self._unchecked = {}  # the model may be loaded after this

    @torch.no_grad()
    def check(self, params: Any) -> None:
        """Looks at those that are about to take the round's first step."""
        numbers = [i for i in (self._number.get(id(p), -1) for p in params) if i in self._unchecked]
        written = [i for i in numbers if self._unchecked.pop(i) != _writes(self._params[i])]
        m = self.method
        if written and m.starts:  # it is known where the round began
            flats = zip(m.buckets, m.starts, strict=True)
            starts = {id(p): x for b, flat in flats for p, x in zip(b.params, views(flat, b.params), strict=True)}
            tolerance = ROUGHLY if m.starts_roughly else TOLERANCE
            written = [i for i in written if _differ(p := self._params[i], starts[id(p)].to(p.dtype), tolerance)]
        if written and (m.starts or m.state):  # else nothing is kept that could pull anywhere
            warnings.warn(
                f"{len(written)} of {len(self._params)} parameters were changed since the last round closed, and not "
                "by an optimiser: if weights were loaded, call resync() on all workers, or the next rounds pull them "
                "back to where the old ones were",
                stacklevel=2,
            )


def warn_of_ddp(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Warns where training passes through a DistributedDataParallel around any of these that averages gradients among a
    method's workers, too; not among those of a node, where the method runs across nodes. One that is there and not
    called does nothing. group: of the method, None for one worker.

    Such a module leaves no mark on its parameters: all of Python's objects are asked whether they refer to its class,
    some 30 ms.
    """
    if group is None:
        return
    ours, workers = {id(p) for p in params}, set(dist.get_process_group_ranks(group))
    kinds: list[Any] = [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for found in [o for o in gc.get_referrers(*kinds) if type(o) in kinds]:
        known = found in _looked_at or not is_alive(found.process_group)
        if known or not any(id(p) in ours for p in found.parameters()):
            continue  # also one of a run before, whose group is gone
        among = workers & set(dist.get_process_group_ranks(found.process_group))
        if len(among) > 1:
            _looked_at.add(found)
            found.register_forward_pre_hook(functools.partial(_before_pass, len(among)))


def _before_pass(among: int, module: DistributedDataParallel, args: Any) -> None:
    """A hook of a module in `_looked_at`, until it has warned. A module can be pickled with it."""
    if module in _looked_at:
        warn: Any = torch.compiler.disable(_warn_of_pass)  # compiled code would keep the first pass's answer
        warn(among, module)


def _warn_of_pass(among: int, module: DistributedDataParallel) -> None:
    if module in _looked_at and torch.is_grad_enabled() and module.require_backward_grad_sync:
        _looked_at.remove(module)
        warnings.warn(
            f"the model is in DistributedDataParallel, which averages gradients among {among} of these workers in every"
            " step, while they wait, so that nothing is hidden: give the plain model to your loop, not that module, or "
            "with a mesh one over process_group=mesh.get_group(1)",
            stacklevel=2,
        )


_looked_at: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@functools.cache  # one hook for ever: torch may be walking its hooks when a watch is collected
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watches = list(_watches)
    looking = [watch for watch in watches if watch._unchecked or watch._rounds < FIRST]
    params = [p for group in optimizer.param_groups for p in group["params"]] if looking else []
    known = {number for watch in watches for number in watch._number} if looking else set()
    for watch in looking:
        if watch._rounds < FIRST:
            if watch._began:  # a step of this round lies between
                watch._moves = watch._moves or watch._began != [_writes(p) for p in watch._params]
            watch._began = watch._began or [_writes(p) for p in watch._params]
            watch._strangers |= {id(p): tuple(p.shape) for p in params if p.requires_grad and id(p) not in known}
        if watch._unchecked:
            watch.check(params)


def _writes(p: Tensor) -> tuple[int, int]:
    """Changes when p is written to in place, or gets another memory."""
    return p._version, p.data_ptr()


def _differ(p: Tensor, start: Tensor, tolerance: float) -> bool:
    if not p.numel():
        return False
    return bool(norm([p.to(start.dtype) - start]) > tolerance * norm([start]))


class Masters(Rider):
    """Where a method averages the float32 masters that an optimiser keeps of a 16-bit model, that model follows them.

    model_params: its parameters, in the order of their masters.
    """

    def __init__(self, model_params: Iterable[Tensor]):
        self.model_params = [local_shard(p) for p in model_params]

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        given, masters = [p.shape for p in self.model_params], [p.shape for p in method.params]
        if given != masters:
            raise UserError(
                f"{len(given)} model_params for {len(masters)} parameters: give one of each shape, in their order"
            )
        self.moved(at_boundary=True)

    @torch.no_grad()
    def moved(self, *, at_boundary: bool) -> None:
        copy(self.model_params, self.method.params)
