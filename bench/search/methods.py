"""How the workers of a run are kept together: what crosses the network, the rules, and their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.reference import LateReference, mean
from bench.search.task import InnerState
from core.errors import UserError
from core.wires.formats import BLOCK, BLOCK_BYTES, decode, encode

Gradient = Callable[[Tensor, Any], Tensor]

# -- what crosses the network -----------------------------------------------------------------------------------


class NarrowMean:
    """The mean of what the workers send in a narrow format, as core/wires/quantized.py makes it, in one process.

    Two encodings with error feedback, rounded to nearest: of what each worker sends, and of the mean of that.
    Worker j averages the j-th of as many chunks, whole blocks each; together the chunks are one vector here.
    """

    def __init__(self, wire: str):
        self.wire = wire
        self.errors: Tensor | None = None  # [workers, n], n filled up to equal chunks
        self.mean_error: Tensor | None = None  # [n]

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[workers, n] -> [n]. weights: [workers], 1, or 0 for a worker that is left out, whose error waits."""
        workers, n = rows.shape
        rows = pad(rows, (0, -n % (workers * BLOCK)))
        before = torch.zeros_like(rows) if self.errors is None else self.errors
        arrived, kept = self.send(rows, before)
        self.errors = torch.where(weights[:, None] == 0, before, kept)
        average, self.mean_error = self.send(mean(arrived, weights), self.mean_error)
        return average[:n]

    def send(self, values: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor]:
        """What arrives of `values` and the error kept back, and what is kept back now; each shaped as values."""
        values = values if error is None else values + error
        arrived = decode(encode(values.reshape(-1), self.wire), self.wire, values.dtype).view_as(values)
        return arrived, values - arrived


