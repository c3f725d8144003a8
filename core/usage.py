"""Checks for mistakes around a method that would otherwise be silent. Each one is an error, or a single warning.

The mistakes are optimizers and modules that synchronize workers in every step, optimizers of other parameters, two
methods of the same parameters, weights loaded under a method, calls of step() without an update, and a script that ends
without finish().
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .buckets import is_dtensor, local_shard, parts_of, views
from .comm import is_alive, of_all, sum_of_bits
from .errors import UserError
from .hooks import owner_of, owners
from .outer import norm

if TYPE_CHECKING:
    from .local_update import LocalUpdateMethod


FSDP = "torch.distributed.fsdp", "FullyShardedDataParallel"
AVERAGER = "torch.distributed.algorithms.model_averaging.averagers", "ModelAverager"


def refuse_shards(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Raises UserError if a model is sharded over the method's workers, as DTensors or by FullyShardedDataParallel.

    They would average different shards. A group of None means all workers.
    """
    for p in filter(is_dtensor, params):
        for dim, placement in enumerate(p.placements):
            over = _workers(group) & set(dist.get_process_group_ranks(p.device_mesh.get_group(dim)))
            if len(over) > 1 and not placement.is_replicate():
                raise UserError(_shards_message("a DTensor (fully_shard)", over))
    refuse_fsdp(params, group)


