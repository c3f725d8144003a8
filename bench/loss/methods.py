"""The methods: how workers are synchronized. All workers are the rows of one tensor.

A method is a subclass of `Method` and a line of METHODS. Its options, with their defaults, are a class attribute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.loss.tasks import InnerState
from core.buckets import slices
from core.compression.formats import BLOCK, decode, encode
from core.errors import UserError

Gradient = Callable[[Tensor, Any], Tensor]
EPS = 1e-12

# -- the all-reduce -------------------------------------------------------------------------------------------------


def mean(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted average over the workers, [workers, n] and [workers] -> [n]. 0 if all weights are 0."""
    total = weights.sum()
    return torch.einsum("w,w...->...", weights, values) / torch.where(total == 0, 1.0, total)


class CompressedMean:
    """The average over the workers in a narrow format with error feedback, as in core/compression/quantized.py.

    Each worker encodes its tensor. Worker j averages the j-th chunk, in whole blocks, and encodes the average again."""

    def __init__(self, compression: str):
        self.compression = compression
        self.residuals: Tensor | None = None  # [workers, n], n padded to equal chunks
        self.mean_residual: Tensor | None = None  # [n]

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[workers, n] -> [n]. weights: 1, or 0 for an excluded worker, which keeps its residual."""
        workers, n = rows.shape
        rows = pad(rows, (0, -n % (workers * BLOCK)))
        before = torch.zeros_like(rows) if self.residuals is None else self.residuals
        arrived, left = self.send(rows, before)
        self.residuals = torch.where(weights[:, None] == 0, before, left)
        average, self.mean_residual = self.send(mean(arrived, weights), self.mean_residual)
        return average[:n]

    def send(self, values: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The decoded values and the new residual, both shaped as values."""
        values = values if residual is None else values + residual
        arrived = decode(encode(values.reshape(-1), self.compression), self.compression, values.dtype).view_as(values)
        return arrived, values - arrived


# -- the methods ----------------------------------------------------------------------------------------------------


class Method:
    """Workers that are never synchronized; the base class.

    Args:
        x: parameters, [workers, n], updated in place.
        tau: local steps per round.
        sizes: elements of each tensor of the model, in the order of a row; one tensor by default.
        options: the class's options with their values.
    """

    options: ClassVar[dict[str, Any]] = {"compression": "float32"}
    fixed: ClassVar[tuple[str, ...]] = ()
    """Options that the command line may not set."""
    has_rounds: ClassVar[bool] = True
    """Whether tau changes the result."""

    def __init__(self, x: Tensor, tau: int, sizes: Sequence[int] = (), **options: Any):
        self.x, self.tau, self.sizes, self.o = x, tau, sizes or (x.shape[1],), options
        self.taken, self.lr = 0, 0.0
        compression = options.get("compression", "float32")
        self.reduce = mean if compression == "float32" else CompressedMean(compression)

    def mean(self, rows: Tensor) -> Tensor:
        """The average over the workers after compression, [workers, n] -> [n]."""
        return self.reduce(rows, torch.ones_like(rows[:, 0]))

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        """One local step of every worker. gradient: (x, batch) -> [workers, n]."""
        inner.step(self.x, gradient(self.x, batch), lr)
        self.taken, self.lr = self.taken + 1, lr
        self.after_local_step()

    def after_local_step(self) -> None:
        if self.taken % self.tau == 0:
            self.boundary()

    def boundary(self) -> None:
        """Called after every tau-th step."""

    def finish(self) -> None:
        """Makes all rows of x equal."""


class DDP(Method):
    """Averages the gradients every step. Gradient clipping applies to the averaged gradient."""

    has_rounds = False

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        inner.step(self.x, self.mean(gradient(self.x, batch)).expand_as(self.x), lr)


