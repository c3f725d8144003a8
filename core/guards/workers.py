"""Compares the workers: outliers are excluded, replicas are compared by checksums, and a node's ranks by norms."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buckets import local_shard, same_values, views, wipe, zero_each
from ..errors import DivergedError, UserError, log, warn
from ..groups import of_all
from ..hooks import Hook, HookedMethod, Judge, ReductionInfo
from ..outer import norm
from ..stats import HostCopy, read_blocks
from .inputs import names_of

VALID, NOT_FINITE, JUMPED, BUFFER = 0, 1, 2, 3  # verdicts; BUFFER + i: buffer i is not finite
REASONS = {NOT_FINITE: "not finite", JUMPED: "much larger than its usual updates"}
WARMUP_ROUNDS = 5  # valid rounds before a large update counts as a jump
AVERAGE_ROUNDS = 10  # valid rounds in the running average of the update's size
MAX_REPEATS = 3  # rounds in a row in which a worker may be excluded again


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Returns whether all elements are finite: 0-d, on the first tensor's device. A DTensor's local shard counts."""
    local = [local_shard(t.detach()) for t in tensors if t.numel() and "float4" not in str(t.dtype)]  # always finite
    # aminmax supports neither float8 nor empty tensors, as a rank's shard may be
    wide = [t.float() if t.element_size() == 1 else t for t in local if t.numel()]
    ends = [torch.stack(torch.aminmax(t)).double() for t in wide]
    return torch.stack([e.to(ends[0].device) for e in ends]).isfinite().all() if ends else torch.tensor(True)


def nonfinite_buffers(method: HookedMethod) -> list[tuple[int, Tensor]]:
    """Returns `numbered_buffers` that hold non-finite numbers which were not there at construction."""
    found = list[bool]()
    for bucket in method.buckets:
        flat = bucket.flat_buffers()
        bad = views(~flat.isfinite() & ~same_values(flat, bucket.first_values), bucket.given)
        found += [bool(where.any()) for where in bad]
    return [pair for pair, is_bad in zip(method.numbered_buffers, found, strict=True) if is_bad]


