"""Checks for mistakes around a method that would otherwise be silent. Each one is an error, or a single warning."""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..buckets import local_shard, parts_of, views
from ..errors import UserError, warn
from ..hooks import Hook, HookedMethod
from ..outer import norm
from . import failure
from .inputs import FSDP, _imported, _instances, _ranks, refuse_shards
from .workers import forget

ZERO = "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"
# Relative to a tensor's norm. Weights that an evaluation swaps out and in come back exactly or nearly. With ROUGHLY a
# worker that begins a round with its own progress raises no warning, while loaded weights are often farther off.
TOLERANCE, ROUGHLY = 1e-3, 0.3
FIRST, FIRST_CALLS = 2, 12  # rounds, and calls of step(), in which the loop is checked
TWICE = re.compile(r"(so+)\1{3}$")  # in UsageChecks._before: as many calls without a step follow each optimizer step


def _warn_of_synchronous(params: Sequence[Tensor], buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Warns of modules that make a method's workers wait in every step, once they are called.

    Such a module leaves no trace in its parameters, so this searches Python's objects for its class, in some 30 ms.
    """
    if group is None:
        return
    workers, ours = _ranks(group), {id(t) for t in (*params, *buffers)}
    norms = [m for m in _instances(nn.modules.batchnorm._BatchNorm) if m.training and m.running_mean is not None]
    if any(id(m.weight) in ours and id(m.running_mean) not in ours for m in norms):
        warn(
            "the model has BatchNorm, and its statistics are not among the buffers, so each worker evaluates with its "
            "own: give buffers=model.buffers()"
        )
    for module in _instances(DistributedDataParallel, nn.SyncBatchNorm, _imported(*FSDP)):
        of_norm = isinstance(module, nn.SyncBatchNorm)
        own = getattr(module, "process_group", None) or (dist.group.WORLD if of_norm else None)
        among = max(len(workers & _ranks(g)) for g in (own, getattr(module, "_inter_node_pg", None)))
        its = (*module.parameters(), *module.buffers())
        if among > 1 and module not in _waiting and any(id(t) in ours for t in its):
            remedy = "use BatchNorm with buffers=model.buffers()" if of_norm else "remove it and call the plain model"
            what = f"{type(module).__name__} waits for {among} of these workers in every step, so nothing is hidden"
            _waiting[module] = f"{what}: {remedy}, or, with a mesh, give it process_group=mesh.get_group(1)"
            module.register_forward_pre_hook(_before_pass)


_waiting = weakref.WeakKeyDictionary[nn.Module, str]()  # modules whose next call in training warns -> the warning


def _before_pass(module: nn.Module, args: Any) -> None:
    """A forward pre-hook of a module that was in `_waiting`. Pickling a module keeps it."""
    if module in _waiting:
        torch.compiler.disable(_warn_of_pass)(module)  # compiled code would reuse the first answer


def _warn_of_pass(module: nn.Module) -> None:
    """Warns of a module that is called while training, once for all of a model."""
    trains = torch.is_grad_enabled() and (module.training or not isinstance(module, nn.SyncBatchNorm))
    if trains and getattr(module, "require_backward_grad_sync", True):  # no: gradient accumulation
        text = _waiting[module]
        for other in [m for m, its in _waiting.items() if its == text]:
            del _waiting[other]
        warn(text)


class UsageChecks(Hook):
    """Warns of mistakes in a training loop.

    torch counts writes to a tensor, and torch's optimizers call a hook before their step, so this costs nothing per
    step. In the whole run, it warns if parameters were written between the end of a round and the next step of an
    optimizer, of optimizer steps before finish() that no call of step() has followed, and if finish() is missing.

    Only at the beginning it looks for more mistakes:

    - Modules that synchronize the workers in every step. ZeroRedundancyOptimizer is an error.
    - Parameters in an optimizer that no method averages. This is an error if none of the method's own parameters has
      changed in the round, otherwise a warning. Later, only new or extended optimizers are checked, and warned of.
    - Calls of step() that do not follow one optimizer step each.

    Args:
        model_params: See MasterWeightSync. DistributedDataParallel may wrap them.
    """

    def __init__(self, model_params: Sequence[Tensor] = ()):
        self._model_params = model_params
        self._rounds = 0
        self._before = ""  # what came before each call of step(), see before_step
        self._is_done = self._warned = False  # with the calls of step()
        self._own_steps = Counter[int]()  # steps of each optimizer of these parameters since the last call or boundary
        self._steps = 0  # optimizer steps since the last boundary, of any parameters
        self._trained = False  # whether these parameters have changed since then
        # optimizers -> their number of parameters, and whether the method's are among them
        self._optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]]()
        self._unmanaged: dict[int, Tensor] = {}  # optimizers' parameters that no method averages, also frozen ones

    def attach(self, method: HookedMethod) -> None:
        is_new = not hasattr(self, "method")
        super().attach(method)
        self._unchecked = set[int]()  # parameters that no step of this round has reached; weights may be loaded now
        if not is_new:
            return
        self._number = {id(p): i for i, p in enumerate(method.trained)}
        self._params, self._process = method.params, os.getpid()
        _dropped.clear()
        _register()
        _active.add(self)
        self.after_param_update(at_boundary=True)

    def before_step(self) -> bool:
        """Warns of calls that do not follow one optimizer step each."""
        last, self._last = self._last, writes(self._params)
        steps, changed = min(self._own_steps.values(), default=0), self._last != last
        self._own_steps.clear()
        self._trained |= changed or steps > 0
        # m: several steps of each optimizer; s: one; w: other writes; g: nothing, while gradients wait; o: nothing
        kind = "m" if steps > 1 else "s" if steps else "w" if changed else "g" if self._gradients_wait() else "o"
        self._before = calls = self._before + kind
        idle, name, found = calls.count("g"), f"{self.method.name}.step()", ""
        if 1 < idle < len(calls) <= 3 * idle or TWICE.search(calls):  # only idle: torch counts none of the writes
            found = (
                f"nothing had changed before {idle + calls.count('o')} of the first {len(calls)} calls of {name}: call "
                "it once after each optimizer.step(), not twice or after each micro-batch, because tau counts its calls"
            )
        elif len(calls) == 3 and calls[0] == "g" and idle == 1:
            found = (
                f"{name} comes before optimizer.step(): at its first call gradients waited, and no parameter had "
                "changed; call it after each optimizer.step(), or an average lacks the step that ends its round"
            )
        elif calls.count("m") > 1:
            found = (
                f"{steps} optimizer steps came between two calls of {name}, which counts one, so a round has "
                f"{steps * self.method.tau} steps, not tau={self.method.tau}: call it after every optimizer.step(); it "
                "averages by itself after tau calls"
            )
        if found:
            self._warned = True
            warn(found)
        self._is_done = self._warned or (self._rounds >= FIRST and len(calls) >= FIRST_CALLS)
        return self._is_done

    def _gradients_wait(self) -> bool:
        """Returns whether there are gradients, all finite and not all zero."""
        given = [p.grad for p in (*self.method.trained, *self._model_params) if p.grad is not None]
        found = [parts_of(local_shard(grad))[-1] for grad in given]
        return all(bool(g.isfinite().all()) for g in found) and any(bool(g.any()) for g in found)

    def before_finish(self) -> int:
        """Returns the number of optimizer steps without a call of step(), and warns of them."""
        if self.method.local_steps:  # the optimizer's first step has checked
            return 0
        self._check(self.method.trained)
        if (steps := max(self._own_steps.values(), default=0)) and not self._warned:
            warn(
                f"no call of step() has followed {steps} optimizer step{'s' * (steps > 1)} since the last round of "
                f"{self.method.name}: finish() averages them as one round, unless step(last=True) came before them; "
                "call step() once after every optimizer.step(), on every worker"
            )
        return steps

    def before_allreduce(self) -> None:
        """Searches for modules once, and reports parameters that no method averages."""
        m = self.method
        if not self._rounds:
            refuse_shards(m.trained, m.allreduce.group, dtensors=False)  # of modules that were wrapped later
            buffers = [b for bucket in m.buckets for b in bucket.given]
            _warn_of_synchronous([*m.trained, *self._model_params], buffers, m.allreduce.group)
        self._rounds += 1
        if not (found := [p for p in self._unmanaged.values() if p.requires_grad]):
            return
        self._unmanaged = {number: p for number, p in self._unmanaged.items() if not p.requires_grad}
        what = f"{len(found)} parameters that no method averages, the first of shape {list(found[0].shape)}"
        if self._steps > 1 and not self._trained and not self._is_done:
            raise UserError(
                f"the optimizer trains {what}, and none of the {len(self._params)} given to {m.name} has "
                "changed: make the method after whatever replaces parameters (load_state_dict(assign=True), deepcopy, "
                "to_empty, a wrapper), and give it the parameters that the optimizer has"
            )
        warn(f"an optimizer trains {what}: workers will differ in them; give the method all trained parameters")

    def on_excluded(self, where: Tensor) -> None:
        """Zeroes the state of torch's own optimizers. Other libraries' may hold what must not be zero."""
        for optimizer, (_, is_own) in self._optimizers.items():
            if is_own and type(optimizer).__module__.startswith("torch.optim."):
                forget(optimizer)(where)

    def after_param_update(self, *, at_boundary: bool) -> None:
        self._start = self._last = writes(self._params)
        self._unchecked = set(range(len(self._start))) if at_boundary else set()
        if at_boundary:
            self._own_steps.clear()
            self._trained, self._steps = False, 0

    def on_close(self) -> None:
        """Ends the checks, because others may write the parameters now."""
        _active.discard(self)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """The step of any optimizer of the process is about to begin."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        before, is_own = self._optimizers.get(optimizer, (0, False))
        if before != len(params):  # a new or extended one
            is_own |= any(id(p) in self._number for p in params)
            self._optimizers[optimizer] = len(params), is_own
            known = {id(p) for checks in list(_active) for p in checks.method.trained}
            self._unmanaged |= {id(p): p for p in params if id(p) not in known}
            zero = _imported(*ZERO)
            if is_own and zero is not None and isinstance(optimizer, zero):
                over = _ranks(self.method.allreduce.group) & _ranks(vars(optimizer)["process_group"])
                if len(over) > 1:
                    raise UserError(
                        f"{type(optimizer).__name__} shards the parameters over ranks {sorted(over)} and copies them "
                        "in every step: these workers take local steps, and each would get a mixture of their models; "
                        "give each the optimizer inside it, or, with a mesh, process_group=mesh.get_group(1)"
                    )
        self._steps += 1
        if is_own:
            self._own_steps[id(optimizer)] += 1
        if self._unchecked:
            self._check(params)

    @torch.no_grad()
    def _check(self, given: Sequence[Tensor]) -> None:
        """Warns if parameters that are about to take the round's first step were written since the last round."""
        m, now = self.method, writes(self._params)
        numbers = {self._number.get(id(p), -1) for p in given} & self._unchecked
        self._unchecked -= numbers
        written = [self._params[i] for i in numbers if now[i] != self._start[i]]
        for before, device in {(self._start[i][2], now[i][2]) for i in numbers if self._start[i][2] != now[i][2]}:
            what = f"a parameter moved from {before} to {device} after {m.name} was made"
            raise UserError(f"{what}: call model.to(device) before")
        if written and m.anchors:  # compare with the start of the round
            flats, tolerance = zip(m.buckets, m.anchors, strict=True), ROUGHLY if m.begins_apart else TOLERANCE
            starts = {id(p): x for b, flat in flats for p, x in zip(b.params, views(flat, b.params), strict=True)}
            apart = [(p, starts[id(p)].to(p.dtype)) for p in written if p.numel()]
            written = [p for p, x in apart if norm([p.to(x.dtype) - x]) > tolerance * norm([x])]
        if written and (m.anchors or m.state):  # without state, nothing pulls weights back
            warn(
                f"{len(written)} of {len(self._params)} parameters were changed since the last round closed, and not "
                "by an optimizer: if weights were loaded, call resync() on all workers, or the next rounds, finish() "
                "and the end of a with block pull them back to where the old ones were"
            )

    def unfinished(self) -> str | None:
        """Returns the warning that finish() is missing at the end of the process, None if it is not.

        Workers differ after local steps, and while an all-reduce is in flight. The warning is "" on ranks that do not
        log. It is not missing in a forked process, after leave() or a failed all-reduce, or if state_dict() was called
        since the last step, because a saved run continues from there.
        """
        m, flight = self.method, self.method.allreduce
        if self._process != os.getpid() or flight.world_size == 1 or flight.failed:
            return None
        if m.is_saved or not (m.local_steps or flight.in_flight):
            return None
        if not m.is_log_rank:
            return ""
        return (
            f"the script ends without {m.name}.finish(), {m.local_steps} local steps after round {m.rounds}: each "
            "worker holds a model of its own, which is not the trained one; call finish() on every worker after the "
            "loop, or run the loop in a with block: with CO2(...) as co2"
        )

    def __del__(self) -> None:
        """Keeps the warning: a script's main() may have returned, and the process may end next."""
        if not sys.is_finalizing() and hasattr(self, "_process") and (text := self.unfinished()) is not None:
            _dropped.append(text)


_active: weakref.WeakSet[UsageChecks] = weakref.WeakSet()
_dropped: list[str] = []  # warnings of methods that were garbage-collected since the last one was made


def writes(tensors: Iterable[Tensor]) -> list[tuple[int, int, torch.device]]:
    """Returns for each tensor what changes when it is written in place or gets other memory."""
    return [(t._version, t.data_ptr(), t.device) for t in tensors]


@functools.cache  # once, and never removed, because torch may be calling its hooks
def _register() -> None:
    """Registers what is called at the end of the process, and before the step of any optimizer."""
    atexit.register(_warn_at_exit)
    register_optimizer_step_pre_hook(_before_step)


def _warn_at_exit() -> None:
    """Warns in one line if a method was not finished, whatever Python's filter of warnings says.

    The peers of a method that is not closed learn that this script has ended. The exit status stays as it is. Only
    os._exit could change it here, and would lose what others still have to write.
    """
    if hasattr(sys, "last_type"):  # an uncaught exception
        return
    texts = [*(checks.unfinished() for checks in list(_active)), *_dropped]
    for text in [*filter(None, texts)][:1]:
        print(f"warning: {text}", file=sys.stderr)
    if texts:
        failure.tell_end()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """torch's hook before the step of any optimizer."""
    if not torch.compiler.is_compiling():
        for checks in list(_active):
            checks.before_optimizer(optimizer)
