"""The settings of CO2, checks that refuse settings which cannot train, and what a method is built from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, get_args

import torch.distributed as dist
from torch import Tensor

from . import outer
from .comm import AsyncAllReduce, Link
from .compression.config import CompressionConfig
from .errors import UserError, env_number, is_number, is_whole, require, shown, warn
from .hooks import GUARDS, Hook
from .outer import Merge
from .tau import AdaptiveTau, SyncSchedule, TauTuner

LARGE = 1e4  # far above any outer learning rate that trains
GAPS = ("elementwise", "norm", "none")
MERGES: tuple[Merge, ...] = get_args(Merge)
SCHEDULED = ("tau", "outer_lr", "outer_momentum", "clip")  # settings that may change from round to round


@dataclass(frozen=True)
class CO2Config:
    """The settings of CO2. The defaults equal the example that the authors released.

    `CO2Config.recommended` and `CO2Config.paper` name the two sets of settings. CO2 warns if it gets CO2Config(tau=N),
    which is the paper's rule.
    """

    tau: int | Literal["auto"] = 48
    """Local steps per round. The paper searched {1, 3, 6, 12, 24, 48, 96, 192}. auto: the fewest that hide the
    all-reduce, from measured times, chosen again when these change. Until then a round has two local steps."""
    _: KW_ONLY
    outer_lr: float = 1.0
    """alpha: scales the outer step."""
    outer_momentum: float = 0.5
    """beta: how much of the outer momentum survives a round."""
    nesterov: bool = False
    """Takes the outer step with Nesterov momentum, as DiLoCo does. Costs a copy of the parameters if there is a gap."""
    gap: Literal["elementwise", "norm", "none"] = "elementwise"
    """The staleness gap penalty Lambda: one of elementwise, norm, none."""
    clip: float | None = 1.0
    """phi: clips each element of the outer momentum to [-phi, phi]. None means no clipping."""
    allow_unstable: bool = False
    """Accepts an outer step without a gap penalty that diverges, to show that it does."""
    tau_max: int = 192
    """With tau auto: the most local steps per round."""
    merge: Merge = "restart"
    """How a worker continues when an average arrives. restart: from the outer iterate (the paper). keep_local: from
    the outer iterate plus the local progress made since the all-reduce started, at the cost of a copy of the
    parameters."""
    delay: int | Literal["boundary", "auto"] = "boundary"
    """When an average is merged. boundary: at the next boundary, one round after its all-reduce started (the paper). A
    number: after that many local steps, waiting if needed. With 0 a worker waits at once, so nothing is hidden and
    nothing is stale. auto: as soon as it arrives, at the latest at the next boundary."""
    fragments: int | Literal["auto"] = 1
    """With keep_local: into how many parts the parameters are cut, whose all-reduces follow each other within a round
    (Fragment). An average is then late by a part's all-reduce, and a round sends the same bytes. auto: so many
    that a part takes about a local step, and tau auto is then shorter. With shard, and stages that hold parameters
    together, auto means 1."""
    outlier: float | None = 10.0
    """Excludes a worker from a round's average, and restarts it, if its update is more than this many times as large as
    its usual update. None excludes only updates that are not finite."""
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    """How averages are compressed, also with local, overlap_local and slowmo. ddp has ddp_compression."""

    is_named: ClassVar[bool] = False  # whether paper() or make_method() has made it
    expected_workers: ClassVar[int | None] = None  # as given to recommended()

    def __post_init__(self) -> None:
        lasts = is_whole(self.tau) or self.tau == "auto"
        require(self, lasts, "tau", "give a whole number of local steps, 1 or more, or auto")
        require(self, is_whole(self.tau_max), "tau_max", "give a whole number of local steps, 1 or more")
        alpha, beta, phi = self.outer_lr, self.outer_momentum, self.clip
        require(self, self.gap in GAPS, "gap", f"choose one of {', '.join(GAPS)}")
        above_0 = "give a finite number above 0, as 1.0 is usual"
        require(self, is_number(alpha) and 0 < alpha < LARGE, "outer_lr", above_0)
        require(self, is_number(beta) and 0 <= beta < 1, "outer_momentum", "give a number in [0, 1)")
        clips = phi is None or (is_number(phi) and phi > 0)
        require(self, clips, "clip", "give a number above 0, or None for no clipping")
        require(self, isinstance(self.nesterov, bool), "nesterov", "give True or False")
        require(self, self.merge in MERGES, "merge", f"choose one of {', '.join(MERGES)}")
        self._check_delay()
        self._check_fragments()
        limits = self.outlier is None or (is_number(self.outlier) and self.outlier > 1)
        require(self, limits, "outlier", "give a number above 1, or None for no limit")
        example = self.compression if isinstance(self.compression, str) else "int8"
        remedy = f"give an object of CompressionConfig, such as CompressionConfig({example!r})"
        require(self, isinstance(self.compression, CompressionConfig), "compression", remedy)

    def _check_delay(self) -> None:
        """Raises UserError for a delay that does not go with the other settings."""
        number = self.delay if isinstance(self.delay, int) and not isinstance(self.delay, bool) else None
        valid = number is not None or self.delay in ("boundary", "auto")
        require(self, valid and (number or 0) >= 0, "delay", "give boundary, auto, or a whole number of local steps")
        if number is not None:
            require(self, self.tau != "auto", "delay", "with tau auto give delay boundary or auto")
            require(self, number <= int(self.tau), "delay", f"give at most tau={self.tau} local steps")
        # with delay 0 there is no gap to penalize
        nothing_stale = f"nothing is stale then: set gap none, not {self.gap}"
        require(self, number != 0 or self.gap == "none", "delay", nothing_stale)
        discarded = "merge restart would discard the local steps since the all-reduce started: with it give delay "
        discarded += "boundary or 0, or set merge keep_local"
        require(self, self.merge != "restart" or self.is_a_round_late or number == 0, "delay", discarded)

    def _check_fragments(self) -> None:
        """Raises UserError for fragments that do not go with the other settings."""
        valid = is_whole(self.fragments) or self.fragments == "auto"
        require(self, valid, "fragments", "give a whole number of parts, 1 or more, or auto")
        if self.fragments in (1, "auto"):
            return
        require(self, self.merge == "keep_local", "fragments", "the other parts have local progress that only merge "
                "keep_local keeps: with merge restart give fragments 1")  # fmt: skip
        require(self, self.tau == "auto" or self.fragments <= self.tau, "fragments", f"give at most tau={self.tau}")
        if isinstance(self.delay, int) and isinstance(self.tau, int):
            fits = self.delay <= self.tau // self.fragments
            require(self, fits, "fragments", f"with delay={self.delay} and tau={self.tau} give at most "
                    f"{self.tau // max(1, self.delay)}: one all-reduce is in flight at a time")  # fmt: skip

    def check_stable(self) -> None:
        """Raises UserError for an outer step without a gap penalty that diverges.

        Only the paper's order delays the outer step by a round. In all other orders a difference starts from the
        current outer iterate. With keep_local only the momentum's part of the step is late, by as much as the average.
        """
        if self.gap != "none" or self.allow_unstable:
            return
        whole, beta = isinstance(self.delay, str), self.outer_momentum  # boundary, or auto, which may be as late
        late = 1.0 if whole else int(self.delay) / int(self.tau)  # pyright: ignore[reportArgumentType]
        limit = outer.largest_outer_lr(self.merge, beta, late, self.nesterov)
        under = ", nesterov=True" if self.nesterov else ""
        remedy = "set gap='elementwise', or " if self.merge == "restart" and late else ""
        require(
            self,
            self.outer_lr < limit,
            "outer_lr",
            f"with merge={self.merge!r}, delay={self.delay!r}, outer_momentum={beta}{under} and gap='none' it diverges "
            f"from {limit:.3g} on in directions that tau local steps solve; {remedy}lower one of the two "
            "(allow_unstable=True runs it regardless)",
        )

    @property
    def is_a_round_late(self) -> bool:
        """Whether an average is merged one boundary after its all-reduce started."""
        return self.delay == "boundary" or (self.delay != "auto" and self.delay == self.tau)

    @property
    def tau_margin(self) -> float:
        """With tau auto: the share by which the local steps take longer than the all-reduce.

        With merge on arrival, an average arrives in the first two fifths of a round. Up to there, fresh averages lower
        the loss more than frequent averages do (results/loss.md).
        """
        return 0.25 if self.is_a_round_late else 1.5

    @classmethod
    def paper(cls, tau: int | Literal["auto"] = 48, **settings: Any) -> CO2Config:
        """Returns our reading of the paper's rule: averages arrive a whole round late, with the staleness gap penalty.

        docs/tables.md says what the paper leaves open. Our measurements support `recommended` instead. The outer
        momentum is for 33 to 64 workers. The authors' release sets 0 up to 16, 0.2 up to 32 and 0.6 above 64.

        Args:
            tau: Local steps per round.
            settings: Other settings, such as outer_momentum=0.0.
        """
        rule: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.5, "gap": "elementwise", "clip": 1.0}
        rule |= {"merge": "restart", "delay": "boundary"}
        return named(cls(tau=tau, **rule | settings))

    @classmethod
    def recommended(
        cls, workers: int | None = None, steps: int | None = None, *, tau: int | Literal["auto"] = "auto"
    ) -> CO2Config:
        """Returns the settings that our measurements support in place of the paper's (results/loss.md).

        An average is merged when it arrives, with keep_local and without a penalty, because little is stale then. If an
        all-reduce takes longer than a local step, it is cut into fragments, whose averages are fresher. They are
        compressed to int4, at the cost of 1 + 1/workers copies of the parameters, or sent in float32 if that would
        arrive within a local step, judged by int4's time. The outer momentum is 0.3 in runs of 80 rounds or more with a
        fixed tau of 24 or more, where it lowered the loss. Else it is 0, because it raised the mean loss of digits in
        short runs, and of text at tau 2.

        Args:
            workers: Leave it out. No setting depends on it, and CO2 warns if it is not the number of its workers. On a
                mesh, a worker is a node.
            steps: Local steps of the whole run, if known. With tau auto, the run then has at least twenty rounds.
            tau: Local steps per round. auto chooses from measured times.
        """
        for name, given in (("workers", workers), ("steps", steps)):
            if given is not None and not is_whole(given):
                raise UserError(f"{shown(name, given)}: give a whole number, 1 or more")
        if steps is not None and isinstance(tau, int) and tau > steps:
            raise UserError(f"tau={tau} with steps={steps}: no round would end in the run; give a smaller tau")
        tau_max = 192 if steps is None else min(192, max(1, steps // 20))  # at least twenty rounds
        many_long_rounds = isinstance(tau, int) and tau >= 24 and steps is not None and steps >= 80 * tau
        momentum = 0.3 if many_long_rounds else 0.0
        late: dict[str, Any] = {"gap": "none", "merge": "keep_local", "delay": "auto", "outer_momentum": momentum}
        config = cls(tau=tau, tau_max=tau_max, fragments="auto", compression=CompressionConfig("auto"), **late)
        object.__setattr__(config, "expected_workers", workers)
        return config


Schedule = Callable[[int], Mapping[str, Any]]
Config = TypeVar("Config")


def scheduled(c: CO2Config, schedule: Schedule | None, number: int) -> CO2Config:
    """Returns the settings of round `number`.

    Raises:
        UserError: If the schedule changes a setting that may not change.
    """
    if schedule is None:
        return c
    if not callable(schedule):
        raise UserError(f"schedule={schedule!r}: give a function of a round's number that returns a dict of settings")
    changes = schedule(number)
    if not isinstance(changes, Mapping):
        raise UserError(
            f"the schedule gives {changes!r} for round {number}: return a dict of changed settings, {{}} for none"
        )
    if unknown := changes.keys() - set(SCHEDULED):
        raise UserError(f"the schedule changes {', '.join(sorted(unknown))}: only {', '.join(SCHEDULED)} may change")
    if "tau" in changes and "auto" in (c.tau, changes["tau"]):
        raise UserError(f"the schedule gives tau={changes['tau']!r} while tau is {c.tau!r}: give numbers, or only auto")
    try:
        return replace(c, **changes)
    except UserError as error:
        raise UserError(f"the schedule gives {dict(changes)} for round {number}: {error}") from None


def named(config: CO2Config) -> CO2Config:
    """Returns a copy of which CO2 does not warn that it is the paper's rule."""
    config = replace(config)
    object.__setattr__(config, "is_named", True)
    return config


