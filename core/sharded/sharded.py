"""CO2 with its outer state shared out: 1 + 2 / n copies of the parameters instead of 3.

Each of n workers keeps 1 / n of the outer iterate x and of the momentum m, and sends 1 / n, so that every link of a
node is at work. The one full copy, g, holds x_{t+1,0} by the time round t ends: it was computed and gathered while
the round ran. The boundary only swaps. The parameters restart from g, and g takes g - p = x_{t+1,0} - x^i_{t,tau},
whose mean is the pseudo-gradient but for x_{t+1,0} - x_{t,0}, which the shares know. In the background follow the sum
of the shares of g over the workers, steps 4 to 7 on the own share, and the gathering of x_{t+2,0} in g. The boundary
waits only for what outlasts the round.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import outer
from ..adaptive.config import Schedule, settings_of
from ..assembly import CO2Config, Options, named_rule, plugs
from ..checkpoints.saved import Saved
from ..errors import UserError
from ..flat import Bucket, copy, make_buckets, tensors_of, unique
from ..groups import Stage, all_reduce, gather_parts
from ..robust.synchronous import refuse_fsdp
from ..stats import send_off
from .live import HostCopies, Live, beside, pinned
from .mesh import check_shared, groups_of
from .placement import Holders, Placement, sum_parts


class ShardedCO2(Saved):
    """CO2 whose outer state is shared out over the workers of a node, over all workers, or lies on the host.

        mesh = node_mesh("cuda", 8)  # nodes of eight consecutive ranks
        loops = DistributedDataParallel(model, process_group=mesh.get_group("shard"))  # to be called in the loop
        co2 = ShardedCO2(model.parameters(), CO2Config.paper(), mesh=mesh, buffers=model.buffers())

    In that order: DistributedDataParallel writes the parameters when it is made, of which ShardedCO2 would warn.

    mesh: [replicate, shard], as node_mesh makes it; or its two dimensions as groups: inner_group, a node's ranks, and
    group, of Options, the ranks with the same share across nodes; that alone, or neither: all workers are equal.
    Ranks of a node synchronise gradients every step, so that at a boundary their parameters are equal
    (DistributedDataParallel, ZeRO-1), or hold one model's shards (DTensors: ZeRO-2 and 3, tensor parallelism, where a
    rank's share is its shard; plain tensors beside them are equal on all ranks, and made so again every round).
    shards: plain tensors are this rank's own part of the model, a pipeline's stage, and unlike those of the others in
    the inner group. Or, of each parameter, the ranks that hold what this rank holds of it (placement.Holders). With
    either, buffers are averaged over `group` only, else over both groups.
    shard: shares are cut further over the workers of `group`. offload: the outer state and its all-reduce lie in the
    host's (pinned) memory, no copy of the parameters on a GPU. The other arguments: see CO2.
    """

    name = "ShardedCO2"
    differences = True
    sends_later = True
    numbers = ("_last", "_m_squares", "_weightless", "_spoilt")

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
        **options: Unpack[Options],
    ):
        c = named_rule(config)
        self._settings = settings_of(c, schedule)
        check_shared(self._settings(0), c.wire.format)
        options["group"], inner_group = groups_of(mesh, options.get("group"), inner_group)
        plugged = plugs(c, lambda number: self._settings(number).tau, options)
        self.shards, self.shard, self.offload = shards is not False, shard, offload
        self.begin_round(0)
        params = unique(tensors_of(params, "parameters"))
        if not params:
            raise UserError("no parameter is given: nothing to train; each stage of a pipeline needs one")
        plugged["buffers"] = unique(tensors_of(plugged["buffers"], "buffers"))
        refuse_fsdp(params, options.get("group"))
        device, backend = (torch.device("cpu"), "gloo") if offload else (params[0].device, None)
        timeout = options.get("timeout", 600.0)
        of_group: dict[str, Any] = {"timeout": timeout, "device": device, "backend": backend}
        self._node = Placement(params, plugged["buffers"], inner_group, shards, **of_group)
        self._node.agree((self.name, self.signature()))
        self.title = "rank" if inner_group is None else "the node of rank"  # whose workers are left out together
        if offload:
            plugged["flight"] = functools.partial(plugged["flight"], backend="gloo")
        super().__init__(params, **plugged)
        self.reducer.scale = 1 / self.everybody  # of what is summed over both groups
        self.flight.timed_groups += [self._node.group] if self._node.group is not None else []
        self._make_state()

    @torch.no_grad()
    def start_from_params(self) -> None:
        """g, in the payloads, and the shares of x begin as the parameters."""
        self._live.settle()
        super().start_from_params()
        for bucket in self.buckets:
            bucket.flatten(bucket.payload)
        copy(self._x, self._shares())

    def _make_state(self) -> None:
        """x and m as shares, and what the background notes."""
        self._live = HostCopies(self.buckets, self.params[0].device) if self.offload else Live(self.buckets)
        self._x = self.state["outer_iterate"] = [torch.zeros_like(share) for share in self._shares()]
        self._m = self.state["outer_momentum"] = [torch.zeros_like(x) for x in self._x]
        self.replicas = [] if self.shard else self._x
        # x lags: g holds x - _last m; also |x_{t,0} - x_{t-1,0}| = _last |m|. 0-d, on the device, as the next two
        self._last = torch.zeros((), dtype=torch.float64, device=self.flight.device)
        self._m_squares = torch.zeros_like(self._last)
        # whether what was sent last has no weight, as a rider found in the background: known when it lands
        self._weightless = torch.zeros((), dtype=torch.bool, device=self.flight.device)
        # of what was sent last, whether it was not finite: known at the boundary, before the background judges it, for
        # the optimiser's state would spoil the next round, too. 0-d, beside the parameters
        self._spoilt = torch.zeros((), dtype=torch.bool, device=self.params[0].device)
        self._seen: dict[str, Tensor] = {}
        self._checked = False  # whether a node's workers are known to have come to equal parameters
        self._numel = self._node.count(self.params)
        self._node.locate(self.params, self.buckets, self._shares())
        self.start_from_params()

    # -- what Rounds asks -----------------------------------------------------------------------------------

    def make_buckets(self) -> list[Bucket]:
        parts = self._node.parts * (self.flight.world_size if self.shard else 1)
        return make_buckets(self.params, self.buffers, self.scalars.numel, parts, pinned if self.offload else None)

    def resync(self) -> None:
        self.flight.restore(self.rounds, in_flight=False)  # of which a part runs over the same group
        self._node.agree(("resync",))
        super().resync()

    def begin_round(self, number: int) -> None:
        self.config = self._settings(number)
        check_shared(self.config)

    def signature(self) -> Any:
        return asdict(self.config), self.shards, self.shard, self.offload

    def settings(self) -> Any:
        return self.config.changing(self.tau)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.offload else super().device

    @property
    def everybody(self) -> int:
        return self.flight.world_size * self._node.size

    @property
    def tells(self) -> bool:
        return super().tells and self._node.rank == 0

    @property
    def turn(self) -> int | None:
        """The workers of a node take turns: their shares differ."""
        return self.rounds // self._node.size if self.rounds % self._node.size == self._node.rank else None

    def send_buffers(self) -> None:
        with self._live.own_stream():
            super().send_buffers()

    def sum_parts(self, numbers: Tensor) -> Iterator[Stage]:
        """A node's workers hold one model's parts, or gave each other their gradients: they are judged as one."""
        return self._node.sum([numbers])

    # -- the boundary ---------------------------------------------------------------------------------------

    def close_round(self, *, finished: bool) -> bool:
        if not self._checked:  # once: each worker of a node sends a part of the parameters for all of them
            self._checked = True
            if reason := self._node.check(self.params):
                raise self.flight._failure(reason, "the comparison of a node's parameters")
        landed = last = False
        if self.flight.in_flight:
            landed, last = True, self.land(finished=finished).last
            vars(self.stats).update(send_off(self._seen))  # before the next launch, whose stream's memory they lie in
        told_late = beside(self._weightless, self._spoilt.device) & ~self._spoilt & landed
        self._spoilt.copy_(self._live.swap(snapshot=not last))
        self.left_out(self._spoilt | told_late)
        if last:  # nothing follows
            self._take_last_step()
        else:
            self.begin_round(self.rounds + 1)  # before the background uses its settings
            self.send(finished=finished)
        return last

    def _take_last_step(self) -> None:
        """x, which lags, becomes what g holds."""
        for x, m in zip(self._x, self._m, strict=True):
            x.copy_(outer.outer_step(x, m, self._last))
        self._last.zero_()

    # -- in the background ----------------------------------------------------------------------------------

    @torch.no_grad()
    def stages(self) -> Iterator[Stage]:
        """From the snapshots in g to x_{t+2,0} in g."""
        yield from self._live.differences()
        for rider in self.riders:
            yield from rider.stages()
        # a worker in finish() has no weight, either, where workers count by their steps
        self._weightless.copy_((self.scalars["weight"] == 0) & (self.scalars["steps"] > 0))
        yield from self._reduce([b.rest for b in self.buckets])
        squares = self._pseudo_gradient()
        sums = torch.stack([squares, self._m_squares])
        yield from self._node.sum([sums])
        across = self.flight.group if self.shard else None  # over whose workers shares are cut further
        if across is not None:
            yield all_reduce([sums], across)
        self._update_share(sums[0].sqrt(), sums[1].sqrt())
        if across is not None:
            for share in self._node_shares():
                yield gather_parts(share, across)
        yield from self._node.gather(self.buckets)

    def _reduce(self, rests: list[Tensor]) -> Iterator[Stage]:
        """Sums of the shares over the workers, and of BatchNorm's statistics and the scalars over everybody; a stage's
        statistics are its own."""
        shares, group = self._node_shares(), self.flight.group
        if group is not None:
            yield all_reduce(rests if self.shard else [*shares, *rests], group)
            if self.shard:
                for share in shares:
                    yield from sum_parts(share, group)
        if not self.shards:
            yield from self._node.sum(rests)
            return
        scalars = self.buckets[0].scalars
        sums = scalars.double()  # the first bucket's dtype may be another elsewhere
        yield from self._node.sum([sums])
        scalars.copy_(sums)
        for bucket in self.buckets:
            bucket.values.mul_(self._node.size)  # reducer.scale is of sums over both groups

    def _node_shares(self) -> list[Tensor]:
        """The share of each payload that this worker sends across nodes."""
        return [self._node.part(b.flat[: b.padded]) for b in self.buckets]

    def _shares(self) -> list[Tensor]:
        """This worker's share of each payload."""
        shares = self._node_shares()
        if self.shard and self.flight.group is not None:
            shares = [s.view(self.flight.world_size, -1)[self.flight.rank] for s in shares]
        return shares

    def _segments(self) -> Iterator[tuple[torch.dtype, Tensor, Tensor, Tensor]]:
        """(dtype of the parameters, share of g, x, m), a cache-sized piece at a time."""
        for bucket, *flats in zip(self.buckets, self._shares(), self._x, self._m, strict=True):
            for g, x, m in zip(*(f.split(outer.segment_size(bucket.flat)) for f in flats), strict=True):
                if len(g):
                    yield bucket.dtype, g, x, m

    def _pseudo_gradient(self) -> Tensor:
        """Delta in the share of g, and x catches up; returns the sum of Delta's squares, 0-d.

        What was sent at a boundary is x_{t+1,0} - x^i_{t,tau}; the local steps began at x_{t,0} as the parameters'
        dtype holds it.
        """
        squares, weight = torch.zeros_like(self._last), self.scalars["weight"]
        scale = torch.where(weight > 0, self._node.size / weight, 0.0)  # the weight is summed over both groups
        for dtype, g, x, m in self._segments():
            following = outer.outer_step(x, m, self._last)
            g.mul_(scale.to(g))
            g.add_((weight > 0).to(g) * (x.to(dtype).to(x.dtype) - following))
            x.copy_(following)
            squares += outer.norm([g]).double().square()
        return squares - self._node.surplus(self._shares())

    def _update_share(self, delta_norm: Tensor, m_norm: Tensor) -> None:
        """Steps 4 to 7 on the share; an empty round, the last of finish(), moves nothing."""
        c = self.config
        moved = self.scalars["steps"] > 0
        c_t = delta_norm / max(1, self._numel) ** 0.5 if c.gap == "elementwise" else None
        gap = outer.gap_scalar(self._last * m_norm, delta_norm) if c.gap == "norm" else None
        alpha = moved.double() * c.outer_lr
        rule = outer.Rule(outer.carried(c.outer_momentum, self.growth), alpha, self._last, c.clip, c=c_t, gap=gap)
        seen = [torch.zeros(4, dtype=torch.float64, device=self.flight.device)]  # of nothing: Lambda is 1
        seen[0][2].fill_(1.0)  # on the device: a copy from the host would wait for the collectives before it
        for _, g, x, m in self._segments():
            new, numbers = outer.new_momentum(m, g, rule)  # 4, 5, 6
            m.copy_(torch.where(moved, new, m))
            g.copy_(outer.outer_step(x, m, rule.alpha))  # 7
            seen.append(numbers)
        total = outer.all_seen(seen)
        self._last.copy_(alpha)  # in place: they are read and written in another stream
        self._m_squares.copy_(torch.where(moved, total[0] - self._node.surplus(self._m), self._m_squares))
        share = max(1, sum(len(m) for m in self._m))  # what follows is of this worker's share
        self._seen = {"pseudo_gradient_norm": delta_norm, "momentum_norm": m_norm, "clipped_share": total[3] / share}
        if c.gap != "none":
            self._seen |= {"gap_mean": total[1] / share, "gap_max": total[2]}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def recount(self) -> None:
        """After another rank's state was loaded, and this one's share of the momentum: the sum of its squares."""
        squares = [torch.dot(m, m).double() for _, _, _, m in self._segments()]
        total = torch.stack([torch.zeros_like(self._m_squares), *squares]).sum()  # in the order of _update_share
        self._m_squares.copy_(total - self._node.surplus(self._m))

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._live.settle()
        super().load_own_state(state)  # g, too, in the flats

    def close(self) -> None:
        """Leaves the process groups. Only after finish()."""
        super().close()
        self._node.close()

    def leave(self) -> None:
        super().leave()  # the node's group, too
        self._node.group = None
