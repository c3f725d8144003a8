"""CO2 with sharded outer state: ShardedCO2, and two ways to swap the parameters with the next outer iterate.

g is a copy of the parameters in which the background collects the next outer iterate. It lies next to the parameters
(Live), or in the host's pinned memory (HostCopies).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import outer
from .buckets import Bucket, copy, group_pieces, make_buckets, tensors_of, unique, views
from .build import CommonArgs, build_args
from .checkpoint import all_finite
from .comm import Stage, gather_parts, sum_flats
from .config import CO2Config, Schedule, named_rule, scheduled
from .errors import UserError
from .hooks import OutlierFilter
from .local_update import LocalUpdateMethod
from .placement import Holders, Placement, check_shared, groups_of, sum_parts
from .stats import defer
from .usage import refuse_fsdp


class Live:
    """Swaps parameters with g on the same device. g lies in the payloads."""

    def __init__(self, buckets: list[Bucket]):
        self._buckets = buckets

    def swap(self, *, snapshot: bool) -> Tensor:
        """p <- g, and g <- g - p if there is a snapshot, in segments that fit a cache.

        Returns:
            0-d bool: whether the difference is not finite.
        """
        finite = torch.ones((), dtype=torch.bool, device=self._buckets[0].flat.device)
        for p, g in self._pieces():
            difference = [a - b for a, b in zip(g, p, strict=True)] if snapshot else g
            if snapshot:
                finite &= outer.norm(difference).isfinite()
            copy(p, g)
            copy(g, difference)
        return ~finite

    def own_stream(self) -> contextlib.AbstractContextManager[None]:
        """The stream of copies between a GPU and the host. Here there are none."""
        return contextlib.nullcontext()

    def drain(self) -> None:
        """Waits until nothing that is queued reads g."""

    def sends_differences(self) -> Iterator[Stage]:
        """Turns snapshots into differences. Here g holds the differences already."""
        yield from ()

    def _pieces(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yields the parameters and g in the same shapes, in segments that fit a cache."""
        for bucket in self._buckets:
            start = 0
            for pieces in group_pieces(bucket.params, outer.segment_size(bucket.flat)):
                n = sum(p.numel() for p in pieces)
                yield pieces, views(bucket.flat[start : start + n], pieces)
                start += n


class HostCopies:
    """Like Live, with g in host memory. The GPU and the host exchange copies of the parameters.

    Copies are queued in a stream of their own. The compute stream waits for it, the host does not. A background thread
    waits for it as for a collective.
    """

    def __init__(self, buckets: list[Bucket], device: torch.device):
        self._buckets, self._device = buckets, device
        self._copies = [views(pinned(b.numel, b.dtype), b.params) for b in buckets]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def swap(self, *, snapshot: bool) -> Tensor:
        """Queues g -> p, and before it p -> the host's copy if there is a snapshot.

        Returns:
            0-d bool: whether p was not finite.
        """
        spoilt = torch.zeros((), dtype=torch.bool, device=self._device)
        if snapshot:
            spoilt = ~all_finite(p for b in self._buckets for p in b.params)
        with self.own_stream():
            for bucket, copies in zip(self._buckets, self._copies, strict=True):
                for p, g, on_host in zip(bucket.params, bucket.payload_views, copies, strict=True):
                    if snapshot:
                        on_host.copy_(p, non_blocking=True)
                    p.copy_(g, non_blocking=True)
        return spoilt

    def drain(self) -> None:
        """Waits until nothing that is queued reads or writes host memory."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()  # the current stream waits for the copies' stream

    def sends_differences(self) -> Iterator[Stage]:
        """g <- g - p from the host's copies, once both are complete."""
        yield [self], 0
        for bucket, copies in zip(self._buckets, self._copies, strict=True):
            for g, on_host in zip(bucket.payload_views, copies, strict=True):
                g.sub_(on_host)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Queues the block's copies after the compute stream's work. The compute stream then waits for them."""
        if self._stream is None:
            yield
            return
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            yield
            self._event = torch.cuda.Event()
            self._event.record(self._stream)
        compute.wait_stream(self._stream)

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout: Any = None) -> None:
        if self._event is not None:
            self._event.synchronize()


def on_device(flag: Tensor, device: torch.device) -> Tensor:
    """Returns a 0-d bool on `device`. A bool on the host becomes a kernel's argument, because a copy would block."""
    return flag if flag.device == device else torch.full((), bool(flag), device=device)


