"""Stale synchronous parallel on real processes: a comparator, which is only measured."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.groups import ring_bytes
from core.rounds import Rounds
from core.stats import RoundStats
from core.testing.link import ThrottledLink


@dataclass
class Update:
    """An all-reduce on its way. own: what this worker has put in, [n]; total: of all workers, once it has landed."""

    own: Tensor
    total: Tensor
    work: dist.Work | None
    sent_at: float
    there_at: float

    def landed(self) -> bool:
        return (self.work is None or self.work.is_completed()) and time.perf_counter() >= self.there_at

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        time.sleep(max(0.0, self.there_at - time.perf_counter()))
        return self.total


@Rounds.register  # for bench/standin.py: what it waits for is given back
class StaleSync:
    """Every tau local steps, a clock, a worker sends what they have moved, over the number of workers, and goes on from
    all updates that have arrived and its own. It begins clock c once the updates of all clocks before c - staleness
    are there (Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS
    2013).

    There is no server: the updates of one clock are summed by an all-reduce, which lands once the slowest worker has
    sent. So a worker hears nothing of a fast peer's clock before that, which SSP allows and a server improves on; when
    it must wait is the same. params: float32, equal on all workers from here on. link: holds collectives back.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        staleness: int,
        link: ThrottledLink | None = None,
        timeout: float = 120.0,
    ):
        self.params, self.tau, self.staleness, self.link = list(params), tau, staleness, link
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.group = dist.new_group(timeout=timedelta(seconds=timeout)) if self.world_size > 1 else None
        self.server = nn.utils.parameters_to_vector(self.params).detach().clone()
        if self.world_size > 1:
            dist.broadcast(self.server, src=0)
        self.on_the_way: deque[Update] = deque()
        self.steps, self.stats = 0, RoundStats()
        self._go_on()

    @torch.no_grad()
    def step(self) -> bool:
        """Call after every optimiser step; True when a clock has ended."""
        self.steps += 1
        if self.steps % self.tau:
            return False
        own = (nn.utils.parameters_to_vector(self.params) - self.begun) / self.world_size
        self._send(own)
        arrived = time.perf_counter()
        while self.on_the_way and (len(self.on_the_way) > self.staleness or self.on_the_way[0].landed()):
            self._land()
        self.stats.exposed_seconds = time.perf_counter() - arrived
        self._go_on()
        return True

    def finish(self) -> None:
        """Waits for all that is on its way; all workers, after as many clocks each, then hold the same."""
        while self.on_the_way:
            self._land()
        self._go_on()

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def _send(self, own: Tensor) -> None:
        total, now = own.clone(), time.perf_counter()
        work = dist.all_reduce(total, group=self.group, async_op=True) if self.group is not None else None
        self.stats.bytes_sent = ring_bytes(total.nbytes, self.world_size)
        there_at = self.link.reserve(self.stats.bytes_sent) if self.link is not None else now
        self.on_the_way.append(Update(own, total, work, now, there_at))

    def _land(self) -> None:
        update = self.on_the_way.popleft()
        self.server += update.wait()
        self.stats.allreduce_seconds = time.perf_counter() - update.sent_at

    @torch.no_grad()
    def _go_on(self) -> None:
        """From what has arrived and this worker's own updates."""
        self.begun = self.server + sum((update.own for update in self.on_the_way), torch.zeros_like(self.server))
        nn.utils.vector_to_parameters(self.begun.clone(), self.params)