class CO2(Method):
    """Algorithm 1 of the paper, and other ways to merge a late averaged update.

    Attributes:
        alpha, beta, nesterov, gap, phi: Options of the outer step. nesterov applies beta m + new in place of m.
        delay: local steps from the start of an all-reduce to its merge. round is tau, the paper's; 0 is blocking.
        merge: where worker i continues after the outer step gave z. restart: from z (the paper). keep_local: from z
            plus the local progress since the all-reduce started (LOSCAR-SGD, arXiv 2605.20866).

    A worker sends z - x^i. With keep_local it leaves out progress that it sent before, so nothing counts twice. A
    worker whose difference is not finite is excluded from the average and continues from z.
    """

    options = {
        **{"alpha": 1.0, "beta": 0.5, "gap": "elementwise", "phi": 1.0, "delay": "round"},
        **{"merge": "restart", "nesterov": False, "compression": "float32"},
    }

    def __init__(self, x: Tensor, tau: int, sizes: Sequence[int] = (), **options: Any):
        super().__init__(x, tau, sizes, **options)
        self.delay = tau if self.o["delay"] == "round" else self.o["delay"]
        self.into = 0  # local steps of this round
        if not 0 <= self.delay <= tau:
            raise UserError(f"delay={self.delay}: between 0 and tau={tau}")
        self.z, self.m = x[0].clone(), torch.zeros_like(x[0])
        self.z_before = self.z
        self.base = x.clone()  # x without the local progress since the last send
        # each worker's tensor as sent, [workers, n], and their average, [n]
        self.in_flight: list[tuple[Tensor, Tensor]] = []

    def after_local_step(self) -> None:
        self.into += 1
        if self.in_flight and self.into == self.delay < self.tau:
            self.merge()
        if self.into == self.tau:
            self.into = 0
            self.boundary()

    def boundary(self) -> None:
        self.send()  # step 3
        if self.delay == 0 or len(self.in_flight) == 2:
            self.merge()  # steps 2 and 4 to 7
        elif self.delay == self.tau:  # round 0: nothing was launched before
            self.restart()
        self.x.copy_(torch.where(self.excluded, self.z, self.x))
        self.base.copy_(torch.where(self.excluded, self.x, self.base))

    def send(self) -> None:
        own = (self.base if self.o["merge"] == "keep_local" else self.z) - self.x
        self.excluded = ~own.isfinite().all(dim=1, keepdim=True)
        own = torch.where(self.excluded, 0.0, own)
        self.in_flight.append((own, self.reduce(own, (~self.excluded[:, 0]).to(own))))
        self.base = self.x.clone()

    def merge(self) -> None:
        """Applies the oldest averaged update."""
        _, delta = self.in_flight.pop(0)
        new = delta / self.gap(delta)
        self.m = self.o["beta"] * self.m + new  # step 5
        if self.o["phi"] != "none":  # step 6
            self.m = torch.where(self.m.abs() > self.o["phi"], self.o["phi"] * self.m.sign(), self.m)
        self.z_before = self.z
        self.z = self.z - self.o["alpha"] * (self.o["beta"] * self.m + new if self.o["nesterov"] else self.m)
        self.restart()

    def gap(self, delta: Tensor) -> Tensor | float:
        """The staleness gap Lambda, from the last movement of z (step 4)."""
        moved = self.z - self.z_before
        if self.o["gap"] == "elementwise":
            return 1 + moved.abs() / (delta.pow(2).mean().sqrt() + EPS)
        return 1 + moved.norm() / (delta.norm() + EPS) if self.o["gap"] == "norm" else 1.0

    def restart(self) -> None:
        progress = self.x - self.base
        if self.o["merge"] == "restart":
            self.x.copy_(self.z.expand_as(self.x))
        else:
            self.x.copy_(self.z + (progress - sum(own for own, _ in self.in_flight)))
        self.base = self.x - progress

    def finish(self) -> None:
        """Merges what is in flight and averages the local steps since the last boundary. With merge restart, a merge
        inside a round gives up the local steps before it, at the end too."""
        late = bool(self.in_flight) and self.delay < self.tau
        if late:
            self.merge()
        if self.into and not (late and self.o["merge"] == "restart"):
            self.send()
        while self.in_flight:
            self.merge()
        self.x.copy_(self.z.expand_as(self.x))


