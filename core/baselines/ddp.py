"""torch's DistributedDataParallel behind the calls of the local methods: the synchronous baseline."""

from __future__ import annotations

import inspect
import itertools
import math
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..buckets import Bucket, Part, Scalars, as_real, copy, has_mean, is_dtensor, keep_unchanged, views
from ..comm import PAUSE, AsyncAllReduce, Link, Stage, gather_parts, ring_bytes, sum_parts
from ..compression.quantized import HELD_BACK
from ..config import CompressionConfig
from ..errors import DivergedError, UserError, is_number
from ..groups import broadcast, compare, leave_group, new_group
from ..guards import failure
from ..guards.inputs import check_order, groups_of, tensors_of
from ..guards.workers import all_finite
from ..hooks import Hook, Requests
from ..local_update import Loop
from ..state import of_rank, on_host, under_rank
from ..stats import AsyncReadback, Mark, RoundStats, between, mark, plus

EVERY, FIRST = 100, 10  # steps of L-GreCo's period and first decision; the authors' code: every 100 after 1,000


class GradientCompression:
    """Averages gradients in a compressed format during the backward pass, as a hook of DistributedDataParallel (DDP).

    One all-reduce lasts as long as a backward pass. The hook puts each bucket that is ready in a queue. The stages take
    the buckets from there, in DDP's order, which is the same on all workers, and average each bucket by itself. The
    last bucket waits for the end. L-GreCo then chooses for later steps. DDP makes new buckets after the first step, so
    error feedback starts again. It discards values that are not finite, as while a GradScaler searches its scale.

    Args:
        model: The model that DDP wraps.
        compression: Any format except float32.
        group, timeout, link: See CommonArgs.
        inner_group: This node's ranks, which average in float32. Each then sends its share of a bucket to the ranks
            with the same share on other nodes (`group`). Not for lgreco.
    """

    def __init__(
        self,
        model: nn.Module,
        compression: CompressionConfig,
        *,
        group: dist.ProcessGroup | None,
        timeout: float,
        link: Link | None,
        inner_group: dist.ProcessGroup | None = None,
    ):
        self._params = params = [p for p in model.parameters() if p.requires_grad]
        compression.check(params, group)
        self._place, self._device = {id(p): i for i, p in enumerate(params)}, params[0].device
        self._scalars = Scalars({"steps": 1, "weight": 1})
        self._scalars.attach(torch.ones(2, device=self._device))  # every worker counts in every step
        self.allreduce = AsyncAllReduce(self._device, group=group, timeout=timeout, link=link, failures=failure)
        self._inner, self._per_node = inner_group, dist.get_world_size(inner_group) if inner_group is not None else 1
        self.allreduce.timed_groups += [inner_group] if inner_group is not None else []
        if (own := compression.lgreco) and compression.format == "lgreco":  # its defaults differ: each step is a round
            own = replace(own, every=own.every or EVERY, first=own.first or FIRST)
        self._compression = replace(compression, lgreco=own)
        self._queue = queue.SimpleQueue[tuple[dict[int, Tensor], Mark, bool]]()  # gradients, time, whether it is last
        self._ready: list[tuple[Any, Tensor]] = []  # of each bucket that is ready: its future, and DDP's buffer
        self._former: Any = None  # former buckets, whose memory a GPU may still read
        self.idle = 0.0  # seconds in which the last all-reduce waited for gradients
        self._make([[i for i, p in enumerate(params) if p.dtype == d] for d in dict.fromkeys(p.dtype for p in params)])

    def _make(self, places: list[list[int]]) -> None:
        """Makes buckets of the parameters at these places in the model, which ascend."""
        self._places, parts = places, self._per_node
        self.buckets = [Bucket([self._params[i] for i in each], [], parts=parts) for each in places]
        sent: Sequence[Any] = self.buckets
        if self._inner is not None:
            shares = [b.flat.view(parts, -1)[dist.get_rank(self._inner)] for b in self.buckets]
            sent = [Part(share, len(share), share, share[:0], share[:0]) for share in shares]
        self.reducer = self._compression.reducer(sent, self._scalars, self.allreduce.rank, self.allreduce.world_size)

    def hook(self, _, bucket):  # DDP evaluates annotations, and cannot evaluate these types
        """DDP's communication hook. The first bucket starts the all-reduce, and the last one waits for it."""
        gradients, places = bucket.gradients(), [self._place[id(p)] for p in bucket.parameters()]
        future = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
        self._ready.append((future, bucket.buffer()))
        self._queue.put((dict(zip(places, gradients, strict=True)), mark(self._device), bucket.is_last()))
        if not self.allreduce.in_flight:
            self.allreduce.launch(self._stages(self.allreduce.group, self.allreduce.launched + 1))
        with self.allreduce.counted():
            self.allreduce.resume()
        if bucket.is_last():
            self.allreduce.wait()
            self._former, ready, self._ready = None, self._ready, []
            for each, buffer in ready:
                each.set_result(buffer)
        return future

    @torch.no_grad()
    def _stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        """Yields the stages of one backward pass. They replace the gradients by their averages."""
        self.idle, turn, last, changed = 0.0, 0, False, False
        delivered, done = list[dict[int, Tensor]](), 0
        while not last:
            yield PAUSE
            began = time.perf_counter()
            gradients, ready, last = self._queue.get()
            self.idle += time.perf_counter() - began
            if isinstance(ready, torch.cuda.Event):
                torch.cuda.current_stream(self._device).wait_event(ready)
            delivered.append(gradients)
            changed |= not self._found(gradients)
            if changed and not last:
                continue  # L-GreCo can only start again when all new buckets are known
            if changed:
                self._former, turn = (self.buckets, self.reducer), 0
                self._make([*map(sorted, delivered)])
            for gradients in delivered[done:]:
                for i in self._found(gradients):
                    bucket, own = self.buckets[i], [gradients[place] for place in self._places[i]]
                    copy(bucket.payload_views, own)
                    if self._inner is not None:
                        yield from sum_parts(bucket.flat, self._inner)
                        bucket.flat.div_(self._per_node)
                    yield from self.reducer.of_bucket(i, group, number, turn)
                    if self._inner is not None:
                        yield from gather_parts(bucket.flat.view(self._per_node, -1), self._inner)
                    copy(own, bucket.payload_views)
                    for name, flats in self.reducer.state.items():
                        for flat in flats[i : i + 1] if name in HELD_BACK else flats if last else []:
                            flat.nan_to_num_(0.0, 0.0, 0.0)
                    turn += 1
            done = len(delivered)

    def _found(self, gradients: dict[int, Tensor]) -> list[int]:
        """Returns the buckets that make up one of DDP's, several after a resume. Without them DDP has made new ones."""
        found = [i for i, places in enumerate(self._places) if gradients.keys() >= {*places}]
        return found if sum(len(self._places[i]) for i in found) == len(gradients) else []

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's state in host memory."""
        counts = {"launched": self.allreduce.launched, "workers": self.allreduce.world_size, "inner": self._per_node}
        return {"reducer": on_host(self.reducer.state), "buckets": self._places} | counts

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned. UserError if another compression wrote it.

        With another number of workers, error-feedback residuals are discarded.
        """
        self.allreduce.restore(state["launched"], False)
        if (state["workers"], state.get("inner", 1)) != (self.allreduce.world_size, self._per_node):
            return
        if sorted(itertools.chain(*(places := state.get("buckets", [])))) == [*range(len(self._params))]:
            self._make(places)
        own, saved = self.reducer.state, state["reducer"]
        shapes = [{name: [len(f) for f in flats] for name, flats in each.items()} for each in (saved, own)]
        if shapes[0] != shapes[1]:
            why = "another ddp_compression compressed the gradients of the checkpoint's run"
            raise UserError(f"{why}: resume with the setting that wrote it")
        for name, flats in own.items():
            copy(flats, saved[name])


ASK_EVERY = 8  # steps between two exchanges of requests, such as to stop


class DDP(Loop):
    """torch's DistributedDataParallel with the calls of the local methods. Every step is a round.

    Call the attribute `model` in place of the model. BatchNorm statistics stay local until finish() averages them,
    because DDP's own broadcast would block every forward pass. A model of DTensors synchronizes itself
    (training.layouts.zero.shard_model with everywhere=True). Its communication is not measured, and its times are NaN.

    Args:
        model: A module on this worker's device, with at least one parameter that requires a gradient.
        group, timeout, link: See CommonArgs.
        compression: How gradients are compressed for the network, see GradientCompression.
        hooks: Only a Requests hook is used. Its requests are exchanged every ASK_EVERY steps.
        synchronous: Whether a model of plain tensors also synchronizes itself (training.layouts.parallel). Then its
            buffers stay each rank's own.
        mesh: [nodes, workers per node]. With a compression except lgreco, a node's workers average gradients in
            float32, and only the averages of the nodes are compressed.
        **options: Other arguments of DistributedDataParallel, such as bucket_cap_mb and find_unused_parameters.

    Raises:
        UserError: If no parameter requires a gradient, or the workers' models differ in shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
        compression: CompressionConfig = CompressionConfig(),  # noqa: B008 - it is frozen
        hooks: Sequence[Hook] = (),
        synchronous: bool = False,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ):
        if not any(p.requires_grad for p in tensors_of(model.parameters(), "parameters")):
            raise UserError("no parameter requires a gradient: nothing to train")
        if not (is_number(cap := options.get("bucket_cap_mb", 25)) and 0 < cap < math.inf):
            raise UserError(f"bucket_cap_mb={cap!r}: give MiB, above 0, as 25 is usual")
        self.tau, self.rounds, self.stats, self.model = 1, 0, RoundStats(), model
        device = next(model.parameters()).device
        self.group = new_group(group, timeout, device)
        if self.group is not None:
            self.world_size = dist.get_world_size(self.group)
            failure.register(self.group)
        self._timeout, self._link, self._bytes = timeout, link, 0
        self._module = model  # self.model may wrap it
        self._given = {name: b for name, b in model.named_buffers() if has_mean(b)} if not synchronous else {}
        self._buffers = [as_real(b) for b in self._given.values()]
        self._spans: list[tuple[Mark, Mark]] = []  # launch and arrival of each bucket's all-reduce
        self._requests = next((hook for hook in hooks if isinstance(hook, Requests)), Requests())
        # per request, how many workers ask for it; last, how many have diverged
        self._flags = torch.zeros(len(self._requests.scalars) + 1, device=device)
        self._exchange: dist.Work | None = None
        self._readback = AsyncReadback()
        self._sharded = synchronous or any(map(is_dtensor, model.parameters()))
        self.compression: GradientCompression | None = None
        check_compression(compression, sharded=self._sharded)
        self._first_values = self._flat_buffers()
        if self.group is None or self._sharded:
            return
        tensors = tensors_of([*model.parameters(), *model.buffers()], "parameters")
        check_order(tensors, self.group)
        compare(("ddp", compression, options), tensors, self.group)
        broadcast(tensors, self.group, device)
        self._first_values = self._flat_buffers()
        if compression.format != "float32":
            across, inner = groups_of(mesh if compression.format != "lgreco" else None, self.group)
            self.compression = GradientCompression(
                model, compression, group=across, inner_group=inner, timeout=timeout, link=link
            )
        accepted = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in accepted else "broadcast_buffers"  # torch < 2.13
        options |= {key: False for key in (name, "init_sync") if key in accepted}  # torch 2.6 has no init_sync
        self.model = DistributedDataParallel(model, process_group=self.group, **options)
        self.model.register_comm_hook(None, self.compression.hook if self.compression else self._all_reduce)

    def _all_reduce(self, _, bucket):  # see GradientCompression.hook
        """DDP's default hook, which averages the gradients, with timing and the emulated network's delay."""
        gradients = bucket.buffer().div_(self.world_size)
        started = mark(gradients.device)
        sent = ring_bytes(gradients.numel() * gradients.element_size(), self.world_size)
        ready_at = self._link.reserve(sent) if self._link else 0.0
        work = dist.all_reduce(gradients, group=self.group, async_op=True)
        assert work is not None

        def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            time.sleep(max(0.0, ready_at - time.perf_counter()))
            self._spans.append((started, mark(gradients.device)))  # on a GPU this is the collective's stream
            self._bytes += sent
            return future.value()[0]

        return work.get_future().then(finish)

    def step(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Counts a step. Call it after every optimizer step.

        exposed_seconds is the time of the last bucket, because its launch ends the backward pass. allreduce_seconds
        covers all buckets without the gaps between them. With a compression, a GPU's times contain these gaps.

        Args:
            last: Not used.

        Returns:
            True, because every step averages the gradients.

        Raises:
            DivergedError: On all workers, if the parameters are not finite.
        """
        self.rounds += 1
        if self.rounds % ASK_EVERY == 0:
            self._receive()
            self._send()
        self._requests.on_round_end()
        self.stats = stats = RoundStats(self.rounds, local_steps=1, bytes_sent=self._bytes)
        if spans := self._spans:
            times = [s for s in spans if isinstance(s[0], float)]  # on a GPU the gaps between spans count, too
            gaps = sum(max(0.0, b[0] - a[1]) for a, b in itertools.pairwise(times))  # pyright: ignore[reportOperatorIssue]
            stats.exposed_seconds = between(*spans[-1])
            stats.allreduce_seconds = between(spans[0][0], spans[-1][1], excluding=gaps)
        if self.compression is not None:
            allreduce = self.compression.allreduce
            stats.bytes_sent, stats.exposed_seconds = allreduce.bytes_sent, allreduce.exposed
            stats.allreduce_seconds = plus(allreduce.seconds, -self.compression.idle)
        if self._sharded:
            stats.exposed_seconds = stats.allreduce_seconds = float("nan")
        self._bytes, self._spans = 0, []
        return True

    def _send(self) -> None:
        """Starts to send this worker's requests, and whether its parameters are no longer finite."""
        for place, asked in zip(self._flags, [*self._requests.take(), 0.0], strict=True):
            place.fill_(asked)
        self._flags[-1].copy_(~all_finite(self.model.parameters()))
        if self.group is not None:
            self._exchange = dist.all_reduce(self._flags, group=self.group, async_op=True)

    def _receive(self, *, at_once: bool = False) -> None:
        """Reads the flags that were sent ASK_EVERY steps ago. `at_once` waits for a GPU.

        DivergedError on all workers if one has diverged, because all of them apply the same gradients.
        """
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        received = (self._flags.tolist(), None) if at_once else self._readback.exchange(self._flags)
        *asked, diverged = received[0] if received else [0.0] * len(self._flags)
        self._requests.receive(asked)
        if diverged > 0:
            raise DivergedError(
                f"the parameters are not finite after {self.rounds} steps or a few less: lower the learning rate, clip "
                "gradients, or check the data"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self) -> None:
        """Averages the buffers. The parameters are equal already. DivergedError if they are not finite."""
        self._receive()
        self._send()
        self._receive(at_once=True)
        if self._buffers and self.group is not None:
            self._buffers = self._live_buffers()
            flat = self._flat_buffers()  # one all-reduce for all buffers saves round trips
            dist.all_reduce(flat, group=self.group)
            flat.div_(self.world_size)
            if flat.element_size() >= 4:
                keep_unchanged(flat, self._first_values, self.world_size)
            copy(self._buffers, views(flat, self._buffers))

    def _live_buffers(self) -> list[Tensor]:
        """Returns the buffers, which the model may have replaced. One of another shape or dtype is not averaged."""
        now, live = dict(self._module.named_buffers()), list[Tensor]()
        for name, given in self._given.items():
            new = now.get(name, given)
            alike = has_mean(new) and (new.shape, new.dtype, new.device) == (given.shape, given.dtype, given.device)
            live.append(as_real(new if alike else given))
        return live

    @torch.no_grad()
    def _flat_buffers(self) -> Tensor:
        """Returns a copy of the buffers, 1-d, in the widest of their dtypes."""
        if not self._buffers:
            return torch.empty(0)
        return torch.cat([(b.float() if b.element_size() == 1 else b).flatten() for b in self._buffers])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, under this worker's rank."""
        return under_rank(
            {"rounds": self.rounds} | ({"compression": self.compression.state_dict()} if self.compression else {})
        )

    @torch.inference_mode(False)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned."""
        state = of_rank(state)
        self.rounds = state["rounds"]
        if self._exchange is not None:
            self._exchange.wait()
        self._exchange, self._readback = None, AsyncReadback()  # discards what was sent before
        self._flags.zero_()
        if self.compression is not None:
            if "compression" not in state:
                raise UserError("the checkpoint is of a run with float32 gradients: resume without ddp_compression")
            self.compression.load_state_dict(state["compression"])

    def close(self) -> None:
        if self.compression is not None:
            self.compression.allreduce.close()
        if self.group is not None:
            if isinstance(self.model, DistributedDataParallel):
                # The destructor of DDP's reducer holds the interpreter's lock. If it held the last reference to the
                # group, it would wait for a thread of the group that may need the same lock to free a tensor.
                del self.model.logger, self.model.reducer
                self.model.process_group = None  # pyright: ignore[reportArgumentType] - evaluation still works
            leave_group(self.group, self._timeout)
            self.group = None


def check_compression(compression: CompressionConfig, *, sharded: bool) -> None:
    """Raises UserError for a compression with DTensors, whose gradients synchronize without it."""
    if sharded and compression.format != "float32":
        raise UserError(
            f"ddp_compression.format={compression.format!r} with ZeRO: shards are sent as float32; leave it out"
        )