PORTABLE = 1  # cudaHostRegisterPortable: pinned memory for all devices


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros in host memory, [numel], pinned if there is a GPU, so that copies to and from it do not block.

    The memory has exactly this size. torch would round it up to a power of two, and keep it.

    Raises:
        UserError: If the memory cannot be pinned.
    """
    nbytes = numel * dtype.itemsize
    if not nbytes or not torch.cuda.is_available():
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # The buffer lives as long as tensors use it. An mmap object itself would free its memory before its finalizer runs.
    memory = (ctypes.c_byte * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    held = torch.frombuffer(memory, dtype=dtype)
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(held.data_ptr(), nbytes, PORTABLE)):
        raise UserError(f"{nbytes} bytes of the host's memory cannot be pinned (CUDA error {code}): leave out offload")
    weakref.finalize(memory, _unpin, held.data_ptr(), torch.cuda.current_device()).atexit = False
    return held


def _unpin(address: int, device: int) -> None:
    """Unpins memory after all queued copies."""
    torch.cuda.synchronize(device)
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)


class ShardedCO2(LocalUpdateMethod):
    """CO2 with outer state that is sharded over the workers of a node or over all workers, or offloaded to the host.

        mesh = node_mesh("cuda", 8)  # nodes of eight consecutive ranks
        ddp_model = DistributedDataParallel(model, process_group=mesh.get_group("shard"))  # call this in the loop
        co2 = ShardedCO2(model.parameters(), CO2Config.paper(), mesh=mesh, buffers=model.buffers())

    Keep this order, because DistributedDataParallel writes the parameters when it is made, and ShardedCO2 would warn.

    The ranks of a node are equal at a boundary, because they synchronize gradients in every step
    (DistributedDataParallel, ZeRO-1). Or they hold shards of one model as DTensors (ZeRO-2 and 3, tensor parallelism),
    and a rank's share of the outer state belongs to its shard. Plain tensors among the DTensors must be equal, and
    every round makes them equal again.

    Args:
        params: See CO2.
        config: See CO2. Only merge restart with delay boundary is supported.
        mesh: [nodes, workers per node], as node_mesh makes it. Without a mesh, `group` of CommonArgs is its first
            dimension and inner_group its second. Without these, every worker is a node.
        inner_group: The ranks of this rank's node. `group` then has the ranks with the same share on all nodes.
        shards: True: plain tensors are this rank's own part of the model, such as a pipeline stage. Or, for each
            parameter, the ranks that hold it (placement.Holders). Both average buffers over `group`, not over all
            ranks.
        shard: Whether shares are sharded further over the workers of `group`.
        offload: Whether outer state and all-reduce are in pinned host memory. The GPU then holds no copy of the
            parameters.
        schedule: See CO2.
        **args: See CommonArgs.
    """

    _name = "ShardedCO2"
    _sends_differences = True
    _payload_is_deferred = True
    _numbers = ("_last", "_m_squares", "_weightless", "_spoilt")

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        mesh: DeviceMesh | None = None,
        inner_group: dist.ProcessGroup | None = None,
        shards: bool | Holders = False,
        shard: bool = False,
        offload: bool = False,
        schedule: Schedule | None = None,
        **args: Unpack[CommonArgs],
    ):
        c = named_rule(config)
        self._given, self._schedule = c, schedule
        check_shared(scheduled(c, schedule, 0), c.compression.format)
        args["group"], inner_group = groups_of(mesh, args.get("group"), inner_group)
        built = build_args(c, args, schedule)
        self._shards, self._shard, self._offload = shards is not False, shard, offload
        self._begin_round(0)
        params = unique(tensors_of(params, "parameters"))
        if not params:
            raise UserError("no parameter is given: nothing to train; each pipeline stage needs one")
        built["buffers"] = unique(tensors_of(built["buffers"], "buffers"))
        refuse_fsdp(params, args.get("group"))
        device, backend = (torch.device("cpu"), "gloo") if offload else (params[0].device, None)
        timeout = args.get("timeout", 600.0)
        of_group: dict[str, Any] = {"timeout": timeout, "device": device, "backend": backend}
        self._node = Placement(params, built["buffers"], inner_group, shards, **of_group)
        self._node.agree((self._name, self._signature()))
        # workers of a node are excluded together
        self._worker_label = "rank" if inner_group is None else "the node of rank"
        if offload:
            built["allreduce"] = functools.partial(built["allreduce"], backend="gloo")
        super().__init__(params, **built)
        self._reducer.scale = 1 / self._total_world_size  # the sums are over both groups
        self._allreduce.timed_groups += [self._node.group] if self._node.group is not None else []
        self._make_state()
        self._rehearse()

    def _rehearse(self) -> None:
        super()._rehearse()
        self._start_from_params()
        self._outer_stats = {}

    @torch.no_grad()
    def _start_from_params(self) -> None:
        """Sets g and the shares of x to the parameters."""
        self._live.drain()
        super()._start_from_params()
        for bucket in self._buckets:
            bucket.flatten(bucket.payload)
        copy(self._x, self._shares())

    def _make_state(self) -> None:
        """Makes x and m as shares, and the numbers that the background writes."""
        self._live = HostCopies(self._buckets, self._params[0].device) if self._offload else Live(self._buckets)
        self._x = self._state["outer_iterate"] = [torch.zeros_like(share) for share in self._shares()]
        self._m = self._state["outer_momentum"] = [torch.zeros_like(x) for x in self._x]
        self._replicated_state = [] if self._shard else self._x
        # x is one step behind: g holds x - _last m, and |x_{t,0} - x_{t-1,0}| = _last |m|. These numbers are 0-d on
        # the device, because the background reads and writes them in another stream.
        self._last = torch.zeros((), dtype=torch.float64, device=self._allreduce.device)
        self._m_squares = torch.zeros_like(self._last)
        # whether the last payload has weight 0, as the filter decides in the background; read when it arrives
        self._weightless = torch.zeros((), dtype=torch.bool, device=self._allreduce.device)
        # Whether the last payload was not finite. The boundary finds it before the background judges it, because
        # the optimizer's state would affect the next round, too. On the parameters' device.
        self._spoilt = torch.zeros((), dtype=torch.bool, device=self._params[0].device)
        self._outer_stats: dict[str, Tensor] = {}
        self._checked = False  # whether a node's workers were found to have equal parameters
        self._numel = self._node.count(self._params)
        self._node.locate(self._params, self._buckets, self._shares())
        self._start_from_params()

    # -- overrides of LocalUpdateMethod --------------------------------------------------------------------------------

    def _make_buckets(self) -> list[Bucket]:
        parts = self._node.parts * (self._allreduce.world_size if self._shard else 1)
        return make_buckets(self._params, self._buffers, self._scalars.numel, parts, pinned if self._offload else None)

    def resync(self) -> None:
        """See LocalUpdateMethod."""
        self._allreduce.restore(self.rounds, in_flight=False)  # the background uses the same group
        self._node.agree(("resync",))
        super().resync()

    def _begin_round(self, number: int) -> None:
        self.config = scheduled(self._given, self._schedule, number)
        check_shared(self.config)

    def _signature(self) -> Any:
        return asdict(self.config), self._shards, self._shard, self._offload

    def _settings(self) -> Any:
        return self.config.changing(self.tau)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self._offload else super()._device

    @property
    def _total_world_size(self) -> int:
        return self._allreduce.world_size * self._node.size

    @property
    def _is_log_rank(self) -> bool:
        return super()._is_log_rank and self._node.rank == 0

    @property
    def _checksum_round(self) -> int | None:
        """The workers of a node take turns, because their shares differ."""
        return self.rounds // self._node.size if self.rounds % self._node.size == self._node.rank else None

    def _fill_buffers(self) -> None:
        with self._live.own_stream():
            super()._fill_buffers()

    def _sum_parts(self, numbers: Tensor) -> Iterator[Stage]:
        """Sums over a node, whose workers are judged as one: they hold one model, or shared their gradients."""
        yield from self._node.sum([numbers])

    # -- the boundary ---------------------------------------------------------------------------------------

    def _close_round(self, *, finished: bool) -> bool:
        if not self._checked:  # once: each worker of a node sends a part of the parameters for all of them
            self._checked = True
            if reason := self._node.check(self._params):
                raise self._allreduce._failure(reason, "the comparison of a node's parameters")
        arrived = is_last = False
        if self._allreduce.in_flight:
            arrived, is_last = True, self._wait_allreduce(finished=finished).is_last
            vars(self.stats).update(
                defer(self._outer_stats)
            )  # before the next launch, which reuses the numbers' memory
        excluded = on_device(self._weightless, self._spoilt.device) & ~self._spoilt & arrived
        self._spoilt.copy_(self._live.swap(snapshot=not is_last))
        self._report_excluded(self._spoilt | excluded)
        if is_last:
            self._take_last_step()
        else:
            self._begin_round(self.rounds + 1)  # before the background reads the settings
            self._start_allreduce(finished=finished)
        return is_last

    def _take_last_step(self) -> None:
        """Brings x, which is one step behind, up to date with g."""
        for x, m in zip(self._x, self._m, strict=True):
            x.copy_(outer.outer_step(x, m, self._last))
        self._last.zero_()

    # -- in the background ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _stages(self) -> Iterator[Stage]:
        """The collectives of a round, from the snapshots in g to x_{t+2,0} in g. All of Algorithm 1's steps 3 to 7."""
        yield from self._live.sends_differences()
        # Processes that hold parts of one payload are judged as one: a node's workers shared their gradients.
        outliers, size = self.hook(OutlierFilter), outer.norm([b.payload for b in self._buckets]).double()
        square = torch.where(outliers.nonfinite_buffer() > 0, float("nan"), size.square()).view(1)
        yield from self._node.sum([square])
        self._zero_payload(outliers.judge(square[0].sqrt()))
        yield from self._repair_replicas()
        # a worker in finish() has no weight, either, if workers count by their steps
        self._weightless.copy_((self._scalars["weight"] == 0) & (self._scalars["steps"] > 0))
        yield from self._reduce([b.rest for b in self._buckets])
        squares = self._pseudo_gradient()
        sums = torch.stack([squares, self._m_squares])
        yield from self._node.sum([sums])
        across = self._allreduce.group if self._shard else None  # shares are sharded further over this group
        if across is not None:
            yield sum_flats([sums], across)
        self._update_share(sums[0].sqrt(), sums[1].sqrt())
        if across is not None:
            for share in self._node_shares():
                yield gather_parts(share, across)
        yield from self._node.gather(self._buckets)

    def _reduce(self, rests: list[Tensor]) -> Iterator[Stage]:
        """Sums shares over the workers, and buffers and scalars over all processes.

        A pipeline stage's buffers are summed over the workers only.
        """
        shares, group = self._node_shares(), self._allreduce.group
        if group is not None:
            yield sum_flats(rests if self._shard else [*shares, *rests], group)
            if self._shard:
                for share in shares:
                    yield from sum_parts(share, group)
        if not self._shards:
            yield from self._node.sum(rests)
            return
        scalars = self._buckets[0].scalars
        sums = scalars.double()  # on another stage, the first bucket's dtype may differ
        yield from self._node.sum([sums])
        scalars.copy_(sums)
        for bucket in self._buckets:
            bucket.values.mul_(self._node.size)  # reducer.scale assumes a sum over both groups

    def _node_shares(self) -> list[Tensor]:
        """Returns the share of each payload that this worker sends across nodes."""
        return [self._node.part(b.flat[: b.padded]) for b in self._buckets]

    def _shares(self) -> list[Tensor]:
        """Returns this worker's share of each payload."""
        shares = self._node_shares()
        if self._shard and self._allreduce.group is not None:
            shares = [s.view(self._allreduce.world_size, -1)[self._allreduce.rank] for s in shares]
        return shares

    def _segments(self) -> Iterator[tuple[torch.dtype, Tensor, Tensor, Tensor]]:
        """Yields (dtype of the parameters, share of g, x, m) in segments that fit a cache."""
        for bucket, *flats in zip(self._buckets, self._shares(), self._x, self._m, strict=True):
            for g, x, m in zip(*(f.split(outer.segment_size(bucket.flat)) for f in flats), strict=True):
                if len(g):
                    yield bucket.dtype, g, x, m

    def _pseudo_gradient(self) -> Tensor:
        """Computes Delta in the share of g, and brings x up to date.

        The boundary sent x_{t+1,0} - x^i_{t,tau}. The local steps began at x_{t,0} as the parameters' dtype holds it.

        Returns:
            The sum of Delta's squares, 0-d.
        """
        squares, weight = torch.zeros_like(self._last), self._scalars["weight"]
        scale = torch.where(weight > 0, self._node.size / weight, 0.0)  # the weight is a sum over both groups
        for dtype, g, x, m in self._segments():
            following = outer.outer_step(x, m, self._last)
            g.mul_(scale.to(g))
            g.add_((weight > 0).to(g) * (x.to(dtype).to(x.dtype) - following))
            x.copy_(following)
            squares += outer.norm([g]).double().square()
        return squares - self._node.surplus(self._shares())

    def _update_share(self, delta_norm: Tensor, m_norm: Tensor) -> None:
        """Steps 4 to 7 on the share. The empty round at the end of finish() changes nothing."""
        c = self.config
        moved = self._scalars["steps"] > 0
        delta_rms = delta_norm / max(1, self._numel) ** 0.5 if c.gap == "elementwise" else None
        gap = outer.gap_scalar(self._last * m_norm, delta_norm) if c.gap == "norm" else None
        alpha = moved.double() * c.outer_lr
        beta = outer.carried(c.outer_momentum, self._growth)
        rule = outer.Rule(beta, alpha, self._last, c.clip, delta_rms=delta_rms, gap=gap)
        stats = [torch.zeros(4, dtype=torch.float64, device=self._allreduce.device)]  # of no elements: Lambda is 1
        stats[0][2].fill_(1.0)  # not a copy from the host, which would wait for earlier collectives
        for _, g, x, m in self._segments():
            new, numbers = outer.new_momentum(m, g, rule)  # 4, 5, 6
            m.copy_(torch.where(moved, new, m))
            g.copy_(outer.outer_step(x, m, rule.alpha))  # 7
            stats.append(numbers)
        total = outer.combine_stats(stats)
        self._last.copy_(alpha)  # in place, because another stream reads it
        self._m_squares.copy_(torch.where(moved, total[0] - self._node.surplus(self._m), self._m_squares))
        share = max(1, sum(len(m) for m in self._m))  # elements of this worker's share, for the statistics
        self._outer_stats = {
            "pseudo_gradient_norm": delta_norm,
            "momentum_norm": m_norm,
            "clipped_share": total[3] / share,
        }
        if c.gap != "none":
            self._outer_stats |= {"gap_mean": total[1] / share, "gap_max": total[2]}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _recount(self) -> None:
        """Recomputes the momentum's sum of squares, after a state of another rank was loaded."""
        squares = [torch.dot(m, m).double() for _, _, _, m in self._segments()]
        total = torch.stack([torch.zeros_like(self._m_squares), *squares]).sum()  # in the order of _update_share
        self._m_squares.copy_(total - self._node.surplus(self._m))

    def _load_local_state(self, state: dict[str, Any]) -> None:
        self._live.drain()
        super()._load_local_state(state)  # also g, which lies in the flat tensors

    def close(self) -> None:
        """Leaves the process groups. Call finish() first."""
        super().close()
        self._node.close()

    def leave(self) -> None:
        """See LocalUpdateMethod."""
        super().leave()  # leaves the node's group, too
        self._node.group = None
