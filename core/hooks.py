"""Hooks: what runs next to a method's all-reduces, such as a filter for outliers or a checksum of replicated state.

A hook reports what it found, and the method acts on it. The scalars of a hook travel behind the parameters, in the same
all-reduce. No hook makes the host wait for a GPU.
"""

from __future__ import annotations

import gc
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import (
    Bucket,
    Scalars,
    State,
    copy,
    first_nonfinite,
    local_shard,
    read_blocks,
    same_values,
    views,
    wipe,
    zero_each,
)
from .comm import AsyncAllReduce, Reducer
from .errors import DivergedError, UserError, log
from .outer import norm
from .placement import Node
from .stats import HostCopy, RoundClock

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
    """The part of a LocalUpdateMethod that hooks read.

    Attributes:
        allreduce: The workers' group, and the all-reduce in flight.
        node: The ranks that hold one model together. A process that holds the whole model is a node by itself.
        trained: The parameters that require a gradient, as given.
        params: Their local tensors, in the same order.
        hooks: In the order in which they are called.
        share: This rank's part of the outer state on a node, see shares.py. None for a worker by itself.
        sync_schedule: Decides when a round ends.
        buckets: The flat tensors of the all-reduce, one per dtype and device.
        sent_payloads: The payloads of the next all-reduce at a boundary.
        scalars: The numbers that travel with it, by name.
        reducer: Sums or averages the buckets.
        state: State that persists from round to round, by name: one flat tensor per bucket.
        replicated: The part of it that is equal on all workers.
        anchors: Where rounds begin, one flat tensor per bucket. Empty if it is not kept.
        broadcasts_state: Whether the next all-reduce also sends rank 0's state to all workers. A hook may set it.
        clock: Measures the rounds.
        local_steps: Steps since the last boundary. `local_steps_sent` counts the steps of the last all-reduce.
        growth: tau of the round whose all-reduce started last, over the tau of the average before.
        _given_buffers: The averaged buffers, by their index in `buffers`. `_buffers` are their local tensors.
    """

    name = ""  # for messages
    worker_label = "rank"  # what messages call a worker, before its number
    sends_differences = False  # whether payloads are differences: zero if nothing has moved
    numbers: Sequence[str] = ()  # attributes for checkpoints: plain numbers or 0-d tensors
    allreduce: AsyncAllReduce
    node: Node
    share: Any
    sync_schedule: Any
    hooks: list[Hook]
    trained: list[Tensor]
    params: list[Tensor]
    buckets: list[Bucket]
    sent_payloads: list[Tensor]
    scalars: Scalars
    reducer: Reducer
    state: State
    replicated: list[Tensor]
    anchors: list[Tensor]
    clock: RoundClock
    local_steps = local_steps_sent = 0
    growth = 1.0
    broadcasts_state = False
    timed_from = 0  # the first all-reduce without the buffers that nobody changes; its time is the first that counts
    fragment, is_cut = 0, False  # the fragment of the last all-reduce, and whether there are several: see fragments.py
    _buffers: list[Tensor]
    _given_buffers: dict[int, Tensor]
    _starts_near_anchor = False  # whether rounds begin near `anchors`, not exactly there
    _between = 0  # all-reduces of other fragments than the first
    _saved_at: tuple[int, int] | None = None  # rounds and local steps at which state_dict() was last called

    @property
    def begins_apart(self) -> bool:
        """Whether this worker may begin a round away from `anchors`."""
        return self._starts_near_anchor

    @property
    def rounds(self) -> int:
        """Rounds closed so far, including the rounds of finish()."""
        return self.allreduce.launched - self._between

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

    def settings(self) -> Any:
        """Settings that must be equal on all workers, compared in every round."""
        return self.tau

    @property
    def late(self) -> int:
        """Local steps since the last all-reduce started."""
        return self.local_steps

    def numbered_buffers(self) -> list[tuple[int, Tensor]]:
        """Returns the averaged buffers as given, each with its index in `buffers`, in the order of the buckets."""
        numbered = {id(b): pair for b, pair in zip(self._buffers, self._given_buffers.items(), strict=True)}
        return [numbered[id(b)] for bucket in self.buckets for b in bucket.given]

    def nonfinite_buffers(self) -> list[tuple[int, Tensor]]:
        """Returns `numbered_buffers` that hold non-finite numbers which were not there at construction."""
        found = list[bool]()
        for bucket in self.buckets:
            flat = bucket.flat_buffers()
            bad = views(~flat.isfinite() & ~same_values(flat, bucket.first_values), bucket.given)
            found += [bool(where.any()) for where in bad]
        return [pair for pair, is_bad in zip(self.numbered_buffers(), found, strict=True) if is_bad]

    def exclude(self, where: Tensor) -> None:
        """Excludes this worker from the average if the 0-d bool `where` is True."""
        wipe([*self.sent_payloads, *(b.values for b in self.buckets)], where)
        self.scalars["weight"].copy_(torch.where(where, 0.0, self.scalars["weight"]))

    def state_dict(self) -> dict[str, Any]:
        """See state.py."""
        raise NotImplementedError

    def _calls(self, name: str) -> list[Callable[..., Any]]:
        """The bound methods of the hooks whose class overrides `name`."""
        return [getattr(hook, name) for hook in self.hooks if getattr(type(hook), name) is not getattr(Hook, name)]


