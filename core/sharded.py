"""CO2 with its outer state shared out: 1 + 2 / n copies of the parameters instead of 3.

Each of n workers keeps 1 / n of the outer iterate x and of the momentum m, and sends 1 / n, so that every link of a
node is at work. The one full copy, g, holds x_{t+1,0} by the time round t ends: it was computed and gathered while
the round ran. The boundary only swaps. The parameters restart from g, and g takes g - p = x_{t+1,0} - x^i_{t,tau},
whose mean is the pseudo-gradient but for x_{t+1,0} - x_{t,0}, which the shares know. In the background follow the sum
of the shares of g over the workers, steps 4 to 7 on the own share, and the gathering of x_{t+2,0} in g. The boundary
waits only for what outlasts the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core import outer
from core.co2 import CO2, CO2Config
from core.collectives import AsyncMean, Bucket, Stage, leave_group, new_group, ring_bytes
from core.errors import UserError
from core.fused import group_pieces, views
from core.groups import gather_parts, sum_parts
from core.offload import Arrival
from core.rounds import STEPS, all_finished
from core.rounds import _copy as copy_all

SEGMENT = 1 << 18  # elements at a time on a CPU, which stay in its cache
GPU_SEGMENT = 1 << 24
ONLY = {"delay": 1, "clip_by": "element", "wire": "float32", "policy": "penalty", "nesterov": False}


class ShardedCO2(CO2):
    """What CO2(...) makes when it is given `inner_group` or `mesh`, or `CO2Config.shard`.

    inner_group: ranks that synchronise gradients every step, as a node's do, so that at a boundary their parameters
    are equal (DistributedDataParallel, ZeRO-1), or are shards of one model (DTensors: ZeRO-2 and 3, where a rank's
    share is its shard). Each keeps and sends its own share. group: the ranks with the same share, across nodes.
    mesh: both in one, [replicate, shard]. config.shard: shares are cut further over the workers of `group`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        inner_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        timeout: float = 600.0,
        **kwargs: Any,
    ):
        if mesh is not None:
            group, inner_group = _groups_of(mesh)
        elif inner_group is not None and group is None:
            raise UserError("inner_group without group: give also the ranks across nodes, or both at once with mesh")
        self._refuse(config or CO2Config())
        backend = "gloo" if (config or CO2Config()).offload else None
        self._inner = new_group(inner_group, timeout, backend) if inner_group is not None else None
        self.inner_size = dist.get_world_size(self._inner) if self._inner else 1
        super().__init__(params, config, group, timeout=timeout, **kwargs)

    def _refuse(self, c: CO2Config) -> None:
        for name, only in ONLY.items():
            if getattr(c, name, only) != only:
                raise UserError(f"{name}={getattr(c, name)!r} needs unshared outer state; here only {only!r} works")
        if c.gap == "inner":
            raise UserError("gap='inner' needs unshared outer state; choose elementwise, norm or none")

    def _make_mean(self, tensors: list[Tensor], **kwargs: Any) -> AsyncMean:
        slices = self.inner_size if not self.of_shards else 1
        group = kwargs["group"]
        workers = dist.get_world_size(group) if dist.is_initialized() else 1
        parts = slices * (workers if self.config.shard else 1)
        host = self.config.offload
        kwargs["backend"] = "gloo" if host else None
        mean = _ChainedMean(tensors, {id(p) for p in self.params}, parts, host, **kwargs)
        mean.chain = self._background
        mean.scale = 1 / (mean.world_size * self.inner_size)  # of what is summed over both groups
        return mean

    @torch.no_grad()
    def _make_state(self) -> None:
        """x and m as shares; g, which begins as x_{0,0}, in the flat buffers."""
        for bucket, ps in zip(self.mean.buckets, self.bucket_params, strict=True):
            copy_all(bucket.views[: len(ps)], ps)
        self._arrived = Arrival(self.params[0].device) if self.config.offload else None
        pinned = self.config.offload and torch.cuda.is_available()
        on_host = {"device": "cpu", "pin_memory": pinned}  # in the parameters' dtype and shapes
        self._copies = [
            [torch.empty(p.shape, dtype=p.dtype, **on_host) for p in ps] if self.config.offload else []
            for ps in self.bucket_params
        ]
        self._x = [share.clone() for share in self._shares()]
        self._m = [torch.zeros_like(x) for x in self._x]
        self._flats |= {"outer_iterate": self._x, "outer_momentum": self._m}
        # x lags: g holds x - _last m; also |x_{t,0} - x_{t-1,0}| = _last |m|. 0-d, on the device, as the next two
        self._last = torch.zeros((), dtype=torch.float64, device=self.mean.device)
        self._m_squares = torch.zeros_like(self._last)
        self._seen: dict[str, Tensor] = {}
        self._numel = sum(self.sizes)
        if self._inner is not None and self.of_shards:
            box = torch.tensor(self._numel, device=self.mean.device)
            dist.all_reduce(box, group=self._inner)
            self._numel = int(box)

    def _agree(self, tensors: list[Tensor]) -> None:
        if self._inner is not None and not self.of_shards:
            for t in tensors:
                flat = t.detach().to(self.mean.device).contiguous()
                dist.broadcast(flat, group_src=0, group=self._inner)
                with torch.no_grad():
                    t.copy_(flat)
        super()._agree(tensors)

    # -- the boundary ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _close(self, *, finished: bool) -> bool:
        everyone = stepped = False
        if self.mean.in_flight:
            tail = self._land(divide=False)
            self._scale_buffers()
            vars(self.stats).update(self._seen)
            everyone = finished and all_finished(tail)
            stepped = not (everyone and tail[STEPS].item() == 0.0)
        own = [b.clone() for b in self.buffers]
        if stepped:  # an empty round carries older buffers
            self._restore_buffers()
        self._swap(snapshot=not everyone)
        if everyone:  # nothing follows: what lagged catches up
            for x, m in zip(self._x, self._m, strict=True):
                x.copy_(outer.outer_step(x, m, self._last))
            self._last = torch.zeros_like(self._last)
        else:
            self._send_buffers(own)
            self._launch(finished=finished)
        return everyone

    def _swap(self, *, snapshot: bool) -> None:
        """p <- g, and g <- g - p where a snapshot is wanted, a cache-sized segment at a time."""
        if self._arrived is not None:
            return self._swap_with_host(snapshot=snapshot)
        for bucket, ps in zip(self.mean.buckets, self.bucket_params, strict=True):
            start = 0
            for pieces in group_pieces(ps, GPU_SEGMENT if bucket.flat.is_cuda else SEGMENT):
                n = sum(p.numel() for p in pieces)
                g = views(bucket.flat[start : start + n], pieces)
                difference = [a - p for a, p in zip(g, pieces, strict=True)] if snapshot else g
                copy_all(pieces, g)
                copy_all(g, difference)
                start += n

    def _swap_with_host(self, *, snapshot: bool) -> None:
        """Queues p -> the host's copy and g -> p; the difference is taken in the background, once both are through.

        In a stream of its own: the compute stream waits for it, the host does not.
        """
        arrived = self._arrived
        assert arrived is not None
        with arrived.stream():
            for bucket, ps, copies in zip(self.mean.buckets, self.bucket_params, self._copies, strict=True):
                for p, g, copy in zip(ps, bucket.views, copies, strict=False):
                    if snapshot:
                        copy.copy_(p, non_blocking=True)
                    p.copy_(g, non_blocking=True)

    def _take_differences(self) -> None:
        """g <- g - p from the host's copies."""
        for bucket, copies in zip(self.mean.buckets, self._copies, strict=True):
            for g, copy in zip(bucket.views, copies, strict=False):
                g.sub_(copy)

    # -- in the background ----------------------------------------------------------------------------------

    def _shares(self) -> list[Tensor]:
        """This worker's share of each flat buffer."""
        shares = self._node_shares()
        if self.config.shard and self.mean.group is not None:
            shares = [s.view(self.mean.world_size, -1)[self.mean.rank] for s in shares]
        return shares

    def _node_shares(self) -> list[Tensor]:
        """The share that this worker sends across nodes."""
        flats = [b.flat[: b.shared_numel] for b in self.mean.buckets]
        if self._inner is None or self.of_shards:
            return flats
        return [f.view(self.inner_size, -1)[dist.get_rank(self._inner)] for f in flats]

    @torch.no_grad()
    def _background(self) -> Iterator[Stage]:
        """From the snapshots in g to x_{t+2,0} in g."""
        if self._arrived is not None:
            yield [self._arrived], 0
            self._take_differences()
        rests = [rest for b in self.mean.buckets if len(rest := b.flat[b.shared_numel :])]
        yield from self._reduce(rests)
        squares = self._pseudo_gradient()
        sums = torch.stack([squares, self._m_squares])
        for group in self._holders():
            yield _all_reduce([sums], group)
        self._update_share(sums[0].sqrt(), sums[1].sqrt())
        if self.config.shard and self.mean.group is not None:
            for share in self._node_shares():
                yield gather_parts(share, self.mean.group)
        if self._inner is not None and not self.of_shards:
            for bucket in self.mean.buckets:
                yield gather_parts(bucket.flat[: bucket.shared_numel], self._inner)

    def _reduce(self, rests: list[Tensor]) -> Iterator[Stage]:
        """Sums of the shares over the workers, and of BatchNorm's statistics and the tail over everybody."""
        shares, group = self._node_shares(), self.mean.group
        if group is not None:
            yield _all_reduce(rests if self.config.shard else [*shares, *rests], group)
            if self.config.shard:
                for share in shares:
                    yield from sum_parts(share, group)
        if self._inner is not None:
            yield _all_reduce(rests, self._inner)

    def _holders(self) -> list[dist.ProcessGroup]:
        """The groups over whose workers the shares are spread."""
        spread = [self._inner, self.mean.group if self.config.shard else None]
        return [group for group in spread if group is not None]

    def _segments(self) -> Iterator[tuple[torch.dtype, Tensor, Tensor, Tensor]]:
        """(dtype of the parameters, share of g, x, m), a cache-sized piece at a time."""
        for bucket, *flats in zip(self.mean.buckets, self._shares(), self._x, self._m, strict=True):
            size = GPU_SEGMENT if bucket.flat.is_cuda else SEGMENT
            for g, x, m in zip(*(f.split(size) for f in flats), strict=True):
                yield bucket.dtype, g, x, m

    def _pseudo_gradient(self) -> Tensor:
        """Delta in the share of g, and x catches up; returns the sum of Delta's squares, 0-d.

        What was sent is x_{t+1,0} - x^i_{t,tau}; the local steps began at x_{t,0} as the parameters' dtype holds it.
        """
        squares = torch.zeros_like(self._last)
        for dtype, g, x, m in self._segments():
            following = outer.outer_step(x, m, self._last)
            g.mul_(1 / self.mean.world_size).add_(x.to(dtype).to(x.dtype) - following)
            x.copy_(following)
            squares += torch.linalg.vector_norm(g).double().square()
        return squares

    def _update_share(self, delta_norm: Tensor, m_norm: Tensor) -> None:
        """Steps 4 to 7 on the share; an empty round, the last of finish(), moves nothing."""
        c = self.config
        moved = self.mean.tail_view[STEPS] > 0
        rms, gap = delta_norm / max(1, self._numel) ** 0.5, None
        if c.gap == "norm":
            gap = outer.gap_scalar(self._last * m_norm, delta_norm)
        alpha = moved.double() * c.outer_lr
        m_squares, clipped = torch.zeros_like(self._last), torch.zeros_like(self._last)
        gap_sum, gap_max = torch.zeros_like(self._last), torch.ones_like(self._last)
        for _, g, x, m in self._segments():
            if c.gap == "elementwise":
                gap = outer.gap_elementwise(m * self._last, rms)
            if gap is not None and len(m):
                gap_sum += gap.double().expand_as(m).sum()
                gap_max = torch.maximum(gap_max, gap.max().double())
            new = outer.momentum(m, g, c.outer_momentum, gap)
            if c.clip is not None:
                clipped += (new.abs() > c.clip).sum()
                new = outer.clip_elements(new, c.clip)
            m.copy_(torch.where(moved, new, m))
            g.copy_(outer.outer_step(x, m, alpha))
            m_squares += torch.linalg.vector_norm(m).double().square()
        self._last, self._m_squares = alpha, m_squares
        share = max(1, sum(len(m) for m in self._m))
        self._seen = {"pseudo_gradient_norm": delta_norm, "momentum_norm": m_norm, "clipped_share": clipped / share}
        if c.gap != "none":  # of this worker's share, as clipped_share
            self._seen |= {"gap_mean": gap_sum / share, "gap_max": gap_max}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["shared"] = {
            "gathered": [b.flat.clone() for b in self.mean.buckets],
            "last": self._last.clone(),
            "m_squares": self._m_squares.clone(),
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for bucket, flat in zip(self.mean.buckets, state["shared"]["gathered"], strict=True):
            bucket.flat.copy_(flat)
        self._last.copy_(state["shared"]["last"])
        self._m_squares.copy_(state["shared"]["m_squares"])

    def close(self) -> None:
        """Leaves the process groups. Only after finish()."""
        super().close()
        if self._inner is not None:
            leave_group(self._inner, self.mean.timeout)
            self._inner = None


class _ChainedMean(AsyncMean):
    """AsyncMean whose buckets can be cut into `parts`, and whose background is its owner's."""

    chain: Any

    def __init__(self, tensors: list[Tensor], shared: set[int], parts: int, host: bool, **kwargs: Any):
        self._shared, self._parts, self._host = shared, parts, host
        super().__init__(tensors, **kwargs)

    def _bucket(self, tensors: list[Tensor], tail: int) -> Bucket:
        return Bucket(tensors, tail, sum(id(t) in self._shared for t in tensors), self._parts, self._host)

    def _stages(self) -> Iterator[Stage]:
        return self.chain()


def _groups_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    if mesh.ndim != 2:
        raise UserError(f"a mesh of {mesh.ndim} dimensions: give two, [replicate, shard]")
    return mesh.get_group(0), mesh.get_group(1)


def _all_reduce(tensors: list[Tensor], group: dist.ProcessGroup) -> Stage:
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    n = dist.get_world_size(group)
    return [w for w in works if w is not None], sum(ring_bytes(t.numel() * t.element_size(), n) for t in tensors)
