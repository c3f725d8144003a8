"""Checkpoints that a run can resume under another layout, with torch.distributed.checkpoint (DCP).

Every tensor has its name in the whole model. If ranks hold parts of it, it is a DTensor. DCP writes each part once, and
reads the parts that another layout needs. CO2's outer iterate and momentum are equal on all islands. The model, the
optimizer, the averaged update and the small numbers of an island have its number in their names. Error feedback is left
out, because it belongs to a rank's place. The manifest has every file's SHA-256.

DCP writes the location of each tensor to .metadata, a pickle. The same records are in records.pt, which torch.load
reads without running code.
"""

import contextlib
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PosixPath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.tensor import DTensor

from core import CO2, checkpoint
from core.buckets import Bucket, is_dtensor, local_shard, views
from core.checkpoint import all_finite
from core.comm import host_group, of_all
from core.errors import UserError
from core.local_update import LocalUpdateMethod
from core.methods import DDP, Method
from core.state import of_rank, under_rank
from core.stored import file_digest, reason
from training.data import mix
from training.fixed import Fixed
from training.folder import settings
from training.layouts.layout import Layout
from training.layouts.parallel import Parallel
from training.progress import Trained
from training.workers import join
from training.zero import gathered, group_settings, shard_optimizer

Named = dict[str, Tensor]
RECORDS = "records.pt"
KINDS = (  # the classes in records
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    PosixPath,
    torch.serialization._get_layout,
)