def named_rule(config: CO2Config | None) -> CO2Config:
    """Returns the config or the default. Warns if all settings but tau are the defaults, and the rule was not named."""
    c = of_kind(config, CO2Config, "config")
    if not c.is_named and c == CO2Config(c.tau) and not (dist.is_initialized() and dist.get_rank()):
        warn(
            f"CO2Config(tau={c.tau!r}) with nothing else is our reading of the paper's rule. On short runs its loss is "
            f"higher than with CO2Config.recommended(steps=N, tau={c.tau!r}). Use that, or CO2Config.paper(tau="
            f"{c.tau!r}) for the paper's rule without this warning"
        )
    return c


def of_kind(given: Any, kind: type[Config], name: str) -> Config:
    """Returns the settings, or the defaults if none are given.

    Raises:
        UserError: For an object of another class.
    """
    if given is not None and not isinstance(given, kind):
        raise UserError(f"{shown(name, given)}: give an object of {kind.__name__}, or leave it out")
    return given if given is not None else kind()


class CommonArgs(TypedDict, total=False):
    """Arguments that every method supports.

    Attributes:
        buffers: The model's buffers, see LocalUpdateMethod.
        model_params: The 16-bit model's parameters, if `params` are the float32 masters that an optimizer keeps of it,
            in the same order.
        average: Tensors that are evaluated but not trained, such as an EMA model, or a function that returns them. See
            guards.extra.ExtraAverage.
        group: The workers. None means all.
        timeout: Seconds until a missing worker is an error.
        link: An emulated slow network.
        hooks: More hooks, such as Requests.
    """

    buffers: Iterable[Tensor]
    model_params: Iterable[Tensor]
    average: Any
    group: dist.ProcessGroup | None
    timeout: float
    link: Link | None
    hooks: Sequence[Hook]