def mean_over(wire: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What a wire format makes of [workers, n] with weights, [workers]: their mean, [n]."""
    return mean if wire == "float32" else NarrowMean(wire)


def bits(wire: str) -> float:
    """That a number takes, its share of the block's scale included."""
    return 32.0 if wire == "float32" else 8 * BLOCK_BYTES[wire] / BLOCK


# -- the rules --------------------------------------------------------------------------------------------------


class Method:
    """Workers that never meet: the base of all others. x: [workers, n], stepped in place. options: among them wire, the
    format in which `mean` takes what crosses the network."""

    def __init__(self, x: Tensor, tau: int, **options: Any):
        self.x, self.tau, self.options = x, tau, options
        self.taken, self.lr = 0, 0.0
        self.reduce = mean_over(options.get("wire", "float32"))

    def mean(self, rows: Tensor) -> Tensor:
        """What arrives of the mean over the workers, [workers, n] -> [n]."""
        return self.reduce(rows, torch.ones_like(rows[:, 0]))

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        """A step of every worker: x[i] moves along its gradient, then local_step.

        gradient: (x, batch) -> [workers, n]. batch: tensors [workers, samples, ...].
        """
        inner.step(self.x, gradient(self.x, batch), lr)
        self.taken, self.lr = self.taken + 1, lr
        self.local_step()

    def local_step(self) -> None:
        if self.taken % self.tau == 0:
            self.boundary()

    def boundary(self) -> None:
        """What is done after every tau-th step."""

    def finish(self) -> None:
        """Leaves all rows of x equal."""


class Blocking(Method):
    """Waits for the mean of the parameters at every boundary, and once more for steps behind the last one."""

    def finish(self) -> None:
        if self.taken % self.tau:
            self.boundary()


class DDP(Method):
    """The mean of the gradients, every step; whatever clipping there is clips the mean."""

    def on_all(self, rows: Tensor) -> Tensor:
        """In each row the mean, [workers, n]."""
        return self.mean(rows).expand_as(rows)

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        inner.step(self.x, self.on_all(gradient(self.x, batch)), lr)


class DPU(DDP):
    """DDP one step late (delayed parameter update, ZeRO-Offload, arXiv 2101.06840): the mean gradient of a step is
    applied after the next one's is computed. The first step moves nothing; the last gradient is not used."""

    late: Tensor | None = None

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        now = self.on_all(gradient(self.x, batch))
        if self.late is not None:
            inner.step(self.x, self.late, lr)
        self.late = now


class ACCO(DDP):
    """ACCO (arXiv 2406.02613; the rule as in the authors' release, without its warm-up), tau 1.

    x_t are the parameters, e_t their estimate one step ahead. While the mean of the second halves' gradients, h_t at
    e_t, is on its way to e_{t+1} = Opt(x_t, h_t), the first halves' g_t are computed at x_t; while (h_t + g_t) / 2 is
    on its way to x_{t+1} = Opt(x_t, (h_t + g_t) / 2), h_{t+1} is computed at e_{t+1}. The optimiser's state moves with
    x alone. In the first step there is no estimate: h_1 is taken at x_0, and g_0 is applied.
    """

    ahead: Tensor | None = None

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        half = batch[0].shape[1] // 2
        now = self.on_all(gradient(self.x, tuple(part[:, :half] for part in batch)))
        estimate = self.x.clone()
        if self.ahead is not None:
            inner.copy().step(estimate, self.ahead, lr)
        later = self.on_all(gradient(estimate, tuple(part[:, half:] for part in batch)))
        inner.step(self.x, now if self.ahead is None else (now + self.ahead) / 2, lr)
        self.ahead = later


class SlowMo(Blocking):
    """core.methods.slowmo: u <- beta u + mean(x - x^i) / lr; x <- x - alpha lr u. wire: of x - x^i."""

    def __init__(self, x: Tensor, tau: int, **options: Any):
        super().__init__(x, tau, **options)
        self.start, self.u = x[0].clone(), torch.zeros_like(x[0])

    def boundary(self) -> None:
        lr = max(self.lr, 1e-12)
        self.u = self.options["beta"] * self.u + self.mean(self.start - self.x) / lr
        self.start = self.start - self.options["alpha"] * lr * self.u
        self.x.copy_(self.start.expand_as(self.x))


class OverlapLocal(Method):
    """core.methods.overlap_local_sgd: at a boundary the mean that was launched one round ago moves the anchor z,
    v <- mu v + (mean - z), z <- z + v; each worker is pulled towards it; the mean of the pulled is launched, as that of
    z less them. wire: of this difference."""

    in_flight: Tensor | None = None

    def __init__(self, x: Tensor, tau: int, **options: Any):
        super().__init__(x, tau, **options)
        self.z, self.v = x[0].clone(), torch.zeros_like(x[0])

    def boundary(self) -> None:
        if self.in_flight is not None:
            self.v = self.options["mu"] * self.v - self.in_flight
            self.z = self.z + self.v
        self.x.lerp_(self.z.expand_as(self.x), self.options["pull"])
        self.in_flight = self.mean(self.z - self.x)

    def finish(self) -> None:
        self.boundary()
        assert self.in_flight is not None
        self.x.copy_((self.z - self.in_flight).expand_as(self.x))


class Outer(Method):
    """bench.reference.LateReference, whose history, which nobody reads here, is dropped; and three options around it.

    wire: the format in which differences cross the network, with error feedback.
    fragments: the parameters in so many equal parts, each averaged every tau steps, tau / fragments after the one
      before; so each message is as much smaller, and the mean merged as much sooner over the same link. With merge
      mix, Nesterov and one step's delay that is Streaming DiLoCo (arXiv 2501.18512).
    first_every, second_every: the inner optimiser's moments are averaged in every so-manyth round; 0: never. They are
      sent and merged when the parameters are; the mean takes the place of the worker's own as of the sending, and what
      has been added to it since stays. Blocking, with 3 and 6, that is DES-LOC (arXiv 2505.22549). In float32.
    """

    def __init__(self, x: Tensor, tau: int, **options: Any):
        super().__init__(x, tau, **options)
        wire, count = options.pop("wire"), options.pop("fragments")
        self.every = options.pop("first_every"), options.pop("second_every")
        self.delay = tau if options["delay"] is None else options["delay"]
        if not 1 <= count <= tau:
            raise ValueError(f"fragments={count}: between 1 and tau={tau}")
        pieces = x.tensor_split(count, dim=1)
        self.parts = [LateReference(part, tau, **options, reduce=mean_over(wire)) for part in pieces]
        for i, part in enumerate(self.parts):
            part.steps = tau - (i + 1) * tau // count
        self.rounds = 0
        self.late: list[tuple[int, Tensor, Tensor]] = []  # when, which moment, and what it then lacks of the mean

    def train_step(self, gradient: Gradient, batch: tuple[Tensor, ...], inner: InnerState, lr: float) -> None:
        super().train_step(gradient, batch, inner, lr)
        if self.closed:
            self.rounds += 1
            for every, (moment, decay) in zip(self.every, inner.moments(), strict=False):
                if every and self.rounds % every == 0:
                    missing = (moment.mean(dim=0) - moment) * decay**self.delay
                    self.late.append((self.taken + self.delay, moment, missing))
        while self.late and self.late[0][0] == self.taken:
            _, moment, missing = self.late.pop(0)
            moment.add_(missing)

    def local_step(self) -> None:
        self.closed = False
        for r in self.parts:
            closed = r.local_step()
            if closed:
                for history in (r.restarts, r.deltas):
                    history.clear()
                del r.outer[:-2]
        self.closed = closed  # the last part's round is the whole's

    def finish(self) -> None:
        for r in self.parts:
            r.finish()


# -- by name ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A method, its options with their usual values, and which it tries where the command line says nothing."""

    method: type[Method]
    options: dict[str, Any]
    tried: dict[str, tuple[Any, ...]]
    settable: tuple[str, ...] | None = None  # of the options, those that may be given; None for all


CO2: dict[str, Any] = {
    **{"alpha": 1.0, "beta": 0.5, "gap": "elementwise", "phi": 1.0, "delay": "round"},
    **{"merge": "outer", "kappa": 0.5, "nesterov": False},
    **{"wire": "float32", "fragments": 1, "first_every": 0, "second_every": 0},
}
BLOCKING = CO2 | {"delay": 0, "gap": "none", "phi": "none"}
KINDS = {
    "ddp": Kind(DDP, {"wire": "float32"}, {}),
    "dpu": Kind(DPU, {"wire": "float32"}, {}),
    "acco": Kind(ACCO, {}, {}),
    "local": Kind(Outer, BLOCKING | {"beta": 0.0}, {}, settable=("wire",)),
    "slowmo": Kind(SlowMo, {"alpha": 1.0, "beta": 0.5, "wire": "float32"}, {"beta": (0.5, 0.2)}),
    "diloco": Kind(Outer, BLOCKING | {"alpha": 0.7, "beta": 0.9, "nesterov": True}, {"beta": (0.9, 0.5)}),
    "streaming": Kind(
        Outer,
        BLOCKING
        | {"alpha": 0.4, "beta": 0.9, "nesterov": True, "merge": "mix", "kappa": 0.5, "delay": 1, "fragments": 3},
        {"beta": (0.9, 0.5)},
    ),
    "des_loc": Kind(Outer, BLOCKING | {"beta": 0.0, "first_every": 3, "second_every": 6}, {}),
    "overlap_local": Kind(OverlapLocal, {"pull": 0.6, "mu": 0.7, "wire": "float32"}, {"mu": (0.7, 0.0)}),
    "co2": Kind(Outer, CO2, {"beta": (0.5, 0.0)}),
}
Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Settings:
    """A method with a value for each option, as in a row of the file."""

    name: str
    options: Options

    def make(self, x: Tensor, tau: int) -> Method:
        kind = KINDS[self.name]
        values = dict(self.options)
        if kind.method is Outer:
            values["phi"] = None if values["phi"] == "none" else values["phi"]
            values["delay"] = None if values["delay"] == "round" else values["delay"]
        try:
            return kind.method(x, tau, **values)
        except ValueError as error:  # LateReference's; a developer's there, a user's here
            raise UserError(f"method {self}: {error}") from None

    def hidden_steps(self, tau: int) -> float:
        """How many local steps a mean may be on its way without anybody waiting: the latency that is tolerated."""
        if self.name in ("co2", "streaming"):
            delay = dict(self.options)["delay"]
            return tau if delay == "round" else delay
        return {"dpu": 1, "acco": 0.5, "overlap_local": tau}.get(self.name, 0)

    @property
    def has_rounds(self) -> bool:
        """Whether tau makes a difference."""
        return not issubclass(KINDS[self.name].method, DDP)

    def bits_a_step(self, tau: int) -> float:
        """That a parameter's all-reduces take, per local step."""
        options = dict(self.options)
        if not self.has_rounds:
            return bits(options.get("wire", "float32")) * (2 if self.name == "acco" else 1)
        moments = sum(1 / options[key] for key in ("first_every", "second_every") if options.get(key))
        return (bits(options.get("wire", "float32")) + 32 * moments) / tau

    def __str__(self) -> str:
        usual = KINDS[self.name].options
        changed = ",".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.options
            if value != usual[key]
        )
        return f"{self.name}:{changed}" if changed else self.name
