"""Hooks: what runs next to a method's all-reduces, such as requests that any worker may make for all.

A hook reports what it found, and the method acts on it. The scalars of a hook travel behind the parameters, in the same
all-reduce. No hook makes the host wait for a GPU. guards/ has the hooks that watch over a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .buckets import Bucket, Scalars, State, wipe
from .comm import AsyncAllReduce, Failures, Reducer
from .errors import UserError
from .nodes import Node
from .stats import RoundClock

OneHook = TypeVar("OneHook", bound="Hook")


class ReductionInfo(NamedTuple):
    """Describes the all-reduce that delivered the sums.

    Attributes:
        round: Index of the round that ended when the all-reduce started, from 0.
        total_world_size: Number of processes that were summed over.
        workers: Number of payloads. It is smaller if several processes hold parts of one payload.
        generation: Rises whenever workers have left or joined.
    """

    round: int
    total_world_size: int
    workers: int
    generation: int


class HookedMethod:
    """The part of a LocalUpdateMethod that hooks read. Lists of flat tensors have one per bucket."""

    name = ""  # for messages
    allreduce: AsyncAllReduce  # the workers' group, and the all-reduce in flight
    node: Node  # the ranks that hold one model together: one, if each process holds the whole model
    trained: list[Tensor]  # the parameters that require a gradient, as given
    params: list[Tensor]  # their local tensors, in the same order
    hooks: list[Hook]  # in the order in which they are called
    share: Any  # this rank's part of the outer state on a node, see shares.py; None for a worker by itself
    sync_schedule: Any  # decides when a round ends
    buckets: list[Bucket]  # the flat tensors of the all-reduce, one per dtype and device
    sent_payloads: list[Tensor]  # the payloads of the next all-reduce at a boundary
    scalars: Scalars  # the numbers that travel with it, by name
    reducer: Reducer  # sums or averages the buckets
    state: State  # flat tensors that persist from round to round, by name
    replicated: list[Tensor]  # the part of it that is equal on all workers
    anchors: list[Tensor]  # where rounds begin; empty if it is not kept
    broadcasts_state = False  # whether the next all-reduce also sends rank 0's state to all; a hook may set it
    clock: RoundClock  # measures the rounds
    rounds = 0
    """Rounds closed so far, including the rounds of finish()."""
    settings: Mapping[str, float | None] = {}  # of the outer step in this round: compared in every round, as tau is
    local_steps = local_steps_sent = 0  # since the last boundary, and of the last all-reduce
    growth = 1.0  # tau of the round whose all-reduce started last, over the tau of the average before
    sends_differences = False  # whether payloads are differences: zero if nothing has moved
    timed_from = 0  # the first all-reduce without the buffers that nobody changes; its time is the first that counts
    fragment_index = 0  # of the last all-reduce's Fragment
    is_cut = False  # whether there are several fragments
    numbered_buffers: list[tuple[int, Tensor]]  # the averaged buffers with their index in `buffers`, in buckets' order
    _starts_near_anchor = False  # whether rounds begin near `anchors`, not exactly there
    _saved_at: tuple[int, int] | None = None  # rounds and local steps at which state_dict() was last called

    @property
    def begins_apart(self) -> bool:
        """Whether this worker may begin a round away from `anchors`."""
        return self._starts_near_anchor and (self.allreduce.in_flight or self.is_cut)

    @property
    def tau(self) -> int:
        """Local steps of the current round."""
        return self.sync_schedule.tau

    def hook(self, kind: type[OneHook]) -> OneHook:
        """Returns the hook of that class.

        Raises:
            UserError: If there is none.
        """
        for hook in self.hooks:
            if isinstance(hook, kind):
                return hook
        raise UserError(f"{self.name} has no {kind.__name__}: give one among its hooks")

    @property
    def is_saved(self) -> bool:
        """Whether state_dict() was called since the last step."""
        return self._saved_at == (self.rounds, self.local_steps)

    @property
    def total_world_size(self) -> int:
        """The number of processes over which scalars are averaged."""
        return self.allreduce.world_size * self.node.size

    @property
    def is_log_rank(self) -> bool:
        """Whether this process prints what concerns all workers."""
        return self.allreduce.rank == 0 and self.node.rank == 0

    def exclude(self, where: Tensor) -> None:
        """Excludes this worker from the average if the 0-d bool `where` is True."""
        wipe([*self.sent_payloads, *(b.values for b in self.buckets)], where)
        self.scalars["weight"].copy_(torch.where(where, 0.0, self.scalars["weight"]))

    def state_dict(self, *, alone: bool = False) -> dict[str, Any]:
        """See state.py."""
        raise NotImplementedError

    def _calls(self, name: str) -> list[Callable[..., Any]]:
        """The bound methods of the hooks whose class overrides `name`."""
        return [getattr(hook, name) for hook in self.hooks if getattr(type(hook), name) is not getattr(Hook, name)]


class Hook:
    """Base class for code that runs with every all-reduce of a method. Override what you need.

    A round calls the methods in the order of their definition, except that `after_allreduce` and
    `on_reduced_scalars` belong to the all-reduce that started a round earlier, where it is hidden. With merge on
    arrival, they follow later, before `after_param_update`. With fragments, `after_allreduce` and
    `after_param_update` are called for each fragment, and `before_allreduce` for the first. A hook that must be in a
    checkpoint has a `name`, and overrides `state_dict()` and `load_state_dict()`. Checkpoints copy its tensors to
    the host.

    Attributes:
        name: Its key in checkpoints.
        scalars: Numbers that travel with the all-reduce, as {name: count}. Every worker adds to the same place.
        per_worker_scalars: The same, with a place for each worker.
        alike: Tensors that start as on the first worker.
        compared: A description that must be equal on all workers. "" for none.
        method: The method that calls this hook. A hook may read what HookedMethod lists (docs/loop.md).
    """

    name = ""
    scalars: Mapping[str, int] = {}
    per_worker_scalars: Mapping[str, int] = {}
    alike: Sequence[Tensor] = ()
    compared = ""
    method: HookedMethod

    def attach(self, method: HookedMethod) -> None:
        """The method is made, or starts anew from its parameters or from a checkpoint."""
        self.method = method

    def before_step(self) -> bool | None:
        """A local step is about to be counted. Returns True once this hook needs no more of these calls."""

    def before_finish(self) -> int | None:
        """finish() begins. Returns how many local steps this worker has taken that step() has not counted."""

    def before_allreduce(self) -> Tensor | None:
        """An all-reduce is about to start. Writes this hook's scalars.

        Returns:
            0-d bool: whether to exclude this worker from the average, with fragments only from the first one's. The
            ranks of a node must return the same. None means no.
        """

    def on_excluded(self, where: Tensor) -> None:
        """This worker's update was judged, and the method has no `on_excluded`. `where`: whether it was excluded."""

    def after_allreduce(self) -> None:
        """The all-reduce is over. The sums are in the buckets, and nothing has used them."""

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        """Receives the sums over all workers on the host. On a GPU they belong to the previous all-reduce."""

    def on_round_end(self) -> None:
        """The round is over, and the next all-reduce has started, if any follows. Decisions take effect on all workers
        at once.
        """

    def after_param_update(self, *, at_boundary: bool) -> None:
        """The method has written the parameters."""

    def on_common_model(self, equal: bool) -> None:
        """All workers have come together outside of a round.

        Args:
            equal: Whether this worker holds the common model. Other workers may not.
        """

    def on_close(self) -> None:
        """The method has left the process group."""

    def state_dict(self) -> Any:
        """Returns what a checkpoint holds of a hook with a name."""

    def load_state_dict(self, state: Any) -> None:
        """Restores what state_dict returned."""


