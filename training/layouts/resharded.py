"""Checkpoints that a run can resume under another layout.

Every tensor has its name in the whole model, and each rank writes its part with the part's place in the whole tensor.
Under the same layout a rank reads its own file. Under another one it takes its parts from the files of an island's
ranks. Error feedback is left out, because it belongs to a rank's place.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from core import CO2
from core.baselines.table import Method
from core.buckets import Bucket, is_dtensor, local_shard, views
from core.checkpoint import runs as checkpoint
from core.checkpoint import stored
from core.errors import UserError
from core.groups import host_group, of_all
from core.local_update import LocalUpdateMethod
from core.state import of_rank, under_rank
from training.layout import Layout
from training.layouts.parallel import Parallel

Named = dict[str, Tensor]
Start = tuple[int, ...]  # of a part in the whole tensor
NEEDS = {"layout": str, "model": dict, "places": dict, "method": dict}  # see load_newest


class Resharded:
    """Saves and loads a run under a layout, whose method is CO2 between the islands, or DDP."""

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer, method: Method):
        self.parallel, self.method = parallel, method
        own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)  # with ZeRO-1, of this rank's part
        self._states = own.state
        self._groups = {p: group for group in own.param_groups for p in group["params"]}
        self._named = dict(parallel.named_parameters())
        self._buckets, self._wholes = (), dict[int, tuple[str, Tensor]]()  # local part -> name, parameter
        if isinstance(method, LocalUpdateMethod):
            self._buckets: Sequence[Bucket] = method.buckets
            names = {id(p): name for name, p in self._named.items()}
            at = zip(method.params, method.trained, strict=True)
            self._wholes = {id(part): (names[id(p)], p) for part, p in at}
        self._share = method.share if isinstance(method, CO2) else None

    def save(self, folder: Path, step: int, attempt: str, others: dict[str, Any]) -> bool:
        """Writes folder/step*/ with `others` as more state, completely or not at all. Every rank must call it.

        `attempt` is the name of this start of the run, see core/checkpoint/runs.py.

        Returns:
            False, with nothing written, if a rank's model is not finite.

        Raises:
            UserError: On all ranks, if one rank cannot write.
        """
        own = of_rank(self.method.state_dict())  # waits for the all-reduce in flight
        own.pop("residual", None)
        if (share := self._share) and share.method.is_cut:  # only the change in flight is merged after a resume
            for bucket, flat, place in zip(self._buckets, own["flats"], share.now.places, strict=True):
                rows = flat[: bucket.padded].view(share.node.parts, -1)
                rows[:, : place.start] = 0
                rows[:, place.stop if self.method.allreduce.in_flight else place.start :] = 0
        tensors = self._tensors() | self._outer(own)
        places = {name: (tuple(t.shape), start_of(t)) for name, t in tensors.items()}
        state = {"model": tensors, "places": places, "method": own, "layout": str(self.parallel.layout), "step": step}
        saver = checkpoint.Saver(folder, dist.get_rank(), dist.get_world_size(), attempt, group=host_group())
        spared = [name for name in tensors if not name.startswith("model.")]
        return saver.write(step, others | state, spared)

    def _tensors(self) -> Named:
        """The model and the optimizer's state, by name."""
        found: Named = {f"model.{name}": p.detach() for name, p in self._named.items()}
        for name, p in self._named.items():
            values = self._states.get(p, {}).items()
            if lost := [key for key, value in values if not (value is None or isinstance(value, Tensor))]:
                raise UserError(f"--layout: the optimizer's state has a {lost[0]} that is no tensor: give adamw")
            found |= {f"optimizer.{name}.{key}": value for key, value in values if isinstance(value, Tensor)}
        return found

    def _outer(self, own: dict[str, Any]) -> Named:
        """CO2's flat tensors by the parameters' names. `own` keeps the numbers behind them."""
        found: Named = {}
        for key, flats in self._flats(own):
            for i, bucket in enumerate(self._buckets):
                whole, flats[i] = self._joined(flats[i], bucket)
                for p, t in zip(bucket.params, views(whole, bucket.params), strict=True):
                    name, like = self._wholes[id(p)]
                    found[f"co2.{key}.{name}"] = placed(t, like)
        return found

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
            UserError: On all ranks, if there are checkpoints and none can be read, or it is of another model.
        """
        found = checkpoint.load_newest(folder, rank=dist.get_rank(), needs=NEEDS)
        if found is None:
            return None
        state, target, problem = found[0], folder / f"step{found[0]['step']:09d}", ""
        now = of_rank(self.method.state_dict())
        likes = {key: [*flats] for key, flats in self._flats(now)}
        outer = self._outer(now)
        try:
            state = self._load(target, state, outer)
        except (UserError, OSError) as error:
            problem = str(error) if isinstance(error, UserError) else stored.reason(error)
        if problem := next(filter(None, of_all(problem)), ""):
            raise UserError(f"{target} is refused ({problem}): remove it, to resume from the checkpoint before it")
        self._give_back(state, likes, outer)
        return state

    def _load(self, target: Path, state: dict[str, Any], outer: Named) -> dict[str, Any]:
        """Fills this rank's tensors, and returns the rest of the state, of a rank of the island."""
        layout, here = Layout.parse(state["layout"]), self.parallel
        sources: Iterator[dict[str, Any]] = iter([state])
        if (layout.island_size == 1) != (here.layout.island_size == 1):
            sizes = f"islands of {layout.island_size}, here they are of {here.layout.island_size}"
            raise UserError(f"it is of {sizes}: an island of one device holds another state than one of several")
        if layout != here.layout:
            sources = island_of(target, layout, here.place.island)
        rest, filled = None, Filled()
        for held in sources:
            rest = rest or {key: value for key, value in held.items() if key not in ("model", "places")}
            self._begin_states(held)
            filled.add(self._tensors() | outer, held)
        assert rest is not None
        if missing := filled.missing(self._tensors() | outer):
            raise UserError(f"it has no {missing}: resume with the model, optimizer and method that wrote it")
        return rest

    def _begin_states(self, held: dict[str, Any]) -> None:
        """Creates zeros for the optimizer state that the checkpoint has and this optimizer does not have yet."""
        for whole, part in held["model"].items():
            kind, _, rest = whole.partition(".")
            name, _, key = rest.rpartition(".")
            p, shape = self._named.get(name), tuple(held["places"][whole][0])
            if kind != "optimizer" or p not in self._groups or key in self._states[p]:
                continue
            on_device = self._groups[p].get("fused") or self._groups[p].get("capturable")
            device = p.device if on_device else torch.device("cpu")  # of a step count
            alike = p.dim() and shape == tuple(p.shape)
            zeros = torch.zeros_like(p.detach(), dtype=part.dtype) if alike else part.new_zeros(shape, device=device)
            self._states[p][key] = zeros

    def _give_back(self, state: dict[str, Any], likes: dict[str, list[Tensor]], outer: Named) -> None:
        """Restores the method's state, with flat tensors made from the named tensors, as long as `likes`."""
        own = state["method"]
        if moved := state["layout"] != str(self.parallel.layout):
            own["places"] = 0  # drops numbers that need the same number of ranks
            own.pop("order", None)  # names match the parameters
            if isinstance(self.method, CO2) and self.method.config.fragments == 1:  # auto, where ranks hold stages
                own["fragments"] = [own["fragments"][own.get("at", 0)]]  # the one in flight
        for key, flats in self._flats(own):
            for i, bucket in enumerate(self._buckets):
                pieces = [outer[f"co2.{key}.{self._wholes[id(p)][0]}"] for p in bucket.params]
                whole = torch.cat([local_shard(t).to(flats[i].device).reshape(-1) for t in pieces])
                flats[i] = torch.cat([self._part(whole, bucket, likes[key][i]), flats[i]])
        self.method.load_state_dict(under_rank(own))
        if moved and self._share:
            self._share.resliced()


