"""Zeroth-order training: MeZO's step (arXiv 2305.17333) by many workers, each of whom measures a part of it.

    zo = ZerothOrder(model, ZerothConfig(eps=1e-3), lr=1e-6)
    for batch in loader:                                # dealt out by zo.data_rank and zo.data_workers
        zo.step(lambda model: loss(model, batch), count=len(batch))
        zo.flush()                                      # only before an evaluation or a checkpoint
    zo.finish()

A step t, with z of (seed, t) alone:

    1  l+, l-  =  loss at W + eps z, loss at W - eps z          on scratch copies: W is not touched
    2  all workers learn every worker's losses and samples       exchange: 24 bytes, in one hop
    3  g = (mean l+ - mean l-) / (2 eps)                         summed in rank order, so with the same bits everywhere
    4  W <- W - lr (g z + weight_decay W)

There is no backward pass, no gradient and no state of an optimiser, and the list of all g is the whole run (ScalarLog).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import struct
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import failure
from core.buckets import check_group, check_inputs, is_dtensor
from core.comm import broadcast, compare, leave_group, new_group
from core.errors import CollectiveError, DivergedError, UserError, is_number, require
from core.local_update import Loop
from core.testing.link import Link
from training.data import mix

NUMBERS = 3  # (sum of the samples' losses at W + eps z, the same at W - eps z, samples)


@dataclass(frozen=True)
class ZerothConfig:
    """Two forward passes a step, at W + eps z and W - eps z, and W <- W - lr (g z + weight_decay W)."""

    eps: float = 1e-3
    """How far the weights are moved along z to measure the slope; MeZO's."""
    weight_decay: float = 0.0
    """Of matrices, embeddings among them; not of biases and norms, which are vectors."""
    seed: int = 0
    """Of z, which depends on (seed, step, tensor, place in it) and nothing else."""
    pairs: bool | None = None
    """Two ranks (2 i and 2 i + 1) take the same data, one at W + eps z, one at W - eps z. None: where the number of
    workers is even. Otherwise every worker does both."""
    rng: Literal["device", "host"] = "device"
    """Where z is drawn. Devices of different kinds draw different numbers: workers that mix them need host."""

    def __post_init__(self) -> None:
        require(self, is_number(self.eps) and 0 < self.eps < math.inf, "eps", "give a number above 0, such as 1e-3")
        decays = is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf
        require(self, decays, "weight_decay", "give 0 or more")
        seeds = type(self.seed) is int and 0 <= self.seed < 1 << 63
        require(self, seeds, "seed", "give a whole number from 0 to 2^63 - 1")
        require(self, self.pairs in (None, True, False), "pairs", "give True, False or None")
        require(self, self.rng in ("device", "host"), "rng", "choose device or host")


