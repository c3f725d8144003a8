"""torch's DistributedDataParallel with the calls of the local methods: the synchronous baseline."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import failure
from .buckets import Scalars, as_real, copy, has_mean, is_dtensor, keep_unchanged, make_buckets, tensors_of, views
from .checkpoint import all_finite
from .comm import broadcast, compare, leave_group, new_group, ring_bytes
from .config import CompressionConfig
from .errors import DivergedError, UserError
from .hooks import Hook, Requests
from .local_update import Loop, of_rank, on_host, under_rank
from .stats import AsyncReadback, Mark, RoundStats, Seconds, between, mark
from .testing.link import Link, allreduce_over

EVERY, FIRST = 100, 10  # steps, of lgreco; released: every 100 after 1,000


class GradientCompression:
    """Averages the gradients of all buckets of DistributedDataParallel at once, when the last one is there.

    A choice or a rounding for the whole model waits for the whole backward pass, so nothing crosses during it. If a
    step's gradients are not finite, as while a GradScaler finds its scale, error feedback drops what it holds of them.
    compression: not float32.
    """

    def __init__(
        self,
        model: nn.Module,
        compression: CompressionConfig,
        *,
        group: dist.ProcessGroup | None,
        timeout: float,
        link: Link | None,
    ):
        params = [p for p in model.parameters() if p.requires_grad]
        compression.check(params, group)
        self._scalars = Scalars({"steps": 1, "weight": 1})
        self.buckets = make_buckets(params, [], self._scalars.numel)
        self._scalars.attach(self.buckets[0].scalars)
        device = self.buckets[0].flat.device
        self.allreduce = allreduce_over(link)(device, group=group, timeout=timeout, overlap=False, failures=failure)
        if compression.format == "lgreco":  # whose period is in steps of ddp, if it is left open
            own = replace(
                compression.lgreco, every=compression.lgreco.every or EVERY, first=compression.lgreco.first or FIRST
            )
            compression = replace(compression, lgreco=own)
        self.reducer = compression.reducer(self.buckets, self._scalars, self.allreduce.rank, self.allreduce.world_size)
        self._views = {id(p): v for b in self.buckets for p, v in zip(b.params, b.payload_views, strict=True)}
        self._waiting: list[tuple[Any, Tensor, list[Tensor], list[Tensor]]] = []

    def hook(self, _, bucket):  # DDP wants no annotation, or types it can evaluate
        """DDP's communication hook: the last bucket sets the futures of all."""
        gradients, payloads = bucket.gradients(), [self._views[id(p)] for p in bucket.parameters()]
        copy(payloads, gradients)
        future = torch.futures.Future(devices=[gradients[0].device] if gradients[0].is_cuda else None)
        self._waiting.append((future, bucket.buffer(), gradients, payloads))
        if bucket.is_last():
            self._reduce()
        return future

    @torch.no_grad()
    def _reduce(self) -> None:
        self._scalars.set("steps", 1.0)
        self._scalars.set("weight", 1.0)
        self.allreduce.launch(self.reducer.stages(self.allreduce.group, self.allreduce.launched + 1))
        self.allreduce.wait()
        for flat in (f for flats in self.reducer.state.values() for f in flats):
            flat.nan_to_num_(0.0, 0.0, 0.0)
        waiting, self._waiting = self._waiting, []
        for future, buffer, gradients, means in waiting:
            copy(gradients, means)
            future.set_result(buffer)

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's own state, in the host's memory."""
        state = {name: on_host(flats) for name, flats in self.reducer.state.items()}
        return {"reducer": state, "launched": self.allreduce.launched, "workers": self.allreduce.world_size}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned. For another number of workers, as with CO2, what was held back is lost."""
        self.allreduce.restore(state["launched"], False)
        if state["workers"] != self.allreduce.world_size:
            return
        here, saved = self.reducer.state, state["reducer"]
        shapes = [{name: [len(f) for f in flats] for name, flats in each.items()} for each in (saved, here)]
        if shapes[0] != shapes[1]:
            why = "the checkpoint's gradients were sent with another ddp_compression"
            raise UserError(f"{why}: resume with the one that wrote it")
        for name, flats in here.items():
            copy(flats, saved[name])