def refuse_fsdp(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Does refuse_shards only for FullyShardedDataParallel, for CO2 on a mesh, which supports DTensors."""
    workers = _workers(group)
    ours = {id(p) for p in params}
    for module in _instances(_imported(*FSDP)) if len(workers) > 1 else ():
        over = workers & _ranks(module.process_group)
        shards = "NO_SHARD" not in str(module.sharding_strategy)
        if len(over) > 1 and shards and any(id(p) in ours for p in module.parameters()):
            raise UserError(_shards_message("FullyShardedDataParallel", over))


def _workers(group: dist.ProcessGroup | None) -> set[int]:
    """The ranks of the group, none without torch.distributed."""
    return set(dist.get_process_group_ranks(group)) if dist.is_initialized() else set()


def _shards_message(what: str, over: set[int]) -> str:
    """The message for a model that `what` shards over workers."""
    return (
        f"{what} shards the parameters over ranks {sorted(over)}, which are this method's workers: different "
        "shards would be averaged; give the method the whole model, or shard it inside nodes and give CO2 mesh="
    )


def refuse_optimizer(optimizer: torch.optim.Optimizer, params: set[int], group: dist.ProcessGroup | None) -> None:
    """Raises UserError for ZeroRedundancyOptimizer among a method's workers.

    It updates a part of the parameters on each worker and copies it to all, so each would train a mixture of models.
    `params` are the ids of the method's parameters.
    """
    kind = _imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    if group is None or kind is None or not isinstance(optimizer, kind):
        return
    over = set(dist.get_process_group_ranks(group)) & _ranks(vars(optimizer)["process_group"])
    if len(over) > 1 and any(id(p) in params for g in optimizer.param_groups for p in g["params"]):
        raise UserError(
            f"{type(optimizer).__name__} shards the parameters over ranks {sorted(over)} and copies them in every "
            "step: these workers take local steps, and each would get a mixture of their models; give each the "
            "optimizer inside it, or, with a mesh, process_group=mesh.get_group(1)"
        )


def collectives(group: dist.ProcessGroup | None) -> dict[int, int]:
    """Counts the collectives started in each process group with several of a method's workers, by the group's id.

    The groups of methods are not counted: their threads may start a collective at any time. A group of None means one
    worker.
    """
    own = [mine for checks in list(_active) for mine in checks.method._allreduce.timed_groups]
    workers, found = set(dist.get_process_group_ranks(group)) if group is not None else set[int](), dict[int, int]()
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for other in groups if len(workers) > 1 else []:
        if all(other is not mine for mine in own) and len(workers & set(dist.get_process_group_ranks(other))) > 1:
            with contextlib.suppress(RuntimeError):  # some backends do not count
                found[id(other)] = _started_in(other)
    return found


def warn_of_step(optimizer: torch.optim.Optimizer, before: dict[int, int], after: dict[int, int]) -> bool:
    """Warns if collectives have started in an optimizer's step, and returns whether it has. See `collectives`."""
    if not any(after[key] > before[key] for key in before.keys() & after.keys()):
        return False
    _warn(
        f"{type(optimizer).__name__} communicates among these workers in every step: they wait, so nothing is "
        "hidden, or get a mixture of each other's models; use a local optimizer on each worker, or, with a mesh, one "
        "over mesh.get_group(1)"
    )
    return True


def check_start(m: LocalUpdateMethod) -> None:
    """Checks the model with which training starts. Elastic workers may load theirs later.

    Raises UserError, on all workers, if a trained parameter is not finite. Warns if workers differ in frozen parameters
    of the same model that were not given.
    """
    if m._allreduce.is_elastic:
        return
    bad = next((i for i, p in enumerate(m._params) if not bool(p.isfinite().all())), None)
    problem = ""
    if bad is not None:
        name, shape = owner_of(m._trained[bad], "_parameters"), list(m._trained[bad].shape)
        problem = (
            f"parameter {bad}{name}, of shape {shape}, is not finite when {m._name} is made: initialize the model, or "
            "load weights, before"
        )
    frozen = [] if m._frozen else _frozen_next_to(m._trained)  # given ones are equal
    checksum = sum(int(sum_of_bits([t], t.device)) for t in frozen)  # in any order
    told = of_all((problem, str(checksum)), m._allreduce.group)
    if problem := next((text for text, _ in told if text), ""):
        raise UserError(problem)
    if len({found for _, found in told}) > 1 and m._is_log_rank:
        shape = f", the first of shape {list(frozen[0].shape)}," if frozen else ""
        _warn(
            f"{len(frozen)} parameters of the model that need no gradient{shape} were not given to {m._name}, and "
            "differ between workers: give all of model.parameters(), of which frozen ones are sent once"
        )


def _frozen_next_to(params: Sequence[Tensor]) -> list[Tensor]:
    """Returns the frozen parameters of all modules that have one of these parameters."""
    ours, found = {id(p) for p in params}, dict[int, Tensor]()
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        with contextlib.suppress(AttributeError):  # a module whose constructor has not ended
            own = list(module.parameters())
            if any(id(p) in ours for p in own):
                found |= {id(p): p for p in own if not p.requires_grad}
    return [
        p for p in found.values() if p.layout == torch.strided and p.dtype in PLAIN and not (is_dtensor(p) or p.is_meta)
    ]


def warn_of_synchronous(params: Sequence[Tensor], buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Warns if training uses modules or averagers that make a method's workers wait in every step.

    Such a module leaves no trace in its parameters, so this searches Python's objects for its class, in some 30 ms. The
    warning comes only when the module is called. A group of None means one worker.
    """
    if group is None:
        return
    workers, ours = set(dist.get_process_group_ranks(group)), {id(t) for t in (*params, *buffers)}
    replicated = {
        len(over)
        for p in filter(is_dtensor, params)
        for dim in range(p.device_mesh.ndim)
        if len(over := workers & set(dist.get_process_group_ranks(p.device_mesh.get_group(dim)))) > 1
    }
    if replicated:
        _warn(
            f"the parameters are DTensors replicated over {max(replicated)} of these workers, which average gradients "
            "in every step: give the plain model, or a mesh with these workers in its first dimension"
        )
    norms = [m for m in _instances(nn.modules.batchnorm._BatchNorm) if m.training and m.running_mean is not None]
    if any(id(m.weight) in ours and id(m.running_mean) not in ours for m in norms):
        _warn(
            "the model has BatchNorm, and its statistics are not among the buffers, so each worker evaluates with its "
            "own: give buffers=model.buffers()"
        )
    averager = _imported(*AVERAGER)
    for found in _instances(DistributedDataParallel, nn.SyncBatchNorm, _imported(*FSDP), averager):
        among = max((len(workers & _ranks(g)) for g in _groups_of(found)), default=0)
        if among < 2 or found in _looked_at:
            continue
        if averager is not None and isinstance(found, averager):
            if getattr(found, "step", 0) > 0:
                _looked_at.add(found)
                _warn(
                    f"{type(found).__name__} averages parameters among {among} of these workers, which wait for it, "
                    "and this method averages them, too: use the optimizer inside it, without the averager"
                )
        elif any(id(t) in ours for t in (*found.parameters(), *found.buffers())):
            _looked_at.add(found)
            found.register_forward_pre_hook(functools.partial(_before_pass, among))


def _groups_of(found: Any) -> list[dist.ProcessGroup]:
    """Returns the groups over which a module or an averager communicates."""
    groups = [getattr(found, "process_group", None), getattr(found, "_inter_node_pg", None)]
    if isinstance(found, nn.SyncBatchNorm) and groups[0] is None:
        groups = [dist.group.WORLD]
    return [g for g in groups if g is not None]


def _before_pass(among: int, module: nn.Module, args: Any) -> None:
    """A forward pre-hook of a module in `_looked_at` until it has warned. Pickling a module keeps it."""
    if module in _looked_at:
        warn: Any = torch.compiler.disable(_warn_of_pass)  # compiled code would reuse the first answer
        warn(among, module)


def _warn_of_pass(among: int, module: nn.Module) -> None:
    """Warns of a module that is called while training."""
    if module not in _looked_at or not torch.is_grad_enabled():
        return
    if isinstance(module, nn.SyncBatchNorm):
        if not module.training:
            return
        for other in [m for m in _looked_at if isinstance(m, nn.SyncBatchNorm)]:  # one warning per model
            _looked_at.remove(other)
        _warn(
            f"the model has SyncBatchNorm, which waits for {among} of these workers in every forward and backward pass:"
            " use BatchNorm, whose statistics the method averages (buffers=model.buffers()), or, with a mesh, "
            "SyncBatchNorm with process_group=mesh.get_group(1)"
        )
    elif getattr(module, "require_backward_grad_sync", True):
        _looked_at.remove(module)
        _warn(
            f"the model is in {type(module).__name__}, which averages gradients among {among} of these workers in every"
            " step while they wait, so nothing is hidden: give the plain model to your loop, not that module, or, with "
            "a mesh, one over process_group=mesh.get_group(1)"
        )


def _warn(text: str) -> None:
    """Warns at the caller's line."""
    warnings.warn(text, stacklevel=2)


def _started_in(group: Any) -> int:
    """Returns how many collectives have started in a group, by torch's count."""
    return group._get_sequence_number_for_group()


def _imported(module: str, name: str) -> Any:
    """Returns a class if its module was imported. Otherwise None, because no object of it can exist."""
    return getattr(sys.modules.get(module), name, None)


def _instances(*kinds: Any) -> Iterator[Any]:
    """Yields all objects of these classes and of their subclasses."""
    known = [kind for kind in kinds if kind is not None]
    for kind in known:
        known += [derived for derived in kind.__subclasses__() if derived not in known]
    return (o for o in (gc.get_referrers(*known) if known else ()) if type(o) in known)


def _ranks(group: dist.ProcessGroup) -> set[int]:
    """Returns a group's ranks, none for a destroyed group."""
    return set(dist.get_process_group_ranks(group)) if is_alive(group) else set()


_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()


# Relative to a tensor's norm. Weights that an evaluation swaps out and in come back exactly or nearly. With ROUGHLY a
# worker that begins a round with its own progress raises no warning, while loaded weights are often farther off.
TOLERANCE, ROUGHLY = 1e-3, 0.3
FIRST, FIRST_CALLS = 2, 12  # rounds, and calls of step(), in which the loop is checked
PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of a momentum encoder; bases may be packed
SAMPLED = 32  # parameters, and elements of each, that reveal writes which torch does not count


class UsageChecks:
    """Warns of mistakes in a training loop.

    It warns if parameters were written between the end of a round and the next step of an optimizer. torch counts
    writes to a tensor, and torch's optimizers call a hook before their step, so this costs nothing per step. Writes
    through `.data` are noticed if the memory changes. finish() warns if optimizer steps were not followed by a call of
    step(). Both calls raise UserError if a newer method has the same parameters, unless the newer method is closed.

    Only in the first rounds it looks for more mistakes:

    - Optimizers and modules that synchronize the workers in every step.
    - Optimizers of parameters that no method averages. This is an error if none of the method's own parameters has
      changed in the round, otherwise a warning. Later, only new or extended optimizers are checked.
    - No parameter changes in the first calls of step().
    - A module has replaced an averaged buffer by another tensor. Buffers that no checkpoint holds may be caches.
    - Frozen parameters change, as a momentum encoder does, and average= has no tensors.
    - Calls of step() without an optimizer step or a change since the previous call, while finite gradients exist. With
      gradient accumulation these are calls after each micro-batch. If a GradScaler skips a step, gradients are not
      finite.

    Args:
        model_params: See MasterWeightSync. DistributedDataParallel may wrap them.
    """

    def __init__(self, model_params: Sequence[Tensor] = ()):
        self._model_params = model_params
        self._searched = False  # whether modules and averagers were searched
        self._unchecked: dict[int, tuple[int, int]] = {}
        self._began: list[tuple[int, int]] = []  # writes to each parameter before the round's first step
        self._params_change: bool | None = (
            None  # whether an optimizer step of this round has changed a parameter; None: unknown
        )
        self._rounds = 0
        self._unmanaged: dict[int, tuple[int, ...]] = {}  # shapes of optimizers' parameters that no method averages
        self._before: dict[int, dict[int, int]] = {}  # per optimizer in its step: collectives started before it
        self._calls = self._idle = 0  # calls of step(), and how many of them follow no change
        self._has_warned = False  # whether it has warned of an optimizer that communicates
        self._updated = False  # whether an optimizer of these parameters has stepped since the last call
        self._still = 0  # calls before which no parameter had changed
        self._optimizers = weakref.WeakKeyDictionary[
            torch.optim.Optimizer, int
        ]()  # checked optimizers -> their number of parameters
        self._own_optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # optimizers of the method's parameters
        self._uncounted = 0  # optimizer steps since the last boundary
        self._frozen = dict[int, Tensor]()  # optimizers' parameters that no method averages and that need no gradient
        self._frozen_before: Tensor | None = None  # a sample of the method's frozen parameters in the first round
        self._owned = list[tuple[weakref.ref[nn.Module], str, Tensor]]()  # modules, and their buffers in an average
        self.learned = list[Tensor]()  # parameters that require a gradient, until one was frozen
        self._newer: weakref.ref[LocalUpdateMethod] | None = None  # a method made later of the same parameters

    def attach(self, method: LocalUpdateMethod) -> None:
        """Called once the method is made."""
        self.method = method
        check_start(method)
        self._params = method._params
        self.learned = [p for p in (*method._trained, *self._model_params) if p.requires_grad]
        self._number = {id(p): i for i, p in enumerate(method._trained)}
        frozen = [t for t in map(local_shard, method._frozen) if t.layout == torch.strided and t.dtype in PLAIN]
        self._devices = [p.device for p in self._params]
        self._sampled, self._frozen_sampled = _some(self._params), _some(frozen)
        self._owned = [
            (weakref.ref(module), name, b)
            for module, name, b in owners(method._given_buffers.values())
            if name not in module._non_persistent_buffers_set
        ]
        method._on_step = self._before_call
        mine = self._ids()
        for older in [checks for checks in list(_active) if mine & checks._ids()]:
            older._newer, older.method._on_step = weakref.ref(method), older._before_call
        self._process = os.getpid()
        _dropped.clear()
        _register_exit()
        _active.add(self)
        _listen()
        self.after_param_update(at_boundary=True)

    def detach(self) -> None:
        """Called when the method is closed: what happens to the parameters is no longer its concern."""
        _active.discard(self)

    def _ids(self) -> set[int]:
        """Returns the ids of the method's parameters, and of the 16-bit model's."""
        return {id(p) for p in (*self.method._trained, *self._model_params)}

    def _refuse_newer(self) -> None:
        """Raises UserError if a newer method, which is not closed, has the same parameters."""
        if self._newer is None or (newer := self._newer()) is None or newer._is_closed:
            return
        name = newer._name
        del newer
        gc.collect()  # a method that was dropped is part of a reference cycle
        if self._newer() is not None:
            raise UserError(
                f"this {self.method._name} and a newer {name} have the same parameters, so both would average them: "
                "make only one (one hook or callback), or close() the newer one before this one goes on"
            )

    def before_allreduce(self) -> None:
        """Called before each all-reduce: searches once, and reports parameters that no method averages."""
        if not self._searched:
            m = self.method
            refuse_fsdp(m._trained, m._allreduce.group)  # a module may have been wrapped after the method was made
            warn_of_synchronous([*m._trained, *self._model_params], [*m._given_buffers.values()], m._allreduce.group)
            self._searched = True
        self._rounds += 1
        if self._owned:
            self._report_replaced()
        if self._frozen_sampled and self._rounds <= FIRST:
            self._report_teacher()
        for number in [number for number, p in self._frozen.items() if p.requires_grad]:
            self._unmanaged[number] = tuple(self._frozen.pop(number).shape)
        if self._unmanaged:
            self._report_unmanaged()

    def _report_replaced(self) -> None:
        """Warns of a buffer in the place of an averaged one."""
        for ref, name, buffer in self._owned:
            module = ref()
            now = module._buffers.get(name) if module is not None else None
            if now is not None and now is not buffer:
                self._owned = []
                warnings.warn(
                    f"the buffer {name!r} of a {type(module).__name__} is another tensor than the one given to "
                    f"{self.method._name}, so it is not averaged: write it in place, as {name}.copy_(...), and make "
                    "the method after whatever replaces buffers",
                    stacklevel=2,
                )
                return
        self._owned = self._owned if self._rounds < FIRST else []

    def _report_teacher(self) -> None:
        """Warns of frozen parameters that have changed between the first two rounds."""
        before, self._frozen_before = self._frozen_before, _sample(self._frozen_sampled)
        if before is not None and self.method._average is None and not torch.equal(before, self._frozen_before):
            warnings.warn(
                f"parameters that need no gradient change during training, as a momentum encoder's do, and "
                f"{self.method._name} does not average them: give them as average=[...], too",
                stacklevel=2,
            )

    def report_frozen(self) -> None:
        """Warns once of parameters that were frozen after the method was made."""
        frozen = [p for p in self.learned if not p.requires_grad]
        self.learned = []
        warnings.warn(
            f"{len(frozen)} parameters, the first of shape {list(frozen[0].shape)}, were frozen after "
            f"{self.method._name} was made, and its outer step still moves them: if they stay frozen, call "
            "finish() and make it again",
            stacklevel=3,
        )

    def _report_unmanaged(self) -> None:
        """Warns of an optimizer of other parameters, or raises UserError if the method's own ones do not change."""
        shapes, self._unmanaged = [*self._unmanaged.values()], {}
        what = f"{len(shapes)} parameters that no method averages, the first of shape {list(shapes[0])}"
        if self._params_change is False:
            raise UserError(
                f"the optimizer trains {what}, and none of the {len(self._params)} given to {self.method._name} has "
                "changed: make the method after whatever replaces parameters (load_state_dict(assign=True), deepcopy, "
                "to_empty, a wrapper), and give it the parameters that the optimizer has"
            )
        warnings.warn(
            f"an optimizer trains {what}: workers will differ in them; give the method all trained parameters",
            stacklevel=2,
        )

    def after_param_update(self, *, at_boundary: bool) -> None:
        """Called after the method has written the parameters. At a boundary a round begins with them."""
        writes = [(p._version, p.data_ptr()) for p in self._params] if at_boundary else []
        self._unchecked = dict(enumerate(writes))
        self._began, self._params_change = [], None
        self._uncounted = 0 if at_boundary else self._uncounted
        self._before = {}  # the method's own collectives do not count
        if self.method._on_step is not None:
            self._values_before, self._updated = self._values(), False

    def _values(self) -> tuple[list[tuple[int, int]], Tensor]:
        """Returns torch's counts of writes to the parameters, and a sample of their values, to detect changes."""
        return [_writes(p) for p in self._params], _sample(self._sampled)

    def _before_call(self) -> None:
        """Called when the method's step() begins."""
        self._refuse_newer()
        if self._rounds >= FIRST and self._calls >= FIRST_CALLS:
            self.method._on_step = None
            if self._still == self._calls and not self._idle:
                warnings.warn(
                    f"in the first {self._calls} calls of {self.method._name}.step() none of its "
                    f"{len(self._params)} parameters has changed: give it the parameters that are trained, and make it "
                    "after whatever replaces them (load_state_dict(assign=True), deepcopy, a wrapper)",
                    stacklevel=3,
                )
            return
        (writes, sample), before = self._values(), self._values_before
        self._calls += 1
        same = not self._updated and writes == before[0] and torch.equal(sample, before[1])
        self._values_before, self._updated = (writes, sample), False
        self._still += same
        if same and self._gradients_wait():
            self._idle += 1
        if self._idle > 1 and 3 * self._idle >= self._calls:
            self.method._on_step = None
            warnings.warn(
                f"in {self._idle} of the first {self._calls} calls of {self.method._name}.step() no parameter had "
                "changed since the call before, while gradients wait: with gradient accumulation call it once after "
                "each optimizer.step(), not after each micro-batch, because tau counts its calls",
                stacklevel=3,
            )

    def _gradients_wait(self) -> bool:
        """Returns whether there are gradients, all finite and not all zero."""
        given = [p.grad for p in (*self.method._trained, *self._model_params) if p.grad is not None]
        found = [parts_of(local_shard(grad))[-1] for grad in given]
        return all(bool(g.isfinite().all()) for g in found) and any(bool(g.any()) for g in found)

    def before_finish(self) -> None:
        """Called when finish() begins: warns of optimizer steps without a call of step()."""
        self._refuse_newer()
        if self.method._local_steps:  # the optimizer's first step has checked
            return
        self.check(self.method._trained)
        if self._uncounted:
            warnings.warn(
                f"{self._uncounted} optimizer steps since the last round of {self.method._name} are discarded, because "
                "no call of step() has followed them: call step() once after every optimizer.step(), on every worker",
                stacklevel=3,
            )

    def loaded(self) -> None:
        """Called after a checkpoint was loaded."""
        self._unchecked = {}  # the model may be loaded after this

    def torchs_own_optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns the optimizers of the method's parameters whose class is of torch.optim."""
        return [o for o in self._own_optimizers if type(o).__module__.startswith("torch.optim.")]

    def stepping(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], known: set[int]) -> None:
        """Called before an optimizer's step. `known`: ids of all parameters that some method averages."""
        mine = [p for p in params if id(p) in self._number]
        self._updated = self._updated or bool(mine)
        if mine and optimizer not in self._own_optimizers:
            self._own_optimizers.add(optimizer)
            self._uncounted += 1
        new, self._optimizers[optimizer] = self._optimizers.get(optimizer) != len(params), len(params)
        if any(p.grad is not None for p in mine):  # covers writes that torch does not count
            self._params_change = True
        if self._rounds >= FIRST and not new:
            return
        self._frozen |= {id(p): p for p in params if not p.requires_grad and id(p) not in known}
        m = self.method
        if mine:
            refuse_optimizer(optimizer, {*self._number}, m._allreduce.group)
            self._before[id(optimizer)] = collectives(m._allreduce.group)
        if self._began:  # an earlier step of this round is over
            self._params_change = self._params_change or self._began != [_writes(p) for p in self._params]
        self._began = self._began or [_writes(p) for p in self._params]
        self._unmanaged |= {id(p): tuple(p.shape) for p in params if p.requires_grad and id(p) not in known}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer's step."""
        m, before = self.method, self._before.pop(id(optimizer), None)
        if before is not None and not self._has_warned:
            self._has_warned = warn_of_step(optimizer, before, collectives(m._allreduce.group))

    @torch.no_grad()
    def check(self, params: Any) -> None:
        """Warns if parameters that are about to take the round's first step were written since the last round."""
        numbers = [i for i in (self._number.get(id(p), -1) for p in params) if i in self._unchecked]
        written = [i for i in numbers if self._unchecked.pop(i) != _writes(self._params[i])]
        m = self.method
        if (moved := next((i for i in written if self._params[i].device != self._devices[i]), None)) is not None:
            raise UserError(
                f"a parameter moved from {self._devices[moved]} to {self._params[moved].device} after {m._name} was "
                "made: call model.to(device) before"
            )
        if written and m._anchor_params:  # compare with the start of the round
            flats = zip(m._buckets, m._anchor_params, strict=True)
            starts = {id(p): x for b, flat in flats for p, x in zip(b.params, views(flat, b.params), strict=True)}
            tolerance = ROUGHLY if m._begins_apart() else TOLERANCE
            written = [i for i in written if _differ(p := self._params[i], starts[id(p)].to(p.dtype), tolerance)]
        if written and (m._anchor_params or m._state):  # without state, nothing pulls weights back
            warnings.warn(
                f"{len(written)} of {len(self._params)} parameters were changed since the last round closed, and not "
                "by an optimizer: if weights were loaded, call resync() on all workers, or the next rounds, finish() "
                "and the end of a with block pull them back to where the old ones were",
                stacklevel=2,
            )

    def unfinished(self) -> str:
        """Returns the warning that finish() is missing at the end of the process, "" if it is not.

        Workers differ after local steps, and while an all-reduce is in flight. There is no warning on ranks that do not
        log, in a forked process, and after leave() or a failed all-reduce. The same holds if state_dict() was called
        since the last step, because a saved run continues from there.
        """
        m = self.method
        if self._process != os.getpid() or m._allreduce.world_size == 1 or not m._is_log_rank or m._allreduce.failed:
            return ""
        if not (m._local_steps or m._allreduce.in_flight) or m._saved_at == (m.rounds, m._local_steps):
            return ""
        return (
            f"the script ends without {m._name}.finish(), {m._local_steps} local steps after round {m.rounds}: each "
            "worker holds a model of its own, which is not the trained one; call finish() on every worker after the "
            "loop, or run the loop in a with block: with CO2(...) as co2"
        )

    def __del__(self) -> None:
        """Keeps the warning: a script's main() may have returned, and the process may end next."""
        if not sys.is_finalizing() and hasattr(self, "_process") and (text := self.unfinished()):
            _dropped.append(text)


_dropped: list[str] = []  # warnings of methods that were garbage-collected since the last one was made


@functools.cache
def _register_exit() -> None:
    """Registers `_warn_at_exit`, once."""
    atexit.register(_warn_at_exit)


def _warn_at_exit() -> None:
    """Warns if a method was not finished."""
    if hasattr(sys, "last_type"):  # an uncaught exception
        return
    if texts := [text for checks in list(_active) if (text := checks.unfinished())] or _dropped:
        warnings.warn(texts[0], stacklevel=1)


_active: weakref.WeakSet[UsageChecks] = weakref.WeakSet()


@functools.cache  # registered once and never removed, because torch may be calling its hooks
def _listen() -> None:
    """Registers hooks that torch calls around the step of any optimizer."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """torch's hook before the step of any optimizer."""
    if torch.compiler.is_compiling():
        return
    all_checks, count = list(_active), sum(len(group["params"]) for group in optimizer.param_groups)
    for checks in all_checks:
        checks._uncounted += optimizer in checks._own_optimizers
    interested = [
        checks
        for checks in all_checks
        if checks._unchecked
        or checks._rounds < FIRST
        or checks.method._on_step is not None
        or checks._optimizers.get(optimizer) != count
    ]
    if not interested:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    averaged = {number for checks in all_checks for number in checks._number}
    for checks in interested:
        checks.stepping(optimizer, params, averaged)
        if checks._unchecked:
            checks.check(params)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """torch's hook after the step of any optimizer."""
    if torch.compiler.is_compiling():
        return
    for checks in [checks for checks in _active if checks._before]:
        checks.stepped(optimizer)


def _some(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns at most SAMPLED of the tensors."""
    return tensors[:: -(-len(tensors) // SAMPLED) or 1]


def _sample(tensors: Sequence[Tensor]) -> Tensor:
    """Returns some elements of each tensor, which show writes that torch does not count."""
    parts = [p.detach().reshape(-1)[:: -(-p.numel() // SAMPLED) or 1] for p in tensors]
    return torch.cat([part.to(parts[0].device, torch.float64).nan_to_num() for part in parts])


def _writes(p: Tensor) -> tuple[int, int]:
    """Returns a value that changes when p is written in place or gets other memory."""
    return p._version, p.data_ptr()


def _differ(p: Tensor, start: Tensor, tolerance: float) -> bool:
    """Whether p differs from start by more than the tolerance, relative to the norm of start."""
    if not p.numel():
        return False
    return bool(norm([p.to(start.dtype) - start]) > tolerance * norm([start]))
