"""CO2 (Sun et al., ICLR 2024, arXiv 2401.16265), which testing/reference.py specifies in plain code for all workers.

A worker takes tau local steps while the previous all-reduce is in flight:

    co2 = CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers())
    for batch in loader:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        co2.step()
    co2.finish()

Algorithm 1, outer step t on worker i:

    1  Take tau local steps with any optimizer, from x_{t,0} to x^i_{t,tau}.
    2  Wait for the all-reduce of round t-1: Delta = x_{t-1,0} - mean_i x^i_{t-1,tau}.
    3  Start the all-reduce of x_{t,0} - x^i_{t,tau}. It runs during the next round.
    4  Compute the staleness gap Lambda_t >= 1 from x_{t,0} - x_{t-1,0} and Delta (formulas: outer.py).
    5  m_t = beta m_{t-1} + Delta / Lambda_t.
    6  m_t <- clip(m_t, -phi, phi).
    7  x_{t+1,0} = x_{t,0} - alpha m_t, where every worker continues.

That is our reading of the paper's rule. The settings merge and delay extend it. merge says where a worker continues:

    restart       from x_{t+1,0}, which is equal on all workers
    keep_local    from x_{t+1,0} plus the worker's progress since the all-reduce started, which a snapshot tells

delay says when an average is used: "boundary", a number of local steps after its all-reduce started, "auto" for when it
arrives, or 0 for at once, which hides nothing. Together they choose one of two orders:

    paper order        for restart with delay "boundary". At the boundary, steps 2, 4, 5, 6, 7 and last
                       step 3. An average is one round old when it is used.
    merge on arrival   for keep_local, and for every other delay (restart: only 0). This order is ours. At the boundary
                       only step 3. When the average of this all-reduce is due, at the latest at the next boundary,
                       steps 2, 4, 5, 6 and 7 follow, with the Delta of the round that the last boundary ended. With
                       "auto", workers may do so after different local steps. x and m stay equal, because they follow
                       from the averages only.

So a call of step() may change the parameters: at a boundary in the paper's order, after any local step in the other.
The optimizer's state stays the worker's own.

Both orders all-reduce the difference x_{t,0} - x^i_{t,tau}, not the parameters. Every worker holds the same x_{t,0}, so
the average gives the same pseudo-gradient, and a difference keeps its precision in 16 bits. The payload of a bucket
holds this worker's difference before the all-reduce, and the sum over the workers after it; compression happens in
between. x_{t-1,0} need not be kept, because x_{t,0} - x_{t-1,0} = -alpha m_{t-1}. The memory cost is three copies of
the parameters: the outer iterate x, the momentum m, and the payload, x and m in float32 for 16-bit parameters. The
snapshot of keep_local is a fourth copy, and Nesterov momentum with a gap needs one more.

In finish(), a worker first sends the progress of its unfinished round, if there is any. Then it takes part in the
rounds of the other workers with a difference of zero, which counts in the average. An all-reduce that every
worker started from finish() is the last (is_last). If no worker had taken a step before it, it is also empty
(is_empty), and moves nothing. All workers end with the parameters of x.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import outer
from .buckets import cut, is_dtensor, local_shard, slices, unique
from .comm import Reducer
from .config import CO2Config, CommonArgs, Schedule, build_args, named_rule, scheduled
from .errors import UserError
from .groups import Holders, of_all
from .hooks import GUARDS, Judge
from .local_update import OWN_SCALARS, LocalUpdateMethod, ReduceResult
from .nodes import Node, sent_parts
from .shares import SAVED, Fragment, Share, Slice, make_outer_step
from .state import on_host
from .stats import RoundStats, defer

OWN = len(OWN_SCALARS)  # scalars that travel with every fragment


class CO2(LocalUpdateMethod):
    """Hides the all-reduce of data-parallel training behind tau local steps.

    With merge "restart", delay "boundary" and a fixed tau, the parameters of every worker equal x_{n,0} bit for bit
    after n * tau calls of step().

    With a mesh, a worker is a node of several ranks, and CO2 runs between the nodes:

        mesh = node_mesh("cuda", 8)  # nodes of eight consecutive ranks
        ddp_model = DistributedDataParallel(model, process_group=mesh.get_group("shard"))  # call this in the loop
        co2 = CO2(model.parameters(), config, mesh=mesh, buffers=model.buffers())

    Keep this order, because DistributedDataParallel writes the parameters when it is made. The ranks of a node hold
    equal parameters, because they synchronize gradients in every step (DistributedDataParallel, ZeRO-1). Or they hold
    shards of one model as DTensors (ZeRO-2 and 3, tensor parallelism). Plain tensors among the DTensors must be equal,
    and every round makes them equal again. shares.py says what a rank of a node holds and does.

    Args:
        params: model.parameters() or any list of tensors on this worker's device. Every worker must pass the same
            shapes.
        config: The settings of the method.
        mesh: [nodes, ranks of a node], as node_mesh makes it. None means that every process is a worker.
        shards: True: plain tensors are this rank's own part of the model, such as a pipeline stage. Or, for each
            parameter, the ranks that hold it (groups.Holders). Buffers are then averaged over the nodes only.
        shard: Whether each worker keeps only a part of the outer state, which costs an all-gather of x in each round.
        offload: Whether outer state and all-reduce are in pinned host memory. The GPU then holds no copy of the
            parameters.
        schedule: From a round's number, counted from 0, to the settings that differ from config in that round. Allowed
            keys: tau, outer_lr, outer_momentum, clip. It must be the same on all workers, which every round checks.
        **args: See CommonArgs.
    """

    name = "CO2"
    sends_differences = _needs_global_norms = True  # see LocalUpdateMethod
    fragments: Sequence[Fragment] = ()
    _reached_in = -1  # the round whose boundary has merged all fragments for an evaluation

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        mesh: DeviceMesh | None = None,
        shards: bool | Holders = False,
        shard: bool = False,
        offload: bool = False,
        schedule: Schedule | None = None,
        **args: Unpack[CommonArgs],
    ):
        c, params = named_rule(config), unique(GUARDS.inputs.tensors_of(params, "parameters"))
        args["group"], inner = GUARDS.inputs.groups_of(mesh, args.get("group"))
        split = any(map(is_dtensor, params)) or shards is not False
        if inner is not None and dist.get_world_size(inner) == 1 and not split:
            inner = None  # a node of one rank is a worker that holds the whole model
        is_whole = inner is None and not (shard or offload or shards)
        GUARDS.inputs.refuse_shards(params, args.get("group"), dtensors=is_whole)
        if is_whole:
            c.compression.check(params, args.get("group"))
            return self._build(params, c, schedule, **build_args(c, args, schedule))
        held = isinstance(shards, Mapping)
        if (shard or held) and c.fragments == "auto":
            c = replace(c, fragments=1)
        GUARDS.inputs.check_share(c, shard=shard, split=split, held=held)
        built, timeout = build_args(c, args, schedule, owned=shard), args.get("timeout", 600.0)
        buffers = built["buffers"] = unique(GUARDS.inputs.tensors_of(built["buffers"], "buffers"))
        device, backend = (torch.device("cpu"), "gloo") if offload else (params[0].device, None)
        if not offload:
            c.compression.check([local_shard(p) for p in params], args.get("group"))
        built["allreduce"] = functools.partial(built["allreduce"], backend=backend)
        votes = c.delay == "auto"
        node = Node(params, buffers, inner, shards, votes=votes, timeout=timeout, device=device, backend=backend)
        node.agree((self.name, asdict(c), shards is not False, shard, offload))
        share = Share(node, shard=shard, offload=offload, unit=c.compression.block)
        self._build(params, c, schedule, share=share, **built)
        share.attach(self)
        self.replicated = [] if shard else share.x
        self._cut()
        if node.group is not None:
            GUARDS.failure.register(node.group)
        self.allreduce.timed_groups += node.groups
        self.allreduce.votes, self.allreduce.voters = node.voters is not None, node.voters
        self._start_from_params()
        self._rehearse()
        self._start_from_params()
        share.stats = {}

    def _build(self, params: Iterable[Tensor], c: CO2Config, schedule: Schedule | None, **built: Any) -> None:
        """The rest of the constructor, which elastic_co2 calls with other arguments."""
        self._given, self._schedule = c, schedule  # self.config: what holds in the current round
        self._use_settings(0)
        c = self.config
        super().__init__(params, **built)
        self._starts_near_anchor = c.merge != "restart"
        self.in_paper_order = c.merge != "keep_local" and c.is_a_round_late
        if c.outer_momentum == 0 and c.gap == "none" and schedule is None:
            self._unsaved = ("outer_momentum",)  # step 5 multiplies m_{t-1} by 0
        self._make_reducer = built.get("reducer", Reducer)
        if self.share is not None:
            return
        # x_{t,0} and m_t, one flat tensor per bucket, float32 for 16-bit parameters. Checksums compare x between the
        # workers (replicated state), and rounds begin there (anchor).
        self._x = self.replicated = self.anchors = self.state.new("outer_iterate", of_params=True)
        self._m = self.state.new("outer_momentum")
        # keep_local: this worker's parameters when the all-reduce started
        self._snapshots = self.state.new("snapshot", of_params=True, own=True) if c.merge == "keep_local" else []
        # Nesterov takes another direction than m in step 7. The next gap needs it.
        self._directions = self.state.new("outer_step") if c.nesterov and c.gap != "none" else []
        self._squares = self.scalars["squares"] if "squares" in self.scalars.sizes else None  # see OutlierFilter
        self._cut()

    # -- the boundary ------------------------------------------------------------------------------------------

    def _close_round(self, *, finished: bool) -> bool:
        """Ends the round in one of the two orders. See LocalUpdateMethod._close_round."""
        # Averages that have not arrived during the round are merged first.
        if not self.in_paper_order and self._end_fragments(finished=finished):
            return True
        if self.sync_schedule.fragments not in (None, len(self.fragments)):
            self._cut(self.sync_schedule.fragments)
        # The parameters may differ from x by a rounding of keep_local. That is no progress, so it must not be sent.
        idle = finished and not self.local_steps
        if idle and self.share is None:
            self._restart([self._now])
        if self.in_paper_order:
            return self._close_in_paper_order(finished=finished)
        for fragment in self.fragments:
            fragment.lag += self.local_steps
        self.fragments[0].lag = 0
        self._take(idle=idle)  # writes step 3's difference to the payload, and the snapshot
        if self.share is not None and self.config.delay != 0:
            self._use_settings(self.rounds + 1)  # the background takes the outer step with the settings of its merge
        self._start_allreduce(finished=finished)  # step 3
        if self.config.delay == 0:
            self._merge(finished=finished)
        return self.config.delay == 0 and not self.is_cut and self._end_fragments(finished=finished)

    def _take(self, *, idle: bool) -> None:
        """Step 3 of the current fragment's merge on arrival."""
        if self.share is not None:
            self.share.take(idle=idle)
        for outer_step in self._now.outer_steps:
            outer_step.take()

    def _close_in_paper_order(self, *, finished: bool) -> bool:
        """Steps 2 4 5 6 7 3. In the first round no average has arrived, so x_{1,0} = x_{0,0}.

        One payload serves both directions. The pass over memory reads the arrived sum from it and writes the next
        difference to it, before step 7 overwrites x. The all-reduce starts last.
        """
        result = self._wait_allreduce(finished=finished) if self.allreduce.in_flight else None  # step 2
        if result and result.is_empty:
            self._now.last_alpha = 0.0
            return True
        if self.share is not None:  # steps 4 to 7 have run in the background
            self._continue_from_share(self.share, result)
        else:
            self._outer_step(arrived=result is not None)  # 4 to 7, and step 3's difference
        if result and result.is_last:
            return True
        self._start_allreduce(finished=finished)  # step 3
        return False

    def _continue_from_share(self, share: Share, result: ReduceResult | None) -> None:
        """Step 3 of a node, whose steps 4 to 7 have run in the background. Reports an exclusion."""
        spoilt = self._now.spoilt
        excluded = share.excluded() & ~spoilt & (result is not None)
        vars(self.clock.stats).update(defer(share.stats))  # before the next launch, which reuses their memory
        if result and result.is_last:
            share.end()
        else:
            # the background judges the payload later, but the optimizer's state would affect the next round, too
            spoilt.copy_(self.hook(Judge).bad_params())
            share.take(idle=False)
            self._use_settings(self.rounds + 1)  # the background takes the outer step with the settings of its merge
        self._report_excluded(spoilt | excluded)

    # -- merge on arrival --------------------------------------------------------------------------------------

    def _mid_round(self) -> None:
        """Merges the average in flight if it is due after this local step. Starts the next fragment if that is due."""
        if self.in_paper_order:
            return
        delay = self.config.delay
        if self.allreduce.in_flight and (self.allreduce.arrived() if delay == "auto" else self._late == delay):
            self._merge_early()
        following, count = self.fragment_index + 1, len(self.fragments)
        if following >= count or self.local_steps < max(1, following * self.tau // count):
            return
        if self.allreduce.in_flight and self.config.delay == "auto":
            return  # it starts later
        self._merge_early(starts_next=True)

    def _come_even(self) -> None:
        """Starts the fragments that another worker has started in this round. In mid-round, every worker must call it.

        With delay "auto" a worker may be a fragment ahead. Its all-reduce would otherwise wait for the other workers,
        and they for that worker.
        """
        if not self.is_cut or self.config.delay != "auto" or not self.local_steps or self.allreduce.is_elastic:
            return  # all workers have started the same
        GUARDS.failure.come_together("state_dict", self)
        ahead = max(of_all(self.fragment_index, self.allreduce.of_workers))
        while self.fragment_index < ahead:
            self._merge_early(starts_next=True)

    def _merge(self, *, finished: bool = False) -> ReduceResult:
        """Steps 2 and 4 to 7, then the merge."""
        share = self.share
        result = self._wait_allreduce(finished=finished)  # step 2
        if share is not None:  # steps 4 to 7 have run in the background
            share.drain()
            vars(self.clock.stats).update(defer(share.stats))
            self._report_excluded(share.excluded())
            if result.is_last:
                share.end()
            elif not result.is_empty:
                share.merge()
            # A number that is not finite is in all fragments after a local step, so all of them restart at once.
            if self.is_cut and not self.fragment_index and self.hook(Judge).excludes_this:
                self.allreduce.in_foreground(share.restart, "the restart of an excluded node")
                self._report_excluded(torch.ones_like(share.excluded()))
            return result
        if not result.is_empty:
            self._outer_step(takes_difference=False)  # 4 to 7
        if result.is_last:  # nothing is stale any more
            self._restart([self._now])
            self._now.last_alpha = 0.0
        return result

    @torch.inference_mode(False)
    @torch.no_grad()
    def _merge_early(self, *, at_boundary: bool = False, starts_next: bool = False) -> None:
        """Merges the average in flight, if any, in mid-round, or at a boundary before an evaluation.

        `starts_next`: Whether the next fragment's all-reduce then starts.
        """
        with self.clock.early_merge(self._late if self.allreduce.in_flight else 0):
            if self.allreduce.in_flight:
                self._merge()
                self._params_updated(at_boundary=at_boundary)
            if starts_next:
                self._start_fragment(self.fragment_index + 1)
                if self.config.delay == 0:  # it is merged
                    self._params_updated(at_boundary=at_boundary)

    def _reach_common_model(self) -> bool:
        """Whether the workers hold equal parameters, for sync_for_eval().

        With keep_local and delay "auto", waits for the average in flight and merges it first.
        """
        c = self.config
        may_merge = c.merge == "keep_local" and self.at_boundary and (c.delay == "auto" or self.is_cut)
        if may_merge and self.allreduce.in_flight:
            self._merge_early(at_boundary=True)
        if may_merge and self.is_cut and self._reached_in != self.rounds:  # lags differ between workers
            self._reached_in = self.rounds
            stats, self.clock.stats = self.clock.stats, RoundStats()  # tau auto counts no evaluations
            self._end_fragments(finished=False)
            self.clock.stats = stats
            self._params_updated(at_boundary=True)
        return super()._reach_common_model()

    # -- the outer step ----------------------------------------------------------------------------------------

    def _outer_step(self, *, arrived: bool = True, takes_difference: bool = True) -> None:
        """Steps 4 to 7 and the merge, from the sums in the payloads. One pass over memory per bucket, after one for the
        norm of Delta.

        Args:
            arrived: Whether the payloads hold sums. If not, as in the first round, x and m stay.
            takes_difference: Whether the pass also writes step 3's difference to the payload.
        """
        c, stats, fragment = self.config, self.clock.stats, self._now
        if not fragment.outer_steps:
            return  # there are more fragments than elements
        numel, last_alpha = sum(map(len, fragment.payloads)), fragment.last_alpha
        if arrived:
            # Delta = _scale * payload. _scale is one over the number of workers, without excluded ones.
            delta_norm = stats.pseudo_gradient_norm = self._scale * outer.norm(fragment.payloads)
            if self._squares is not None and not self.is_cut:  # hooks' scalars belong to the whole payload
                stats.consensus_distance = outer.consensus_distance(self._squares, self._weight, delta_norm)
            last_step_norm = last_alpha * fragment.momentum_norm
            if self._directions and c.gap == "norm":
                last_step_norm = last_alpha * outer.norm([step for step in fragment.directions if len(step)])
            rule = outer.rule_of(c, self.growth, delta_norm, last_step_norm, numel)
            rule = replace(rule, last_alpha=last_alpha, scale=self._scale, merge=c.merge)
            rule = replace(rule, takes_difference=takes_difference)
        else:
            for bucket in self.buckets:
                bucket.payload.zero_()  # the rule multiplies it by 0, and 0 times a NaN is a NaN
            rule = outer.Rule(nesterov=c.outer_momentum if c.nesterov else None, merge=c.merge)
        # [4]: the sums of m^2 and of Lambda, the largest Lambda, and how many elements were clipped
        squares, gaps, largest_gap, clipped = outer.run_all(fragment.outer_steps, rule)
        fragment.last_alpha = float(rule.alpha)
        if arrived:
            stats.momentum_norm = fragment.momentum_norm = squares.sqrt()
            stats.gap_mean, stats.gap_max, stats.clipped_share = gaps / numel, largest_gap, clipped / numel

    def _restart_from_anchor(self, where: Tensor) -> None:
        if self.config.merge != "restart" and self.share is None:  # with restart or in a node, a merge itself does it
            self._restart(self.fragments, where)

    def _restart(self, fragments: Sequence[Fragment], where: Tensor | None = None) -> None:
        for outer_step in (step for fragment in fragments for step in fragment.outer_steps):
            outer_step.restart(where)

    # -- fragments in turn: see Fragment -------------------------------------------------------------------

    @property
    def _now(self) -> Fragment:
        """The current fragment."""
        return self.fragments[self.fragment_index]

    def _cut(self, count: int | None = None) -> None:
        """Cuts the payloads into fragments while nothing is in flight. Error feedback begins anew.

        A count of None means the setting's, which auto begins with 1.
        """
        count = count or (self.config.fragments if isinstance(self.config.fragments, int) else 1)
        lag = max((fragment.lag for fragment in self.fragments), default=0)
        fragments, share, self.is_cut = list[Fragment](), self.share, count > 1
        owned, is_first = share is not None and share.shard, not self.fragments
        whole = zip(*(slices(b.numel, count) for b in self.buckets), strict=True)
        for i, places in enumerate(whole if share is None else share.cut(count)):
            parts, reducer = sent_parts(self.node, self.buckets, places, OWN if i else None, owned=owned), self.reducer
            if self.is_cut or not is_first:  # else the constructor has made it
                reducer = self._make_reducer(parts, self.scalars, self.allreduce.rank, self.allreduce.world_size)
            made = parts, reducer, self.params[0].device, self._arrived_tau, lag
            fragments.append(Slice(share, places, *made) if share else Fragment(*made, *self._outer_steps(places)))
        self.fragments, self.fragment_index = fragments, 0
        self.reducer, self.sent_payloads = fragments[0].reducer, fragments[0].payloads

    def _outer_steps(self, places: Sequence[slice]) -> tuple[list[outer.OuterStep], list[Tensor]]:
        """Returns steps 3 to 7 on a slice of each payload, and the slices of the last directions."""
        payloads, absent = [b.payload for b in self.buckets], [None] * len(self.buckets)
        flats = [cut(f, places) for f in (payloads, self._x, self._m, self._snapshots, self._directions)]
        steps = [
            make_outer_step(b.params, *of_bucket, start=place.start, nesterov=self.config.nesterov)
            for b, place, *of_bucket in zip(self.buckets, places, *(f or absent for f in flats), strict=True)
            if len(of_bucket[0])  # a bucket may hold only buffers
        ]
        return steps, flats[-1]

    def _enter(self, i: int) -> None:
        """Makes fragment i the current one."""
        self._now.arrived_tau = self._arrived_tau
        self.fragment_index, now = i, self.fragments[i]
        self.reducer, self.sent_payloads, self._arrived_tau = now.reducer, now.payloads, now.arrived_tau

    def _start_fragment(self, i: int, *, finished: bool = False) -> None:
        """Step 3 of a fragment that carries neither buffers nor hooks' scalars."""
        self._enter(i)
        fragment, steps = self.fragments[i], self._late
        idle = finished and not steps
        if idle and self.share is None:
            self._restart([fragment])  # p + (x - snapshot) may have been rounded
        self._take(idle=idle)
        fragment.lag = -self.local_steps
        self.reducer.become(self.fragments[0].reducer.kind)
        self._launch([self.hook(Judge).before_allreduce], steps, finished=self._is_last)
        if self.config.delay == 0:
            self._merge(finished=finished)

    def _end_fragments(self, *, finished: bool) -> bool:
        """Merges what is in flight, and what is left of the round's fragments. Returns whether that was the end."""
        if self.allreduce.in_flight:
            self._merge(finished=finished)
        for i in range(self.fragment_index + 1, len(self.fragments)):
            self._start_fragment(i, finished=finished)
            if self.allreduce.in_flight:
                self._merge(finished=finished)
        if self.is_cut:
            self._enter(0)
        is_last, self._is_last = self._is_last, False
        return is_last

    def _reducers(self) -> list[Reducer]:
        return [fragment.reducer for fragment in self.fragments] or [self.reducer]

    @property
    def _late(self) -> int:
        """Local steps since the last all-reduce started."""
        return self.local_steps + (self._now.lag if self.is_cut else 0)

    def _local_state(self) -> dict[str, Any]:
        state = super()._local_state()
        self._now.arrived_tau = self._arrived_tau
        fragments = on_host([{name: getattr(fragment, name) for name in SAVED} for fragment in self.fragments])
        place = {"at": self.fragment_index, "reached_in": self._reached_in} if self.is_cut else {}
        return state | {"fragments": fragments} | place

    # -- the state ----------------------------------------------------------------------------------------------

    def _start_from_params(self) -> None:
        super()._start_from_params()
        for fragment in self.fragments:
            fragment.lag = 0
            fragment.begin()
        if self.is_cut:
            self._cut()
        if self.share is not None:
            self.share.start_from_params()

    def _load_local_state(self, state: dict[str, Any]) -> None:
        self._come_even()
        if self.share is not None:
            self.allreduce.drain()
            self.share.drain()
        saved = state.get("fragments", ())
        if (count := len(saved)) not in (0, len(self.fragments)):
            if self.config.fragments != "auto":
                raise UserError(
                    f"the checkpoint has {count} fragments, not {self.config.fragments}: resume with the settings that "
                    "wrote it"
                )
            self.allreduce.drain()
            self._cut(count)
        if self.is_cut:
            self.fragment_index, self._reached_in = state["at"], state.get("reached_in", -1)
            self.reducer = self.fragments[self.fragment_index].reducer
        super()._load_local_state(state)
        for fragment, numbers in zip(self.fragments, saved, strict=True):
            for name, value in numbers.items():
                own = getattr(fragment, name)
                setattr(fragment, name, value.to(own, copy=True) if isinstance(value, Tensor) else value)

    # -- settings ----------------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        super()._begin_round()
        if self._schedule is not None:
            self._use_settings(self.rounds)

    def _use_settings(self, number: int) -> None:
        """Uses a round's settings from now on. The workers compare the settings that a schedule may change."""
        c = scheduled(self._given, self._schedule, number)
        c.check_stable()
        self.config, numbers = c, {"outer_lr": c.outer_lr, "outer_momentum": c.outer_momentum, "clip": c.clip}
        self.settings = {name: None if n is None else float(n) for name, n in numbers.items()}  # 1 prints as 1.0

    def _signature(self) -> Any:
        settings = asdict(self.config)
        if self.config.tau != "auto":
            del settings["tau_max"]  # it may follow from the number of a worker's batches
        if self.share is not None:
            settings |= {"shard": self.share.shard, "offload": self.share.offload}
        return settings