ASK_EVERY = 8  # steps between two exchanges of whether to stop


class DDP(Loop):
    """torch's DistributedDataParallel itself, with the calls of the local methods: every step is a round.

    Call the attribute `model` in place of the model. BatchNorm statistics stay local until finish() averages them,
    because DDP's own broadcast would block every forward pass. A model of DTensors synchronizes itself
    (training.zero.shard_model with everywhere=True); its communication is not measured: nan.

    Args:
        compression: How gradients cross the network; see GradientCompression.
        hooks: Of these, Requests are exchanged every ASK_EVERY steps.
        synchronous: Whether a model of plain tensors synchronizes itself, too (training.layouts.parallel).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        average_buffers: bool = True,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
        compression: CompressionConfig | None = None,
        hooks: Sequence[Hook] = (),
        synchronous: bool = False,
    ):
        if not any(p.requires_grad for p in model.parameters()):
            raise UserError("no parameter requires a gradient: nothing to train")
        self.tau, self.rounds, self.stats, self.model = 1, 0, RoundStats(), model
        device = next(model.parameters()).device
        self.group = new_group(group, timeout, device)
        if self.group is not None:
            self.world_size = dist.get_world_size(self.group)
            failure.register(self.group)
        self._timeout, self._link, self._bytes = timeout, link, 0
        self._buffers = [as_real(b) for b in model.buffers() if has_mean(b)] if average_buffers else []
        self._spans: list[tuple[Mark, Mark]] = []  # of each bucket: launched, landed
        self._requests = next((hook for hook in hooks if isinstance(hook, Requests)), Requests())
        # how many workers ask for each, and have diverged
        self._news = torch.zeros(len(self._requests.scalars) + 1, device=device)
        self._exchange: dist.Work | None = None
        self._late = AsyncReadback()
        self._sharded = synchronous or any(map(is_dtensor, model.parameters()))
        self.compression: GradientCompression | None = None
        if compression is not None:
            check_wire(compression, sharded=self._sharded)
        self._first_values = self._flat_buffers()
        if self.group is None or self._sharded:
            return
        tensors = tensors_of([*model.parameters(), *model.buffers()], "parameters")
        narrow = compression if compression is not None and compression.format != "float32" else None
        compare(("ddp", narrow), tensors, self.group)
        broadcast(tensors, self.group, device)
        self._first_values = self._flat_buffers()
        if narrow is not None:
            self.compression = GradientCompression(model, narrow, group=self.group, timeout=timeout, link=link)
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.13
        how: dict[str, Any] = {name: False, "init_sync": False}
        self.model = DistributedDataParallel(model, process_group=self.group, **how)
        self.model.register_comm_hook(None, self.compression.hook if self.compression else self._all_reduce)

    def _all_reduce(self, _, bucket):  # DDP wants no annotation, or types it can evaluate
        """DDP's default hook (the mean of the gradients), timed, and delayed by the emulated link if there is one."""
        gradients = bucket.buffer().div_(self.world_size)
        started = mark(gradients.device)
        sent = ring_bytes(gradients.numel() * gradients.element_size(), self.world_size)
        ready_at = self._link.reserve(sent) if self._link else 0.0
        work = dist.all_reduce(gradients, group=self.group, async_op=True)
        assert work is not None

        def land(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            time.sleep(max(0.0, ready_at - time.perf_counter()))
            self._spans.append((started, mark(gradients.device)))  # on a GPU the current stream is the collective's
            self._bytes += sent
            return future.value()[0]

        return work.get_future().then(land)

    def step(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Call it after every optimizer step. Always True, because the gradients were averaged. last: not used.

        Exposed is the last bucket's time, because backward ends at its launch. The all-reduce's time is that of all
        buckets together, without the gaps between them.
        """
        self.rounds += 1
        if self.rounds % ASK_EVERY == 0:
            self._hear()
            self._tell()
        self._requests.grant()
        self.stats = stats = RoundStats(self.rounds, local_steps=1, bytes_sent=self._bytes)
        if self._spans:
            stats.exposed_seconds, stats.allreduce_seconds = between(*self._spans[-1]), _union(self._spans)
        if self.compression is not None:
            flight = self.compression.allreduce
            stats.bytes_sent, stats.exposed_seconds = flight.bytes_sent, flight.exposed
            stats.allreduce_seconds = flight.seconds
        if self._sharded:
            stats.exposed_seconds = stats.allreduce_seconds = float("nan")
        self._bytes, self._spans = 0, []
        return True

    def _tell(self) -> None:
        """Sends what this worker asks for, and whether its parameters are no longer finite."""
        for place, asked in zip(self._news, [*self._requests.take(), 0.0], strict=True):
            place.fill_(asked)
        self._news[-1].copy_(~all_finite(self.model.parameters()))
        if self.group is not None:
            self._exchange = dist.all_reduce(self._news, group=self.group, async_op=True)

    def _hear(self, *, at_once: bool = False) -> None:
        """Reads what was sent ASK_EVERY steps ago. DivergedError on all workers if one has diverged, because they share
        all gradients. at_once: a GPU is waited for."""
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        heard = (self._news.tolist(), None) if at_once else self._late.exchange(self._news)
        *asked, diverged = heard[0] if heard else [0.0] * len(self._news)
        self._requests.receive(asked)
        if diverged > 0:
            raise DivergedError(
                f"the parameters are not finite after {self.rounds} steps or a few less: lower the learning rate, clip "
                "gradients, or look at the data"
            )

    def finish(self) -> None:
        """Averages the buffers; the parameters are equal already. DivergedError if they are not finite."""
        self._hear()
        self._tell()
        self._hear(at_once=True)
        if self._buffers and self.group is not None:
            together = self._flat_buffers()  # each buffer alone would take a round trip
            dist.all_reduce(together, group=self.group)
            together.div_(self.world_size)
            if together.element_size() >= 4:
                keep_unchanged(together, self._first_values, self.world_size)
            copy(self._buffers, views(together, self._buffers))

    @torch.no_grad()
    def _flat_buffers(self) -> Tensor:
        """A copy of the buffers, 1-d, of the widest dtype among them."""
        if not self._buffers:
            return torch.empty(0)
        return torch.cat([(b.float() if b.element_size() == 1 else b).flatten() for b in self._buffers])

    def state_dict(self) -> dict[str, Any]:
        return under_rank(
            {"rounds": self.rounds} | ({"compression": self.compression.state_dict()} if self.compression else {})
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = of_rank(state)
        self.rounds = state["rounds"]
        if self._exchange is not None:
            self._exchange.wait()
        self._exchange, self._late = None, AsyncReadback()  # the run that goes on has heard nothing yet
        self._news.zero_()
        if self.compression is not None:
            if "compression" not in state:
                raise UserError("the checkpoint's gradients were sent as float32: resume without ddp_compression")
            self.compression.load_state_dict(state["compression"])

    def close(self) -> None:
        """Leaves the process group."""
        if self.compression is not None:
            self.compression.allreduce.close()
        if self.group is not None:
            if isinstance(self.model, DistributedDataParallel):
                # Its reducer's destructor holds the interpreter's lock. If it had the last reference to the group, it
                # would wait for a thread of the group that may need that lock, to free a tensor.
                del self.model.logger, self.model.reducer
                self.model.process_group = None  # pyright: ignore[reportArgumentType] - passes without gradients go on
            leave_group(self.group, self._timeout)
            self.group = None


def check_wire(compression: CompressionConfig, *, sharded: bool) -> None:
    """Raises UserError for a narrow wire with DTensors, which synchronize themselves."""
    if sharded and compression.format != "float32":
        raise UserError(
            f"ddp_compression.format={compression.format!r} with ZeRO: shards cross as float32; leave it out"
        )


def _union(spans: list[tuple[Mark, Mark]]) -> Seconds:
    """Returns how long at least one ran; on a GPU from the first's start to the last's end, gaps included."""
    if isinstance(spans[0][0], torch.cuda.Event):
        return between(spans[0][0], spans[-1][1])
    total = until = 0.0
    for start, end in spans:
        assert not isinstance(start, torch.cuda.Event) and not isinstance(end, torch.cuda.Event)
        total += end - max(start, until)
        until = end
    return total
