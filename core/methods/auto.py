"""Auto: ddp over a narrow wire, and CO2 from where the link turns out too slow for it, as measured while training."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import KW_ONLY, asdict, dataclass, field
from statistics import median
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..adaptive.pacing import Adaptive
from ..assembly import CO2, CO2Config, Options
from ..assembly.wire import WireConfig
from ..checkpoints.saved import of_rank, under_rank
from ..config import is_number, is_whole, require
from ..errors import UserError
from ..groups import host_group
from ..pacing import Pacing
from ..stats import Seconds, between, mark
from .ddp import DDP
from .registry import Entry, Given, Settings

# Up to here the two need as many steps to a loss: on text ddp 48, and CO2 with tau 2, taking over, 48 to 49
# (results/seconds.md). CO2's boundaries may take COST of the time, 5 % (adaptive/tau.py), and merging late costs a
# little: so it wins where twice that is exposed. On text at 1000 Mbit/s, 12 to 14 %, both are equally fast.
SHARE = 0.1
WARM_UP = 1  # steps that are not measured: ddp makes its buckets anew after the first, connections open
# Measured steps -> times `share`: a look before `steps` of them are known acts upon what is clear alone. Over the
# slowest links, where most of a step is exposed, every further step of ddp would cost a run a tenth of its time.
CLEAR = {1: 2.5, 3: 1.5, 6: 1.5}


@dataclass(frozen=True)
class AutoConfig:
    """Of method auto: when it goes over from ddp to CO2. CO2's own settings are then the recommended ones, with tau
    auto, unless others are given."""

    _: KW_ONLY
    wire: WireConfig = field(default_factory=lambda: WireConfig("int4"))
    """How ddp's gradients cross the network until then; float32 hides a part of them under the backward pass."""
    share: float = SHARE
    """CO2 takes over where more than this share of a step of ddp is exposed communication."""
    steps: int = 9
    """Measured steps that it takes to decide, behind one that is not; fewer where the share is far larger."""
    again: int = 100
    """Steps from one look to the next where ddp has stayed: links change."""

    def __post_init__(self) -> None:
        ok = is_number(self.share) and 0 < self.share < 1
        require(self, ok, "share", "give a share of a step's time, between 0 and 1")
        for name in ("steps", "again"):
            require(self, is_whole(getattr(self, name)), name, "give a whole number of steps, 1 or more")
        require(self, isinstance(self.wire, WireConfig), "wire", "give a WireConfig, such as WireConfig('int4')")
        require(self, self.wire.format != "auto", "wire", "ddp's gradients need a format: give one, such as int4")


@dataclass(frozen=True)
class Look:
    """What all workers have found alike after so many steps of ddp."""

    step: int
    share: float
    """Of a step, exposed."""
    leaves: bool
    """Whether CO2 takes over."""
    waited: float
    """Exposed seconds of a step."""
    computed: float
    """Its other seconds."""

    def __str__(self) -> str:
        then = "CO2 takes over" if self.leaves else "ddp stays"
        return f"{self.share:.0%} of a step of ddp is exposed communication: {then}"