def build_args(
    c: CO2Config,
    args: CommonArgs,
    schedule: Schedule | None = None,
    *,
    overlap: bool = True,
    owned: bool = False,
    allreduce: Callable[..., AsyncAllReduce] | None = None,
) -> dict[str, Any]:
    """Returns LocalUpdateMethod's keyword arguments for a method with these settings.

    `overlap`: whether local steps run during an all-reduce. `owned`: whether each worker gets only the part of an
    average that it owns. `allreduce`: makes the AsyncAllReduce of elastic workers.
    """
    GUARDS.inputs.check_names(group := args.get("group"))
    workers = dist.get_world_size(group) if dist.is_initialized() else 1
    if allreduce is not None:  # elastic workers have not met, and come and go
        workers = env_number("WORLD_SIZE", 1)
    elif c.expected_workers not in (None, workers) and not (dist.is_initialized() and dist.get_rank()):
        warn(
            f"CO2Config.recommended(workers={c.expected_workers}), and {workers} average here: give it neither that "
            "number nor steps in its place, as recommended(steps=N); on a mesh a worker is a node"
        )
    tau: Any = c.tau if schedule is None else lambda number: scheduled(c, schedule, number).tau
    tuner = tuner_for(c, workers)
    sync_schedule = SyncSchedule(tau) if tuner is None else AdaptiveTau(tau, tuner)
    choosing = [sync_schedule] if isinstance(sync_schedule, AdaptiveTau) else []
    options: dict[str, Any] = {name: given for name, given in args.items() if name in ("group", "timeout", "link")}
    options["overlap"] = overlap and c.delay != 0  # with delay 0 the worker waits at once
    return {
        "sync_schedule": sync_schedule,
        "buffers": args.get("buffers", ()),
        "allreduce": functools.partial(allreduce or AsyncAllReduce, failures=GUARDS.failure, **options),
        "reducer": functools.partial(c.compression.reducer, owned=owned),
        "hooks": GUARDS.make_hooks(c.outlier, choosing, args),
    }


def tuner_for(c: CO2Config, workers: int) -> TauTuner | None:
    """Returns what decides from the workers' times, or None if nothing is chosen from them.

    The choices are tau, the compression and the fragments.
    """
    formats = c.compression.choices if workers > 1 else dict([*c.compression.choices.items()][-1:])
    given = None if c.tau == "auto" else c.tau
    cuts = c.fragments == "auto" and c.merge == "keep_local" and c.delay == "auto" and workers > 1
    if given is not None and len(formats) == 1 and not cuts:
        return None
    return TauTuner(c.tau_max, c.tau_margin, formats, given=given, cuts=cuts)
