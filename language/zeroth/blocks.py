"""Training a model that does not fit the device: its blocks are in host memory and are uploaded one at a time.

While block i computes, block i + 1 is uploaded and block i - 1 is offloaded (threads on a CPU, streams on a GPU). The
first block is uploaded during the last block, the head and the exchange of scalars. A block moves once a step in each
direction, because its update is applied when it is next uploaded (ZO2's idea). If one process measures both W + eps z
and W - eps z, two passes go through the model in turns. The device holds three blocks (Window), the embedding and the
head.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.buckets import unique
from core.comm import gather_parts
from core.errors import CollectiveError, UserError
from core.shares import pinned

from .order import Noise, Update, Weights, weights_uncached

T = TypeVar("T")
Hold = Callable[[int], None]
ALIGNED = 64  # bytes: tensors begin at multiples of it in a block


class BlockStream:
    """Keeps a model's blocks in host memory. Pass it to ZerothOrder as `make_forward`.

        make_forward=functools.partial(BlockStream, blocks=model.transformer.h)

    Losses and updates equal ScratchCopy's, bit for bit.

    Args:
        model: The model.
        weights: Its trained parameters.
        blocks: Modules that the model calls one after another, in this order, in every forward pass.
        device: Where to compute. None: where the model is. Tensors outside the blocks move there.
        hold: See Lane.
        make_host: Allocates uint8 [its argument] for a block, such as a mapped file. None: host memory, pinned if the
            device is a GPU.
        share: A group of the workers of one node. Each uploads a part of a block and sends it to the group. All must
            make equally many passes.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        *,
        blocks: Sequence[nn.Module],
        device: torch.device | None = None,
        hold: Hold | None = None,
        make_host: Callable[[int], Tensor] | None = None,
        share: dist.ProcessGroup | None = None,
    ):
        self._model, self._weights = model, weights
        self.device = device or weights.params[0].device
        self.share = share
        inside = {id(m) for block in blocks for m in block.modules()}
        _refuse(model, blocks, inside)
        parts = dist.get_world_size(share) if share is not None else 1
        make = pinned if self.device.type == "cuda" else torch.empty
        make_host = make_host or functools.partial(make, dtype=torch.uint8)
        self.blocks = [Block(block, weights, make_host=make_host, parts=parts) for block in blocks]
        in_blocks = {id(t) for block in self.blocks for t in block.tensors}
        for t in [*model.parameters(), *model.buffers()]:
            if id(t) not in in_blocks:
                t.data = t.data.to(self.device)
        if weights.config.rng == "device":
            weights.noise = Noise(weights.config.seed, self.device)
        self.window = Window(self.blocks, self.device, hold, share)
        self._passes = Passes(self.device)
        self._rest = Rest(weights, self.window, [p for p in weights.params if id(p) not in in_blocks])
        self._signs: tuple[int, ...] = ()  # of eps z, in each pass
        self._now = 0  # step
        self._came = 0  # passes that have reached the block that computes
        self._updated = False  # whether that block was updated after its upload
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self._enter(i))
            block.register_forward_hook(lambda *_, i=i: self._leave(i))
        for module in model.modules():
            if id(module) not in inside and module._parameters:
                module.register_forward_pre_hook(lambda m, _: self._perturb_rest(m))
                module.register_forward_hook(lambda m, *_: self._rest.restore(m), always_call=True)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device in addition to the weights outside the blocks."""
        return self.window.nbytes + self._rest.beyond

    @property
    def pending(self) -> list[Update]:
        """The deferred updates."""
        return list(self._rest.behind)

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Defers the update of each block to its next upload, or to `flush`."""
        if not update.dropped:
            for part in (self._rest, *self.blocks):
                part.behind.append(update)

    @torch.no_grad()
    def flush(self) -> None:
        """Applies the deferred updates."""
        self.window.forget_ahead()
        self._rest.catch_up()
        for block in self.blocks:
            if block.behind:
                slot = self.window.scratch[: block.nbytes]
                slot.copy_(block.host)
                self._update(block, slot)
                block.host.copy_(slot)

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """A context in which the model can be called at W with all updates applied. Uploads are not shared."""
        self.flush()
        self._signs, self.window.shares = (0,), False
        try:
            with torch.no_grad(), weights_uncached(), self._passes.under_way(0):
                yield
        finally:
            self._end()
            self.window.forget_ahead()
            self.window.shares = True

    def losses(self, loss: Callable[[nn.Module], Any], step: int, signs: tuple[int, ...]) -> list[Any]:
        """loss(model) at W + sign eps z for each of one or two signs. Sign 0 means W itself."""
        self._now, self._signs = step, signs
        self._rest.catch_up()
        self.window.begin_first()
        try:
            return self._passes.run(functools.partial(loss, self._model), len(signs))
        finally:
            self._end()

    def _enter(self, i: int) -> None:
        """Before block i computes: uploads, updates, and perturbs it for this pass."""
        if self._passes.number is None:
            return
        if i == 0:
            self._passes.pass_on()  # so that both passes have finished the embedding
        block, sign = self.blocks[i], self._signs[self._passes.number]
        if self.window.at != i or self._came == len(self._signs):
            self._take(i)
        self._came += 1
        views = block.views(self.window.slot)
        if sign:
            moved = block.views(self.window.scratch)
            for number, w, out in zip(block.numbers, views, moved, strict=True):
                if number is not None:
                    self._weights.perturb(number, w, out, self._now, sign)
            views = [w if n is None else out for n, w, out in zip(block.numbers, views, moved, strict=True)]
        if self._came == len(self._signs) and self._updated:
            self.window.keep()
        block.show(views)

    def _take(self, i: int) -> None:
        """Replaces the previous block by block i, and updates it."""
        at = self.window.at
        if i != (at + 1) % len(self.blocks) or self._came not in (0, len(self._signs)):
            raise UserError(
                f"block {i} is called after block {at}: give `blocks` in the order in which the model calls them"
            )
        self.window.move_on()
        self._came, self._updated = 0, bool(self.blocks[i].behind)
        self._update(self.blocks[i], self.window.slot)

    def _update(self, block: Block, slot: Tensor) -> None:
        """Applies the deferred updates to a copy of the block, bytes [nbytes]."""
        for number, w in zip(block.numbers, block.views(slot), strict=True):
            if number is not None:
                for update in block.behind:
                    self._weights.update(number, w, update)
        block.behind.clear()

    def _leave(self, i: int) -> None:
        """After block i has computed for this pass."""
        if self._passes.number is not None:
            self.blocks[i].show(self.blocks[i].views(self.blocks[i].host))
            self._passes.pass_on()

    def _end(self) -> None:
        """After all passes: everything is back in host memory, and the upload of the first block has begun."""
        if self._updated and self._came < len(self._signs):  # a pass failed, and only the device has the updates
            self.window.keep()
        self.window.close()
        self._came, self._updated = 0, False
        for block in self.blocks:
            block.show(block.views(block.host))

    def _perturb_rest(self, module: nn.Module) -> None:
        """Before a module outside the blocks computes: perturbs it."""
        number = self._passes.number
        if number is not None and self._signs[number]:
            self._rest.perturb(module, self._now, self._signs[number])


