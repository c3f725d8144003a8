"""A rank's share of the outer state on a node, and Algorithm 1's steps on it, which run in the background.

A worker may be a node of several ranks. Each rank then keeps x, m and the snapshot of its share only, and reduces only
the share with the other nodes:

    DDP inside     Every rank holds the whole model. The share is one of n equal parts of each payload.
    FSDP2 inside   The share is the rank's own shard, or its pipeline stage: the whole payload of this rank.
    shard=True     Every worker owns a part of each share. Averages are taken by the owner, and gathered from it.
    offload=True   The outer state and the payloads are in host memory.

One round of a rank, where g is its share's part of the payload:

    boundary     g <- x - p (step 3), in the paper's order also p <- x_{t+1,0}. The all-reduce starts.
    background   The node sums the norms of g, and judges the node's update as one. g crosses to the other nodes in the
                 round's format (step 2). Steps 4 to 7 run on x, m and g. The ranks of the node gather the result in the
                 payload: x_{t+1,0} to restart from, or the change D = x_{t+1,0} - snapshot for keep_local.
    merge        p <- payload, or p <- p + D, in one pass that waits for nothing.

The ranks of a node merge after the same local step, although their all-reduces arrive at different times: they vote
(AsyncAllReduce.arrived).

A share is cut into fragments (Fragment). Fragment f is the f-th slice of each rank's share, so no element changes
its owner. A share that is not cut has one fragment, the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import _foreach_add_ as add_each  # pyright: ignore[reportPrivateImportUsage]

from . import outer
from .buckets import BucketShare, copy, cut, elements, has_triton, on_device, pinned, slices, slices_alike, views, wipe
from .comm import BACKGROUND, OtherWork, Reducer, Stage, gather_parts, run, sum_flats
from .groups import Holding, of_all
from .hooks import Judge
from .nodes import Node, Where
from .outer import FusedOuterStep, OuterStep
from .stats import read_blocks

ALPHA, M_SQUARES, STEP_SQUARES, EXCLUDED, WHOLE = range(5)  # of Share.numbers


def make_outer_step(
    params: Sequence[Tensor], d: Tensor, *state: Tensor | None, start: int = 0, nesterov: bool = False
) -> OuterStep:
    """Returns the fastest pass for the device: Triton's kernel on CUDA if Triton is installed, the fused one on a CPU.

    `state` has x, m, snapshot and direction, see OuterStep. Nesterov momentum runs in the plain formulas everywhere.
    """
    kind: Any = OuterStep if nesterov or d.is_cuda else FusedOuterStep
    if not nesterov and has_triton(d.device):
        from .compression.outer_kernels import TritonOuterStep as kind  # importing Triton takes a second
    return kind(params, d, *state, start=start)


@dataclass
class Fragment:
    """A slice of each payload, or on a node of this rank's share of each (Slice).

    Lists have one entry per bucket. Slices are 1-d, float64 for float64 parameters, otherwise float32.

    Attributes:
        parts: The parts of the buckets that the all-reduce sends.
        payloads: Their slices of the payloads.
        reducer: Reduces the parts.
        device: The parameters' device.
        arrived_tau: tau of the round whose average arrived last.
        lag: Local steps from the start of its last all-reduce to the last boundary; negative if it has started since.
        outer_steps: Steps 3 to 7 on the slices. Empty on a node, and none for an empty slice.
        directions: The slices of the last step under Nesterov momentum with a gap, otherwise empty.
        last_alpha: outer_lr of its last outer step; 0 if the last boundary took none.
        momentum_norm: The norm of its m, 0-d float64.
        numbers: On a node in place of last_alpha and momentum_norm, see Share. [5] float64.
        spoilt: On a node in the paper's order, whether this rank's last difference was not finite, 0-d bool.
    """

    parts: Sequence[BucketShare]
    reducer: Reducer
    device: torch.device
    arrived_tau: int
    lag: int
    outer_steps: Sequence[OuterStep] = ()
    directions: Sequence[Tensor] = ()

    def __post_init__(self):
        self.payloads = [part.payload for part in self.parts]
        self.begin()

    def begin(self) -> None:
        """Resets the numbers, as if no outer step had been taken."""
        numbers = torch.zeros(6, dtype=torch.float64, device=self.payloads[0].device)
        self.last_alpha, self.momentum_norm, self.numbers = 0.0, numbers[5], numbers[:5]
        self.spoilt = torch.zeros((), dtype=torch.bool, device=self.device)


SAVED = ("arrived_tau", "lag", "last_alpha", "momentum_norm", "numbers", "spoilt")  # of a Fragment, in checkpoints


class Slice(Fragment):
    """A fragment of a share: the slices `places` of its flat tensors.

    A slice has n elements, of which this rank owns k: all, or with `shard` one of as many equal parts as there are
    workers.

    Attributes:
        g, snapshots: Slices of the payload and the snapshot, [n].
        x: Slice of x_{t,0}: [n], or [k] with `shard` in the paper's order.
        own_g, own_x, m, directions: g, x, the momentum and the last direction of what this rank owns, [k].
        updates: Steps 4 to 7. Their parameters are own_g, where they leave x_{t+1,0}.
        here, owned: Node.places of g and of own_g.
        numel: Elements of the whole model.
        takes: Step 3.
        own, others: (live elements, the same of the payload), in a parameter's shape, of this rank's share and of the
            other ranks' shares.
        copies: With offload, copies of the live elements in `own`, in host memory.
    """

    def __init__(self, share: Share, places: Sequence[slice], *fragment: Any):
        super().__init__(*fragment)
        m, owners = share.method, share.owners
        self.places, owned = places, [slice(place.start // owners, place.stop // owners) for place in places]
        self.g, self.x, self.snapshots = (cut(flats, places) for flats in (share.g, share.x, share.snapshots))
        self.m, self.directions = (cut(flats, owned) for flats in (share.m, share.directions))
        self.own_g, self.own_x = share.owned(self.g), self.x if share.next_x else share.owned(self.x)
        at = zip(self.own_g, self.own_x, self.m, self.directions or [None] * len(places), strict=True)
        self.updates = [
            make_outer_step([g], g, x, own_m, None, d, nesterov=m.config.nesterov) for g, x, own_m, d in at if len(g)
        ]
        self.here, self.owned = (share.node.places(m.params, m.buckets, flats) for flats in (self.g, self.own_g))
        # an element on several ranks counts in part on each
        here = sum((at.stop - at.start) / n for (n, _), where in self.here.items() for _, at in where)
        self.numel = round(here if share.node.group is None else sum(of_all(here, share.node.group)))

    def lay_out(self, share: Share) -> None:
        """Finds the live elements, again if a storage has moved."""
        self.takes, self.copies = list[OuterStep](), list[Tensor]()
        self.own, self.others = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for i, (b, place) in enumerate(zip(share.method.buckets, self.places, strict=True)):
            for row in range(share.node.parts):
                start = row * len(share.g[i]) + place.start
                payload = b.payload[start : start + len(self.g[i])]
                pieces = elements(b.params, start, start + len(payload))
                found = self.own if row == share.node.row else self.others
                found += zip(pieces, views(payload, pieces), strict=True)
                if (n := len(payload)) and found is self.own:
                    if share.offload:  # the background reads copies
                        self.copies += (pieces := views(share.host[i][place][:n], pieces))
                    x = (self.g if share.next_x else self.x)[i][:n]
                    snapshot = self.snapshots[i][:n] if self.snapshots else None
                    self.takes.append(make_outer_step(pieces, payload, x, x, snapshot))


class Share:
    """This rank's share of a CO2's outer state. CO2 calls it at a boundary, in the background, and at a merge.

    Args:
        node: The ranks inside this rank's node.
        shard: Whether the workers own parts of the shares.
        offload: Whether outer state and payloads are in pinned host memory.
        unit: With `shard`, each worker owns a multiple of so many elements, such as a compression's block.

    Attributes:
        x: x_{t,0}, one flat tensor per bucket. With `shard` in the paper's order, only the part that this rank owns.
        m: Outer momentum of what this rank owns.
        numbers: [5] float64: the last outer_lr, the sums of squares of m and of the last step, whether the node was
            excluded, and whether the payload holds x_{t+1,0}, not a change. They are on the payloads' device, because
            the background reads and writes them in another stream.
        stats: Statistics of the outer step that ran last.
        method: The CO2 that calls it.
    """

    method: Any

    def __init__(self, node: Node, *, shard: bool, offload: bool, unit: int = 1):
        self.node, self.shard, self.offload, self._unit = node, shard, offload, unit
        self.stats: dict[str, Tensor] = {}
        self._idle = self._copied = False
        self._merges_all = False  # see resliced

    # -- made with the method ------------------------------------------------------------------------------------------

    def parts(self, workers: int) -> int:
        """Returns the number of equal parts into which each payload must be cut."""
        return self.node.parts * (workers * self._unit if self.shard else 1)

    def owned(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Returns what this rank owns of flat tensors as long as its shares."""
        rank = self.method.allreduce.rank if self.shard else 0
        return [flat.view(self.owners, -1)[rank] for flat in flats]

    def attach(self, method: Any) -> None:
        """Makes the outer state, when the method has its buckets."""
        self.method, c = method, method.config
        self.owners = method.allreduce.world_size if self.shard else 1
        self.g = self.node.own_shares(method.buckets)
        own, new = self.owned(self.g), method.state.new
        lone = self.shard and method.in_paper_order  # then no worker holds the whole x between two boundaries
        self.x = new("outer_iterate", like=own if lone else self.g)
        # x_{t+1,0} of what this rank owns, while g holds it no more
        self.next_x = new("next_outer_iterate", like=own) if lone else []
        self.m = new("outer_momentum", like=own)
        directed = c.nesterov and (c.gap != "none" or method.in_paper_order)
        self.directions = new("outer_step", like=own) if directed else []
        # No checkpoint holds the snapshot: when its average has arrived, the payload holds the change.
        self.snapshots = [torch.zeros_like(g) for g in self.g] if c.merge == "keep_local" else []
        self.host = [pinned(len(g), b.dtype) for b, g in zip(method.buckets, self.g, strict=True) if self.offload]

    def cut(self, count: int) -> list[Sequence[slice]]:
        """Cuts the shares into fragments, and returns the places of each in the shares."""
        m, node = self.method, self.node
        wholes = {id(p): given.numel() for p, given in zip(m.params, m.trained, strict=True)}
        if node.of_shards and not self.shard:
            at = [slices_alike([(p.numel(), wholes[id(p)]) for p in b.params], count) for b in m.buckets]
        else:
            at = [slices(len(g), count, self.owners * self._unit if self.shard else 1) for g in self.g]
        self._layout: list[tuple[int, tuple[int, ...]]] = []
        return [*zip(*at, strict=True)]

    @property
    def now(self) -> Slice:
        """The current fragment."""
        return self.method.fragments[self.method.fragment_index]

    @property
    def numbers(self) -> Tensor:
        return self.now.numbers

    def _lay_out(self) -> None:
        """Finds the live parameters in all fragments, again if a storage has moved."""
        layout = [(p.data_ptr(), p.stride()) for p in self.method.params]
        if layout != self._layout:
            self._layout = layout
            for s in self.method.fragments:
                s.lay_out(self)

    @torch.no_grad()
    def start_from_params(self) -> None:
        """Sets x and the payloads to the parameters."""
        self.drain()
        for bucket in self.method.buckets:
            bucket.flatten(bucket.payload)
        copy(self.x, self.owned(self.g) if self.next_x else self.g)
        copy(self.next_x, self.x)
        self.numbers[WHOLE] = 1.0

    # -- on the main thread --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, *, idle: bool) -> None:
        """Step 3. In the paper's order, the parameters also continue from x_{t+1,0}, which the payload holds.

        Args:
            idle: Whether this rank has taken no local step since the last boundary, so that it has nothing to send.
        """
        self._lay_out()
        self._idle, self._copied, self._merges_all = idle, self.offload, False
        if not self.offload:
            return self._differences()
        copy(self.now.copies, [p for p, _ in self.now.own], queued=True)
        if self.method.in_paper_order:
            copy(*self._pairs(), queued=True)  # p <- payload

    def _differences(self) -> None:
        """g <- x - p, and in the paper's order x <- g and p <- g before, in segments that fit a cache.

        If no worker holds the whole x, the difference starts from x_{t+1,0}, and the owner corrects the average.
        """
        if not self.method.in_paper_order:
            for taken in self.now.takes:
                taken.take()
            for g in self.now.g if self._idle else ():
                g.zero_()  # p + D may have been rounded
            return
        copy(self.next_x, self.owned(self.g))
        for taken in self.now.takes:
            taken.locate()
        for s in (s for taken in self.now.takes for s in taken.segments):
            own = outer.difference(s)
            if not self.next_x:  # otherwise x is g itself
                s.x.copy_(s.d)
            if not self.offload:
                copy(s.params, s.d_views)
            s.d.copy_(own)
        if not self.offload:
            copy([p for p, _ in self.now.others], [x for _, x in self.now.others])

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the live parameters' elements in the current fragment, and the same elements of the payload."""
        self._lay_out()
        merged = self.method.fragments if self._merges_all else [self.now]
        pairs = [pair for s in merged for pair in s.own + s.others]
        return [p for p, _ in pairs], [x for _, x in pairs]

    @torch.no_grad()
    def restart(self) -> None:
        """p <- x, in all fragments. Nothing is in flight, and the ranks of the node wait for each other."""
        self._fill()
        for b in self.method.buckets:
            copy(b.params, b.payload_views, queued=True)

    def _fill(self) -> None:
        """payload <- x, in all fragments. The ranks of the node wait for each other."""
        node, buckets = self.node, self.method.buckets
        copy(self.g, self.x)
        if not node.of_shards:
            run(node.gather(node.shares(buckets), self.g, self.now.here))

    @torch.no_grad()
    def end(self) -> None:
        """The parameters become x_{t+1,0} at the end of finish(). The payload holds it, and nothing is stale."""
        copy(*self._pairs(), queued=True)
        self.numbers[ALPHA].zero_()
        if self.method.in_paper_order:
            copy(self.x, self.owned(self.g) if self.next_x else self.g)

    @torch.no_grad()
    def merge(self) -> None:
        """The merge on arrival: p <- p + D for keep_local, otherwise p <- payload. One pass, without a wait."""
        whole = self.numbers[WHOLE] > 0
        if not self.snapshots or (not read_blocks(whole) and whole):
            return copy(*self._pairs(), queued=True)
        params, changes = self._pairs()
        if read_blocks(whole):  # a GPU is not read: there p <- 0 + x
            wipe(params, whole)
        for p, change in zip(params, changes, strict=True) if self.offload else ():
            p.add_(change.to(p.device, non_blocking=True))
        if params and not self.offload:
            add_each(params, changes)

    def excluded(self) -> Tensor:
        """Returns whether the average that has arrived leaves out this node, 0-d bool on the parameters' device."""
        return on_device(self.numbers[EXCLUDED] > 0, self.method.params[0].device)

    # -- in the background ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def stages(self, reduction: Iterator[Stage]) -> Iterator[Stage]:
        """The collectives of a round, with Algorithm 1's steps 4 to 7 after the `reduction` among the nodes."""
        m, node, s = self.method, self.node, self.now
        end = self._compute_stream.record_event() if self._compute_stream else None  # of the copies to the host
        yield BACKGROUND
        if end is not None:
            yield [OtherWork(end.query, end.synchronize)], 0  # the thread waits for them as for a collective
        if self.offload:
            if self._copied:  # not at the end of finish(), for buffers alone
                self._differences()
            self._copied = False
        # the node is judged as one worker, because its ranks shared their gradients
        judge, square = m.hook(Judge), self._square(s.g, s.here).view(1)
        if not m.fragment_index:  # buffers travel with the first fragment
            square = torch.where(judge.bad_buffer() > 0, float("nan"), square)
        yield from node.sum([square])
        m.exclude(judge.judge(square[0].sqrt()))
        self.numbers[EXCLUDED].copy_(m.scalars["weight"] == 0)
        yield from reduction  # 2
        yield from self._mean_over_node()
        yield from self._outer_step(s)
        if self.shard and m.allreduce.group is not None:
            for g in s.g:
                yield from gather_parts(g.view(self.owners, -1), m.allreduce.group)
        rows = [shares[:, place] for shares, place in zip(node.shares(m.buckets), s.places, strict=True)]
        if node.of_shards:
            yield from node.gather(rows, s.g, s.here)  # only what several ranks hold
        if not m.in_paper_order and (node.of_shards or self.shard):
            copy(s.x, s.g)
        # In finish(), and after an exclusion, the parameters become x itself.
        all_finished = m.scalars["finished"] * m.reducer.scale > 1 - 1e-6
        whole = all_finished | (self.numbers[EXCLUDED] > 0)
        self.numbers[WHOLE].copy_(whole if self.snapshots else torch.ones_like(whole))
        for g, snapshot in zip(s.g, s.snapshots, strict=False):
            for part, start in zip(*(f.split(outer.segment_size(g)) for f in (g, snapshot)), strict=True):
                part.copy_(torch.where(whole, part, part - start))
        if not node.of_shards:
            yield from node.gather(rows, s.g, s.here)

    def _mean_over_node(self) -> Iterator[Stage]:
        """Averages buffers and scalars over the node's ranks, so that a node counts as one worker.

        The buffers of pipeline stages are each stage's own.
        """
        parts, node = self.now.parts, self.node
        if node.group is None:
            return
        rests = [part.rest for part in parts if len(part.rest)] if not node.separate else [parts[0].scalars.double()]
        yield from node.sum(rests)  # in float64 for stages, whose first buckets may differ in their dtypes
        for rest in rests:
            rest.div_(node.size)
        if node.separate:
            parts[0].scalars.copy_(rests[0])

    def _outer_step(self, s: Slice) -> Iterator[Stage]:
        """Steps 4 to 7 on what this rank owns. g becomes x_{t+1,0}. An average of no local step changes nothing."""
        m, c, numbers = self.method, self.method.config, s.numbers
        own, weight, moved = s.own_g, m.scalars["weight"].double(), m.scalars["steps"] > 0
        scale = torch.where(weight == 0, 1.0, 1 / weight)
        if self.next_x:
            for g in own:
                g.mul_(scale.to(g))
            scale = torch.ones_like(scale)
        sent = self._square(own, s.owned)
        for x, following, g, b in zip(s.own_x, self.next_x, own, m.buckets, strict=False):
            # each worker has sent x_{t+1,0} - p, and its local steps began at x_{t,0}, both as p's dtype holds them
            begun, taken = (values.to(b.dtype).to(x.dtype) for values in (x, following))
            g.add_((weight > 0).to(g) * (begun - taken))
            x.copy_(following)
        squares = self._square(own, s.owned) if self.next_x else sent
        sums = torch.stack([squares, numbers[M_SQUARES], numbers[STEP_SQUARES], sent])
        yield from self.node.sum([sums])
        if self.shard and m.allreduce.group is not None:
            yield sum_flats([sums], m.allreduce.group)
        delta_norm, m_norm, step_norm, sent_norm = sums.sqrt().unbind()
        delta_norm, sent_norm, last_alpha = scale * delta_norm, scale * sent_norm, numbers[ALPHA].clone()
        alpha = moved.double() * c.outer_lr
        rule = outer.rule_of(c, m.growth, delta_norm, last_alpha * step_norm, s.numel)
        beta, scale = torch.where(moved, torch.full_like(alpha, float(rule.beta)), 1.0), torch.where(moved, scale, 0.0)
        rule = replace(rule, beta=beta, alpha=alpha, last_alpha=last_alpha, scale=scale, takes_difference=False)
        if not read_blocks(moved):  # the fused pass takes plain numbers
            rule = replace(rule, beta=float(beta), alpha=float(alpha), scale=float(scale))
            rule = rule if moved else outer.Rule(nesterov=rule.nesterov, takes_difference=False)
        # In the paper's order x stays x_{t,0} until the boundary, whose differences start there.
        total = torch.zeros(4, dtype=torch.float64, device=numbers.device)
        total[2].fill_(1.0)  # of no elements: Lambda is 1
        if s.updates:
            total = outer.run_all(s.updates, replace(rule, alpha=0.0) if m.in_paper_order else rule)
        for g, step in zip(own, s.directions or s.m, strict=True) if m.in_paper_order else ():
            g.sub_(rule.alpha.to(step) * step) if isinstance(rule.alpha, Tensor) else g.sub_(step, alpha=rule.alpha)
        numbers[ALPHA].copy_(alpha)  # in place, because another stream reads it
        m_squares = total[0] - self.node.surplus(s.m, s.owned)
        self._count(s, torch.where(moved, m_squares, numbers[M_SQUARES]))
        count = max(1, sum(map(len, s.m)))
        self.stats = {"pseudo_gradient_norm": delta_norm, "momentum_norm": m_norm, "clipped_share": total[3] / count}
        if c.gap != "none":
            self.stats |= {"gap_mean": total[1] / count, "gap_max": total[2]}
        if not m.is_cut:  # the squares belong to the whole payload
            self.stats["consensus_distance"] = outer.consensus_distance(m.scalars["squares"], weight, sent_norm)

    def _count(self, s: Slice, m_squares: Tensor) -> None:
        """Sets a fragment's sums of squares, of its momentum and its last step."""
        s.numbers[M_SQUARES].copy_(m_squares)
        if s.directions:
            m_squares = self._square(s.directions, s.owned)
        s.numbers[STEP_SQUARES].copy_(m_squares)

    def _square(self, flats: Sequence[Tensor], where: Mapping[Holding, Where]) -> Tensor:
        """Returns this rank's part of the node's sum of squares, 0-d float64. `where` are their Node.places."""
        return outer.norm(flats).double().square() - self.node.surplus(flats, where)

    @torch.no_grad()
    def resliced(self) -> None:
        """Adapts a state that ranks with other shares have saved, in which fragments had other elements.

        Every fragment's sums of squares are counted. The change in flight is merged in all fragments. The saved
        payloads are zero elsewhere.
        """
        method = self.method
        for s in method.fragments:
            self._count(s, self._square(s.m, s.owned))
        self._merges_all = bool(self.snapshots) and method.allreduce.in_flight
        if self._merges_all and self.numbers[WHOLE] > 0:  # every parameter becomes x
            self._fill()

    # -- copies between a GPU and the host -----------------------------------------------------------------------------

    @property
    def _compute_stream(self) -> torch.cuda.Stream | None:
        """The GPU's stream that copies parameters to host memory and back, if there is one."""
        device = self.method.params[0].device
        return torch.cuda.current_stream(device) if self.offload and device.type == "cuda" else None

    def drain(self) -> None:
        """Waits until nothing that is queued reads or writes host memory."""
        if (stream := self._compute_stream) is not None:
            stream.synchronize()