def placed(own: Tensor, like: Tensor) -> Tensor:
    """A DTensor placed as `like`, from this rank's part, in the part's own dtype. The part if `like` is none."""
    if not is_dtensor(like):
        return own
    place: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(own.to(like.to_local().device), like.device_mesh, like.placements, **place)


def start_of(t: Tensor) -> Start:
    """Where this rank's part of a tensor begins in the whole tensor."""
    if not isinstance(t, DTensor):
        return (0,) * t.dim()
    return compute_local_shape_and_global_offset(t.shape, t.device_mesh, t.placements)[1]


def island_of(target: Path, layout: Layout, island: int) -> Iterator[dict[str, Any]]:
    """Yields the states of the ranks of an island, one at a time."""
    first = island % layout.islands * layout.island_size
    files = checkpoint.read_manifest(target)["files"]
    return (stored.read(target, rank, files) for rank in range(first, first + layout.island_size))


class Filled:
    """Tensors that are filled with parts from several ranks."""

    def __init__(self) -> None:
        self._seen = set[tuple[str, Start]]()
        self._counts = dict[str, int]()  # elements of each tensor that are filled

    def add(self, tensors: Named, held: dict[str, Any]) -> None:
        """Copies what a rank's state has of the tensors."""
        for name in tensors.keys() & held["model"].keys():
            start = tuple(held["places"][name][1])
            if (name, start) not in self._seen:
                self._seen.add((name, start))
                own = tensors[name]
                count = copy_overlap(local_shard(own), start_of(own), held["model"][name], start)
                self._counts[name] = self._counts.get(name, 0) + count

    def missing(self, tensors: Named) -> str:
        """The first tensor that is not filled, or ""."""
        short = (name for name, t in tensors.items() if self._counts.get(name, 0) < local_shard(t).numel())
        return min(short, default="")