class OutlierFilter(Judge):
    """Excludes a worker whose update is not finite, or is much larger than its usual updates.

    Otherwise one NaN in one worker's update would reach every worker. The filter judges an update by its norm over the
    square root of its local steps, which changes little when tau changes. The method then sends zeros with weight 0,
    and restarts the worker from the outer iterate. A jump to a level that lasts, as at a learning-rate restart, is a
    jump once. EDiT (arXiv 2412.07210) excludes workers in a similar way.

    The square of the norm travels, too, for outer.consensus_distance.

    Args:
        factor: An update has jumped if it exceeds this multiple of the worker's running average. None excludes only
            updates that are not finite.

    Attributes:
        verdict: VALID, NOT_FINITE or JUMPED, of this worker's last update, 0-d float64.
        size: Norm of this worker's last update, 0-d float64.
        state: [3] float64: the running average, valid rounds so far, and the size of the last jump. Several fragments
            have a row each.
    """

    name, scalars, per_worker_scalars = "outlier_filter", {"squares": 1}, {"excluded": 1}

    def __init__(self, factor: float | None = 10.0):
        self.factor, self.excludes_this = factor, False
        self._most_steps = 0  # local steps of the longest round that was judged

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        group, places = method.allreduce.group, method.allreduce.places
        ranks = dist.get_process_group_ranks(group) if group is not None else []
        ranks = ranks if len(ranks) == places else range(places)  # elastic workers have a place each, also if some left
        label = "rank" if method.node.group is None else "the node of rank"  # a node's ranks are excluded together
        self.names = [f"{label} {rank}" for rank in ranks]
        self.state = torch.zeros(3, dtype=torch.float64, device=method.allreduce.device)
        self.verdict = torch.zeros((), dtype=torch.float64, device=method.allreduce.device)
        self._verdicts, self._square = method.scalars["excluded"].view(-1), method.scalars["squares"]
        self._repeats, self._generation = [0] * len(self.names), 0
        self._of_others: Tensor | None = None  # the worst verdict on other fragments than the first since its last one

    def before_allreduce(self) -> Tensor | None:
        m = self.method
        if m.share is not None:
            return None  # the method calls judge() with the norm of the whole node
        return self.judge(norm(m.sent_payloads).double(), None if m.fragment_index else self.bad_buffer())

    def bad_buffer(self) -> Tensor:
        """Returns the number, from 1 over all buckets, of the first buffer with a non-finite value that is new.

        0 for none. It looks at the buffers that travel. The result is 0-d int64 on the first bucket's device, and the
        host does not wait for it.
        """
        buckets, before = self.method.buckets, 0
        found = torch.zeros((), dtype=torch.int64, device=buckets[0].flat.device)
        for bucket in buckets:
            flat = bucket.values
            # on a CPU one sum finds that all is finite
            if len(flat) and (read_blocks(flat) or not flat.sum().isfinite()):
                bad = ~flat.isfinite() & ~same_values(flat, bucket.first)
                # from an element to its buffer
                place = torch.bucketize(bad.to(torch.uint8).argmax(), bucket.buffer_ends, right=True)
                index = bucket.numbers[place.clamp(max=len(bucket.buffers) - 1)]
                number = torch.where(bad.any(), before + 1 + index, 0)
                found = torch.where(found == 0, number.to(found.device), found)
            before += len(bucket.given)
        return found

    def bad_params(self) -> Tensor:
        """Returns whether a parameter on this rank has a non-finite value, 0-d bool."""
        return ~all_finite(p for b in self.method.buckets for p in b.params)

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        """Warns of excluded workers.

        Raises:
            DivergedError: If no worker's update is finite, unless this worker is the last one of an elastic run, or if
                a worker is excluded too many times in a row.
        """
        codes = [round(verdict * info.workers / info.total_world_size) for verdict in sums["excluded"]]
        self.method.clock.stats.excluded = count = len(codes) - codes.count(VALID)
        self.excludes_this = codes[self.method.allreduce.place] != VALID
        if self._generation != info.generation or not count:
            self._repeats, self._generation = [0] * len(codes), info.generation
        self._repeats = [n + 1 if code else 0 for n, code in zip(self._repeats, codes, strict=True)]
        remedy = "lower the learning rate, clip gradients, or check the data"
        bad = [code for code in codes if code == NOT_FINITE or code >= BUFFER]
        alone = info.workers == 1 < len(codes)  # the other elastic workers are lost, so it restarts by itself
        if len(bad) == info.workers and not alone:
            m = self.method
            sent = [m.numbered_buffers[code - BUFFER] for code in bad[:1] if code >= BUFFER]
            live = nonfinite_buffers(m) if not sent and all_finite(m.params) else []  # its buffers are the cause
            what = "".join(f"; {described(*pair)}" for pair in (sent + live)[:1])
            raise DivergedError(f"every worker's update in round {info.round} is not finite{what}: {remedy}")
        for name, code, repeats in zip(self.names, codes, self._repeats, strict=True):
            if not code:
                continue
            reason = REASONS.get(code) or f"not finite, {described(*self.method.numbered_buffers[code - BUFFER])}"
            text = f"{name} is excluded from the average of round {info.round}: its update is {reason}"
            if repeats > MAX_REPEATS:
                raise DivergedError(f"{text}, as in the {repeats - 1} rounds before; {remedy}")
            if self.method.is_log_rank:
                log.info("%s; it restarts from the outer iterate", text)
                warn(f"{text}; it restarts from the outer iterate: {remedy} if this goes on")

    @torch.no_grad()
    def judge(self, size: Tensor, bad_buffer: Tensor | None = None) -> Tensor:
        """Finds the verdict on this worker's update, and writes it to the scalars.

        Args:
            size: Norm of the update, 0-d: not finite if any number of it is not.
            bad_buffer: See bad_buffer(). The buffers travel with the first fragment.

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
        if method.fragment_index:  # reported with fragment 0
            self._of_others = verdict if self._of_others is None else torch.maximum(self._of_others, verdict)
            return verdict != VALID
        if self._of_others is not None:
            self.verdict.copy_(torch.where(verdict == VALID, self._of_others, verdict))
            self._of_others = None
        self._verdicts.zero_()[method.allreduce.place].copy_(self.verdict)
        if method.sends_differences and not method.is_cut:  # it needs the whole difference in one all-reduce
            self._square.copy_(torch.where(verdict != VALID, 0.0, self.size.square()))
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
        rows, at = self.state.view(-1, 3), self.method.fragment_index
        if at >= len(rows):
            self.state = rows = torch.cat([rows, rows.new_zeros(at + 1 - len(rows), 3)])
        return rows[at]

    def state_dict(self) -> Any:
        return self.state

    @torch.no_grad()
    def load_state_dict(self, state: Any) -> None:
        self.state = state.to(self.state.device, copy=True)


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


def described(number: int, buffer: Tensor) -> str:
    """Describes a buffer for a message: its number, its name in a module, if any, and its shape."""
    (name,) = names_of([buffer])
    return f"buffer {number}{f' ({name})' * bool(name)}, of shape {list(buffer.shape)}"


class NodeCheck(Hook):
    """Compares the parameters of a node's ranks once, before the first all-reduce, because each sends a part for all.

    It uses the node's group, which an all-reduce in flight uses in its thread. A run that resumes with one compares
    later, or not at all.
    """

    _is_done = False

    def before_step(self) -> bool:
        m = self.method
        if m.node.group is None or m.local_steps + 1 >= m.tau // max(1, len(getattr(m, "fragments", ()))):
            self.before_finish()
        return self._is_done

    def before_finish(self) -> None:
        """Compares the norm of what all ranks of the node hold.

        Raises:
            UserError: If they have become different.
        """
        node = self.method.node
        if self._is_done or self.method.allreduce.in_flight:
            return
        self._is_done = True
        if node.group is None or not (shared := node.on_all_ranks(self.method.params)):
            return
        norms, what = list[float](), "the comparison of a node's parameters"
        gather = lambda: norms.extend(of_all(norm(shared).item(), node.group))  # noqa: E731
        self.method.allreduce.in_foreground(gather, what)
        highest, lowest = max(norms), min(norms)
        if highest - lowest > 1e-6 * abs(highest):
            what = "unsharded parameters" if node.of_shards else "parameters"
            raise UserError(
                f"the {what} of one node's workers differ (norms from {lowest:.9g} to {highest:.9g}): they must "
                "synchronize gradients in every step, as DistributedDataParallel over mesh.get_group(1); or give "
                "no mesh, or shards=True for pipeline stages"
            )


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
        self._most = method.allreduce.most * method.node.size  # processes that a sum may be over

    def _settings(self) -> dict[str, float | None]:
        return {"tau": float(self.method.sync_schedule.tau), **self.method.settings}

    def before_allreduce(self) -> None:
        m = self.method
        number, turn = divmod(m.rounds, m.node.size)  # the ranks of a node take turns, because their shares differ
        settings = checksum_of(self._settings(), self._most)
        replicas = checksum(m.replicated, number, self._most) if m.replicated and turn == m.node.rank else 0
        for places, c in zip(self._places, (settings, replicas), strict=True):
            for place, value in zip(places, (c, c * c), strict=True):
                place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)
        if self._repair_in == m.allreduce.generation and m.allreduce.group is not None:
            m.broadcasts_state = True  # with the all-reduce that is about to start
            self._repaired = m.allreduce.generation, m.rounds + 1
        self._repair_in = None

    def on_reduced_scalars(self, sums: Mapping[str, Sequence[float]], info: ReductionInfo) -> None:
        """Records RoundStats.drifted and asks for a repair.

        Raises:
            UserError: If the workers' settings differ.
        """
        m = self.method
        if not equal(sums["settings"], info.total_world_size):
            raise UserError(
                f"workers differ in their settings in round {info.round}, and this worker has {self._settings()}: "
                "a schedule must return the same on all workers, from the round's number only"
            )
        equal_replicas = equal(sums["replicas"], info.workers)
        m.clock.stats.drifted = float(not equal_replicas)
        generation = m.allreduce.generation
        repaired = self._repaired[1] if self._repaired[0] == generation else -REPAIR_EVERY
        if equal_replicas or m.rounds - repaired < REPAIR_EVERY:
            return
        self._repair_in = generation
        if m.is_log_rank:
            log.info("round %d: the workers' outer state differs, and rank 0's is sent to all", info.round)
        if repaired < 0 and m.allreduce.rank == 0:
            warn(
                f"the workers' outer state was not the same in round {info.round}, as on different machines: "
                f"rank 0's state is sent to all, at most once in {REPAIR_EVERY} rounds; use equal machines, builds of "
                "torch and thread counts to prevent this"
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