class Rest:
    """The parameters outside the blocks. They stay on the device, and are perturbed one module at a time.

    The perturbed copies are in the window's scratch memory, as far as it has room.

    Attributes:
        behind: Updates that are not applied yet.
        beyond: Bytes of perturbed copies that did not fit the scratch memory.
    """

    def __init__(self, weights: Weights, window: Window, params: Sequence[nn.Parameter]):
        self._weights, self._window, self._params = weights, window, params
        self.behind: list[Update] = []
        self.beyond = 0
        self._local = threading.local()

    @property
    def _perturbed(self) -> dict[int, list[tuple[nn.Parameter, Tensor]]]:
        """In this thread's pass, from the id of each module that computes to its parameters and their values before."""
        return self._local.__dict__.setdefault("perturbed", {})

    def catch_up(self) -> None:
        """Applies the deferred updates."""
        for p in self._params:
            for update in self.behind:
                self._weights.update(self._weights.numbers[id(p)], p.data, update)
        self.behind.clear()

    def perturb(self, module: nn.Module, step: int, sign: int) -> None:
        """Before the module computes: sets its own parameters to W + sign eps z, unless an outer module already has."""
        around = {id(p): p for kept in self._perturbed.values() for p, _ in kept}
        numbers, kept = self._weights.numbers, self._perturbed.setdefault(id(module), [])
        spare = self._window.scratch  # free: passes take turns between blocks, so no block computes now
        at, more = sum(aligned(p.nbytes) for p in around.values()), 0
        for p in module._parameters.values():
            if p is None or id(p) not in numbers or id(p) in around:
                continue
            size = aligned(p.nbytes)
            fits = at + size <= spare.nbytes
            out = spare[at : at + p.nbytes].view(p.dtype).view(p.shape) if fits else torch.empty_like(p.data)
            at, more = (at + size, more) if fits else (at, more + size)
            self._weights.perturb(numbers[id(p)], p.data, out, step, sign)
            kept.append((p, p.data))
            around[id(p)] = p
            p.data = out
        self.beyond = max(self.beyond, more)

    def restore(self, module: nn.Module) -> None:
        """After the module has computed: restores its parameters."""
        for p, data in self._perturbed.pop(id(module), ()):
            p.data = data


