"""The flat tensors that an all-reduce sums, and helpers for tensors of all dtypes and layouts."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

# one kernel for many tensors, as in torch's optimizers
from torch import _foreach_copy_ as copy_each  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_zero_ as zero_each  # pyright: ignore[reportPrivateImportUsage]

from .errors import UserError
from .stats import read_blocks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Zeros = Callable[[int, torch.dtype], Tensor]


class Bucket:
    """All tensors of one dtype on one device, and the flat tensor that the all-reduce sums.

    Args:
        params: Live parameters of the model.
        buffers: Live buffers, such as BatchNorm's statistics.
        scalars: How many numbers to send with them.
        parts: The payload is padded to a multiple of this number, so that it can be cut into equal parts.
        zeros: Makes the flat tensor from its length and dtype. None means on the tensors' device.

    Attributes:
        flat: 1-d: payload, padding, buffers' values, scalars. Its dtype is float64 for float64 tensors, otherwise
            float32, so that sums of 16-bit parameters lose no precision.
        payload: View of flat, [numel]: what the worker sends for its parameters, and later the sum over the workers.
        padded: Length of the payload with its padding.
        given: All buffers. `buffers` are the buffers that travel, `travelling` their places in `given`: at first all.
        fresh: The places in `buffers` of each buffer that did not travel in the all-reduce before.
        rest: View of flat: values and scalars.
        values: View of flat: the values of the buffers that travel, next to the scalars.
        scalars: View of flat: the scalars.
        start, end: Where values begin and end in flat.
        payload_views, buffer_views: Views of payload and values in the shapes of the tensors.
        numbers, buffer_ends: The place of each buffer that travels among `given`, and its end in values, [buffers].
        first_values: All buffers' values at the last `begin`, 1-d in the order of `given`. `first` has only the values
            of `buffers`, and `first_given` has one tensor per buffer, on the buffer's device.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        scalars: int = 0,
        parts: int = 1,
        zeros: Zeros | None = None,
    ):
        self.params, self.given = list(params), list(buffers)
        first = [*params, *buffers][0]
        self.dtype = first.dtype
        self.numel = sum(p.numel() for p in params)
        self.padded = -(-self.numel // parts) * parts  # rounded up to a multiple of parts
        self.end = self.padded + sum(b.numel() for b in buffers)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32  # sums of 16-bit parameters need float32
        n = self.end + scalars
        self.flat = zeros(n, wide) if zeros else torch.zeros(n, dtype=wide, device=first.device)
        self.payload, self.scalars = self.flat[: self.numel], self.flat[self.end :]
        self.payload_views = views(self.payload, self.params)
        self._places = torch.arange(len(self.given), device="cpu").to(self.flat.device)
        self._sizes = torch.tensor([b.numel() for b in buffers], device="cpu").to(self.flat.device)
        self.begin()

    @torch.no_grad()
    def begin(self, first_values: Tensor | None = None) -> None:
        """Sets what the buffers held at first, by default what they hold now. All of them travel."""
        self.first_values = self.flat_buffers() if first_values is None else first_values.to(self.flat, copy=True)
        firsts = views(self.first_values, self.given)
        self.first_given = [v.to(b.device) for v, b in zip(firsts, self.given, strict=True)]
        self.travelling, self.fresh = list[int](), list[int]()
        self.choose_buffers(range(len(self.given)))
        self.fresh = []

    def choose_buffers(self, places: Iterable[int]) -> None:
        """Sets which buffers travel, by their places in `given`, and which of them are `fresh`."""
        chosen = sorted(places)
        self.fresh = [i for i, place in enumerate(chosen) if place not in self.travelling]
        if chosen == self.travelling and chosen:
            return
        self.travelling, self.buffers = chosen, [self.given[i] for i in chosen]
        self.start = self.end - sum(b.numel() for b in self.buffers)
        self.rest, self.values = self.flat[self.start :], self.flat[self.start : self.end]
        self.buffer_views = views(self.values, self.buffers)
        # slices of tensors that are there, because the host would wait for a copy to a GPU
        firsts = views(self.first_values, self.given)
        self.first = torch.cat([self.first_values[:0], *(firsts[i].reshape(-1) for i in chosen)])
        self.numbers, sizes = (
            torch.cat([of_each[:0], *(of_each[i : i + 1] for i in chosen)]) for of_each in (self._places, self._sizes)
        )
        self.buffer_ends = sizes.cumsum(0)

    @torch.no_grad()
    def flat_buffers(self) -> Tensor:
        """Returns a copy of all live buffers, 1-d in the order of `given`."""
        flat = self.flat.new_empty(sum(b.numel() for b in self.given))
        copy(views(flat, self.given), self.given)
        return flat

    def flatten(self, flat: Tensor) -> None:
        """Copies the live parameters into flat, [numel]."""
        copy(views(flat, self.params), self.params)


@dataclass
class Part:
    """The part of a bucket that a reducer reads and writes.

    The payload is rounded. The values and the scalars are exact. `params` have the payload's elements, in its order.
    """

    flat: Tensor
    numel: int
    payload: Tensor
    values: Tensor
    scalars: Tensor
    params: Sequence[Tensor] = ()


class BucketShare:
    """The part of a bucket that a rank sends: a share of the payload, all buffers that travel, and the scalars.

    Args:
        bucket: The bucket.
        flat: The share of the payload, with its padding, [n].
        start: Place of its first element in the payload.
        scalars: How many of the scalars are sent, and no buffer. None sends all scalars and the buffers.
        owned: Whether each worker owns a part of the share, which includes padding.

    Attributes:
        numel: Elements of the share that are sent.
        params: Views of the live parameters' elements in the share.
    """

    def __init__(self, bucket: Bucket, flat: Tensor, start: int, scalars: int | None = None, *, owned: bool = False):
        self._bucket, self.flat, self.params = bucket, flat, elements(bucket.params, start, start + len(flat))
        self.numel = len(flat) if owned else sum(p.numel() for p in self.params)
        self.payload, self.scalars = flat[: self.numel], bucket.scalars[:scalars]
        self._has_buffers = scalars is None

    @property
    def values(self) -> Tensor:
        return self._bucket.values if self._has_buffers else self._bucket.values[:0]

    @property
    def rest(self) -> Tensor:
        return self._bucket.rest if self._has_buffers else self.scalars

    def sent(self) -> list[Tensor]:
        """Returns what travels in float32.

        A share that is a whole payload travels in one tensor with the buffers and scalars behind it, as without nodes.
        gloo adds more than two numbers in an order that depends on their place in the tensor.
        """
        if self._has_buffers and len(self.flat) == self._bucket.padded == self._bucket.start:
            return [self._bucket.flat]
        return [self.flat, self.rest]


def make_buckets(
    params: Sequence[Tensor], buffers: Sequence[Tensor], scalars: int, parts: int = 1, zeros: Zeros | None = None
) -> list[Bucket]:
    """Makes a bucket per dtype and device, in order of occurrence. The first bucket holds the scalars."""
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for place, tensors in enumerate((params, buffers)):
        for t in tensors:
            kinds.setdefault((t.dtype, t.device), ([], []))[place].append(t)
    return [Bucket(*kind, 0 if i else scalars, parts, zeros) for i, kind in enumerate(kinds.values())]


class Scalars:
    """Named numbers that travel behind the parameters. Before a launch they are this worker's, afterwards averages.

    Args:
        sizes: Name -> count of numbers.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.numel = sum(self.sizes.values())

    def attach(self, place: Tensor) -> None:
        """Sets the memory of the numbers: `place`, [numel], at the end of a bucket's flat tensor."""
        self.place = place
        self._of = dict(zip(self.sizes, place.split(list(self.sizes.values())), strict=True))

    def __getitem__(self, name: str) -> Tensor:
        """Returns the numbers of a name as a view: [size], or 0-d for one number."""
        numbers = self._of[name]
        return numbers[0] if self.sizes[name] == 1 else numbers

    def named(self, numbers: Sequence[float]) -> dict[str, Sequence[float]]:
        """Returns all numbers, as read on the host, by name."""
        ends = accumulate(self.sizes.values())
        return {name: numbers[end - size : end] for (name, size), end in zip(self.sizes.items(), ends, strict=True)}

    def set(self, name: str, value: float | Tensor) -> None:
        """Writes a number. Unlike an assignment, it never makes the host wait for a GPU."""
        place = self[name]
        place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)


