"""What else holds or writes a model's weights: the 16-bit model of float32 masters, a checkpoint that is loaded under a
method that trains them, an optimizer of other parameters, and a loop that calls step() where nothing was updated.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import UserError
from ..flat import copy, local_shard, parts_of, views
from ..outer import norm
from ..rounds import Rider, Rounds
from .synchronous import collectives, refuse_optimizer, warn_of_step, warn_of_synchronous

# Of a tensor's norm. Weights that were swapped for an evaluation come back as they were, or nearly so; where a worker
# begins a round with progress of its own, that is no reason to warn, while loaded weights are farther off.
TOLERANCE, ROUGHLY = 1e-3, 0.3
FIRST, FIRST_CALLS = 2, 12  # rounds, and calls of step(), in which a loop is looked at
SAMPLED = 32  # of the parameters, and of the elements of each, by which a write is noticed that torch does not count


class Watch(Rider):
    """Warns when parameters were written to between a round's end and the optimiser's first step after it.

    model_params: see Masters; here for DistributedDataParallel's sake. torch counts what is written to a tensor, and
    torch's optimisers call before their step: so it costs nothing a step. Weights written through `.data` are noticed
    where their memory is another one.

    Only in the first rounds it looks for more mistakes in the loop:

    - Optimizers and modules that synchronize the workers in every step (core/robust/synchronous.py).
    - Optimizers of parameters that no method averages: an error if none of the method's own parameters has changed in
      the round, else a warning.
    - Calls of step() since whose last one no optimizer has stepped and no parameter has changed, while finite gradients
      wait: with gradient accumulation, calls after each micro-batch. Where a GradScaler skips a step, gradients are not
      finite, or gone.
    """

    def __init__(self, model_params: Sequence[Tensor] = ()):
        self._model_params = model_params
        self._looked = False  # for what else averages the parameters
        self._unchecked: dict[int, tuple[int, int]] = {}
        self._began: list[tuple[int, int]] = []  # each parameter's writes before the round's first step
        self._moves: bool | None = None  # whether a step of this round has changed one; None: not known
        self._rounds = 0
        self._strangers: dict[int, tuple[int, ...]] = {}  # shapes of optimizers' parameters that no method averages
        self._before: dict[int, dict[int, int]] = {}  # of an optimizer in its step: collectives that had begun before
        self._calls = self._idle = 0  # calls of step(), and those among them since whose last one nothing changed
        self._told = False  # whether a warning was given of an optimizer that communicates
        self._updated = False  # whether an optimizer of these parameters has stepped since the last call

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        self._params = method.params
        self._number = {id(p): i for i, p in enumerate(method.trained)}
        self._sampled = self._params[:: -(-len(self._params) // SAMPLED)]
        method.on_step = self._called
        _watches.add(self)
        _listen()
        self.moved(at_boundary=True)

    def pack(self) -> None:
        if not self._looked:
            m = self.method
            warn_of_synchronous([*m.trained, *self._model_params], [*m.given_buffers.values()], m.flight.group)
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
        self._before = {}  # what the method sends is no optimizer's
        if self.method.on_step is not None:
            self._held, self._updated = self._values(), False

    def _values(self) -> tuple[list[tuple[int, int]], Tensor]:
        """By what it is noticed that a parameter changes: writes that torch counts, and a sample of the values."""
        parts = [p.detach().reshape(-1)[:: -(-p.numel() // SAMPLED) or 1] for p in self._sampled]
        sample = torch.cat([part.to(parts[0].device, torch.float64) for part in parts])
        return [_writes(p) for p in self._params], sample

    def _called(self) -> None:
        """step() of the method begins."""
        if self._rounds >= FIRST and self._calls >= FIRST_CALLS:
            self.method.on_step = None
            return
        (writes, sample), before = self._values(), self._held
        self._calls += 1
        same = not self._updated and writes == before[0] and torch.equal(sample, before[1])
        self._held, self._updated = (writes, sample), False
        if same and self._gradients_wait():
            self._idle += 1
        if self._idle > 1 and 3 * self._idle >= self._calls:
            self.method.on_step = None
            warnings.warn(
                f"in {self._idle} of the first {self._calls} calls of {self.method.name}.step() no parameter had "
                "changed since the call before, while gradients wait: with gradient accumulation call it once after "
                "each optimizer.step(), not after each micro-batch, because tau counts its calls",
                stacklevel=3,
            )

    def _gradients_wait(self) -> bool:
        """Whether there are gradients, all of them finite, that are not all zero."""
        given = [p.grad for p in (*self.method.trained, *self._model_params) if p.grad is not None]
        found = [parts_of(local_shard(grad))[-1] for grad in given]
        return all(bool(g.isfinite().all()) for g in found) and any(bool(g.any()) for g in found)

    def finishing(self) -> None:
        if not self.method.local_steps:  # else the optimiser's first step has looked
            self.check(self.method.trained)

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        self._unchecked = {}  # the model may be loaded after this

    def stepping(self, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], known: set[int]) -> None:
        """An optimizer begins its step. known: the ids of all parameters that some method averages."""
        mine = [p for p in params if id(p) in self._number]
        self._updated = self._updated or bool(mine)
        if self._rounds >= FIRST:
            return
        m = self.method
        if mine:
            refuse_optimizer(optimizer, {*self._number}, m.flight.group)
            self._before[id(optimizer)] = collectives(m.flight.group, m.flight.timed_groups)
        if self._began:  # a step of this round lies between
            self._moves = self._moves or self._began != [_writes(p) for p in self._params]
        if any(p.grad is not None for p in mine):  # also where the optimizer writes what torch does not count
            self._moves = True
        self._began = self._began or [_writes(p) for p in self._params]
        self._strangers |= {id(p): tuple(p.shape) for p in params if p.requires_grad and id(p) not in known}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer ends its step."""
        m, before = self.method, self._before.pop(id(optimizer), None)
        if before is not None and not self._told:
            self._told = warn_of_step(optimizer, before, collectives(m.flight.group, m.flight.timed_groups))

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


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@functools.cache  # one hook for ever: torch may be walking its hooks when a watch is collected
def _listen() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    watches = list(_watches)
    looking = [w for w in watches if w._unchecked or w._rounds < FIRST or w.method.on_step is not None]
    if not looking:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    known = {number for watch in watches for number in watch._number}
    for watch in looking:
        watch.stepping(optimizer, params, known)
        if watch._unchecked:
            watch.check(params)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watch in [watch for watch in _watches if watch._before]:
        watch.stepped(optimizer)


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