class Hook:
    """Base class for code that runs with every all-reduce of a method. Override what you need.

    A round calls the methods in the order of their definition, except that `after_allreduce` and
    `on_reduced_scalars` belong to the all-reduce that started a round earlier, where it is hidden. A hook that must be
    in a checkpoint has a `name`, and overrides `state_dict()` and `load_state_dict()`. Checkpoints copy its tensors to
    the host.

    Attributes:
        name: Its key in checkpoints.
        scalars: Numbers that travel with the all-reduce, as {name: count}. Every worker adds to the same place.
        per_worker_scalars: The same, with a place for each worker.
        alike: Tensors that start as on the first worker.
        compared: A description that must be equal on all workers. "" for none.
        method: The method that calls this hook.
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

    def before_finish(self) -> None:
        """finish() begins."""

    def before_allreduce(self) -> Tensor | None:
        """An all-reduce is about to start. Writes this hook's scalars.

        Returns:
            0-d bool: whether to exclude this worker from the average. None means no.
        """

    def on_excluded(self, where: Tensor) -> None:
        """This worker's update was judged, and the method has no `on_excluded`. `where`: whether it was excluded."""

    def after_allreduce(self) -> None:
        """The all-reduce is over. The sums are in the buckets, and nothing has used them."""

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        """Receives the sums over all workers on the host. On a GPU they belong to the previous all-reduce."""

    def on_round_end(self) -> None:
        """The round is over, and the next all-reduce has started. Decisions take effect on all workers at once."""

    def after_param_update(self, *, at_boundary: bool) -> None:
        """The method has written the parameters."""

    def on_common_model(self, equal: bool, call: str) -> None:
        """All workers have come together in `call`, outside of a round.

        Args:
            equal: Whether this worker holds the common model. Other workers may not.
            call: The call of the loop, for messages, such as "finish()".
        """

    def on_close(self) -> None:
        """The method has left the process group."""

    def state_dict(self) -> Any:
        """Returns what a checkpoint holds of a hook with a name."""

    def load_state_dict(self, state: Any) -> None:
        """Restores what state_dict returned."""


def check_hooks(hooks: Sequence[Any], taken: Iterable[str]) -> None:
    """Raises UserError for objects of other classes, a hook of another method, and a repeated name.

    The method has scalars of its own with the names `taken`.
    """
    names = set(taken)
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(f"hooks: {hook!r} is among them: give objects of a Hook's classes")
        if hasattr(hook, "method"):
            raise UserError(f"hooks: this {type(hook).__name__} belongs to another method: make one for each")
        own = {*hook.scalars, *hook.per_worker_scalars, *([hook.name] if hook.name else [])}
        if repeated := names & own | hook.scalars.keys() & hook.per_worker_scalars.keys():
            raise UserError(
                f"hooks: two have the name {min(repeated)!r}, of a scalar or of a state: give them different names"
            )
        names |= own


VALID, NOT_FINITE, JUMPED, BUFFER = 0, 1, 2, 3  # verdicts; BUFFER + i: buffer i is not finite
REASONS = {NOT_FINITE: "not finite", JUMPED: "much larger than its usual updates"}
WARMUP_ROUNDS = 5  # valid rounds before a large update counts as a jump
AVERAGE_ROUNDS = 10  # valid rounds in the running average of the update's size
MAX_REPEATS = 3  # rounds in a row in which a worker may be excluded again