class Judge(Hook):
    """A hook that judges updates. A node's background and the start of a fragment's all-reduce call it, too.

    guards.workers.OutlierFilter describes its methods.
    """

    excludes_this = False  # whether the verdicts that were received last exclude this worker
    bad_buffer: Callable[[], Tensor]
    bad_params: Callable[[], Tensor]
    judge: Callable[..., Tensor]


Group = dist.ProcessGroup | None


class Inputs(Protocol):
    """The functions of guards/inputs.py that the root calls, which refuse what cannot be averaged."""

    def tensors_of(self, given: Iterable[Any], name: str) -> list[Tensor]: ...
    def check_inputs(self, given: Sequence[Tensor], params: Sequence[Tensor], buffers: Sequence[Tensor]) -> None: ...
    def check_group(self, places: int = 1, *, is_elastic: bool = False) -> None: ...
    def check_names(self, group: Group) -> None: ...
    def check_order(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None: ...
    def check_share(self, c: Any, *, shard: bool, split: bool, held: bool) -> None: ...
    def check_state(self, method: HookedMethod, state: Mapping[str, Any]) -> None: ...
    def groups_of(self, mesh: DeviceMesh | None, group: Group) -> tuple[Group, Group]: ...
    def refuse_shards(self, params: Sequence[Tensor], group: Group, *, dtensors: bool) -> None: ...


class Guards:
    """The guards that the root calls. It imports none of them: core/guards registers itself when `core` is imported."""

    make_hooks: Callable[[float | None, Sequence[Hook], Mapping[str, Any]], list[Hook]]  # of every method
    failure: Failures
    inputs: Inputs


GUARDS = Guards()


class Requests(Hook):
    """Requests that any worker may make for all workers, such as to stop or to save.

    The next all-reduce carries a request. It is granted on all workers at the same boundary once that all-reduce has
    arrived, on a GPU one boundary later. It holds for one boundary, unless it is in `lasting`.

    Args:
        names: Names of the requests.
        lasting: Names of requests that are repeated in every round, and stay granted until `answered`.

    Attributes:
        asked: Requests of this worker that no all-reduce has carried yet.
        granted: Requests that hold now.
    """

    def __init__(self, *names: str, lasting: Iterable[str] = ("stop",)):
        self.scalars, self._lasting = dict.fromkeys(names, 1), {*lasting}
        self.asked, self.granted, self._received = set[str](), set[str](), set[str]()

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        for name in self.scalars:  # a checkpoint's run has already granted its requests
            method.scalars[name].zero_()

    def ask(self, name: str) -> None:
        """Makes a request. Only one worker needs to call it."""
        if name not in self.scalars:
            raise UserError(f"ask({name!r}): these Requests were made only for {', '.join(self.scalars)}")
        self.asked.add(name)

    def answered(self, name: str) -> None:
        """Ends a request that lasts. Every worker calls it after finish() if it trains on."""
        self.asked.discard(name)
        self.granted.discard(name)

    def before_allreduce(self) -> None:
        for name, value in zip(self.scalars, self.take(), strict=True):
            self.method.scalars.set(name, value)

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        self.receive([sums[name][0] for name in self.scalars])

    def on_round_end(self) -> None:
        self.granted, self._received = (self.granted & self._lasting) | self._received, set()

    # -- for methods without all-reduces of their own ----------------------------------------------------------

    def take(self) -> list[float]:
        """Returns this worker's requests, one number per name, to be summed over the workers."""
        numbers = [float(name in self.asked) for name in self.scalars]
        self.asked &= self._lasting
        return numbers

    def receive(self, sums: Sequence[float]) -> None:
        """Receives the sums over the workers, in the order of the names."""
        self._received |= {name for name, total in zip(self.scalars, sums, strict=True) if total > 0.5}
