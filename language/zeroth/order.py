"""Zeroth-order training: MeZO's step (arXiv 2305.17333) on many workers, each of which measures a part of it.

    zo = ZerothOrder(model, ZerothConfig(eps=1e-3), lr=1e-6)
    for batch in loader:                                # the part zo.place.data_rank of zo.place.data_workers
        zo.step(lambda model: loss(model, batch), count=len(batch))
        zo.sync_for_eval()                              # only before an evaluation or a checkpoint
    zo.finish()

Step t, where z depends only on (seed, t):

    1  l+, l-  =  loss at W + eps z, loss at W - eps z          on scratch copies: W is not touched
    2  all workers receive every worker's losses and samples     exchange: 24 bytes, in one hop
    3  g = (mean l+ - mean l-) / (2 eps)                         summed in rank order: the same bits on all workers
    4  W <- W - lr g z

There is no backward pass, no gradient and no optimizer state. The list of all g is the whole run (ScalarLog).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from core.buckets import is_dtensor
from core.comm import Link
from core.errors import CollectiveError, DivergedError, UserError, is_number, require
from core.groups import broadcast, compare, leave_group, new_group
from core.guards import failure
from core.guards.inputs import check_group, check_inputs
from core.hooks import Requests
from core.local_update import Loop
from core.stats import RoundStats
from training.data.samples import mix
from training.optim import evaluating
from training.start.errors import explained

NUMBERS = 3  # (sum of the samples' losses at W + eps z, the same at W - eps z, samples)


@dataclass(frozen=True)
class ZerothConfig:
    """Two forward passes a step, at W + eps z and W - eps z, and W <- W - lr g z."""

    eps: float = 1e-3
    """Distance along z at which the loss is measured. The default is MeZO's."""
    seed: int = 0
    """Seed of z, which depends only on (seed, step, tensor, position in the tensor)."""

    def __post_init__(self) -> None:
        require(self, is_number(self.eps) and 0 < self.eps < math.inf, "eps", "give a number above 0, such as 1e-3")
        seeds = type(self.seed) is int and 0 <= self.seed < 1 << 63
        require(self, seeds, "seed", "give a whole number from 0 to 2^63 - 1")


