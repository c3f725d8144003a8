"""Training a model that does not fit the device: its blocks lie in the host's memory and pass through one at a time.

While block i computes, block i + 1 is uploaded and block i - 1 offloaded: two threads beside the computation on a CPU,
two streams beside its own on a GPU (which was not run). A block is moved once a step each way: the update of the step
before is applied when the block next comes by (ZO2's idea), and where one process measures both W + eps z and
W - eps z, two passes go through the model side by side, block by block.

On the device are, beside what belongs to no block (embedding, head): two blocks as they are and one perturbed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..flat import unique
from .noise import Noise
from .replay import Update
from .weights import Weights

_ALIGNED = 64  # bytes, where a tensor begins in a block
Hold = Callable[[int], None]


class Block:
    """A module whose tensors lie one after the other in one piece of the host's memory."""

    def __init__(self, module: nn.Module, weights: Weights, *, pin: bool):
        numbers = {id(p): i for i, p in enumerate(weights.params)}
        self.tensors = unique([*module.parameters(), *module.buffers()])
        self.numbers = [numbers.get(id(t)) for t in self.tensors]  # in weights; None: not trained
        self._places, self.nbytes = [], 0
        for t in self.tensors:
            self._places.append(self.nbytes)
            self.nbytes += -(-t.nbytes // _ALIGNED) * _ALIGNED
        self.host = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pin)
        for t, view in zip(self.tensors, self.views(self.host), strict=True):
            view.copy_(t.data)
            t.data = view
        self.behind: list[Update] = []  # not applied yet

    def views(self, flat: Tensor) -> list[Tensor]:
        """The block's tensors in a flat one of bytes."""
        places = zip(self.tensors, self._places, strict=True)
        return [flat[at : at + t.nbytes].view(t.dtype).view(t.shape) for t, at in places]

    def show(self, views: Sequence[Tensor]) -> None:
        """From here on the module computes with these."""
        for t, view in zip(self.tensors, views, strict=True):
            t.data = view


class Lane:
    """Copies beside the computation, one after the other: a thread on a CPU, a stream on a GPU.

    hold: called with a copy's bytes when it is done, to emulate a slow bus on a CPU. Attributes: bytes, seconds (on a
    CPU), of all copies.
    """

    def __init__(self, device: torch.device, hold: Hold | None):
        self._hold = hold
        self.bytes, self.seconds = 0, 0.0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = None if self._stream else ThreadPoolExecutor(1)

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> Any:
        """Begins a copy, after another lane's and what the device computes so far; returns what `wait` takes."""
        self.bytes += source.nbytes
        if self._thread is not None:
            return self._thread.submit(self._copy, target, source, after)
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _copy(self, target: Tensor, source: Tensor, after: Future[None] | None) -> None:
        if after is not None:
            after.result()
        began = time.perf_counter()
        target.copy_(source)
        if self._hold is not None:
            self._hold(source.nbytes)
        self.seconds += time.perf_counter() - began


def wait(copy: Any) -> None:
    """Until a copy is through: the host on a CPU, the current stream on a GPU."""
    if isinstance(copy, Future):
        copy.result()
    elif copy is not None:
        torch.cuda.current_stream().wait_event(copy)


class Turns:
    """Two passes through a model take turns: only one of them runs at a time."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._left: set[int] = set()
        self._failed = False

    def begin(self, me: int) -> None:
        """Waits for this pass's first turn."""
        with self._condition:
            self._await(me)

    def pass_on(self, me: int) -> None:
        """The other's turn, and then again this one's."""
        with self._condition:
            if 1 - me not in self._left:
                self._turn = 1 - me
                self._condition.notify_all()
                self._await(me)

    def leave(self, me: int, *, failed: bool) -> None:
        with self._condition:
            self._left.add(me)
            self._failed |= failed
            self._turn = 1 - me
            self._condition.notify_all()

    def _await(self, me: int) -> None:
        self._condition.wait_for(lambda: self._turn == me or self._failed)
        if self._failed:
            raise _OtherFailed


class _OtherFailed(Exception):
    """The pass beside this one has failed, and says why."""


