"""A worker of several ranks, called an island. Its ranks synchronize gradients in every step, over their own group.

Only the first rank, the leader, takes part in generations. The other ranks get from it the sums that count and the
changes among the workers: when a reduction starts, when it is over, and after the training script's sums. So all ranks
take the same steps of Algorithm 1, and hold the same outer iterate bit for bit. An island ends as a whole. If a rank is
lost, the launcher ends the remaining ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ..buckets import keep_unchanged
from ..comm import Stage
from ..groups import of_all
from ..guards import failure
from ..hooks import Requests
from ..local_update import CHANGED
from .allreduce import ElasticAllReduce
from .joining import ElasticCO2
from .members import Members, Over, Report, WorkersChanged, packed, unpacked

PATIENCE = 10  # timeouts that a rank waits for its leader, which may wait for other workers
_groups: list[dist.ProcessGroup] = []  # keeps the island's group until the process ends, see connect


def connect(members: Members, device: torch.device) -> None:
    """Connects the ranks of an island. Their group is torch's default group."""
    store = PrefixStore(f"island/{members.name}", members.store.plain)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    ranks, within = (members.island_rank, members.island), timedelta(seconds=PATIENCE * members.timeout)
    dist.init_process_group(backend, store=store, rank=ranks[0], world_size=ranks[1], timeout=within)
    # DDP's reducer holds the GIL while it is destroyed. If it had the last reference to the group, the group would
    # wait for its thread, and that thread may wait for the GIL, to destroy the tensors of the last collective.
    _groups.append(dist.group.WORLD)  # pyright: ignore[reportArgumentType]
    failure.register()


def share_state(state: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the leader's state, tensors and plain values, on all ranks. Other ranks give None."""
    flat = packed(state)
    size = of_all(len(flat))[0]
    flat = flat if state is not None else torch.empty(size, dtype=torch.uint8, device="cpu")
    dist.broadcast(flat, src=0)
    return state or unpacked(flat)


class IslandAllReduce(ElasticAllReduce):
    """An ElasticAllReduce of the leader, whose results the other ranks of the island get."""

    votes = True

    def __init__(self, device: torch.device, **options: Any):
        super().__init__(device, **options)
        self.leads = self.members.island_rank == 0
        self.place -= self.members.island_rank
        self._reports: list[Report | None] | None = None  # of the last new generation, until the ranks share it
        self._repairs = False  # whether the reduction in flight also sends the first worker's state

    def launch(self, stages: Iterator[Stage]) -> None:
        if self.leads:
            self._repairs = self.owner.broadcasts_state
            super().launch(stages)
        else:
            self.launched, self.in_flight = self.launched + 1, True
        self.share()

    def wait(self, before_use: Sequence[Callable[[], None]] = ()) -> None:
        super().wait([self._share_sums, *before_use])

    def _share_sums(self) -> None:
        """Gives all ranks the leader's sums."""
        state = self.owner.state.shared() if self.share(repairs=self._repairs)["repairs"] else []
        for flat in filter(len, [t for b in self.owner.reducer.buckets for t in (b.payload, b.rest)] + state):
            dist.broadcast(flat.view(torch.uint8), src=0)

    def sum_of_all(self, values: Tensor) -> Tensor:
        total, changed = values.clone(), False
        dist.all_reduce(total)
        if self.leads:
            try:
                total = super().sum_of_all(total)
            except WorkersChanged:
                changed = True
        if self.share(changed=changed)["changed"]:
            raise WorkersChanged
        dist.broadcast(total, src=0)
        return total

    def share(self, **told: Any) -> dict[str, Any]:
        """Brings this rank to the leader's generation, and returns what the leader has `told`, JSON values.

        A request of one rank becomes a request of the whole island.
        """
        m, owner = self.members, self.owner
        requests = [hook for hook in owner.hooks if isinstance(hook, Requests)]
        mine = {"asked": sorted({name for hook in requests for name in hook.asked}), "reports": self._reports}
        mine["members"] = m.generation, m.names, m.planned
        mine["workers"] = self.world_size, owner.reducer.scale, self.generation, [*self.lost["launched"]]
        all_told = of_all(mine | told)
        leader, self._reports = all_told[0], None
        for hook in requests:
            hook.asked |= {name for each in all_told for name in each["asked"] if name in hook.scalars}
        if not self.leads:
            m.generation, m.names, m.planned = leader["members"]
            self.rank = m.rank * m.island + m.island_rank
            self.world_size, owner.reducer.scale, self.generation, lost = leader["workers"]
            self.lost["launched"].update(lost)
        if leader["reports"] is not None:
            self.script.on_change(leader["reports"])
        return leader

    def _changed(self, reports: list[Report | None]) -> None:
        """Lets all ranks learn of a new generation at once, when they share it."""
        self._reports = reports


class IslandCO2(ElasticCO2):
    """An ElasticCO2 of an island. Only its leader joins other workers. Its ranks first average their buffers."""

    _kind = IslandAllReduce

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        connect(self.members, self.allreduce.device)

    def _first_state(self, found: Callable[[], None]) -> tuple[bool, dict[str, Any] | None]:
        """Does what ElasticCO2 does on the leader, and gives the other ranks its state."""
        allreduce = self.allreduce
        assert isinstance(allreduce, IslandAllReduce)
        if not allreduce.leads:
            if (told := allreduce.share())["over"]:
                raise Over
            return told["training"], share_state(None)

        def begin() -> None:
            allreduce.share(over=False, training=False)
            found()
            share_state(self.script.give(self))

        try:
            training, state = super()._first_state(begin)
        except Over:
            allreduce.share(over=True)
            raise
        if state is not None:
            allreduce.share(over=False, training=training)
            share_state(state)
        return training, state

    def _fill_buffers(self) -> None:
        super()._fill_buffers()
        if CHANGED in self.scalars.sizes:
            dist.all_reduce(self.scalars[CHANGED])
        for bucket in self.buckets:
            if bucket.buffers:
                dist.all_reduce(bucket.values)
                bucket.values.div_(size := dist.get_world_size())
                keep_unchanged(bucket.values, bucket.first, size)

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()