class OutlierFilter(Hook):
    """Excludes a worker whose update is not finite, or is much larger than its usual updates.

    Otherwise one NaN in one worker's update would reach every worker. The filter judges an update by its norm over the
    square root of its local steps, which changes little when tau changes. The method then sends zeros with weight 0,
    and restarts the worker from the outer iterate. A jump to a level that lasts, as at a learning-rate restart, is a
    jump once. EDiT (arXiv 2412.07210) excludes workers in a similar way.

    Args:
        factor: An update has jumped if it exceeds this multiple of the worker's running average. None excludes only
            updates that are not finite.

    Attributes:
        verdict: VALID, NOT_FINITE or JUMPED, of this worker's last update, 0-d float64.
        size: Norm of this worker's last update, 0-d float64.
        count: How many workers the last received verdicts exclude. `excludes_this`: whether they exclude this one.
        state: [3] float64: the running average, valid rounds so far, and the size of the last jump. Several fragments
            have a row each.
    """

    name, per_worker_scalars = "outlier_filter", {"excluded": 1}

    def __init__(self, factor: float | None = 10.0):
        self.factor, self.count, self.excludes_this = factor, 0, False
        self._most_steps = 0  # local steps of the longest round that was judged

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        group, places = method.allreduce.group, method.allreduce.places
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        ranks = ranks if len(ranks) == places else range(places)  # elastic workers have a place each, also if some left
        self.names = [f"{method.worker_label} {rank}" for rank in ranks]
        self.state = torch.zeros(3, dtype=torch.float64, device=method.allreduce.device)
        self.verdict = torch.zeros((), dtype=torch.float64, device=method.allreduce.device)
        self._verdicts = method.scalars["excluded"].view(-1)
        self._repeats, self._generation = [0] * len(self.names), 0
        self._of_others: Tensor | None = None  # the worst verdict on other fragments than the first since its last one

    def before_allreduce(self) -> Tensor | None:
        if self.method.share is not None:
            return None  # the method calls judge() with the norm of the whole node
        buffer = (
            None if self.method.fragment else first_nonfinite(self.method.buckets)
        )  # buffers travel with the first fragment
        return self.judge(norm(self.method.sent_payloads).double(), buffer)

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        """Warns of excluded workers.

        Raises:
            DivergedError: If no worker's update is finite, unless this worker is the last one of an elastic run, or if
                a worker is excluded too many times in a row.
        """
        codes = [round(verdict * info.workers / info.total_world_size) for verdict in sums["excluded"]]
        self.count = self.method.clock.stats.excluded = len(codes) - codes.count(VALID)
        self.excludes_this = codes[self.method.allreduce.place] != VALID
        if self._generation != info.generation or not self.count:
            self._repeats, self._generation = [0] * len(codes), info.generation
        self._repeats = [n + 1 if code else 0 for n, code in zip(self._repeats, codes, strict=True)]
        remedy = "lower the learning rate, clip gradients, or check the data"
        bad = [code for code in codes if code == NOT_FINITE or code >= BUFFER]
        alone = info.workers == 1 < len(codes)  # the other elastic workers are lost, so it restarts by itself
        if len(bad) == info.workers and not alone:
            what = self._buffer_name(bad[0]) if bad[0] >= BUFFER else self._live_buffer()
            what = f"; {what}" if what else ""
            raise DivergedError(f"every worker's update in round {info.round} is not finite{what}: {remedy}")
        for name, code, repeats in zip(self.names, codes, self._repeats, strict=True):
            if not code:
                continue
            reason = REASONS.get(code) or f"not finite, {self._buffer_name(code)}"
            text = f"{name} is excluded from the average of round {info.round}: its update is {reason}"
            if repeats > MAX_REPEATS:
                raise DivergedError(f"{text}, as in the {repeats - 1} rounds before; {remedy}")
            if self.method.is_log_rank:
                log.info("%s; it restarts from the outer iterate", text)
                warnings.warn(f"{text}; it restarts from the outer iterate: {remedy} if this goes on", stacklevel=2)

    @torch.no_grad()
    def judge(self, size: Tensor, bad_buffer: Tensor | None = None) -> Tensor:
        """Finds the verdict on this worker's update and writes it to the scalars.

        Args:
            size: Norm of the update, 0-d: not finite if any number of it is not.
            bad_buffer: Number of a buffer that is not finite, counted from 1, 0-d; 0 for none.

        Returns:
            0-d bool: whether to exclude this worker.
        """
        method = self.method
        size = size.to(self.state)
        number = torch.zeros_like(size) if bad_buffer is None else bad_buffer.to(size)
        self.size = torch.where(number > 0, float("nan"), size)  # a bad buffer counts as an update that is not finite
        verdict = self._verdict_on(self.size, method.local_steps_sent if method.sends_differences else 0)
        # names the buffer only if the update itself is finite
        verdict = torch.where((number > 0) & size.isfinite(), number - 1 + BUFFER, verdict)
        self.verdict.copy_(verdict)
        if method.fragment:  # reported with fragment 0
            self._of_others = verdict if self._of_others is None else torch.maximum(self._of_others, verdict)
            return verdict != VALID
        if self._of_others is not None:
            self.verdict.copy_(torch.where(verdict == VALID, self._of_others, verdict))
            self._of_others = None
        self._verdicts.zero_()[method.allreduce.place].copy_(self.verdict)
        return verdict != VALID

    def _verdict_on(self, size: Tensor, steps: int) -> Tensor:
        """Returns the verdict on an update, and updates the running average.

        `steps` local steps led to the update. With 0 steps no update can jump.
        """
        finite = size.isfinite()
        jumped = torch.zeros_like(finite)
        if steps and self.factor is not None:
            average, rounds, last_jump = (state := self._of_fragment()).unbind()
            size = size / steps**0.5  # an update of noisy steps grows with their square root
            longer = (max(steps, self._most_steps) / (self._most_steps or steps)) ** 0.5  # one of equal steps with them
            self._most_steps = max(steps, self._most_steps)
            large = finite & (rounds >= WARMUP_ROUNDS) & (average > 0) & (size > self.factor * average)
            # a new level, not a jump: the second large update in a row, or the first of a longer round
            new_level = large & (
                (size <= self.factor * last_jump) | (size <= self.factor * longer * average * (longer > 1))
            )
            jumped = large & ~new_level
            valid = finite & ~jumped
            # a running average over the last rounds
            mean = average + (size - average) / (rounds + 1).clamp(max=AVERAGE_ROUNDS)
            average = torch.where(valid, torch.where(new_level, size, mean), average)
            state.copy_(torch.stack([average, rounds + valid, torch.where(jumped, size, 0.0)]))
        return torch.where(finite, jumped.double() * JUMPED, float(NOT_FINITE))

    def _of_fragment(self) -> Tensor:
        """Returns the fragment's row of `state`, [3]."""
        rows, at = self.state.view(-1, 3), self.method.fragment
        if at >= len(rows):
            self.state = rows = torch.cat([rows, rows.new_zeros(at + 1 - len(rows), 3)])
        return rows[at]

    def _buffer_name(self, code: int) -> str:
        """Describes a verdict's buffer by its number as given, its shape and its module."""
        return described(*self.method.numbered_buffers()[code - BUFFER])

    def _live_buffer(self) -> str:
        """Describes this worker's first non-finite buffer. "" if there is none, or parameters are not finite."""
        m = self.method
        if not all(bool(p.isfinite().all()) for p in m.params):
            return ""
        return next((described(*pair) for pair in m.nonfinite_buffers()), "")

    def state_dict(self) -> Any:
        return self.state

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        self.state = state.to(self.state.device, copy=True)


