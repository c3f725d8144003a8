"""What lies in a checkpoint's folder: the workers' tensors, each content once, by torch.distributed.checkpoint (DCP).

DCP writes a file a worker, *.distcp, and says in .metadata where each tensor lies; its own tools read the folder. Three
things are added. Tensors are named by what they are, `model.layers.0.weight`, and by a worker where workers differ,
`rank3.optimizer.layers.0.weight.exp_avg`; what has one content has one name, so that what is equal on all workers is
written once, by turns. What is no tensor lies in one of bytes for each worker, `rank3.rest`, with the names and SHA-256
digests of that worker's tensors, which are compared on loading. And .metadata, a pickle, is read by an unpickler that
makes nothing but DCP's own records, for whoever loads a checkpoint should not have to trust it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..flat import local_shard
from .untrusted import reason

Gather = Callable[[Any], list[Any]]  # what each worker gives, by rank
Rest = tuple[str, str]  # name and digest of a worker's tensor of bytes

STORED = "stored as"  # marks what stands in a tensor's place: its path first, then [name, digest, strides]
# what .metadata is made of; dtypes besides
RECORDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


def take_out(state: Any, tensors: dict[str, Tensor], path: str = "", *, copy: bool = True) -> Any:
    """`state`, nested dicts and lists, with a mark in each tensor's place; the tensors go to `tensors`, by their paths,
    in the host's memory.

    copy: for tensors that the training goes on to change. Of a DTensor this worker's shard is taken. 0-d tensors stay.
    """
    if isinstance(state, Tensor):
        held = local_shard(state.detach()).to("cpu", copy=copy)
        if not held.dim():
            return held
        assert path not in tensors, path
        tensors[path] = held
        return {STORED: path}
    if isinstance(state, dict):
        below = f"{path}." if path else ""
        return {key: take_out(value, tensors, f"{below}{key}", copy=copy) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(take_out(value, tensors, f"{path}.{i}", copy=copy) for i, value in enumerate(state))
    return state


def put_back(state: Any, put: Callable[[Any], Any]) -> Any:
    """`state` with put(what the mark says) in place of each mark."""
    if isinstance(state, dict):
        if state.keys() == {STORED}:
            return put(state[STORED])
        return {key: put_back(value, put) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(put_back(value, put) for value in state)
    return state


def write(
    folder: Path, state: Any, tensors: dict[str, Tensor], rank: int, gather: Gather, group: dist.ProcessGroup | None
) -> Rest:
    """Writes what take_out has left and found into a new folder; every worker must call it.

    gather: over `group`, of all workers; None: this one is alone. An error is raised on all of them, but where a worker
    is gone.
    """
    digests = {path: digest(tensor) for path, tensor in tensors.items()}
    names = make_names(gather(digests))
    stored = {path: [names[d], d, strides(tensors[path])] for path, d in digests.items()}
    buffer = io.BytesIO()
    torch.save(put_back(state, lambda path: {STORED: stored[path]}), buffer)
    rest, name = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8), f"rank{rank}.rest"
    write_tensors(folder, {stored[path][0]: t for path, t in tensors.items()} | {name: rest}, group)
    return name, digest(rest)


def write_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    dcp = library()

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception as error:  # what caused it would be lost on the way to the other workers
                raise OSError(reason(error)) from None

    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with named_failures(dcp, alone=group is None):
        dcp.save(tensors, storage_writer=Writer(folder), planner=planner, process_group=group, no_dist=group is None)


def make_names(everyone: list[dict[str, str]]) -> dict[str, str]:
    """Digest -> name, from each worker's path -> digest; the same on all workers."""
    found: dict[str, set[str]] = {}
    for digests in everyone:
        for path, d in digests.items():
            found.setdefault(path, set()).add(d)
    names: dict[str, str] = {}
    for rank, digests in enumerate(everyone):
        for path, d in digests.items():
            names.setdefault(d, path if len(found[path]) == 1 else f"rank{rank}.{path}")
    return names


def rests(folder: Path) -> list[str]:
    """The names under which the workers' rests lie there, sorted."""
    found = open_folder(folder).read_metadata().state_dict_metadata
    return sorted(name for name in found if re.fullmatch(r"rank\d+\.rest", name))


def missing(folder: Path) -> str:
    """The name of a file that a worker has written and that is not there, as where it wrote elsewhere; "" if none."""
    written = {info.relative_path for info in open_folder(folder).read_metadata().storage_data.values()}
    return min((name for name in written if not (folder / name).exists()), default="")


def read(folder: Path, rest: Rest) -> Any:
    """The state of the worker whose `rest` that is. ValueError where a digest differs; any other error where .metadata
    or a file of tensors is missing or not what it was."""
    name, known = rest
    reader = open_folder(folder)
    data = _load(reader, {name: (known, [])})[name]
    state = torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
    wanted: dict[str, tuple[str, list[int]]] = {}
    put_back(state, lambda stored: wanted.update({stored[0]: (stored[1], stored[2])}))
    tensors = _load(reader, wanted)
    shared: set[str] = set()

    def own(name: str) -> Tensor:  # nobody wants memory that is somebody else's, too
        seen = name in shared
        shared.add(name)
        return tensors[name].clone() if seen else tensors[name]

    return put_back(state, lambda stored: own(stored[0]))


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and elements."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)  # hashlib lets other threads run
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def strides(tensor: Tensor) -> list[int]:
    """As a tensor lies in memory where that is not row by row, as with channels innermost; else nothing."""
    return [] if tensor.is_contiguous() else list(tensor.stride())


def _load(reader: Any, wanted: dict[str, tuple[str, list[int]]]) -> dict[str, Tensor]:
    """Name -> tensor; wanted: name -> (digest, strides)."""
    dcp = library()
    known = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name, (_, layout) in wanted.items():
        kind, size = known[name].properties.dtype, known[name].size
        tensors[name] = torch.empty_strided(size, layout, dtype=kind) if layout else torch.empty(size, dtype=kind)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with named_failures(dcp, alone=True):
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    for name, tensor in tensors.items():
        if digest(tensor) != wanted[name][0]:
            raise ValueError(f"{name} is damaged, its checksum differs")
    return tensors


class _Unpickler(pickle.Unpickler):
    """Makes the records of .metadata, which run nothing, and refuses all else. Without the record of bytes: DCP would
    load those as any pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata holds {module}.{name}, which belongs in no checkpoint")


def open_folder(folder: Path) -> Any:
    """DCP's reader, which would unpickle anything."""

    class Reader(library().FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with open(folder / ".metadata", "rb") as file:
                return _Unpickler(file).load()

    return Reader(folder)


@contextlib.contextmanager
def named_failures(dcp: Any, *, alone: bool) -> Iterator[None]:
    """DCP's exception, which is no Exception, holds those of the workers: the first one's; not alone, with its rank."""
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if alone:
            raise cause from None
        raise OSError(f"rank {rank}: {reason(cause)}") from None


def library() -> Any:
    """torch.distributed.checkpoint, imported where it is used: that takes most of a second."""
    from torch.distributed import checkpoint

    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of a worker alone, and of each in loading
    return checkpoint
