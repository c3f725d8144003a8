"""Training a model that does not fit the device: its blocks lie in the host's memory and pass through one at a time.

While block i computes, block i + 1 is uploaded and block i - 1 offloaded: two threads beside the computation on a CPU,
two streams beside its own on a GPU (which was not run). After the last block comes the first one again: it is uploaded
under the last one, the head and the exchange of scalars, and takes this step's update when the next step comes to it.
So a block is moved once a step each way: its update is applied when it next comes by (ZO2's idea), and where one
process measures both W + eps z and W - eps z, two passes go through the model side by side, block by block.

On the device are, beside what belongs to no block (embedding, head): two blocks as they are and one perturbed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UserError
from ..flat import unique
from .forward import weights_uncached
from .lanes import Block, Hold, Lane, OtherFailed, Turns, aligned, stream_of, wait
from .noise import Noise
from .replay import Update
from .weights import Weights


class BlockStream:
    """Holds a model's blocks in the host's memory; for ZerothOrder, as `make_forward`.

        make_forward=functools.partial(BlockStream, blocks=model.transformer.h)

    blocks: modules that the model calls one after the other, in this order, in every forward pass. device: where to
    compute (None: where the model is); what belongs to no block is moved there, and is perturbed a module at a time.
    hold: see Lane. share: the workers of a node, in a group that nobody else uses: each uploads its part of a block,
    and they send each other theirs; all must then make equally many passes. Losses and updates are ScratchCopy's, bit
    for bit.

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
        share: dist.ProcessGroup | None = None,
    ):
        self._model, self._weights = model, weights
        self.device = device or weights.params[0].device
        self.share = share
        inside = {id(m) for block in blocks for m in block.modules()}
        _refuse(model, blocks, inside)
        parts = dist.get_world_size(share) if share is not None else 1
        self.blocks = [Block(block, weights, pin=self.device.type == "cuda", parts=parts) for block in blocks]
        in_blocks = {id(t) for block in self.blocks for t in block.tensors}
        others = [t for t in unique([*model.parameters(), *model.buffers()]) if id(t) not in in_blocks]
        for t in others:
            t.data = t.data.to(self.device)
        if weights.config.rng == "device":
            weights.noise = Noise(weights.config.seed, self.device)
        self._numbers = {id(p): i for i, p in enumerate(weights.params)}
        self._resident = [i for i, p in enumerate(weights.params) if id(p) not in in_blocks]
        self._behind: list[Update] = []  # of what belongs to no block
        size = self._size = max(block.nbytes for block in self.blocks)
        self._arena = torch.empty(3 * size, dtype=torch.uint8, device=self.device)
        # a slot and what is beside it are free together, before the first block and after the last
        self._slots, self._scratch = (self._arena[:size], self._arena[2 * size :]), self._arena[size : 2 * size]
        self.device_bytes = self._arena.nbytes
        self.upload, self.offload = Lane(self.device, hold), Lane(self.device, hold)
        self.waited = 0.0
        self._local = threading.local()  # sign and number of the pass that runs in a thread
        self._at, self._passes = -1, 0  # the block on the device, and how many passes have come to it
        self._slot = 1  # that it is in; the next one comes into the other
        self._ahead: tuple[int, Any, list[int]] | None = None  # a block that is uploaded, its copy and versions
        self._offloaded: Any = None  # the newest copy to the host
        self._shares = share is not None
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
        self._forget_ahead()
        self._catch_up()
        for block in self.blocks:
            if block.behind:
                slot = self._slots[0][: block.nbytes]
                slot.copy_(block.host)
                self._update(block, slot)
                block.host.copy_(slot)

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Inside, the model may be called, at W with all that was put off: its blocks pass through, unshared."""
        self.flush()
        self._signs, self._shares = (0,), False
        self._local.sign, self._local.number = 0, 0
        try:
            with torch.no_grad(), weights_uncached():
                yield
        finally:
            self._local.sign = None
            self._end()
            self._forget_ahead()
            self._shares = self.share is not None

    def losses(self, loss: Callable[[nn.Module], Any], step: int, direction: int, signs: tuple[int, ...]) -> list[Any]:
        """loss(model) at W + sign eps z for each sign, of which there are one or two; 0 stands for W itself."""
        self._now, self._signs = (step, direction), signs
        self._catch_up()
        if self._ahead is not None and self._ahead[2] != self.blocks[0].versions():
            self._forget_ahead()  # other weights were loaded
        if self._ahead is None:
            self._begin_upload(0)
        self._turns = Turns()
        found: list[Any] = [None] * len(signs)
        errors: list[BaseException] = []
        kind, stream = self.device.type, stream_of(self.device)
        autocast = {"enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}

        def run(number: int) -> None:
            failed = True
            try:
                # a thread has a state of its own, its GPU and stream among it; and a cache that they share would mix
                # up the passes' weights
                passing = torch.autocast(kind, **autocast, cache_enabled=False)
                with torch.no_grad(), passing, torch.cuda.stream(stream):
                    self._local.sign, self._local.number = signs[number], number
                    if number:
                        self._turns.begin(number)
                    found[number] = loss(self._model)
                failed = False
            except OtherFailed:
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
        block = self.blocks[i]
        if self._at != i or self._passes == len(self._signs):
            self._take(i)
        self._passes += 1
        slot = self._slots[self._slot]
        views = block.views(slot)
        if sign:
            moved = block.views(self._scratch)
            for number, w, out in zip(block.numbers, views, moved, strict=True):
                if number is not None:
                    self._weights.perturb(number, w, out, *self._now, sign)
            views = [w if n is None else out for n, w, out in zip(block.numbers, views, moved, strict=True)]
        if self._passes == len(self._signs) and self._updated:
            self._offloaded = self.offload.copy(block.host, slot[: block.nbytes])
        block.show(views)

    def _take(self, i: int) -> None:
        """Block i, uploaded and updated, into its slot; the next one's upload begins."""
        count = len(self.blocks)
        if i != (self._at + 1) % count or self._passes not in (0, len(self._signs)):
            raise UserError(
                f"block {i} is called after block {self._at}: give `blocks` in the order in which the model calls them"
            )
        if self._ahead is None:
            self._begin_upload(i)
        assert self._ahead is not None and self._ahead[0] == i
        began = time.perf_counter()
        wait(self._ahead[1], self.device)
        self.waited += time.perf_counter() - began
        self._ahead, self._slot = None, 1 - self._slot
        block = self.blocks[i]
        self._updated = bool(block.behind)
        if self._updated:
            self._update(block, self._slots[self._slot][: block.nbytes])
        self._at, self._passes = i, 0
        if count > 1:  # else it is not offloaded yet
            self._begin_upload((i + 1) % count)

    def _begin_upload(self, i: int) -> None:
        """Into the slot that is free once the last block there is offloaded, as are all that were before it."""
        block = self.blocks[i]
        slot = self._slots[1 - self._slot][: block.nbytes]
        copy = self.upload.copy(slot, block.host, self._offloaded, self.share if self._shares else None)
        self._ahead = i, copy, block.versions()

    def _forget_ahead(self) -> None:
        if self._ahead is not None:
            wait(self._ahead[1], self.device)
        self._ahead = None

    def _update(self, block: Block, slot: torch.Tensor) -> None:
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
        """After all passes: everything is in its place on the host, and the first block on its way to the device."""
        wait(self._offloaded, self.device, host=True)
        self._offloaded = None
        if self._ahead is not None and self._ahead[0] != 0:  # a pass has failed
            self._forget_ahead()
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
        wait(self._offloaded, self.device)  # the last block may still be in the spare memory
        trained = [
            (p, self._numbers[id(p)]) for p in unique(list(module.parameters(recurse=False))) if id(p) in self._numbers
        ]
        self._local.kept = [(p, p.data) for p, _ in trained]
        between = 0 <= self._at < len(self.blocks) - 1  # two blocks: there is none to spare
        spare = self._arena[:0] if between else self._arena[self._slot * self._size :][: 2 * self._size]
        at = more = 0
        for p, number in trained:
            size = aligned(p.nbytes)
            fits = at + size <= spare.nbytes
            out = spare[at : at + p.nbytes].view(p.dtype).view(p.shape) if fits else torch.empty_like(p.data)
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