@dataclass(frozen=True)
class Place:
    """The part of a step that worker `rank` of `workers` measures."""

    rank: int
    workers: int

    @property
    def pairs(self) -> bool:
        """Whether ranks 2 i and 2 i + 1 use the same data, one at W + eps z and one at W - eps z.

        An odd number of workers forms no pairs, so each measures both.
        """
        return self.workers % 2 == 0

    @property
    def data_workers(self) -> int:
        """The number of groups that each use their own data."""
        return self.workers // 2 if self.pairs else self.workers

    @property
    def data_rank(self) -> int:
        """This worker's data group. Give both workers of a pair the same batches."""
        return self.rank // 2 if self.pairs else self.rank

    @property
    def signs(self) -> tuple[int, ...]:
        """The signs of eps z at which this worker measures."""
        return (1 - 2 * (self.rank % 2),) if self.pairs else (1, -1)

    def combine(self, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Averages the losses over all samples, with the same bits on all workers.

        Args:
            rows: Each worker's NUMBERS, in rank order.

        Returns:
            The average losses at W + eps z and at W - eps z. NaN if a loss was not finite or there was no sample.

        Raises:
            UserError: If the workers of a pair had different numbers of samples.
        """
        sums, samples = [0.0, 0.0], [0.0, 0.0]
        for rank, (*losses, count) in enumerate(row[:NUMBERS] for row in rows):
            for side in ((1 - sign) // 2 for sign in Place(rank, self.workers).signs):
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
    """Sends a worker's numbers to all workers.

    gloo's all-to-all needs one hop, its all-gather n - 1, and its all-reduce 2 (n - 1). All workers have equally many
    numbers. Without a group there is one worker.

    Returns:
        Every worker's numbers in rank order, the bytes that this worker sent, and the seconds that it waited.
    """
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
            f"rank {dist.get_rank()}: the scalars of step {step} did not come; {failure.describe_failed()} ({reason})"
        ) from None
    time.sleep(max(0.0, ready_at - time.perf_counter()))
    return received.tolist(), bytes_sent, time.perf_counter() - began


# -- the log, from which a run's weights follow -----------------------------------------------------------------------


class Update(NamedTuple):
    """W <- W - lr g z, with the z of step 0, 1, ..., and the projected gradient g."""

    step: int
    lr: float
    g: float

    @property
    def dropped(self) -> bool:
        """Whether a loss was not finite on some worker. Then no worker changes a weight."""
        return not math.isfinite(self.g)


@dataclass
class ScalarLog:
    """The projected gradients g of steps 0, 1, ... in float64, and the learning rate at each change."""

    seed: int
    g: array[float] = field(default_factory=lambda: array("d"))
    lrs: list[tuple[int, float]] = field(default_factory=list)  # (step, the rate from there on)

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.g)

    def append(self, update: Update) -> None:
        assert update.step == len(self), "steps follow one another"
        if not self.lrs or self.lrs[-1][1] != update.lr:
            self.lrs.append((update.step, update.lr))
        self.g.append(update.g)

    def updates(self, first: int = 0) -> list[Update]:
        """The updates of the steps from `first` on."""
        found, rates, lr = [], dict(self.lrs), 0.0
        for step, g in enumerate(self.g):
            lr = rates.get(step, lr)
            found.append(Update(step, lr, g))
        return found[first:]

    def beyond(self, known: ScalarLog) -> list[Update]:
        """The steps of this log that follow the steps of `known`.

        Raises:
            UserError: If `known` has another seed, or its steps are not the first steps of this log.
        """
        if self.seed != known.seed:
            raise UserError(f"the scalars are of seed={self.seed}, here it is {known.seed}: replay with their settings")
        first = self.g[: len(known.g)].tobytes() == known.g.tobytes()  # bytes, because NaN is not equal to itself
        rates = zip(self.updates(), known.updates(), strict=False)
        if not first or any(mine.lr != theirs.lr for mine, theirs in rates):
            raise UserError("the scalars are of another run than this one: replay from its initial weights")
        return self.updates(len(known))

    def save(self, path: str | Path) -> None:
        """Writes g as a float64 tensor of a safetensors file, whose metadata have all else."""
        rest = self.state_dict()
        g = torch.tensor(rest.pop("g"), dtype=torch.float64)
        Path(path).write_bytes(serialize({"g": g}, {"rest": json.dumps(rest)}))

    @classmethod
    def load(cls, path: str | Path) -> ScalarLog:
        """Reads a file that `save` wrote.

        Raises:
            UserError: If it is another file, or is cut short.
        """
        what = f"{path} is no whole list of a zeroth-order run's scalars"
        with explained(what, "give a file of ScalarLog.save"), safe_open(path, "pt") as file:
            return cls.from_state(json.loads(file.metadata()["rest"]) | {"g": file.get_tensor("g").tolist()})

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "lrs": self.lrs, "g": list(self.g)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> ScalarLog:
        lrs = [(int(step), float(rate)) for step, rate in state["lrs"]]
        return cls(state["seed"], array("d", state["g"]), lrs)


# -- weights and the random direction z -------------------------------------------------------------------------------


CHUNK = 1 << 20  # elements that are drawn after one seeding of the generator


class Noise:
    """The direction z, from the standard normal distribution. Any worker can draw any chunk of it, in any order.

    Args:
        seed: The seed of the run.
        device: The device that draws, of the same kind on all workers. CUDA devices of one model draw alike.
    """

    def __init__(self, seed: int, device: torch.device):
        self.seed, self.device = seed, device
        self._generator = torch.Generator(device)

    def chunk(self, step: int, tensor: int, number: int, numel: int, into: Tensor | None = None) -> Tensor:
        """Draws elements number * CHUNK to number * CHUNK + numel of a tensor's z.

        Returns:
            float32 [numel]; `into`, if it is given.
        """
        into = torch.empty(numel, dtype=torch.float32, device=self.device) if into is None else into
        self._generator.manual_seed(mix(self.seed, step, 0, tensor, number))  # the 0 keeps saved scalars valid
        return into.normal_(generator=self._generator)

    @property
    def kind(self) -> str:
        """The kind of the device. Devices of one kind draw the same numbers."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type


class Weights:
    """The trained parameters of a model, tied weights once.

    Attributes:
        numbers: From a parameter's id to its index, which is its tensor number in Noise.
    """

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
        check_inputs([*model.parameters()], self.params, ())
        self.noise = Noise(config.seed, self.params[0].device)

    @torch.no_grad()
    def perturb(self, index: int, w: Tensor, out: Tensor, step: int, sign: int) -> None:
        """Writes W + sign eps z to `out`. Both have the parameter's shape. W stays, so nothing must be undone."""
        parts = zip(w.view(-1).split(CHUNK), out.view(-1).split(CHUNK), strict=True)
        for number, (part, moved) in enumerate(parts):
            z = self._z(step, index, number, part, moved if moved.dtype == torch.float32 else None)
            torch.add(part, z.mul_(sign * self.config.eps), out=moved)

    @torch.no_grad()
    def update(self, index: int, w: Tensor, update: Update) -> None:
        """Applies the step's update to tensor `index` in place. It is never fused, so all devices give equal bits."""
        if update.dropped:
            return
        into = torch.empty(min(CHUNK, w.numel()), dtype=torch.float32, device=w.device)
        for number, part in enumerate(w.view(-1).split(CHUNK)):
            new = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            z = self._z(update.step, index, number, part, into[: part.numel()])
            new.sub_(z.mul_(update.lr * update.g))
            if new is not part:
                part.copy_(new)

    def _z(self, step: int, index: int, number: int, like: Tensor, into: Tensor | None) -> Tensor:
        """A chunk of z in float32, in `into` if given. In float64 if `like` is."""
        z = self.noise.chunk(step, index, number, like.numel(), into)
        return z.double() if like.dtype == torch.float64 else z


def digest(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of the tensors' bytes in order."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# -- the step ---------------------------------------------------------------------------------------------------------


PATIENCE = 10  # dropped steps in a row that end the run

Loss = Callable[[nn.Module], Tensor | float]


class ScratchCopy:
    """Keeps the weights of `params` (None: all) on their device, with one copy to perturb. Applies each update at once.

    Attributes:
        pending: The deferred updates, none here.
    """

    def __init__(self, model: nn.Module, weights: Weights, params: Sequence[nn.Parameter] | None = None):
        self._model, self._weights = model, weights
        self._params = weights.params if params is None else params
        self._scratch = [torch.empty_like(p, requires_grad=False) for p in self._params]
        self.pending: list[Update] = []

    def losses(self, loss: Loss, step: int, signs: tuple[int, ...]) -> list[Tensor | float]:
        """loss(model) at W + sign eps z for each sign."""
        found = []
        for sign in signs:
            with self.perturbed(step, sign):
                found.append(loss(self._model))
        return found

    @contextlib.contextmanager
    def perturbed(self, step: int, sign: int) -> Iterator[None]:
        """A context in which the model's parameters are W + sign eps z."""
        live = [p.data for p in self._params]
        for p, scratch in zip(self._params, self._scratch, strict=True):
            self._weights.perturb(self._weights.numbers[id(p)], p.data, scratch, step, sign)
        try:
            for p, scratch in zip(self._params, self._scratch, strict=True):
                p.data = scratch
            yield
        finally:
            for p, w in zip(self._params, live, strict=True):
                p.data = w

    def apply(self, update: Update) -> None:
        for p in self._params:
            self._weights.update(self._weights.numbers[id(p)], p.data, update)

    def flush(self) -> None:
        """Does nothing, because no update is deferred here."""

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """A context in which the model can be called at W. Here it always can."""
        yield


@contextlib.contextmanager
def weights_uncached() -> Iterator[None]:
    """A context without autocast's cache. The cache is keyed by the parameter, whose data change here."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class ZerothOrder(Loop):
    """Trains a model from its losses, without gradients, after MeZO (arXiv 2305.17333).

    Args:
        model: In its final dtype and on its device. If workers differ, rank 0's tensors are used. Trains the parameters
            that require a gradient. It runs in eval mode, because dropout would make a step's two losses incomparable.
        config: The settings.
        lr: The learning rate. A schedule may set the attribute before each step.
        timeout: Seconds until a missing worker is an error.
        link: An emulated slow link.
        requests: A hook whose numbers travel with the losses.
        make_forward: Where the weights are stored: ScratchCopy, or blocks.BlockStream.

    Attributes:
        log: The ScalarLog of the run.
        place: The part of a step that this worker measures.
        own_loss: This worker's loss in the last step.
        stats: Statistics of the last step. Each step is a round, and the exchange of scalars its communication.
    """

    tau = 1
    compression = None  # there are no gradients to compress

    def __init__(
        self,
        model: nn.Module,
        config: ZerothConfig | None = None,
        *,
        lr: float,
        timeout: float = 600.0,
        link: Link | None = None,
        requests: Requests | None = None,
        make_forward: Callable[[nn.Module, Weights], ScratchCopy] = ScratchCopy,
    ):
        self.model, self.config, self.lr = model, config or ZerothConfig(), lr
        self._timeout, self._link, self._requests = timeout, link, requests or Requests()
        rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.place = Place(rank, workers)
        self.group: dist.ProcessGroup | None = None
        if workers > 1:  # a gloo group only for scalars, whose members can find a failed worker
            self.group = new_group(None, timeout, torch.device("cpu"), backend="gloo")
            failure.register(self.group)
        self.weights = Weights(model, self.config)
        self._forward = make_forward(model, self.weights)  # before the workers compare, as it decides where z is drawn
        if self.group is not None:
            self._meet(self.group)
        self.log = ScalarLog(self.config.seed)
        self._dropped = 0  # steps in a row
        self.own_loss, self.stats = math.nan, RoundStats()

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Compares settings and shapes among workers, and broadcasts rank 0's tensors."""
        drawn = f"z drawn on {self.weights.noise.kind}"
        names = [f"{name} {tuple(p.shape)}" for name, p in zip(self.weights.names, self.weights.params, strict=True)]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        compare((str(self.config), drawn, f"{len(names)} tensors", *names), tensors, group)
        broadcast([t.data for t in tensors], group, torch.device("cpu"))

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return len(self.log)

    rounds = steps

    @torch.no_grad()
    def step(self, loss: Loss, count: float) -> Update:
        """One step of all workers.

        Args:
            loss: Called with the model once or twice. Returns the average over this worker's samples.
            count: The number of these samples, which is this worker's weight. 0 if it has none.

        Returns:
            The step's update, the same on all workers.

        Raises:
            UserError: If lr, count or the loss is invalid.
            DivergedError: If PATIENCE steps in a row had losses that are not finite.
        """
        if self.group is None:
            check_group()
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: give a finite number, 0 or more")
        if not (math.isfinite(count) and count >= 0):
            raise UserError(f"count={count}: give how many samples the loss is the mean of")
        number, signs = self.steps, self.place.signs
        with evaluating(self.model), weights_uncached():
            sides = self._measure(loss, count, number, signs)
        self.own_loss = sum(sides) / (len(signs) * count) if count else math.nan
        row = [*sides, float(count), *self._requests.take()]
        rows, bytes_sent, waited = exchange(row, number, self.group, self._link)
        plus, minus = self.place.combine(rows)
        self._requests.receive([math.fsum(numbers) for numbers in zip(*(r[NUMBERS:] for r in rows), strict=True)])
        self._requests.on_round_end()
        self.stats = RoundStats(number + 1, local_steps=1, bytes_sent=bytes_sent)
        self.stats.exposed_seconds = self.stats.allreduce_seconds = waited
        update = Update(number, self.lr, (plus - minus) / (2 * self.config.eps))
        self._take(update)
        if self._dropped == 1 and self.place.rank == 0:
            warnings.warn(f"step {number} is dropped: a loss is not finite on some worker", stacklevel=3)
        if self._dropped >= PATIENCE:
            raise DivergedError(
                f"the losses of {PATIENCE} steps up to step {number} are not finite: lower the learning rate, or "
                "look at the data"
            )
        return update

    def _take(self, update: Update) -> None:
        self._forward.apply(update)
        self.log.append(update)
        self._dropped = self._dropped + 1 if update.dropped else 0

    def _measure(self, loss: Loss, count: float, step: int, signs: tuple[int, ...]) -> list[float]:
        """This worker's summed losses at each side. 0 for a side that another worker measures."""
        sides = [0.0, 0.0]
        if count:
            for sign, value in zip(signs, self._forward.losses(loss, step, signs), strict=True):
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise UserError(f"the loss has shape {tuple(value.shape)}: return the mean over the samples, 0-d")
                sides[(1 - sign) // 2] = float(value) * count
        return sides

    @torch.no_grad()
    def finish(self) -> None:
        """Applies the updates that wait for a block's next upload. Later steps do not change."""
        self._forward.flush()

    def sync_for_eval(self) -> bool:
        """Applies the deferred updates, as before a checkpoint."""
        self.finish()
        return True

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[bool]:
        """A context in which the model can be called with all updates applied, as for an evaluation."""
        with self._forward.inference():
            yield True

    def close(self) -> None:
        """Leaves the process group. Every worker must call it."""
        if self.group is not None:
            leave_group(self.group, self._timeout)
            self.group = None

    # -- checkpoints and replay -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state without the model's weights, equal on all workers. Save the weights at the same time."""
        return {
            "config": asdict(self.config),
            "pending": [tuple(update) for update in self._forward.pending],
            "log": self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state. First load the weights that were saved with it.

        Raises:
            UserError: If the checkpoint has other settings.
        """
        here = asdict(self.config)
        if changed := [f"{k}={v!r}, here {here.get(k)!r}" for k, v in state["config"].items() if here.get(k) != v]:
            raise UserError(f"the checkpoint has {', '.join(changed)}: resume with its settings")
        self.log = ScalarLog.from_state(state["log"])
        for update in state["pending"]:
            self._forward.apply(Update(*update))

    @torch.no_grad()
    def replay(self, log: ScalarLog) -> None:
        """Repeats the steps of `log` that this object has not taken, bit for bit, without data or other workers.

        Raises:
            UserError: If the log has other settings or is from another run.
        """
        for update in log.beyond(self.log):
            self._take(update)
        self.finish()