class State(dict[str, list[Tensor]]):
    """Tensors that a method keeps from round to round, by name: one flat tensor per bucket."""

    def __init__(self, buckets: Sequence[Bucket]):
        super().__init__()
        self._buckets = buckets
        self._of_params: set[str] = set()  # names of tensors that start as the parameters
        self._own: set[str] = set()  # names of tensors that differ between workers

    @torch.no_grad()
    def new(
        self, name: str, *, of_params: bool = False, own: bool = False, like: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """Makes flat tensors in the shapes of the payloads, or of `like`.

        Args:
            name: Their name in checkpoints.
            of_params: Whether they start as the parameters, instead of zeros.
            own: Whether they differ between workers, so that a repair of replicas must not overwrite them.
        """
        self._own |= {name} if own else set()
        self._of_params |= {name} if of_params else set()
        self[name] = [torch.zeros_like(t) for t in like or [b.payload for b in self._buckets]]
        self.begin(name)
        return self[name]

    def shared(self) -> list[Tensor]:
        """Returns the tensors that are equal on all workers."""
        return [flat for name, flats in self.items() if name not in self._own for flat in flats]

    def begin(self, name: str) -> None:
        """Resets the tensors of a name to their start."""
        for flat, bucket in zip(self[name], self._buckets, strict=True):
            bucket.flatten(flat) if name in self._of_params else flat.zero_()


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Returns consecutive slices of a 1-d tensor, in the shapes of `like`."""
    sizes = [t.numel() for t in like]
    return [piece.view(t.shape) for piece, t in zip(flat[: sum(sizes)].split(sizes), like, strict=True)]


def copy(to: Sequence[Tensor], source: Sequence[Tensor], *, queued: bool = False) -> None:
    """Copies each tensor into its counterpart, in as few kernels as possible.

    With `queued`, the host does not wait for copies between a GPU and pinned memory. The caller must not read or write
    them too early.
    """
    if to:
        copy_each(list(to), list(source), queued)


def rescale(flat: Tensor, scale: float | Tensor) -> None:
    """Multiplies in place by a number or a 0-d tensor on any device."""
    flat.mul_(scale.to(flat) if isinstance(scale, Tensor) else scale)


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Returns whether Triton's kernels run on this device. CUDA builds of torch for Linux include Triton."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def copy_where(where: Tensor, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """`copy` if the 0-d bool `where` is True. The host does not wait for a GPU.

    A GPU may read `source` in pinned memory until it has finished all work queued so far.
    """
    if not read_blocks(where):
        if where:
            copy(to, source, queued=True)
        return
    copy(to, [torch.where(where.to(t.device), s, t.to(s.dtype)) for t, s in zip(to, source, strict=True)])


def wipe(flats: Sequence[Tensor], where: Tensor) -> None:
    """Sets all elements to zero, even NaN, if the 0-d bool `where` is True. The host does not wait for a GPU."""
    if read_blocks(where):
        for flat in flats:
            flat.masked_fill_(where.to(flat.device), 0)
    elif where and flats:
        zero_each(list(flats))


def unique(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns each tensor object once, in order, so that tied parameters count once."""
    return list({id(t): t for t in tensors}.values())


def is_dtensor(t: Tensor) -> TypeGuard[DTensor]:
    """Returns whether t is a DTensor, without importing DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")  # before its import no tensor is a DTensor
    return module is not None and isinstance(t, module.DTensor)


def local_shard(p: Tensor) -> Tensor:
    """Returns a DTensor's local shard in the same memory, any other tensor itself."""
    shard = p.detach() if is_dtensor(p) else p
    return shard.to_local() if is_dtensor(shard) else shard


# -- buffers that no worker changes, such as a causal mask of -inf -----------------------------------------------------


def same_values(values: Tensor, first: Tensor) -> Tensor:
    """Returns where two tensors are equal. NaN equals NaN."""
    return (values == first) | (values.isnan() & first.isnan())


def keep_unchanged(averages: Tensor, first: Tensor, workers: int) -> None:
    """Gives buffers that no worker has changed exactly the values that they began with.

    A sum of equal values may be rounded or overflow, so an average that such a sum can produce counts as unchanged. All
    workers decide alike, because they hold the same averages and first values.

    Args:
        averages: The averaged buffers, 1-d.
        first: The buffers as all workers had them at construction, 1-d.
        workers: How many workers the sum was over.
    """
    if len(averages):
        limits = torch.finfo(averages.dtype)
        # within the rounding of a sum of equal values
        near = first.isfinite() & ((averages - first).abs() <= (workers + 2) * limits.eps * first.abs())
        overflowed = (averages == first.sign() * torch.inf) & (
            first.abs() > limits.max / workers
        )  # as in a mask of finfo.min
        averages.copy_(torch.where(near | overflowed | same_values(averages, first), first, averages))


def has_changed(buffer: Tensor, first: Tensor) -> Tensor:
    """Returns whether a buffer differs from its first value, 0-d bool. The host does not wait for a GPU."""
    now = buffer.to(first.dtype)
    if not read_blocks(now) and torch.equal(now, first):
        return torch.zeros((), dtype=torch.bool, device="cpu")
    return ~same_values(now, first).all()


# -- tensors of every dtype and layout ------------------------------------------------------------------------------

_COMPRESSED = {  # layout -> the methods that return a sparse tensor's parts
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def is_wrapper(t: Tensor) -> bool:
    """Returns whether a tensor subclass keeps its numbers in inner tensors, as torchao's quantized weights do."""
    return hasattr(t, "__tensor_flatten__") and not is_dtensor(t)


def has_mean(t: Tensor) -> bool:
    """Returns whether buffers of this kind are averaged: dense ones of real or complex floating point."""
    dense = t.layout == torch.strided and not t.is_nested and not is_wrapper(t)
    return dense and (t.is_floating_point() or t.is_complex()) and t.dtype != getattr(torch, "float4_e2m1fn_x2", None)


def as_real(t: Tensor) -> Tensor:
    """Returns a complex tensor as pairs of real numbers in the same memory, any other tensor itself."""
    return torch.view_as_real(t.detach()) if t.is_complex() else t


def parts_of(t: Tensor) -> list[Tensor]:
    """Returns the dense tensors that hold the numbers of `t`, in the same memory.

    These are `t` itself, a sparse tensor's indices and values, or the tensors inside a wrapper.

    Raises:
        UserError: For nested tensors, tensors of torch.quantize_per_tensor and its like, and unknown layouts.
    """
    t = t.detach()
    if is_wrapper(t):
        names = t.__tensor_flatten__()[0]  # pyright: ignore[reportAttributeAccessIssue]
        return [part for name in names for part in parts_of(getattr(t, name))]
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in _COMPRESSED:
        return [getattr(t, name)() for name in _COMPRESSED[t.layout]]
    if t.layout != torch.strided or t.is_nested or t.is_quantized:
        what = "a nested tensor" if t.is_nested else f"a tensor of layout {t.layout} and type {t.dtype}"
        raise UserError(f"{what} cannot be sent to the other workers: leave it out, or make it dense")
    return [t]


def kind_of(t: Tensor) -> Any:
    """Returns the properties that workers must share to exchange a tensor: shape, dtype and layout."""
    kind: tuple[Any, ...] = (tuple(t.shape), str(t.dtype))
    if t.layout == torch.strided and not is_wrapper(t):
        return kind
    return *kind, str(t.layout), [kind_of(part) for part in parts_of(t)]


def as_bits(t: Tensor) -> Tensor:
    """Returns a dense tensor's bits as integers in the same memory, each element once."""
    t = as_real(t.detach())
    for dim in range(t.ndim):
        if t.stride(dim) == 0 and t.shape[dim] > 1:  # expanded: all elements share memory
            t = t.narrow(dim, 0, 1)
    return t.view(_BITS[t.element_size()])


def group_pieces(params: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Yields groups of views that cover all parameters in order, with at most `limit` elements per group.

    A pass over memory processes one group after the other, so that all tensors of a group stay in the cache.
    """
    group: list[Tensor] = []
    filled = 0
    cuts = ((p.detach(), start) for p in params for start in range(0, p.numel(), limit))
    for piece in (piece for p, start in cuts for piece in _elements(p, start, min(start + limit, p.numel()))):
        if filled + piece.numel() > limit:  # the group is full
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += piece.numel()
    if group:
        yield group


def elements(params: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Returns views of the elements start to stop of the parameters, which follow each other in row-major order."""
    found, at = [], 0
    for p in params:
        first, last = max(start - at, 0), min(stop - at, p.numel())
        found += _elements(p.detach(), first, last) if first < last else []
        at += p.numel()
    return found


def _elements(p: Tensor, first: int, last: int) -> list[Tensor]:
    """Returns views of the elements first to last of one tensor, which may not be contiguous."""
    if first == 0 and last == p.numel():
        return [p]
    if p.is_contiguous():
        return [p.view(-1)[first:last]]
    if p.ndim == 1:
        return [p[first:last]]
    n = p[0].numel()
    a, b = -(-first // n), last // n  # rows a to b are whole
    if b < a:
        return _elements(p[b], first - b * n, last - b * n)
    found = _elements(p[a - 1], first - (a - 1) * n, n) if first < a * n else []
    found += [p[a:b]] if a < b else []
    return found + (_elements(p[b], 0, last - b * n) if b * n < last else [])


UNIT = 128  # elements: large fragments begin at its multiples, so that blocks of a narrow format are whole


def slices(numel: int, count: int, multiple: int = 1) -> list[slice]:
    """Returns `count` slices of about equal lengths that cover `numel` elements, and end at multiples of `multiple`."""
    unit = UNIT if multiple == 1 and numel >= 8 * count * UNIT else multiple
    ends = [min(numel, -(-numel * i // (count * unit)) * unit) for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def slices_alike(sizes: Sequence[tuple[int, int]], count: int) -> list[slice]:
    """Returns slices of tensors that the ranks of a node shard. All ranks cut a tensor that all hold at one element.

    Args:
        sizes: Each tensor's elements on this rank, and on all ranks.
        count: Number of slices.
    """
    starts, ends = [*accumulate((whole for _, whole in sizes), initial=0)], [0]
    for place in slices(starts[-1], count):  # of the whole tensors
        reached = (min(max(place.stop - start, 0), whole) for start, (_, whole) in zip(starts, sizes, strict=False))
        ends.append(sum(-(-own * n // max(1, whole)) for n, (own, whole) in zip(reached, sizes, strict=True)))
    return [slice(a, b) for a, b in pairwise(ends)]


def cut(flats: Sequence[Tensor], places: Sequence[slice]) -> list[Tensor]:
    """Returns a slice of each flat tensor, of none if there are none."""
    return [flat[place] for flat, place in zip(flats, places, strict=False)]


def on_device(flag: Tensor, device: torch.device) -> Tensor:
    """Returns a 0-d bool on `device`. A bool on the host becomes a kernel's argument, because a copy would block."""
    return flag if flag.device == device else torch.full((), bool(flag), device=device)


PORTABLE = 1  # cudaHostRegisterPortable: pinned memory for all devices


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros in host memory, [numel], pinned if there is a GPU, so that copies to and from it do not block.

    The memory has exactly this size. torch would round it up to a power of two, and keep it.

    Raises:
        UserError: If the memory cannot be pinned.
    """
    nbytes = numel * dtype.itemsize
    if not nbytes or not torch.cuda.is_available():
        return torch.zeros(numel, dtype=dtype, device="cpu")
    # The buffer lives as long as tensors use it. An mmap object itself would free its memory before its finalizer runs.
    memory = (ctypes.c_byte * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    held = torch.frombuffer(memory, dtype=dtype)
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(held.data_ptr(), nbytes, PORTABLE)):
        raise UserError(f"{nbytes} bytes of the host's memory cannot be pinned (CUDA error {code}): leave out offload")
    address, device = held.data_ptr(), torch.cuda.current_device()

    def unpin() -> None:
        torch.cuda.synchronize(device)  # after all queued copies
        cudart.cudaHostUnregister(address)

    weakref.finalize(memory, unpin).atexit = False
    return held