class BlockStream:
    """Holds a model's blocks in the host's memory; for ZerothOrder, as `make_forward`.

        make_forward=functools.partial(BlockStream, blocks=model.transformer.h)

    blocks: modules that the model calls one after the other, in this order, in every forward pass. device: where to
    compute (None: where the model is); what belongs to no block is moved there, and is perturbed a module at a time.
    hold: see Lane. Losses and updates are ScratchCopy's, bit for bit.

    Attributes: upload, offload, the Lanes; waited, seconds (on a CPU) that the computation waited for uploads;
    device_bytes, what is held on the device beyond the weights that belong to no block.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        *,
        blocks: Sequence[nn.Module],
        device: torch.device | None = None,
        hold: Hold | None = None,
    ):
        self._model, self._weights = model, weights
        self.device = device or weights.params[0].device
        inside = {id(m) for block in blocks for m in block.modules()}
        _refuse(model, blocks, inside)
        self.blocks = [Block(block, weights, pin=self.device.type == "cuda") for block in blocks]
        in_blocks = {id(t) for block in self.blocks for t in block.tensors}
        others = [t for t in unique([*model.parameters(), *model.buffers()]) if id(t) not in in_blocks]
        for t in others:
            t.data = t.data.to(self.device)
        if weights.config.rng == "device":
            weights.noise = Noise(weights.config.seed, self.device)
        self._numbers = {id(p): i for i, p in enumerate(weights.params)}
        self._resident = [i for i, p in enumerate(weights.params) if id(p) not in in_blocks]
        self._behind: list[Update] = []  # of what belongs to no block
        size = max(block.nbytes for block in self.blocks)
        self._arena = torch.empty(3 * size, dtype=torch.uint8, device=self.device)
        self._slots, self._scratch = (self._arena[:size], self._arena[size : 2 * size]), self._arena[2 * size :]
        self._spare = self._arena[size:]  # free before the first block and after the last
        self.device_bytes = self._arena.nbytes
        self.upload, self.offload = Lane(self.device, hold), Lane(self.device, hold)
        self.waited = 0.0
        self._local = threading.local()  # sign and number of the pass that runs in a thread
        self._uploads: dict[int, Any] = {}
        self._offloads: dict[int, Any] = {}
        self._at, self._passes = -1, 0  # the block on the device, and how many passes have come to it
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self._enter(i))
            block.register_forward_hook(lambda *_, i=i: self._leave(i))
        for module in model.modules():
            if id(module) not in inside and module._parameters:
                module.register_forward_pre_hook(lambda m, _: self._perturb(m))
                module.register_forward_hook(lambda m, *_: self._restore(m))

    @property
    def pending(self) -> list[Update]:
        """Updates that were put off."""
        return list(self._behind)

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """When a block next comes by, or at `flush`."""
        if not update.dropped:
            for behind in (self._behind, *(block.behind for block in self.blocks)):
                behind.append(update)

    @torch.no_grad()
    def flush(self) -> None:
        """Applies what was put off."""
        self._catch_up()
        for block in self.blocks:
            if block.behind:
                slot = self._slots[0][: block.nbytes]
                slot.copy_(block.host)
                self._update(block, slot)
                block.host.copy_(slot)

    def losses(self, loss: Callable[[nn.Module], Any], step: int, direction: int, signs: tuple[int, ...]) -> list[Any]:
        """loss(model) at W + sign eps z for each sign, of which there are one or two; 0 stands for W itself."""
        self._now, self._signs = (step, direction), signs
        self._catch_up()
        self._begin_upload(0)
        self._turns = Turns()
        found: list[Any] = [None] * len(signs)
        errors: list[BaseException] = []

        def run(number: int) -> None:
            failed = True
            try:
                with torch.no_grad():
                    self._local.sign, self._local.number = signs[number], number
                    if number:
                        self._turns.begin(number)
                    found[number] = loss(self._model)
                failed = False
            except _OtherFailed:
                pass
            except BaseException as error:
                errors.append(error)
            finally:
                self._local.sign = None
                self._turns.leave(number, failed=failed)

        beside = [threading.Thread(target=run, args=(number,)) for number in range(1, len(signs))]
        self._turns._left |= set() if beside else {1}
        for thread in beside:
            thread.start()
        run(0)
        for thread in beside:
            thread.join()
        self._end()
        if errors:
            raise errors[0]
        return found

    # -- blocks ---------------------------------------------------------------------------------------------

    def _enter(self, i: int) -> None:
        """Before block i computes: it is on the device, updated, and perturbed for this pass."""
        sign = getattr(self._local, "sign", None)
        if sign is None:  # the model is called by somebody else
            return
        if i == 0 and len(self._signs) > 1:  # so that both passes are through the embedding
            self._turns.pass_on(self._local.number)
        block, slot = self.blocks[i], self._slots[i % 2]
        if self._at != i:
            self._take(i)
        self._passes += 1
        views = block.views(slot)
        if sign:
            moved = block.views(self._scratch)
            for number, w, out in zip(block.numbers, views, moved, strict=True):
                if number is not None:
                    self._weights.perturb(number, w, out, *self._now, sign)
            views = [w if n is None else out for n, w, out in zip(block.numbers, views, moved, strict=True)]
        if self._passes == len(self._signs) and self._updated:
            self._offloads[i % 2] = self.offload.copy(block.host, slot[: block.nbytes])
        block.show(views)

    def _take(self, i: int) -> None:
        """Block i, uploaded and updated, into its slot; the next one's upload begins."""
        if i != (self._at + 1) % len(self.blocks) or self._passes not in (0, len(self._signs)):
            raise UserError(
                f"block {i} is called after block {self._at}: give `blocks` in the order in which the model calls them"
            )
        if i not in self._uploads:
            self._begin_upload(i)
        began = time.perf_counter()
        wait(self._uploads.pop(i))
        self.waited += time.perf_counter() - began
        block = self.blocks[i]
        self._updated = bool(block.behind)
        if self._updated:
            self._update(block, self._slots[i % 2][: block.nbytes])
        self._at, self._passes = i, 0
        if i + 1 < len(self.blocks):
            self._begin_upload(i + 1)

    def _begin_upload(self, i: int) -> None:
        """Once the block that was in its slot is offloaded."""
        block = self.blocks[i]
        before = self._offloads.pop(i % 2, None)
        self._uploads[i] = self.upload.copy(self._slots[i % 2][: block.nbytes], block.host, before)

    def _update(self, block: Block, slot: Tensor) -> None:
        for number, w in zip(block.numbers, block.views(slot), strict=True):
            if number is not None:
                for update in block.behind:
                    self._weights.update(number, w, update)
        block.behind.clear()

    def _leave(self, i: int) -> None:
        """After block i has computed for this pass."""
        if getattr(self._local, "sign", None) is None:
            return
        block = self.blocks[i]
        block.show(block.views(block.host))
        if len(self._signs) > 1:
            self._turns.pass_on(self._local.number)

    def _end(self) -> None:
        """After all passes: everything is in its place on the host."""
        for copy in (*self._uploads.values(), *self._offloads.values()):
            wait(copy)
        self._uploads, self._offloads = {}, {}
        self._at, self._passes = -1, 0
        for block in self.blocks:
            block.show(block.views(block.host))

    # -- what belongs to no block ---------------------------------------------------------------------------

    def _catch_up(self) -> None:
        for i in self._resident:
            for update in self._behind:
                self._weights.update(i, self._weights.params[i].data, update)
        self._behind.clear()

    def _perturb(self, module: nn.Module) -> None:
        """Before it computes, one of its parameters after the other into spare memory."""
        sign = getattr(self._local, "sign", None)
        if not sign:
            return
        for copy in self._offloads.values():  # the last block's may still be in the spare memory
            wait(copy)
        trained = [
            (p, self._numbers[id(p)]) for p in unique(list(module.parameters(recurse=False))) if id(p) in self._numbers
        ]
        self._local.kept = [(p, p.data) for p, _ in trained]
        at = more = 0
        for p, number in trained:
            size = -(-p.nbytes // _ALIGNED) * _ALIGNED
            fits = at + size <= self._spare.nbytes
            out = self._spare[at : at + p.nbytes].view(p.dtype).view(p.shape) if fits else torch.empty_like(p.data)
            at, more = (at + size, more) if fits else (at, more + size)
            self._weights.perturb(number, p.data, out, *self._now, sign)
            p.data = out
        self.device_bytes = max(self.device_bytes, self._arena.nbytes + more)

    def _restore(self, module: nn.Module) -> None:  # noqa: ARG002
        for p, data in getattr(self._local, "kept", ()):
            p.data = data
        self._local.kept = []


def _refuse(model: nn.Module, blocks: Sequence[nn.Module], inside: set[int]) -> None:
    """What cannot pass through block by block."""
    if not blocks:
        raise UserError("no blocks to stream: give the modules that the model calls one after the other")
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        holds = any(id(m) in inside for m in module.modules())
        if id(module) not in inside and holds and (module._parameters or module._buffers):
            raise UserError(f"{name or 'the model'} has tensors of its own beside blocks: they cannot be streamed")
    for i, block in enumerate(blocks):
        for t in unique([*block.parameters(), *block.buffers()]):
            if owners.setdefault(id(t), f"block {i}") != f"block {i}":
                raise UserError(f"block {i} shares a tensor with {owners[id(t)]}: such blocks cannot be streamed")
    for name, module in model.named_modules():
        shared = [t for t in (*module._parameters.values(), *module._buffers.values()) if id(t) in owners]
        if id(module) not in inside and shared:
            raise UserError(f"{name} shares a tensor with {owners[id(shared[0])]}: such blocks cannot be streamed")