@dataclass(frozen=True)
class Place:
    """What worker `rank` of `workers` measures, on a mesh [data groups, 2 if `pairs` else 1]."""

    rank: int
    workers: int
    pairs: bool

    @classmethod
    def make(cls, rank: int, workers: int, config: ZerothConfig) -> Place:
        """UserError where the workers cannot be shared out."""
        pairs = workers % 2 == 0 if config.pairs is None else config.pairs
        if pairs and workers % 2:
            raise UserError(
                f"pairs=True with {workers} worker{'s' * (workers > 1)}: a pair is two, start an even number of them, "
                "or leave pairs out"
            )
        return cls(rank, workers, pairs)

    @property
    def data_workers(self) -> int:
        """How many groups have data of their own."""
        return self.workers // 2 if self.pairs else self.workers

    @property
    def data_rank(self) -> int:
        """Which of these this worker is in: both of a pair must be given the same batches."""
        return self.rank // 2 if self.pairs else self.rank

    @property
    def signs(self) -> tuple[int, ...]:
        """Of eps z."""
        return (1 - 2 * (self.rank % 2),) if self.pairs else (1, -1)

    def combine(self, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        """The mean losses at W + eps z and W - eps z, from each worker's numbers: the same bits on all workers. nan
        where a loss was not finite, or there was no sample."""
        sums, samples = [0.0, 0.0], [0.0, 0.0]
        for rank, (*losses, count) in enumerate(row[:NUMBERS] for row in rows):
            for side in ((1 - sign) // 2 for sign in Place(rank, self.workers, self.pairs).signs):
                sums[side] += losses[side]
                samples[side] += count
        for plus in range(0, self.workers, 2) if self.pairs else ():
            own, other = (rows[rank][NUMBERS - 1] for rank in (plus, plus + 1))
            if own != other:
                raise UserError(
                    f"rank {plus} had {own:g} samples and rank {plus + 1} {other:g}: a pair takes the same batch; deal "
                    "data out by data_rank and data_workers"
                )
        plus, minus = (s / n if n else math.nan for s, n in zip(sums, samples, strict=True))
        return plus, minus


def exchange(
    row: list[float], step: int, group: dist.ProcessGroup | None, link: Link | None
) -> tuple[list[list[float]], int, float]:
    """Every worker's numbers, in rank order; the bytes that this worker sent; the seconds that it waited. gloo's
    all-to-all takes one hop, its all-gather n - 1, its all-reduce 2 (n - 1)."""
    if group is None:
        return [row], 0, 0.0
    began, workers = time.perf_counter(), dist.get_world_size(group)
    sent = torch.tensor([row] * workers, dtype=torch.float64)
    received = torch.empty_like(sent)
    bytes_sent = (workers - 1) * 8 * len(row)
    ready_at = link.reserve(bytes_sent) if link else 0.0
    try:
        dist.all_to_all_single(received, sent, group=group)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CollectiveError(
            f"rank {dist.get_rank()}: the scalars of step {step} did not come; {failure.describe_failed()}: {reason}"
        ) from None
    time.sleep(max(0.0, ready_at - time.perf_counter()))
    return received.tolist(), bytes_sent, time.perf_counter() - began


# -- the log, from which a run's weights follow -----------------------------------------------------------------------


_FORMAT = "co2 zeroth-order scalars 1"


class Update(NamedTuple):
    """W <- W - lr (g z + weight_decay W), with the z of that step."""

    step: int
    lr: float
    g: float

    @property
    def dropped(self) -> bool:
        """A loss was not finite somewhere: nothing is changed, nor decayed."""
        return not math.isfinite(self.g)


@dataclass
class ScalarLog:
    """The projected gradients g of steps 0, 1, ..., in float64, and the learning rate where it changed."""

    seed: int
    weight_decay: float = 0.0
    g: array[float] = field(default_factory=lambda: array("d"))
    lrs: list[tuple[int, float]] = field(default_factory=list)  # (step, the rate from there on)

    def __len__(self) -> int:
        """Steps."""
        return len(self.g)

    def append(self, update: Update) -> None:
        assert update.step == len(self), "steps follow one another"
        if not self.lrs or self.lrs[-1][1] != update.lr:
            self.lrs.append((update.step, update.lr))
        self.g.append(update.g)

    def updates(self, first: int = 0) -> list[Update]:
        """The updates of the steps from `first` on."""
        found, rates = [], dict(self.lrs)
        lr = next((rate for step, rate in reversed(self.lrs) if step <= first), 0.0)
        for step in range(first, len(self)):
            lr = rates.get(step, lr)
            found.append(Update(step, lr, self.g[step]))
        return found

    def beyond(self, known: ScalarLog) -> list[Update]:
        """The steps that follow those of `known`; UserError where its settings or steps differ from this log's."""
        for name in ("seed", "weight_decay"):
            if (ours := getattr(self, name)) != (here := getattr(known, name)):
                raise UserError(f"the scalars are of {name}={ours!r}, here it is {here!r}: replay with their settings")
        first = self.g[: len(known.g)].tobytes() == known.g.tobytes()  # the bytes, for NaN is unequal to itself
        rates = zip(self.updates(), known.updates(), strict=False)
        if not first or any(mine.lr != theirs.lr for mine, theirs in rates):
            raise UserError("the scalars are of another run than this one: replay from its initial weights")
        return self.updates(len(known))

    def save(self, path: str | Path) -> None:
        """Writes a line of JSON, and the numbers in little-endian float64."""
        header = {"format": _FORMAT, "steps": len(self), **self.state_dict()}
        numbers = header.pop("g")
        Path(path).write_bytes(json.dumps(header).encode() + b"\n" + struct.pack(f"<{len(numbers)}d", *numbers))

    @classmethod
    def load(cls, path: str | Path) -> ScalarLog:
        """Reads a file of `save`; UserError where it is another one, or is cut short."""
        line, _, numbers = Path(path).read_bytes().partition(b"\n")
        try:
            header = json.loads(line)
            known = header["format"] == _FORMAT and len(numbers) == 8 * header["steps"]
            log = cls.from_state(header | {"g": []})
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            known, log = False, cls(0)
        if not known:
            raise UserError(f"{path} is no whole list of a zeroth-order run's scalars: give a file of ScalarLog.save")
        log.g.extend(struct.unpack(f"<{len(numbers) // 8}d", numbers))
        return log

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("seed", "weight_decay", "lrs")} | {"g": list(self.g)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ScalarLog:
        lrs = [(int(step), float(rate)) for step, rate in state["lrs"]]
        return cls(state["seed"], state["weight_decay"], array("d", state["g"]), lrs)


# -- weights and the random direction z -------------------------------------------------------------------------------


CHUNK = 1 << 20  # elements, drawn from one generator: a slice that begins at a multiple of it needs no others


class Noise:
    """z, of the standard normal distribution, for every (step, tensor, chunk): any worker can draw it, in any order.
    device: of the generators, one kind on all workers; CUDA devices of one model draw the same numbers."""

    def __init__(self, seed: int, device: torch.device):
        self.seed, self.device = seed, device
        self._generator = torch.Generator(device)

    def chunk(
        self, step: int, tensor: int, number: int, numel: int, out: torch.device, into: Tensor | None = None
    ) -> Tensor:
        """float32 [numel] on `out`, in `into` if given: elements number * CHUNK to number * CHUNK + numel."""
        into = torch.empty(numel, dtype=torch.float32, device=out) if into is None else into
        self._generator.manual_seed(mix(self.seed, step, 0, tensor, number))  # 0: scalars that were saved hold with it
        if self.device == out:
            return into.normal_(generator=self._generator)
        return into.copy_(torch.randn(numel, generator=self._generator, dtype=torch.float32, device=self.device))


def kind_of(device: torch.device) -> str:
    """Devices of one kind draw the same numbers."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class Weights:
    """names, params: what is trained, tied weights once. numbers: each one's index, by its id; its number in Noise."""

    def __init__(self, model: nn.Module, config: ZerothConfig):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.params = [name for name, _ in named], [p for _, p in named]
        self.numbers = {id(p): number for number, p in enumerate(self.params)}
        self.config = config
        for name, p in named:
            if is_dtensor(p):
                raise UserError(
                    f"{name} is a DTensor: zeroth-order training holds whole tensors; do not shard the model"
                )
            if not p.is_contiguous():
                raise UserError(f"{name} is not contiguous: give it contiguous memory before")
        check_inputs(self.params, self.params, ())
        device = self.params[0].device if config.rng == "device" else torch.device("cpu")
        self.noise = Noise(config.seed, device)

    @torch.no_grad()
    def perturb(self, index: int, w: Tensor, out: Tensor, step: int, sign: int) -> None:
        """out <- W + sign eps z, both of the parameter's shape; W stays as it is, so that nothing need be undone."""
        parts = zip(w.view(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
        for number, (part, moved) in enumerate(parts):
            z = self._z(step, index, number, part, moved if moved.dtype == torch.float32 else None)
            torch.add(part, z.mul_(sign * self.config.eps), out=moved)

    @torch.no_grad()
    def update(self, index: int, w: Tensor, update: Update) -> None:
        """The step's update of tensor `index`, in place; never fused, so that all devices give the same bits."""
        if update.dropped:
            return
        decay = update.lr * self.config.weight_decay if w.ndim >= 2 else 0.0
        into = torch.empty(min(CHUNK, w.numel()), dtype=torch.float32, device=w.device)
        for number, part in enumerate(w.view(-1).split(CHUNK)):
            new = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            if decay:
                new.mul_(1 - decay)
            z = self._z(update.step, index, number, part, into[: part.numel()])
            new.sub_(z.mul_(update.lr * update.g))
            if new is not part:
                part.copy_(new)

    def _z(self, step: int, index: int, number: int, like: Tensor, into: Tensor | None) -> Tensor:
        """float32, in `into` if given, or float64 for such a tensor."""
        z = self.noise.chunk(step, index, number, like.numel(), like.device, into)
        return z.double() if like.dtype == torch.float64 else z


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of the tensors' bytes in order."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# -- the step ---------------------------------------------------------------------------------------------------------


PATIENCE = 10  # steps in a row that may be dropped

Loss = Callable[[nn.Module], Tensor | float]


class Forward(Protocol):
    """How losses at perturbed weights are measured, and where the weights lie meanwhile."""

    pending: list[Update]
    share: dist.ProcessGroup | None  # with whom this worker must make equally many passes

    def losses(self, loss: Loss, step: int, signs: tuple[int, ...]) -> list[Tensor | float]: ...
    def apply(self, update: Update) -> None: ...
    def flush(self) -> None: ...
    def inference(self) -> contextlib.AbstractContextManager[None]: ...


class ScratchCopy:
    """All weights on their device, and one copy of them, which is perturbed; updates at once."""

    def __init__(self, model: nn.Module, weights: Weights):
        self._model, self._weights = model, weights
        self._scratch = [torch.empty_like(p, requires_grad=False) for p in weights.params]
        self.pending: list[Update] = []  # always empty
        self.share: dist.ProcessGroup | None = None

    def losses(self, loss: Loss, step: int, signs: tuple[int, ...]) -> list[Tensor | float]:
        """loss(model) at W + sign eps z for each sign."""
        found = []
        live = [p.data for p in self._weights.params]
        for sign in signs:
            for i, (w, scratch) in enumerate(zip(live, self._scratch, strict=True)):
                self._weights.perturb(i, w, scratch, step, sign)
            try:
                for p, scratch in zip(self._weights.params, self._scratch, strict=True):
                    p.data = scratch
                found.append(loss(self._model))
            finally:
                for p, w in zip(self._weights.params, live, strict=True):
                    p.data = w
        return found

    def apply(self, update: Update) -> None:
        for i, p in enumerate(self._weights.params):
            self._weights.update(i, p.data, update)

    def flush(self) -> None:
        """Nothing is put off here."""

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called, at W: as ever, here."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode, and autocast keeps no weights; after it as it was."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with weights_uncached():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def weights_uncached() -> Iterator[None]:
    """Inside, autocast casts a weight whenever it is used: what it keeps goes by the parameter, whose data change."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. loss: the mean over samples and both sides. g: the projected gradient. dropped: a loss was
    not finite on some worker; nobody changed a weight."""

    step: int
    loss: float
    g: float
    dropped: bool


class ZerothOrder(Loop):
    """Trains a model by its losses alone; see the module's text.

    Args:
        model: in its final dtype and on its device; rank 0's tensors are taken where workers differ. Trains what
            requires a gradient, in eval mode: dropout would make the two losses of a step incomparable.
        lr: the learning rate, which a schedule may set before each step.
        timeout: seconds until a missing worker is an error.
        link: an emulated slow link.
        make_forward: how to hold the weights: ScratchCopy, or blocks.BlockStream.

    Attributes: log, the ScalarLog; place, what this worker measures; news, numbers that a worker sends along, equally
    many on all, and heard, their sums. Of the last step: own_loss, this worker's; bytes_sent and exposed_seconds of the
    exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZerothConfig | None = None,
        *,
        lr: float,
        timeout: float = 600.0,
        link: Link | None = None,
        make_forward: Callable[[nn.Module, Weights], Forward] = ScratchCopy,
    ):
        self.model, self.config, self.lr = model, config or ZerothConfig(), lr
        self._timeout, self._link = timeout, link
        rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.place = Place.make(rank, workers, self.config)
        self.group: dist.ProcessGroup | None = None
        if workers > 1:  # a gloo group for scalars alone, whose members find out who has failed
            self.group = new_group(None, timeout, torch.device("cpu"), backend="gloo")
            failure.register(self.group)
        self.weights = Weights(model, self.config)
        self._forward = make_forward(model, self.weights)  # says where z is drawn, so before the workers compare
        if self.group is not None:
            self._meet(self.group)
        self.log = ScalarLog(self.config.seed, self.config.weight_decay)
        self.news: list[float] = []
        self.heard: list[float] = []
        self._dropped = 0  # steps in a row
        self.own_loss = math.nan
        self.bytes_sent, self.exposed_seconds = 0, 0.0

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Compares settings and shapes with the other workers'; takes rank 0's tensors where any differ."""
        drawn = f"z drawn on {kind_of(self.weights.noise.device)} (with rng='host' all draw alike)"
        names = [f"{name} {tuple(p.shape)}" for name, p in zip(self.weights.names, self.weights.params, strict=True)]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        compare((str(self.config), drawn, f"{len(names)} tensors", *names), tensors, group)
        broadcast([t.data for t in tensors], group, torch.device("cpu"))

    @property
    def steps(self) -> int:
        """How many have been taken."""
        return len(self.log)

    @property
    def data_rank(self) -> int:
        """Which part of the data this worker takes, of data_workers."""
        return self.place.data_rank

    @property
    def data_workers(self) -> int:
        """Both workers of a pair take the same part."""
        return self.place.data_workers

    @torch.no_grad()
    def step(self, loss: Loss, count: float) -> StepResult:
        """One step of all workers. loss: called with the model, perhaps twice; returns the mean over this worker's
        samples. count: these samples, which weigh the mean over workers; 0: none."""
        if self.group is None:
            check_group()
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: give a finite number, 0 or more")
        if not (math.isfinite(count) and count >= 0):
            raise UserError(f"count={count}: give how many samples the loss is the mean of")
        number, signs = self.steps, self.place.signs
        with evaluating(self.model):
            sides = self._measure(loss, count, number, signs)
        self.own_loss = sum(sides) / (len(signs) * count) if count else math.nan
        row = [*sides, float(count)]
        rows, self.bytes_sent, self.exposed_seconds = exchange([*row, *self.news], number, self.group, self._link)
        plus, minus = self.place.combine(rows)
        self.heard = [math.fsum(numbers) for numbers in zip(*(r[len(row) :] for r in rows), strict=True)]
        update = Update(number, self.lr, (plus - minus) / (2 * self.config.eps))
        self._forward.apply(update)
        self.log.append(update)
        self._dropped = self._dropped + 1 if update.dropped else 0
        if self._dropped == 1 and self.place.rank == 0:
            warnings.warn(f"step {number} is dropped: a loss is not finite on some worker", stacklevel=3)
        if self._dropped >= PATIENCE:
            raise DivergedError(
                f"the losses of {PATIENCE} steps up to step {number} are not finite: lower the learning rate, or "
                "look at the data"
            )
        return StepResult(number, (plus + minus) / 2, update.g, update.dropped)

    def _measure(self, loss: Loss, count: float, step: int, signs: tuple[int, ...]) -> list[float]:
        """The losses of this worker's samples, summed, at each side: 0 where another worker measures it."""
        sides = [0.0, 0.0]
        if not count and self._forward.share is not None:
            raise UserError("count=0: a worker that shares uploads measures at every step; give each some samples")
        if count:
            for sign, value in zip(signs, self._forward.losses(loss, step, signs), strict=True):
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise UserError(f"the loss has shape {tuple(value.shape)}: return the mean over the samples, 0-d")
                sides[(1 - sign) // 2] = float(value) * count
        return sides

    @torch.no_grad()
    def flush(self) -> None:
        """Applies updates that wait for a block's next upload, for an evaluation. It changes no later step."""
        self._forward.flush()

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called with every update, as for an evaluation."""
        return self._forward.inference()

    def finish(self) -> None:
        """At the end: applies every update."""
        self.flush()

    def close(self) -> None:
        """Leaves the group; every worker must call it."""
        if self.group is not None:
            leave_group(self.group, self._timeout)
            self.group = None

    # -- checkpoints and replay -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the model's weights, the same on all workers. Save the weights at the same moment."""
        return {
            "config": self._lasting(),
            "pending": [tuple(update) for update in self._forward.pending],
            "log": self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights that were saved with it are in the model."""
        here = self._lasting()
        if changed := [f"{k}={v!r}, here {here[k]!r}" for k, v in state["config"].items() if here[k] != v]:
            raise UserError(f"the checkpoint has {', '.join(changed)}: resume with its settings")
        self.log = ScalarLog.from_state(state["log"])
        for update in state["pending"]:
            self._forward.apply(Update(*update))

    def _lasting(self) -> dict[str, Any]:
        """The settings that a resumed run must share; pairs and rng may change."""
        return asdict(self.config) | {"pairs": None, "rng": None}

    @torch.no_grad()
    def replay(self, log: ScalarLog) -> None:
        """Takes the steps that `log` has beyond this object's own, bit for bit, without data and other workers.
        UserError where the log is of other settings or another run."""
        for update in log.beyond(self.log):
            self._forward.apply(update)
            self.log.append(update)
        dropped = takewhile(lambda update: update.dropped, reversed(self.log.updates()))
        self._dropped = len([*dropped])
        self.flush()