class Switch(nn.Module):
    """The model in the loop: at first DistributedDataParallel's, later the plain one."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """See DistributedDataParallel: backward passes in it average nothing."""
        ddp = self.inside
        return ddp.no_sync() if isinstance(ddp, DistributedDataParallel) else contextlib.nullcontext()


class Auto(CO2):
    """CO2 that begins as ddp, every step being a round, and takes over where ddp's communication is exposed.

    model: to be called as `wrapped`. config: CO2's. own: see AutoConfig. options: see Options.

    At the hand-over the parameters are equal on all workers, as ddp keeps them, and so are the inner optimiser's
    moments, which stay as they are. CO2's outer iterate starts there, its momentum and its error feedback at 0. What
    ddp's error feedback holds, the rounding of one step, is dropped: it is a gradient, and would need an optimiser step
    of its own. Buffers become their means. The steps that follow are those of a CO2 that is made there.

    There is no way back: the workers' moments come apart, which ddp needs equal, and CO2 does not see what the mean of
    a gradient would cost. CO2's memory is taken from the start, beside ddp's, which is let go at the hand-over: a run
    that fits goes on fitting. A checkpoint says in which of the two phases it is, and has other keys in each.

    Attributes: ddp, None once CO2 has taken over; wrapped; look, taken at the last step, if any was.
    """

    name = "Auto"

    def __init__(self, model: nn.Module, config: CO2Config, own: AutoConfig, **options: Unpack[Options]):
        self.own = own
        of_ddp: dict[str, Any] = {k: v for k, v in options.items() if k not in ("buffers", "model_params")}
        self.ddp: DDP | None = DDP(model, average_buffers=bool(options.get("buffers")), wire=own.wire, **of_ddp)
        self.model, self.wrapped = model, Switch(self.ddp.model)
        super().__init__(model.parameters(), config, **options)
        assert isinstance(self.pacing, Adaptive)
        self._of_co2, self.pacing = self.pacing, Pacing(1)
        self.look: Look | None = None
        self._left: list[dist.ProcessGroup | None] = []  # ddp's, of no more use
        self._times = deque[tuple[Seconds, Seconds]](maxlen=own.steps)  # of the last steps: exposed, the whole step
        self._ended_at = mark(self.flight.device)

    def step(self, *, last: bool = False) -> bool:
        """See Rounds. In ddp's phase every step closes a round."""
        self.look = None
        if self.ddp is None:
            return super().step(last=last)
        self.ddp.step(last=last)
        self.clock.stats, self.flight.launched = self.ddp.stats, self.ddp.rounds
        times = self.times(self.ddp)
        if self.ddp.rounds > WARM_UP:
            self._times.append(times)
            if self._due(self.ddp.rounds - WARM_UP) and not last:
                self._look(self.ddp)
        return True

    def finish(self) -> None:
        super().finish() if self.ddp is None else self.ddp.finish()

    def close(self) -> None:
        super().close()
        self._left.clear()
        if self.ddp is not None:
            self.ddp.close()

    def signature(self) -> Any:
        return super().signature() | {f"auto.{name}": value for name, value in asdict(self.own).items()}

    # -- the decision -------------------------------------------------------------------------------------------

    def times(self, ddp: DDP) -> tuple[Seconds, Seconds]:
        """Of the step just taken: exposed communication, and the time since the end of the step before."""
        before, self._ended_at = self._ended_at, mark(self.flight.device)
        return ddp.stats.exposed_seconds, between(before, self._ended_at)

    def _due(self, measured: int) -> bool:
        over = measured - self.own.steps
        return over % self.own.again == 0 if over >= 0 else measured in CLEAR

    def _look(self, ddp: DDP) -> None:
        waits, steps = self._agreed()
        share = median(wait / step for wait, step in zip(waits, steps, strict=True))
        measured = ddp.rounds - WARM_UP
        limit = self.own.share * (1.0 if measured >= self.own.steps else CLEAR[measured])
        computed = median(step - wait for wait, step in zip(waits, steps, strict=True))
        self.look = Look(ddp.rounds, share, share > limit, median(waits), computed)
        if self.look.leaves:
            ddp.finish()
            self._hand_over(self.look)
            self._left = [ddp.group, ddp.wire.flight.group if ddp.wire else None]  # gloo takes 0.1 s to disconnect one
            ddp.close()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _hand_over(self, look: Look) -> None:
        """All are at one step, and what ddp has measured stands for the first rounds of tau auto: a mean of
        differences has a gradient's bytes."""
        self.flight.restore(self.flight.launched, in_flight=False)
        self.start_from_params()
        if (tuned := self._of_co2.tuned) is not None:
            tuned.tuner.know(self.rounds, look.computed, look.waited)
        self._become_co2()

    def _agreed(self) -> tuple[list[float], list[float]]:
        """Seconds of the last steps: exposed, and whole. The worker that comes last waits for the network alone, the
        others for it, too: so the shortest wait of all workers counts, and the longest step."""
        numbers = torch.tensor([(float(exposed), -float(step)) for exposed, step in self._times], dtype=torch.float64)
        if self.flight.group is not None:
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=host_group(self.flight.group))
        return numbers[:, 0].tolist(), (-numbers[:, 1]).tolist()

    def _become_co2(self) -> None:
        self.ddp, self.pacing, self.wrapped.inside = None, self._of_co2, self.model
        self.pacing.begin(self.rounds, self.local_steps)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        if self.ddp is None:
            return super().own_state() | {"ddp": None}
        times = [[float(exposed), float(step)] for exposed, step in self._times]
        return super().own_state() | {"ddp": {"state": of_rank(self.ddp.state_dict()), "times": times}}

    def load_own_state(self, state: dict[str, Any]) -> None:
        own, ddp = state.get("ddp", {}), self.ddp
        if own and ddp is None:
            raise UserError("the checkpoint is of ddp's phase, which this object has left: load it into a new one")
        super().load_own_state(state)
        if own and ddp is not None:
            ddp.load_state_dict(under_rank(own["state"]))
            self._times.clear()
            self._times += [(exposed, step) for exposed, step in own["times"]]
        elif ddp is not None:
            self._become_co2()
            ddp.close()


def check_alike(nodes: bool) -> None:
    """Refuses nodes whose workers synchronise every step."""
    if nodes:
        raise UserError(
            "method 'auto' takes all workers alike, here they are grouped in nodes: leave these out, or take co2"
        )


def _make(given: Given) -> tuple[nn.Module, Auto]:
    check_alike(given.mesh is not None)
    made = Auto(given.model, given.co2, given.own, **given.options)
    return made.wrapped, made


ENTRY = Entry(
    "auto",
    _make,
    "chosen",
    Settings("auto", AutoConfig, "Of method auto."),
    check=lambda given: given.co2.check_stable(),
    reads_co2=True,
    usual=CO2Config.recommended,
)