class Passes:
    """Runs one or two passes, each in a thread. With two, only one computes until it passes its turn on."""

    def __init__(self, device: torch.device):
        self._device = device
        self._local = threading.local()
        self._condition = threading.Condition()
        self._turn, self._going, self._failed = 0, set[int](), False  # whose turn it is; the passes that have not ended

    @property
    def number(self) -> int | None:
        """The number of this thread's pass, from 0. None if the model is called outside a pass."""
        return getattr(self._local, "number", None)

    @contextlib.contextmanager
    def under_way(self, number: int) -> Iterator[None]:
        """A context in which this thread makes the pass of that number."""
        self._local.number = number
        try:
            yield
        finally:
            self._local.number = None

    def run(self, work: Callable[[], T], count: int) -> list[T]:
        """Calls `work` in one or two passes.

        Returns:
            Its result in each pass. If a pass fails, its exception is raised.
        """
        self._turn, self._going, self._failed = 0, set(range(count)), False
        kind = self._device.type
        stream = torch.cuda.current_stream(self._device) if kind == "cuda" else None
        cast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}

        def go(number: int) -> T:
            # grad mode, autocast and stream are per thread. A cache would mix up the weights of the passes.
            passing = torch.autocast(kind, **cast, cache_enabled=False)
            try:
                with self.under_way(number), torch.no_grad(), passing, torch.cuda.stream(stream):
                    self._await(number)
                    return work()
            except BaseException:
                self._failed = True
                raise
            finally:
                self._going.discard(number)
                self._give(1 - number)

        with ThreadPoolExecutor(1) as pool:
            beside = [pool.submit(go, number) for number in range(1, count)]
            try:
                found = [go(0)]
            except _OtherFailed:
                found = []
            return found + [other.result() for other in beside]

    def pass_on(self) -> None:
        """Gives the other pass its turn, if there is one, and waits for this thread's next turn."""
        me = self.number
        assert me is not None
        if 1 - me in self._going:
            self._give(1 - me)
            self._await(me)

    def _give(self, turn: int) -> None:
        with self._condition:
            self._turn = turn
            self._condition.notify_all()

    def _await(self, me: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == me or self._failed)
        if self._failed:
            raise _OtherFailed


class _OtherFailed(Exception):
    """The other pass has failed, and raises the reason itself."""


