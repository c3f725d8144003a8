"""Training a model that does not fit the device: its blocks are in host memory and are uploaded one at a time.

While block i computes, block i + 1 is uploaded and block i - 1 is offloaded, in streams of the GPU. The first block is
uploaded during the embedding. A block's update is applied when it is next uploaded (ZO2's idea), so each
pass uploads a block once, and a step offloads it once. The device holds three blocks, and the other parameters twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.buckets import pinned, unique
from core.errors import UserError

from .order import Noise, ScratchCopy, Update, Weights, weights_uncached

ALIGNED = 64  # bytes: tensors begin at multiples of it in a block


class BlockStream(ScratchCopy):
    """Keeps a model's blocks in host memory, and the rest on the device. Pass it to ZerothOrder as `make_forward`.

        make_forward=functools.partial(BlockStream, blocks=model.transformer.h)

    Losses and updates equal ScratchCopy's, bit for bit.

    Args:
        blocks: Modules that the model calls one after another, in this order, in every forward pass.
        device: Where to compute. None: where the model is. Tensors outside the blocks move there.
    """

    def __init__(
        self, model: nn.Module, weights: Weights, *, blocks: Sequence[nn.Module], device: torch.device | None = None
    ):
        self.device = device or weights.params[0].device
        _refuse(model, blocks)
        self.blocks = [Block(block, weights, self.device) for block in blocks]
        in_blocks = {id(t) for block in self.blocks for t in block.tensors}
        for t in [*model.parameters(), *model.buffers()]:
            if id(t) not in in_blocks:
                t.data = t.data.to(self.device)
        weights.noise = Noise(weights.config.seed, self.device)
        self.window = Window(self.blocks, self.device)
        super().__init__(model, weights, [p for p in weights.params if id(p) not in in_blocks])
        self._sign: int | None = None  # of eps z, in a pass; 0 means W itself
        self._now = 0  # step
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self._enter(i))
            block.register_forward_hook(lambda *_, i=i: self._leave(i))

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Defers the update of each block to its next upload, or to `flush`."""
        if not update.dropped:
            for behind in (self.pending, *(block.behind for block in self.blocks)):
                behind.append(update)

    @torch.no_grad()
    def flush(self) -> None:
        """Applies the deferred updates."""
        self._update_rest()
        for block in self.blocks:
            if block.behind:
                slot = self.window.scratch[: block.nbytes]
                slot.copy_(block.host)
                self._update(block, slot)
                block.host.copy_(slot)

    def _update_rest(self) -> None:
        for update in self.pending:
            super().apply(update)
        self.pending.clear()

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """A context in which the model can be called at W with all updates applied."""
        self.flush()
        with torch.no_grad(), weights_uncached(), self._pass(0):
            yield

    @contextlib.contextmanager
    def perturbed(self, step: int, sign: int) -> Iterator[None]:
        """A context in which the model computes at W + sign eps z."""
        self._now = step
        self._update_rest()
        with self._pass(sign), super().perturbed(step, sign):
            yield

    @contextlib.contextmanager
    def _pass(self, sign: int) -> Iterator[None]:
        """A context in which the blocks compute at W + sign eps z. At its end all of them are in host memory."""
        self._sign = sign
        self.window.begin(0)
        try:
            yield
        finally:
            self._sign = None
            self.window.close()
            for block in self.blocks:
                block.show(block.views(block.host))

    def _enter(self, i: int) -> None:
        """Before block i computes: uploads, updates, and perturbs it."""
        if self._sign is None:
            return
        block, at = self.blocks[i], self.window.at
        if i != (at + 1) % len(self.blocks):
            raise UserError(
                f"block {i} is called after block {at}: give `blocks` in the order in which the model calls them"
            )
        slot = self.window.move_on()
        if block.behind:
            self._update(block, slot)
            self.window.keep()
        views = block.views(slot)
        if self._sign:
            moved = block.views(self.window.scratch)
            for number, w, out in zip(block.numbers, views, moved, strict=True):
                if number is not None:
                    self._weights.perturb(number, w, out, self._now, self._sign)
            views = [w if n is None else out for n, w, out in zip(block.numbers, views, moved, strict=True)]
        block.show(views)

    def _update(self, block: Block, slot: Tensor) -> None:
        """Applies the deferred updates to a copy of the block, bytes [nbytes]."""
        for number, w in zip(block.numbers, block.views(slot), strict=True):
            if number is not None:
                for update in block.behind:
                    self._weights.update(number, w, update)
        block.behind.clear()

    def _leave(self, i: int) -> None:
        """After block i has computed."""
        if self._sign is not None:
            self.blocks[i].show(self.blocks[i].views(self.blocks[i].host))