class Resharded:
    """Saves and loads a run under a layout.

    Args:
        parallel: This rank's part of the model.
        optimizer: Its optimizer.
        method: CO2 between the islands, or DDP.
    """

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer, method: Method):
        self.parallel, self.method = parallel, method
        own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)  # with ZeRO-1, of this rank's part
        self._states, self._groups = own.state, own.param_groups
        self._named = dict(parallel.named_parameters())
        self._buckets, self._wholes = (), dict[int, tuple[str, Tensor]]()  # local part -> name, parameter
        if isinstance(method, LocalUpdateMethod):
            self._buckets: Sequence[Bucket] = method.buckets
            names = {id(p): name for name, p in self._named.items()}
            at = zip(method.params, method.trained, strict=True)
            self._wholes = {id(part): (names[id(p)], p) for part, p in at}

    # -- writing --------------------------------------------------------------------------------------------

    def save(self, folder: Path, step: int, attempt: str, others: dict[str, Any]) -> bool:
        """Writes folder/step*/ completely or not at all. Every rank must call it.

        Args:
            folder: The folder of checkpoints.
            step: The number of the step.
            attempt: The name of this start of the run, see core/checkpoint.py.
            others: More state, equal on all ranks.

        Returns:
            False, with nothing written, if a rank's model is not finite.

        Raises:
            UserError: On all ranks, if one rank cannot write.
        """
        if not all(of_all(bool(all_finite(self._named.values())))):
            self._say(f"warning: step {step}: the model is not finite: no checkpoint is written, the last one stays")
            return False
        target = folder / f"step{step:09d}"
        fresh = folder / f"{target.name}.tmp-{attempt}"
        own = of_rank(self.method.state_dict())  # waits for the all-reduce in flight
        own.pop("residual", None)
        tensors = self._of_island(self._tensors()) | self._outer(own, f"island{self.parallel.place.island}.")
        rest = others | {"method": own, "layout": str(self.parallel.layout)}
        if dist.get_rank(self.parallel.island) == 0:
            tensors |= self._of_island({"rest": packed(rest)})
        digests: dict[str, str] = {}

        def write() -> None:
            write_tensors(fresh, tensors, host_group())
            files = fresh.glob(f"__{dist.get_rank()}_*")
            digests.update({file.name: file_digest(file) for file in files})

        def complete() -> None:
            if dist.get_rank() == 0:
                files = {name: found for mine in everyone for name, found in mine.items()}
                files |= {name: file_digest(fresh / name) for name in (RECORDS, ".metadata")}
                layout = {"layout": str(self.parallel.layout), "islands": self.parallel.layout.islands}
                checkpoint.publish(fresh, target, layout | {"files": files}, files, attempt)
                checkpoint.tidy(folder, step, checkpoint.KEEP, attempt)

        self._all(write, target)
        everyone = of_all(digests)
        self._all(complete, target)
        return True

    def _all(self, act: Callable[[], None], target: Path) -> None:
        """Runs `act`. If one rank cannot write, all ranks raise UserError."""
        failure = ""
        try:
            act()
        except UserError as error:
            failure = str(error)
        except OSError as error:
            remedy = "make room or choose another folder; the last checkpoint stays"
            failure = f"{target} cannot be written ({reason(error)}): {remedy}"
        if failures := [line for line in of_all(failure) if line]:
            raise UserError(failures[0])

    def _tensors(self) -> Named:
        """The model and the optimizer's state, by name."""
        found: Named = {f"model.{name}": p.detach() for name, p in self._named.items()}
        for name, p in self._named.items():
            values = self._states.get(p, {}).items()
            if lost := [key for key, value in values if not (value is None or isinstance(value, Tensor))]:
                raise UserError(f"--layout: the optimizer's state has a {lost[0]} that is no tensor: give adamw")
            found |= {f"optimizer.{name}.{key}": value for key, value in values if isinstance(value, Tensor)}
        return found

    def _outer(self, own: dict[str, Any], prefix: str) -> Named:
        """CO2's flat tensors by the parameters' names, with an island's prefix. `own` keeps the numbers behind them."""
        found: Named = {}
        for key, flats in self._flats(own):
            for i, bucket in enumerate(self._buckets):
                whole, flats[i] = self._joined(flats[i], bucket)
                for p, t in zip(bucket.params, views(whole, bucket.params), strict=True):
                    name, like = self._wholes[id(p)]
                    found[f"{self._start(key, prefix)}{name}"] = placed(t, like)
        return found

    @staticmethod
    def _start(key: str, prefix: str) -> str:
        """The start of the names of CO2's tensors. The averaged update of keep_local is an island's own change."""
        return f"{prefix if key == 'flats' else ''}co2.{key}."

    def _flats(self, own: dict[str, Any]) -> list[tuple[str, list[Tensor]]]:
        return [*own["state"].items(), ("flats", own["flats"])] if self._buckets else []

    def _joined(self, flat: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """The whole payload, gathered from the ranks of an island if they shard it, and the numbers behind it."""
        if len(flat) >= bucket.numel:
            return flat[: bucket.numel], flat[bucket.padded :]
        group = host_group(self.parallel.island)
        shares = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shares, flat, group=group)
        return torch.cat(shares)[: bucket.numel], flat[:0]

    def _part(self, whole: Tensor, bucket: Bucket, like: Tensor) -> Tensor:
        """This rank's part of the whole payload, with the length of `like`, or all of it."""
        filled = torch.cat([whole, whole.new_zeros(bucket.padded - len(whole))])
        if len(like) >= bucket.numel:
            return filled
        return filled.view(-1, len(like))[dist.get_rank(self.parallel.island)]

    # -- reading --------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Loads the newest checkpoint that all ranks can read.

        Returns:
            Its `others`. None if there is no checkpoint.

        Raises:
            UserError: If there are checkpoints and none can be read.
        """
        refused: list[str] = []
        for name in of_all(checkpoint.finished(folder))[0]:
            others: dict[str, Any] = {}
            if not (told := self._problem(lambda name=name: self._check(folder / name))):
                told = self._problem(lambda name=name, to=others: to.update(self._load(folder / name)))
            if not told:
                for line in refused:
                    self._say(f"warning: {line}; going on from {name}")
                return others
            refused.append(f"{folder / name} is refused ({told})")
        if refused:
            raise UserError(f"{'; '.join(refused)}: {checkpoint.no_other(refused)}")
        return None

    def _problem(self, act: Callable[[], None]) -> str:
        """Runs `act`, and returns the error of the first rank that failed to all ranks. "" if none failed."""
        problem = ""
        try:
            act()
        except UserError as error:
            problem = str(error)
        except FileNotFoundError as error:
            problem = f"{Path(error.filename).name} is missing"
        except OSError as error:
            problem = f"{Path(error.filename or '').name} cannot be read, {checkpoint.DENIED} {reason(error)!r}"
        except Exception as error:  # any error, because a rank that raised here would leave all others waiting
            problem = f"it cannot be read, {reason(error)}"
        return next((line for line in of_all(problem) if line), "")

    def _check(self, target: Path) -> None:
        """Raises UserError for a damaged file. Each rank reads some of all ranks' files."""
        manifest = checkpoint.read_manifest(target)
        if "layout" not in manifest:
            raise UserError("it is of a run without a layout: resume without --layout")
        for name, known in [*sorted(manifest["files"].items())][dist.get_rank() :: dist.get_world_size()]:
            if file_digest(target / Path(name).name) != known:
                raise UserError(f"{name} is damaged, its checksum differs")

    def _load(self, target: Path) -> dict[str, Any]:
        manifest = checkpoint.read_manifest(target)
        reader = Reader(target)
        known = reader.read_metadata().state_dict_metadata
        prefix = f"island{self.parallel.place.island % int(manifest['islands'])}."
        rest = torch.empty(known[f"{prefix}rest"].size, dtype=torch.uint8)
        _read(reader, {f"{prefix}rest": rest})
        others = torch.load(io.BytesIO(rest.numpy().tobytes()), map_location="cpu", weights_only=True)
        if others["step"] != int(target.name.removeprefix("step")):
            raise UserError(f"it holds step {others['step']!r:.20}, unlike its name")
        now = of_rank(self.method.state_dict())
        likes = {key: [*flats] for key, flats in self._flats(now)}
        outer = self._outer(now, prefix)
        self._begin_states(f"{prefix}optimizer.", known)
        tensors = {f"{prefix}{name}": t for name, t in self._tensors().items()} | outer
        if missing := sorted(name for name in tensors if name not in known):
            raise UserError(f"it has no {missing[0]}: resume with the model, optimiser and method that wrote it")
        _read(reader, tensors)
        self._give_back(others, likes, outer, prefix)
        return others

    def _begin_states(self, start: str, known: dict[str, Any]) -> None:
        """Creates zeros for the optimizer state that the checkpoint has and this optimizer does not have yet."""
        for group in self._groups:
            for p in group["params"]:
                name = next(name for name, mine in self._named.items() if mine is p)
                keys = [key for key in known if key.startswith(f"{start}{name}.")]
                device = p.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
                if keys and not self._states.get(p):
                    zeros = {key.rpartition(".")[2]: _zeros(known[key], p, device) for key in keys}
                    self._states[p] = zeros

    def _give_back(self, others: dict[str, Any], likes: dict[str, list[Tensor]], outer: Named, prefix: str) -> None:
        """Restores the method's state, with flat tensors made from the named tensors, as long as `likes`."""
        own = others["method"]
        if others["layout"] != str(self.parallel.layout):
            own["places"] = 0  # drops numbers that need the same number of ranks
            own.pop("order", None)  # names match the parameters
        for key, flats in self._flats(own):
            for i, bucket in enumerate(self._buckets):
                pieces = [outer[f"{self._start(key, prefix)}{self._wholes[id(p)][0]}"] for p in bucket.params]
                whole = torch.cat([local_shard(t).to(flats[i].device).reshape(-1) for t in pieces])
                flats[i] = torch.cat([self._part(whole, bucket, likes[key][i]), flats[i]])
        self.method.load_state_dict(under_rank(own))
        if isinstance(self.method, CO2) and self.method.share:  # its part of the momentum differs from the leader's
            self.method.share.recount()

    def _of_island(self, tensors: Named) -> Named:
        return {f"island{self.parallel.place.island}.{name}": t for name, t in tensors.items()}

    def _say(self, line: str) -> None:
        if dist.get_rank() == 0:
            print(line, file=sys.stderr, flush=True)