def _refuse(model: nn.Module, blocks: Sequence[nn.Module], inside: set[int]) -> None:
    """Refuses a model that cannot be streamed block by block."""
    if not blocks:
        raise UserError("no blocks to stream: give the modules that the model calls one after the other")
    owners: dict[int, str] = {}
    for i, block in enumerate(blocks):
        for t in unique([*block.parameters(), *block.buffers()]):
            if owners.setdefault(id(t), f"block {i}") != f"block {i}":
                raise UserError(f"block {i} shares a tensor with {owners[id(t)]}: such blocks cannot be streamed")
    for name, module in model.named_modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if id(module) in inside or not own:
            continue
        if any(id(m) in inside for m in module.modules()):
            raise UserError(f"{name or 'the model'} has tensors of its own beside blocks: they cannot be streamed")
        if shared := [owners[id(t)] for t in own if id(t) in owners]:
            raise UserError(f"{name} shares a tensor with {shared[0]}: such blocks cannot be streamed")


# -- where blocks lie -------------------------------------------------------------------------------------------------


class Lane:
    """Runs copies one after another during computation, in a thread on a CPU and in a stream on a GPU.

    Args:
        device: Where to compute.
        hold: Called with the bytes of each finished copy, to emulate a slow bus on a CPU.

    Attributes:
        bytes: Bytes of this worker's part of all copies.
        seconds: Seconds that they took, on a CPU only.
    """

    def __init__(self, device: torch.device, hold: Hold | None):
        self._device, self._hold = device, hold
        self.bytes, self.seconds = 0, 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1)

    def copy(self, target: Tensor, source: Tensor, after: Any = None, share: dist.ProcessGroup | None = None) -> Any:
        """Starts a copy after all work queued on the device.

        Args:
            target: Where to copy to.
            source: Where to copy from.
            after: Another lane's copy, which must end first.
            share: Each worker of this group copies its part of `source` and sends it to the group.

        Returns:
            A handle for `wait`.
        """
        source = own_part(source, share)
        self.bytes += source.nbytes
        if self._thread is not None:
            return self._thread.submit(self._copy, target, source, after, share)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            own_part(target, share).copy_(source, non_blocking=True)
            if share is not None:
                gather(target, share)
            return self._stream.record_event()

    def _copy(
        self, target: Tensor, source: Tensor, after: Future[None] | None, share: dist.ProcessGroup | None
    ) -> None:
        if after is not None:
            after.result()
        began = time.perf_counter()
        own_part(target, share).copy_(source)
        if self._hold is not None:
            self._hold(source.nbytes)
        self.seconds += time.perf_counter() - began
        if share is not None:
            gather(target, share)


def own_part(flat: Tensor, share: dist.ProcessGroup | None) -> Tensor:
    """The part that this worker of the group copies. Without a group it is the whole."""
    return flat if share is None else flat.view(dist.get_world_size(share), -1)[dist.get_rank(share)]


def gather(flat: Tensor, share: dist.ProcessGroup) -> None:
    """Receives the other workers' parts of a flat tensor."""
    try:
        for work in gather_parts(flat, share)[0]:
            work.wait()
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {dist.get_rank()}: another worker's part of a block did not come: "
            f"{str(error).strip().partition(chr(10))[0]}"
        ) from None


def wait(copy: Any, device: torch.device, *, host: bool = False) -> None:
    """Waits for a copy. On a GPU only the current stream waits, unless `host` is True."""
    if isinstance(copy, Future):
        copy.result()
    elif copy is not None and host:
        copy.synchronize()
    elif copy is not None:
        torch.cuda.current_stream(device).wait_event(copy)


def aligned(nbytes: int, to: int = ALIGNED) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-nbytes // to) * to