def described(number: int, buffer: Tensor) -> str:
    """Describes a buffer for a message: its number, the module that has it, its name there, and its shape."""
    return f"buffer {number}{owner_of(buffer)}, of shape {list(buffer.shape)}"


def owner_of(buffer: Tensor) -> str:
    """Describes for a message which module has the buffer, and under which name."""
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        held = vars(module).get("_buffers")
        for name, b in held.items() if isinstance(held, dict) else ():  # a ScriptModule has no dict
            if b is buffer:
                return f" ({name} of a {type(module).__name__})"
    return ""


def forget(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    """Returns a function for a method's `on_excluded` that zeroes an optimizer's state if this worker was excluded.

    An Adam then starts anew: its NaN moments would spoil the next rounds, too. This suits optimizers whose state begins
    at zero, as torch's do (Adagrad's may begin above). A count of steps in host memory, which Adam has on a GPU unless
    it is fused or capturable, is reset a few steps later, when the host has the flag. The moments then start once more,
    because without the bias correction of the first steps, steps would be up to six times as large.
    """
    inner = getattr(optimizer, "optim", optimizer)  # ZeRO-1's local optimizer

    def numbers() -> list[Tensor]:
        values = [v for held in inner.state.values() for v in (held.values() if isinstance(held, dict) else [held])]
        return [local_shard(v) for v in values if isinstance(v, Tensor) and v.is_floating_point()]

    def reset(excluded: Tensor) -> None:
        found = numbers()
        there = [v for v in found if _reaches(excluded, v)]
        wipe(there, excluded)
        if len(there) < len(found) and isinstance(inner, torch.optim.Optimizer):
            known = HostCopy(excluded.view(1))

            def before_step(*_: Any) -> None:
                if known.is_ready():
                    handle.remove()
                    if any(known.read()):
                        zero_each(numbers())

            handle = inner.register_step_pre_hook(before_step)

    return reset


def _reaches(flag: Tensor, v: Tensor) -> bool:
    """Whether `wipe` can change v without the flag's value on the host."""
    return v.device == flag.device or not read_blocks(flag)


class ConsensusDistance(Hook):
    """Records RoundStats.consensus_distance: how far the workers' parameters were from their average.

    It is the root of mean_i ||x^i - mean||^2 when the all-reduce started. Worker i sends d^i = x - x^i with one x on
    all workers, so this is mean_i ||d^i||^2 - ||mean d||^2. As a difference of two squares it cannot resolve less than
    a thousandth of the pseudo-gradient's norm, and it includes what a compression rounds. It needs a method that sends
    differences from an equal outer iterate.
    """

    scalars = {"squares": 1}

    def __init__(self, outlier_filter: OutlierFilter):
        self._filter = outlier_filter

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        self._weight, self._squares = method.scalars["weight"], method.scalars["squares"]
        self._square: Tensor | None = None  # mean_i ||d^i||^2 of the last all-reduce, 0-d

    @torch.no_grad()
    def before_allreduce(self) -> None:
        m = self.method
        if m.sends_differences and m.share is None and not m.is_cut:
            # an excluded worker has weight 0, and its size may be NaN
            square = self._filter.size.square().to(self._weight)
            self._squares.copy_(torch.where(self._weight > 0, self._weight * square, 0.0))

    @torch.no_grad()
    def after_allreduce(self) -> None:
        weight = self._weight.double()
        if not self.method.is_cut:  # it needs the whole update in one all-reduce
            self._square = torch.where(weight > 0, self._squares.double() / weight, 0.0)

    @torch.no_grad()
    def on_round_end(self) -> None:
        stats = self.method.clock.stats
        mean = stats.pseudo_gradient_norm
        # mean_i ||d^i||^2 - ||mean d||^2
        if self._square is not None and isinstance(mean, Tensor) and self.method.share is None:
            stats.consensus_distance = (self._square - mean.to(self._square).square()).clamp(min=0).sqrt()
        self._square = None


PARTS = 16  # parts of the replicated state; a round's checksum reads one, which is 1/4 byte per parameter
REPAIR_EVERY = 100  # minimum rounds between two broadcasts of the state: 2 % of CO2's bytes


class ReplicaChecksum(Hook):
    """Compares the workers' settings and replicated state in every all-reduce.

    Workers exchange differences only, so nothing brings replicas together again that have drifted apart: other CPUs or
    thread counts add in another order. Each worker sends a checksum c and c^2. All n workers hold the same c exactly
    if n sum(c^2) = (sum c)^2, and every worker gets the same sums. A checksum has few bits, so that the sums are exact
    in float32: it misses a difference once in 2^bits times, and finds it in a later round. The method repairs replicas
    that differ: it broadcasts rank 0's.
    """

    scalars = {"settings": 2, "replicas": 2}

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        self._places = method.scalars["settings"], method.scalars["replicas"]
        self._repair_in: int | None = None  # the generation in which replicas were found to differ
        self._repaired = (0, -REPAIR_EVERY)  # the generation and the round of the last repair

    def before_allreduce(self) -> None:
        m = self.method
        most = max(m.allreduce.most, m.total_world_size)
        number, turn = divmod(m.rounds, m.node.size)  # the ranks of a node take turns, because their shares differ
        replicas = checksum(m.replicated, number, most) if m.replicated and turn == m.node.rank else 0
        for places, c in zip(self._places, (checksum_of(m.settings(), most), replicas), strict=True):
            for place, value in zip(places, (c, c * c), strict=True):
                place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        if self._repair_in == m.allreduce.generation and m.allreduce.group is not None:
            m.broadcasts_state = True  # with the all-reduce that is about to start
            self._repaired = m.allreduce.generation, m.allreduce.launched + 1
        self._repair_in = None

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        """Records RoundStats.drifted and asks for a repair.

        Raises:
            UserError: If the workers' settings differ.
        """
        m = self.method
        if not equal(sums["settings"], info.total_world_size):
            raise UserError(
                f"workers differ in their settings in round {info.round}, and this worker has {m.settings()}: "
                "a schedule must return the same on all workers, from the round's number only"
            )
        equal_replicas = equal(sums["replicas"], info.workers)
        m.clock.stats.drifted = float(not equal_replicas)
        launched, generation = m.allreduce.launched, m.allreduce.generation
        repaired = self._repaired[1] if self._repaired[0] == generation else -REPAIR_EVERY
        if equal_replicas or launched - repaired < REPAIR_EVERY:
            return
        self._repair_in = generation
        if m.is_log_rank:
            log.info("round %d: the workers' outer state differs, and rank 0's is sent to all", info.round)
        if repaired < 0 and m.allreduce.rank == 0:
            warnings.warn(
                f"the workers' outer state was not the same in round {info.round}, as on different machines: "
                f"rank 0's state is sent to all, at most once in {REPAIR_EVERY} rounds; use equal machines, builds of "
                "torch and thread counts to prevent this",
                stacklevel=2,
            )


def checksum_of(settings: Any, workers: int) -> int:
    """Returns the checksum of settings, which must print the same on all workers."""
    return zlib.crc32(repr(settings).encode()) % (1 << checksum_bits(workers))


def checksum(flats: Sequence[Tensor], number: int, workers: int) -> Tensor:
    """Returns the checksum, 0-d on the first tensor's device, of part `number` modulo PARTS of each 1-d float tensor.

    It adds integers, so the order of the additions does not matter.
    """
    parts = [flat.view(torch.int32).tensor_split(PARTS)[number % PARTS] for flat in flats]
    sums = [part.sum(dtype=torch.int64).to(flats[0].device) for part in parts]
    return torch.stack(sums).sum() & ((1 << checksum_bits(workers)) - 1)


def equal(sums: Sequence[float], workers: int) -> bool:
    """Returns whether all workers sent the same pair (c, c^2). sums: [2], over the workers."""
    return round(workers * round(sums[1])) == round(sums[0]) ** 2


def checksum_bits(workers: int) -> int:
    """Returns the bits of a checksum: at least one, and so few that the sum of squares stays below 2^20."""
    return max(1, (20 - (workers - 1).bit_length()) // 2)


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
        self.grant()

    # -- for methods without all-reduces of their own ----------------------------------------------------------

    def grant(self) -> None:
        """Grants the requests that were received."""
        self.granted, self._received = (self.granted & self._lasting) | self._received, set()

    def take(self) -> list[float]:
        """Returns this worker's requests, one number per name, to be summed over the workers."""
        numbers = [float(name in self.asked) for name in self.scalars]
        self.asked &= self._lasting
        return numbers

    def receive(self, sums: Sequence[float]) -> None:
        """Receives the sums over the workers, in the order of the names."""
        self._received |= {name for name, total in zip(self.scalars, sums, strict=True) if total > 0.5}


class Snapshot(Hook):
    """Delivers the state at a boundary once the all-reduce in flight has arrived, without waiting for it."""

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        self._callback: Callable[[dict[str, Any]], None] | None = None
        self._current: dict[str, Any] = {}  # state that the next local steps change

    def ask(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Calls `callback` with this boundary's state_dict(), at the next boundary at the latest.

        Copy parameters and optimizer now. An earlier request is answered first, which waits.
        """
        self.hand_over()
        self._callback, self._current = callback, {"local_steps": self.method.local_steps}
        if not self.method.allreduce.in_flight:
            self.hand_over()

    def hand_over(self) -> None:
        """Waits for the all-reduce in flight, and answers the request, if any."""
        if self._callback is not None:
            callback, self._callback = self._callback, None
            state = self.method.state_dict()
            callback({rank: part | self._current for rank, part in state.items()})

    def after_allreduce(self) -> None:
        self.hand_over()


class MasterWeightSync(Hook):
    """Copies averaged float32 master weights to the 16-bit model that they belong to.

    Args:
        model_params: The model's parameters, in the order of their masters.
    """

    def __init__(self, model_params: Iterable[Tensor]):
        self.model_params = [local_shard(p) for p in model_params]

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        given, masters = [p.shape for p in self.model_params], [p.shape for p in method.params]
        if given != masters:
            raise UserError(
                f"{len(given)} model_params for {len(masters)} parameters: give one of each shape, in their order"
            )
        self.after_param_update(at_boundary=True)

    @torch.no_grad()
    def after_param_update(self, *, at_boundary: bool) -> None:
        copy(self.model_params, self.method.params)