@torch.no_grad()
def copy_overlap(own: Tensor, start: Start, part: Tensor, begin: Start) -> int:
    """Copies what `part`, which begins at `begin` in a tensor, has of `own`, which begins at `start`.

    Returns:
        The number of copied elements.
    """
    sizes = [*zip(start, own.shape, begin, part.shape, strict=True)]
    both = [(max(a, b), min(a + n, b + m)) for a, n, b, m in sizes]
    if any(low >= high for low, high in both):
        return 0
    mine, theirs = (
        t[tuple(slice(low - at, high - at) for (low, high), at in zip(both, where, strict=True))]
        for t, where in ((own, start), (part, begin))
    )
    mine.copy_(theirs)
    return mine.numel()


def read_model(target: Path) -> Named:
    """Returns the first island's whole GPT-2 in one process, by transformers' names.

    Layouts keep the joint projection of attention in three parts, and all projections transposed (see parallel.py).
    """
    first = stored.read(target, 0, checkpoint.read_manifest(target)["files"])
    found, filled, prefix = Named(), Filled(), "model.model."
    for held in island_of(target, Layout.parse(first["layout"]), 0):
        for name, part in held["model"].items():
            if name.startswith(prefix):
                found.setdefault(name, part.new_zeros(held["places"][name][0]))
        filled.add(found, held)
    if missing := filled.missing(found):
        raise UserError(f"{target} has only a part of {missing}: give another run")
    whole: Named = {}
    for name, t in found.items():
        name = name.removeprefix(prefix)
        if part := re.search(r"c_attn\.([qkv])\.", name):
            parts = [found[prefix + name.replace(part[0], f"c_attn.{letter}.")] for letter in "qkv"]
            name, t = name.replace(part[0], "c_attn."), torch.cat(parts)
        whole[name] = t.mT.contiguous() if re.search(r"c_(attn|proj|fc)\.weight$", name) else t
    return whole