class Block:
    """A module whose tensors are contiguous in host memory, so that `parts` workers can upload equal parts.

    Attributes:
        host: The memory, uint8 [nbytes].
        tensors: The module's parameters and buffers.
        numbers: Their numbers in Weights. None for a tensor that is not trained.
        behind: Updates that are not applied yet.
    """

    def __init__(self, module: nn.Module, weights: Weights, *, make_host: Callable[[int], Tensor], parts: int):
        self.tensors = unique([*module.parameters(), *module.buffers()])
        self.numbers = [weights.numbers.get(id(t)) for t in self.tensors]
        self._places, self.nbytes = [], 0
        for t in self.tensors:
            self._places.append(self.nbytes)
            self.nbytes += aligned(t.nbytes)
        self.nbytes = aligned(self.nbytes, ALIGNED * parts)
        self.host = make_host(self.nbytes)
        for t, view in zip(self.tensors, self.views(self.host), strict=True):
            view.copy_(t.data)
            t.data = view
        self.behind: list[Update] = []

    def views(self, flat: Tensor) -> list[Tensor]:
        """The block's tensors as views of flat bytes."""
        places = zip(self.tensors, self._places, strict=True)
        return [flat[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in places]

    def show(self, views: Sequence[Tensor]) -> None:
        """Makes the module compute with these tensors from now on."""
        for t, view in zip(self.tensors, views, strict=True):
            t.data = view

    def versions(self) -> list[int]:
        """Version counters, which change if something else writes to the parameters, as load_state_dict does."""
        return [t._version for t in self.tensors]


class _Ahead(NamedTuple):
    """A block whose upload has begun.

    Attributes:
        number: The block's number.
        copy: The handle from Lane.copy.
        versions: The block's versions when the upload began.
    """

    number: int
    copy: Any
    versions: list[int]


class Window:
    """Memory on the device for three blocks: the current block, the next block, and a perturbed copy of the current.

    Attributes:
        at: The number of the block that computes. -1 before the first.
        slot: The bytes of that block.
        scratch: Memory for the perturbed copy.
        shares: Whether uploads are shared now.
        waited: Seconds that the computation waited for uploads, on a CPU only.
    """

    def __init__(
        self, blocks: Sequence[Block], device: torch.device, hold: Hold | None, share: dist.ProcessGroup | None
    ):
        self._blocks, self._device, self._share = blocks, device, share
        self.upload, self.offload = Lane(device, hold), Lane(device, hold)
        self.waited = 0.0
        self.shares = True
        size = max(block.nbytes for block in blocks)
        *self._slots, self.scratch = torch.empty(3, size, dtype=torch.uint8, device=device)
        self.nbytes = 3 * size
        self.at = -1
        self._slot = 1  # the slot of the current block; the next block uses the other slot
        self._ahead: _Ahead | None = None
        self._offloaded: Any = None  # the newest copy to the host

    @property
    def slot(self) -> Tensor:
        """The bytes of the current block, uint8 [its nbytes]."""
        return self._slots[self._slot][: self._blocks[self.at].nbytes]

    def move_on(self) -> None:
        """Waits for the next block, and starts the upload of its successor. The first block follows the last.

        A model of one block does not upload it again before it is offloaded.
        """
        number, count = (self.at + 1) % len(self._blocks), len(self._blocks)
        if self._ahead is None:
            self._begin(number)
        assert self._ahead is not None and self._ahead.number == number
        began = time.perf_counter()
        wait(self._ahead.copy, self._device)
        self.waited += time.perf_counter() - began
        self._ahead, self._slot, self.at = None, 1 - self._slot, number
        if count > 1:
            self._begin((number + 1) % count)

    def begin_first(self) -> None:
        """Starts to upload the first block, unless an upload has begun and the block has not changed since."""
        if self._ahead is not None and self._ahead.versions != self._blocks[0].versions():
            self.forget_ahead()
        if self._ahead is None:
            self._begin(0)

    def _begin(self, number: int) -> None:
        """Uploads a block into the other slot, after the last offload, which frees it."""
        block = self._blocks[number]
        slot = self._slots[1 - self._slot][: block.nbytes]
        copy = self.upload.copy(slot, block.host, self._offloaded, self._share if self.shares else None)
        self._ahead = _Ahead(number, copy, block.versions())

    def forget_ahead(self) -> None:
        """Waits for the upload in progress and discards it."""
        if self._ahead is not None:
            wait(self._ahead.copy, self._device)
        self._ahead = None

    def keep(self) -> None:
        """Starts to offload the current block."""
        self._offloaded = self.offload.copy(self._blocks[self.at].host, self.slot)

    def close(self) -> None:
        """Ends a step, also a failed one: all blocks are in host memory, and only the first may be uploading."""
        wait(self._offloaded, self._device, host=True)
        self._offloaded = None
        if self._ahead is not None and self._ahead.number != 0:
            self.forget_ahead()
        self.at = -1