def placed(own: Tensor, like: Tensor) -> Tensor:
    """A DTensor placed as `like`, from this rank's part, in the part's own dtype. The part if `like` is none."""
    if not is_dtensor(like):
        return own
    place: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(own.to(like.to_local().device), like.device_mesh, like.placements, **place)


def packed(held: Any) -> Tensor:
    """An object as bytes, uint8 [n]."""
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _zeros(known: Any, p: Tensor, device: torch.device) -> Tensor:
    """Zeros for a tensor of an optimizer's state.

    Args:
        known: DCP's record of it.
        p: Its parameter.
        device: The device of a step count.
    """
    kind = known.properties.dtype
    alike = tuple(known.size) == tuple(p.shape) and p.dim()
    return torch.zeros_like(p.detach(), dtype=kind) if alike else torch.zeros(known.size, dtype=kind, device=device)


class Writer(dcp.FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # its cause would be lost on the way to other workers
            raise OSError(reason(error)) from None

    def finish(self, metadata: Any, results: Any) -> None:
        super().finish(metadata, results)
        torch.save(metadata, Path(self.path, RECORDS))


class Reader(dcp.FileSystemReader):
    """DCP's own would unpickle anything."""

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        with torch.serialization.safe_globals([*KINDS]):
            return torch.load(Path(self.path, RECORDS), weights_only=True)


def write_tensors(folder: Path, tensors: Named, group: dist.ProcessGroup | None) -> None:
    """Writes the tensors. Every rank of the group must call it.

    Raises:
        OSError: On all ranks, if one rank cannot write.
    """
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _named_failures(alone=group is None):
        dcp.save(tensors, storage_writer=Writer(folder), planner=planner, process_group=group, no_dist=group is None)


def _read(reader: Any, tensors: Named) -> None:
    """Reads this rank's parts in place."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _named_failures(alone=True):
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)


def read_model(target: Path) -> Named:
    """Returns the first island's whole GPT-2 in one process, by transformers' names.

    Layouts keep the joint projection of attention in three parts, and all projections transposed (see parallel.py).

    Raises:
        UserError: For a damaged file.
    """
    for name, known in checkpoint.read_manifest(target)["files"].items():
        if file_digest(target / Path(name).name) != known:
            raise UserError(f"{target / name} is damaged, its checksum differs")
    reader, prefix = Reader(target), "island0.model.model."
    records = {name: t for name, t in reader.read_metadata().state_dict_metadata.items() if name.startswith(prefix)}
    found = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in records.items()}
    _read(reader, found)
    whole: Named = {}
    for name, t in found.items():
        name = name.removeprefix(prefix)
        if part := re.search(r"c_attn\.([qkv])\.", name):
            parts = [found[prefix + name.replace(part[0], f"c_attn.{letter}.")] for letter in "qkv"]
            name, t = name.replace(part[0], "c_attn."), torch.cat(parts)
        whole[name] = t.mT.contiguous() if re.search(r"c_(attn|proj|fc)\.weight$", name) else t
    return whole


@contextlib.contextmanager
def _named_failures(*, alone: bool) -> Iterator[None]:
    """Raises the first worker's error in place of DCP's, which is no Exception. With its rank if there are several."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # from every load
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if alone:
            raise cause from None
        raise OSError(f"rank {rank}: {reason(cause)}") from None


# -- the run ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class LaidOut(Fixed):
    """One rank of a run under a layout. A data-parallel worker, which gets its own batches, is tp * pp ranks."""

    parallel: Parallel
    _held: Resharded

    def meet(self) -> None:
        """Joins the other ranks, opens the run folder, and seeds all ranks for the same weights."""
        run, r = self.run, self.run.recipe
        self.layout, self._finite = Layout.parse(r.layout), True
        self._made_group = join(run.device, r.timeout, settings(r))
        self.folder.open(r, run.world_size, run.device)
        place = self.layout.place(run.rank)
        run.data_rank = place.island * self.layout.dp + place.data
        run.data_workers = self.layout.data_workers
        torch.manual_seed(r.seed * 1_000_003)

    def shard(self, model: nn.Module, compute: torch.dtype) -> nn.Module:
        """This rank's part of the whole model. FSDP2 gathers parameters in dtype `compute`."""
        run = self.run
        self.parallel = Parallel(model, self.layout, run.device, compute=compute, timeout=run.recipe.timeout)
        self._draw_anew()
        return self.parallel

    def _draw_anew(self) -> None:
        """Seeds random numbers, such as dropout's, by data-parallel worker and stage. Ranks of tp draw alike."""
        run = self.run
        torch.manual_seed(mix(run.recipe.seed, run.data_rank, self.parallel.place.stage, run.step))

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return shard_optimizer(optimizer, self.parallel.mesh, 1) if self.layout.zero == 1 else optimizer

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Keeps FSDP2's parameters gathered for evaluations, where workers may have different numbers of batches."""
        zero: Any = self.layout.zero
        return gathered(nn.ModuleList(self.parallel.parts), zero)

    def make_method(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
    ) -> tuple[nn.Module, Method]:
        """CO2 between islands. With one island, whose ranks are synchronous, a method that only counts steps."""
        run, r = self.run, self.run.recipe
        options: dict[str, Any] = {"timeout": r.timeout, "link": run.link}
        if self.layout.islands == 1:
            return model, DDP(model, average_buffers=False, synchronous=True, hooks=[run.requests], **options)
        return model, self.parallel.co2(r.co2, hooks=[run.requests, run.snapshots], **options)

    def begin(self, trained: Trained, samples: int, epoch: int) -> float:
        self._held = Resharded(self.parallel, trained.optimizer, trained.method)
        return super().begin(trained, samples, epoch)

    def batches(self, make: Callable[[Any, int, int, int, int], Iterator[T]], start: int, total: int) -> Iterator[T]:
        """The batches of this rank's data-parallel worker."""
        return make(self.run.recipe, self.run.data_rank, self.run.data_workers, start, total)

    def sum(self, values: Tensor) -> Tensor:
        """Sums over data-parallel workers. Ranks outside the last stage pass zeros."""
        return super().sum(values) / self.layout.tp

    # -- checkpoints ----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint. Waits for the all-reduce in flight, and until the files are written."""
        run, trained = self.run, self._trained
        with run.clock.paused():
            self.rounds.read()
            groups = [group_settings(group) for group in trained.optimizer.param_groups]
            others = self._counted() | {"schedule": trained.schedule.state_dict(), "groups": groups}
            self._finite = self._held.save(self.folder.checkpoints, run.step, self.folder.attempt, others)

    def saved(self) -> bool:
        return self._finite

    def _resume(self) -> float:
        """Restores the newest checkpoint, of any layout. Returns the seconds of training before it."""
        trained = self._trained
        found = self._held.load(self.folder.checkpoints)
        if found is None:
            return 0.0
        trained.schedule.load_state_dict(found["schedule"])
        for group, saved in zip(trained.optimizer.param_groups, found["groups"], strict=False):
            group.update(saved)
        seconds = self._count_on(found)
        self._draw_anew()
        return seconds
