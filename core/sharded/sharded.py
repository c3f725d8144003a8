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
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import outer
from ..averaging import Landing
from ..checks import tensors_of
from ..co2 import Scheduled
from ..config import CO2Config, Schedule, check_mesh, check_node, check_shared, scheduled
from ..errors import UserError
from ..flat import beside, copy, on_host, unique
from ..flight import Link
from ..groups import Stage, all_reduce, gather_parts, leave_group, new_group, sum_parts
from ..robust.guard import size_of
from ..stats import send_off
from .live import HostCopies, Live
from .placement import Placement


class ShardedCO2(Scheduled):
    """CO2 whose outer state is shared out over the workers of a node, over all workers, or lies on the host.

        mesh = node_mesh("cuda", 8)  # of core.groups: nodes of eight consecutive ranks
        co2 = ShardedCO2(model.parameters(), CO2Config(tau=48), mesh=mesh, buffers=model.buffers())
        model = DistributedDataParallel(model, process_group=mesh.get_group("shard"))

    mesh: [replicate, shard], as groups.node_mesh makes it; or its two dimensions as groups. inner_group: ranks that
    synchronise gradients every step, as a node's do, so that at a boundary their parameters are equal
    (DistributedDataParallel, ZeRO-1), or hold one model's shards (DTensors: ZeRO-2 and 3, tensor parallelism, where a
    rank's share is its shard; plain tensors beside them are equal on all ranks, and made so again every round). Each
    keeps and sends its own share. group: the ranks with the same share, across nodes; alone, or with neither, all
    workers are equal.
    shards: plain tensors are this rank's own part of the model, a pipeline's stage, and unlike those of the others in
    the inner group. Then buffers are averaged over `group` only, else over both groups.
    shard: shares are cut further over the workers of `group`. offload: the outer state and its all-reduce lie in the
    host's (pinned) memory, no copy of the parameters on a GPU. The other arguments: see CO2.
    """

    differences = True

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        mesh: DeviceMesh | None = None,
        inner_group: dist.ProcessGroup | None = None,
        group: dist.ProcessGroup | None = None,
        shards: bool = False,
        shard: bool = False,
        offload: bool = False,
        buffers: Iterable[Tensor] = (),
        model_params: Iterable[Tensor] = (),
        timeout: float = 600.0,
        link: Link | None = None,
        schedule: Schedule | None = None,
    ):
        self.config = c = scheduled(config or CO2Config(), schedule, 0)
        self.schedule = schedule
        self.shards, self.shard, self.offload = shards, shard, offload
        self.check_settings()
        params, buffers = unique(tensors_of(params, "parameters")), unique(tensors_of(buffers, "buffers"))
        if not params:
            raise UserError("no parameter is given: nothing to train; each stage of a pipeline needs one")
        group, inner_group = _groups(mesh, group, inner_group, c)
        backend = "gloo" if offload else None
        device = torch.device("cpu") if offload else params[0].device
        inner = inner_group is not None
        self._inner = new_group(inner_group, timeout, device, backend, hidden=True) if inner else None
        self._placement = Placement(params, buffers, self._inner, shards)
        self.inner_size, self.of_shards = self._placement.size, self._placement.of_shards
        if self._inner is not None:
            self._placement.agree(("ShardedCO2", self.signature()), self._inner, device)
            self.member = "the node of rank"  # they are left out together
        workers = dist.get_world_size(group) if dist.is_initialized() else 1
        super().__init__(
            params,
            c.tau,
            tau_max=c.tau_max,
            tau_margin=c.tau_margin,
            sync_steps=c.sync_steps,
            by_speed=c.steps == "by_speed",
            waits=c.delay != "auto",
            buffers=buffers,
            model_params=model_params,
            group=group,
            timeout=timeout,
            link=link,
            parts=(1 if self.of_shards else self.inner_size) * (workers if shard else 1),
            on_host=offload,
            backend=backend,
        )
        self.reducer.scale = 1 / self.everybody  # of what is summed over both groups
        self.starts_roughly = not c.at_boundary
        self.guard.factor = c.outlier
        self.guard.tells &= self._inner is None or dist.get_rank(self._inner) == 0
        self.flight.timed_groups += [self._inner] if self._inner is not None else []
        self._make_state()

    @torch.no_grad()
    def _start_from_params(self) -> None:
        """g, in the payloads, and the shares of x begin as the parameters."""
        self._live.settle()
        super()._start_from_params()
        for bucket in self.buckets:
            bucket.flatten(bucket.payload)
        copy(self._x, self._shares())
        for number in (self._last, self._m_squares, self._spoilt):
            number.zero_()

    @torch.no_grad()
    def _make_state(self) -> None:
        """x and m as shares, and what the background notes."""
        self._live = HostCopies(self.buckets, self.params[0].device) if self.offload else Live(self.buckets)
        self._x = self.state["outer_iterate"] = [torch.zeros_like(share) for share in self._shares()]
        self._m = self.state["outer_momentum"] = [torch.zeros_like(x) for x in self._x]
        self.replicas = [] if self.shard else self._x
        # x lags: g holds x - _last m; also |x_{t,0} - x_{t-1,0}| = _last |m|. 0-d, on the device, as the next two
        self._last = torch.zeros((), dtype=torch.float64, device=self.flight.device)
        self._m_squares = torch.zeros_like(self._last)
        # of what was sent last, whether it was not finite: known at the boundary, before the background judges it, for
        # the optimiser's state would spoil the next round, too. A jump, and a node's other workers, are known when it
        # lands. 0-d, beside the parameters
        self._spoilt = torch.zeros((), dtype=torch.bool, device=self.params[0].device)
        self._seen: dict[str, Tensor] = {}
        self._checked = self._inner is None
        self._numel = sum(b.numel for b in self.buckets)
        if self._inner is not None and self.of_shards:
            self._numel = self._placement.count(self.params, self._inner)
            self._placement.locate(self.params, self.buckets, self._shares())
        self._start_from_params()

    def _is_late(self) -> bool:
        if self._inner is not None and self.skip_after is not None:
            raise UserError(
                "skip_after with an inner group, whose workers must close their rounds together: leave it out"
            )
        return super()._is_late()

    def resync(self) -> None:
        """See LocalMethod."""
        self.flight.discard()  # of which a part runs over the same group
        if self._inner is not None:
            self._placement.agree(("resync",), self._inner, self.flight.device)
        super().resync()

    def signature(self) -> Any:
        return asdict(self.config), self.shards, self.shard, self.offload

    # -- the boundary ---------------------------------------------------------------------------------------

    def close_round(self, *, finished: bool) -> bool:
        if self._inner is not None and not self._checked:  # once: each sends a part of the parameters for all of them
            self._placement.check(self.params, self._inner)
            self._checked = True
        landed, last = self.flight.in_flight, False
        if landed:
            last = self.merge(finished=finished).last
        if self.config.at_boundary:
            told_late = beside(self.guard.left_out, self._spoilt.device) & ~self._spoilt & landed
            self._spoilt.copy_(self._live.swap(snapshot=not last))
            self.was_left_out(self._spoilt | told_late)
        else:
            if finished and (last or not self.local_steps):
                self._live.mix(1.0)  # what an earlier mean was mixed with is no local step
            if not last:
                self._live.snapshot()
        if last:  # nothing follows: what lagged catches up
            self._catch_up()
        else:
            self.begin_round(self.rounds + 1)  # before the background uses its settings
            self.send(finished=finished)
        return last

    def _catch_up(self) -> None:
        """x becomes what g holds."""
        for x, m in zip(self._x, self._m, strict=True):
            x.copy_(outer.outer_step(x, m, self._last))
        self._last.zero_()

    def merge(self, *, finished: bool = False) -> Landing:
        """See CO2. Of a mean on arrival: the parameters are mixed with g, which holds the outer iterate that it led to,
        and keeps it until the next sending. In finish() no step follows, so nothing is mixed."""
        landing = self.receive(finished=finished)
        vars(self.stats).update(send_off(self._seen))  # before the next launch, whose stream's memory they lie in
        if not self.config.at_boundary:
            if not finished:
                self._live.mix(self.config.mix)
            self.was_left_out(self.guard.left_out)
        return landing

    def agreed_size(self, size: Tensor) -> Tensor:
        if self._inner is not None:
            dist.all_reduce(size, group=self._inner)
        return size

    def send_buffers(self) -> None:
        self._live.send_buffers(self._own_buffers)

    def weigh(self) -> None:
        """That is done in the background: the workers of a node have to find alike."""
        self._to_weigh = self.local_steps, self.weight

    def was_left_out(self, where: Tensor) -> None:
        super().was_left_out(where)
        if not self.config.at_boundary:  # else it has started anew with the boundary
            self._live.restart(where)

    def check_settings(self) -> None:
        check_shared(self.config)

    @property
    def everybody(self) -> int:
        return self.flight.world_size * self.inner_size

    def turn(self) -> int | None:
        """The workers of a node take turns: their shares differ."""
        rank = dist.get_rank(self._inner) if self._inner is not None else 0
        return self.rounds // self.inner_size if self.rounds % self.inner_size == rank else None

    # -- in the background ----------------------------------------------------------------------------------

    @torch.no_grad()
    def stages(self) -> Iterator[Stage]:
        """From the snapshots in g to x_{t+2,0} in g."""
        yield from self._live.differences(rounded=not self.config.at_boundary)
        yield from self._agreement.repair(self.state.shared())
        yield from self._weigh()
        yield from self._reduce([b.rest for b in self.buckets])
        squares = self._pseudo_gradient()
        sums = torch.stack([squares, self._m_squares])
        for group in self._holders():
            yield all_reduce([sums], group)
        self._update_share(sums[0].sqrt(), sums[1].sqrt())
        if self.shard and self.flight.group is not None:
            for share in self._node_shares():
                yield gather_parts(share, self.flight.group)
        if self._inner is not None and not self.of_shards:
            for bucket in self.buckets:
                yield gather_parts(bucket.flat[: bucket.padded], self._inner)
        elif self._inner is not None:
            yield from self._placement.level([b.flat for b in self.buckets], self._inner)

    def _weigh(self) -> Iterator[Stage]:
        """A node is left out as one, for its workers hold one model's parts, or gave each other their gradients."""
        square = size_of(self.buckets).square().view(1)
        if self._inner is not None:
            yield all_reduce([square], self._inner)
        steps, weight = self._to_weigh
        self.guard.judge(square[0].sqrt(), steps)
        self.guard.weigh(self.buckets, weight)

    def _reduce(self, rests: list[Tensor]) -> Iterator[Stage]:
        """Sums of the shares over the workers, and of BatchNorm's statistics and the scalars over everybody; a stage's
        statistics are its own."""
        shares, group = self._node_shares(), self.flight.group
        if group is not None:
            yield all_reduce(rests if self.shard else [*shares, *rests], group)
            if self.shard:
                for share in shares:
                    yield from sum_parts(share, group)
        if self._inner is not None and self.shards:
            scalars = self.buckets[0].scalars
            sums = scalars.double()  # the first bucket's dtype may be another elsewhere
            yield all_reduce([sums], self._inner)
            scalars.copy_(sums)
            for bucket in self.buckets:
                bucket.values.mul_(self.inner_size)  # reducer.scale is of sums over both groups
        elif self._inner is not None:
            yield all_reduce(rests, self._inner)

    def _holders(self) -> list[dist.ProcessGroup]:
        """The groups over whose workers the shares are spread."""
        spread = [self._inner, self.flight.group if self.shard else None]
        return [group for group in spread if group is not None]

    def _node_shares(self) -> list[Tensor]:
        """The share of each payload that this worker sends across nodes."""
        flats = [b.flat[: b.padded] for b in self.buckets]
        if self._inner is None or self.of_shards:
            return flats
        return [f.view(self.inner_size, -1)[dist.get_rank(self._inner)] for f in flats]

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
        dtype holds it. Where means are merged on arrival, x_{t+1,0} is what the difference is to be taken from.
        """
        squares, weight = torch.zeros_like(self._last), self.scalars["weight"]
        scale = torch.where(weight > 0, self.inner_size / weight, 0.0)  # the weight is summed over both groups
        for dtype, g, x, m in self._segments():
            following = outer.outer_step(x, m, self._last)
            g.mul_(scale.to(g))
            if self.config.at_boundary:
                g.add_((weight > 0).to(g) * (x.to(dtype).to(x.dtype) - following))
            x.copy_(following)
            squares += outer.norm([g]).double().square()
        return squares - self._placement.surplus(self._shares())

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
        self._m_squares.copy_(torch.where(moved, total[0] - self._placement.surplus(self._m), self._m_squares))
        share = max(1, sum(len(m) for m in self._m))  # what follows is of this worker's share
        self._seen = {"pseudo_gradient_norm": delta_norm, "momentum_norm": m_norm, "clipped_share": total[3] / share}
        if c.gap != "none":
            self._seen |= {"gap_mean": total[1] / share, "gap_max": total[2]}

    # -- checkpoints ----------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        return super().own_state() | {
            "last": on_host(self._last),
            "m_squares": on_host(self._m_squares),
            "verdict": on_host(self.guard.verdict),  # found in the background, of use when that is received
            "spoilt": on_host(self._spoilt),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._live.settle()
        super().load_own_state(state)  # g, too, in the flats
        self._last.copy_(state["last"])
        self._m_squares.copy_(state["m_squares"])
        self.guard.verdict.copy_(state["verdict"])
        self._spoilt.copy_(state["spoilt"])
        if self.config.at_boundary and not state["in_flight"]:  # merged in mid-round by the run that saved it
            self._catch_up()

    def close(self) -> None:
        """Leaves the process groups. Only after finish()."""
        super().close()
        if self._inner is not None:
            leave_group(self._inner, self.flight.timeout, hidden=True)
            self._inner = None


def _groups(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, inner_group: dist.ProcessGroup | None, c: CO2Config
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Those across nodes and inside one, None where there is none."""
    if mesh is not None:
        check_mesh(mesh)
        group, inner_group = mesh.get_group(0), mesh.get_group(1)
    if inner_group is not None and group is None:
        raise UserError("inner_group without group: give also the ranks across nodes, or both at once with mesh")
    if inner_group is not None:
        check_node(c)
    return group, inner_group