def _refuse(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuses blocks that share tensors with each other, or with the rest of the model."""
    if not blocks:
        raise UserError("no blocks to stream: give the modules that the model calls one after the other")
    inside = {id(m) for block in blocks for m in block.modules()}
    owners: dict[int, str] = {}
    for i, block in enumerate(blocks):
        for t in unique([*block.parameters(), *block.buffers()]):
            if owners.setdefault(id(t), f"block {i}") != f"block {i}":
                raise UserError(f"block {i} shares a tensor with {owners[id(t)]}: such blocks cannot be streamed")
    for name, module in model.named_modules():
        own = [] if id(module) in inside else [*module._parameters.values(), *module._buffers.values()]
        if shared := [owners[id(t)] for t in own if id(t) in owners]:
            raise UserError(f"{name} shares a tensor with {shared[0]}: such blocks cannot be streamed")


# -- where blocks lie -------------------------------------------------------------------------------------------------


class Lane:
    """Runs copies one after another during computation, in a stream of a GPU. On a CPU it copies at once.

    Attributes:
        bytes: Bytes of all copies.
    """

    def __init__(self, device: torch.device):
        self._device, self.bytes = device, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, after: Any = None) -> Any:
        """Starts a copy after all work queued on the device.

        Args:
            target: Where to copy to.
            source: Where to copy from.
            after: Another lane's copy, which must end first.

        Returns:
            A handle for `wait`.
        """
        self.bytes += source.nbytes
        if self._stream is None:
            return target.copy_(source)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()


def wait(copy: Any, device: torch.device, *, host: bool = False) -> None:
    """Waits for a copy. On a GPU only the current stream waits, unless `host` is True."""
    if isinstance(copy, torch.cuda.Event) and host:
        copy.synchronize()
    elif isinstance(copy, torch.cuda.Event):
        torch.cuda.current_stream(device).wait_event(copy)


class Block:
    """A module whose tensors are contiguous in host memory, which is pinned if the device is a GPU.

    Attributes:
        host: The memory, uint8 [nbytes].
        tensors: The module's parameters and buffers.
        numbers: Their numbers in Weights. None for a tensor that is not trained.
        behind: Updates that are not applied yet.
    """

    def __init__(self, module: nn.Module, weights: Weights, device: torch.device):
        self.tensors = unique([*module.parameters(), *module.buffers()])
        self.numbers = [weights.numbers.get(id(t)) for t in self.tensors]
        self._places, self.nbytes = [], 0
        for t in self.tensors:
            self._places.append(self.nbytes)
            self.nbytes += -(-t.nbytes // ALIGNED) * ALIGNED
        self.host = (pinned if device.type == "cuda" else torch.empty)(self.nbytes, dtype=torch.uint8)
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


class Window:
    """Memory on the device for three blocks: the current block, the next block, and a perturbed copy of the current.

    Attributes:
        at: The number of the block that computes. -1 before the first.
        scratch: Memory for the perturbed copy.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device):
        self._blocks, self._device = blocks, device
        self.upload, self.offload = Lane(device), Lane(device)
        size = max(block.nbytes for block in blocks)
        *self._slots, self.scratch = torch.empty(3, size, dtype=torch.uint8, device=device)
        self.at = -1
        self._slot = 1  # the slot of the current block; the next block uses the other slot
        self._ahead: Any = None  # the upload of the next block
        self._offloaded: Any = None  # the newest copy to the host

    @property
    def slot(self) -> Tensor:
        """The bytes of the current block, uint8 [its nbytes]."""
        return self._slots[self._slot][: self._blocks[self.at].nbytes]

    def move_on(self) -> Tensor:
        """Waits for the next block, starts the upload of its successor, and returns the block's slot."""
        number = (self.at + 1) % len(self._blocks)
        if self._ahead is None:  # another sweep over the blocks
            self.begin(number)
        wait(self._ahead, self._device)
        self._ahead, self._slot, self.at = None, 1 - self._slot, number
        if number + 1 < len(self._blocks):
            self.begin(number + 1)
        return self.slot

    def begin(self, number: int) -> None:
        """Uploads a block into the other slot, after the last offload, which frees it."""
        block = self._blocks[number]
        slot = self._slots[1 - self._slot][: block.nbytes]
        self._ahead = self.upload.copy(slot, block.host, self._offloaded)

    def keep(self) -> None:
        """Starts to offload the current block."""
        self._offloaded = self.offload.copy(self._blocks[self.at].host, self.slot)

    def close(self) -> None:
        """Ends a pass, also a failed one: all blocks are in host memory, and none is uploading."""
        for copy in (self._ahead, self._offloaded):
            wait(copy, self._device, host=True)
        self._ahead = self._offloaded = None
        self.at = -1