BLOCKING = CO2.options | {"delay": 0, "gap": "none", "phi": "none"}


class Local(CO2):
    """Local-SGD: a blocking average every tau steps."""

    options = BLOCKING | {"beta": 0.0}
    fixed = tuple(name for name in options if name != "compression")


class DiLoCo(CO2):
    """A blocking average every tau steps, and an outer step with Nesterov momentum."""

    options = BLOCKING | {"alpha": 0.7, "beta": 0.9, "nesterov": True}


CUTS = ("bytes", "layers", "interleaved", "reversed")


def parts_of(sizes: Sequence[int], count: int, cut: str) -> list[list[slice]]:
    """Cuts a row into parts, in the order in which they are sent.

    bytes: core's slices. layers: slices that end where a tensor ends, as near as possible to core's. interleaved: every
    `count`-th tensor. reversed: core's slices, the last one first.
    """
    ends = [0, *accumulate(sizes)]
    if cut == "interleaved":
        return [[slice(*pair) for pair in pairwise(ends)][i::count] for i in range(count)]
    parts = slices(ends[-1], count)
    if cut == "layers":
        parts = [slice(*pair) for pair in pairwise([0, *(min(ends, key=lambda e: abs(e - p.stop)) for p in parts)])]
    return [[part] for part in (parts[::-1] if cut == "reversed" else parts)]


class Fragments(Method):
    """CO2 with fragments in turn: part i starts its all-reduce i tau / fragments steps into the round, and is merged
    `delay` steps later. Tensors of an interleaved part have penalties and compressed blocks of their own.

    together: all parts start at the boundary, and the last one is merged `delay` steps later.
    """

    options = CO2.options | {"beta": 0.0, "gap": "none", "delay": 1, "merge": "keep_local"}
    options |= {"fragments": 8, "cut": "bytes", "together": False}
    fixed = ("merge",)

    def __init__(self, x: Tensor, tau: int, sizes: Sequence[int] = (), **options: Any):
        super().__init__(x, tau, sizes, **options)
        count, delay = options.pop("fragments"), tau if options["delay"] == "round" else options["delay"]
        together, cut = options.pop("together"), options.pop("cut")
        longest = tau if together else tau // count  # one all-reduce is in flight at a time
        if not 1 <= count <= tau or delay > longest:
            raise UserError(f"fragments={count}, delay={delay}: give 1 or more, and a product of at most tau={tau}")
        self.parts: list[CO2] = []
        for i, places in enumerate(parts_of(self.sizes, count, cut)):
            for place in places:
                if place.start < place.stop:  # a part may be empty
                    late = {"delay": -(-delay * (i + 1) // count)} if together else {}
                    self.parts.append(CO2(x[:, place], tau, **options | late))  # a view of x
                    self.parts[-1].into = 0 if together else -(i * tau // count) % tau  # a shorter first round

    def after_local_step(self) -> None:
        for part in self.parts:
            part.after_local_step()

    def finish(self) -> None:
        for part in self.parts:
            part.finish()


METHODS: dict[str, type[Method]] = {
    "ddp": DDP,
    "local": Local,
    "diloco": DiLoCo,
    "co2": CO2,
    "fragments": Fragments,
}


@dataclass(frozen=True)
class Settings:
    """A method with a value for each option, as in a row of the file."""

    name: str
    options: tuple[tuple[str, Any], ...]

    def make(self, x: Tensor, tau: int, sizes: Sequence[int] = ()) -> Method:
        try:
            return METHODS[self.name](x, tau, sizes, **dict(self.options))
        except UserError as error:
            raise UserError(f"method {self}: {error}") from None

    def __str__(self) -> str:
        defaults = METHODS[self.name].options if self.name in METHODS else {}
        changed = ",".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.options
            if key not in defaults or value != defaults[key]
        )
        return f"{self.name}:{changed}" if changed else self.name
