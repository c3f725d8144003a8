"""CO2's settings, what of them may follow a schedule, and which of them are refused together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from . import outer
from .errors import UserError
from .passes import PASSES, Pass
from .wires.config import WireConfig

LARGE = 1e4  # no factor of an outer step that trains comes near


@dataclass(frozen=True)
class CO2Config:
    """The settings of the outer optimiser; defaults as in the example that the authors released."""

    tau: int | Literal["auto"] = 48
    """Local steps per round; the paper searched {1, 3, 6, 12, 24, 48, 96, 192}. auto: chosen from measured times, the
    fewest that hide the all-reduce, and again when those change. Until they are known, with delay auto, a round goes on
    until its predecessor's mean has come, on every worker by itself; later rounds close at one step on all again."""
    tau_max: int = 192
    """With tau auto: never more local steps than this."""
    outer_lr: float = 1.0
    """alpha: the share of the momentum that the outer step takes."""
    outer_momentum: float = 0.5
    """beta: how much of the outer momentum survives a round."""
    gap: outer.Gap = "elementwise"
    """The staleness gap penalty Lambda: one of elementwise, norm, inner, none."""
    clip: float | None = 1.0
    """phi: clips each element of the outer momentum to [-phi, phi]; None for no clipping."""
    merge: outer.Merge = "outer"
    """What a worker continues from when a mean has landed: the outer iterate (the paper), mix, between it and the own
    parameters, or keep, the outer iterate and the own progress since the sending (for a copy of the parameters)."""
    mix: float = 0.5
    """Of merge mix: the share of the outer iterate; 1 for it alone."""
    delay: int | Literal["boundary", "auto"] = "boundary"
    """When a mean is merged: at the boundary a round after the sending (the paper); so many local steps after the
    sending, waiting for it where need be; or auto: as soon as it is there, on every worker by itself, which waits
    for it after the local steps that the link needs, known after four rounds. Without that a mean would come as late as
    the slowest worker sends, up to a round, which costs loss. 0 waits at once: nothing is hidden, nor stale."""
    sync_steps: int = 0
    """So many first steps after each of which the workers' parameters are averaged, everyone waiting."""
    allow_unstable: bool = False
    """Accept outer_momentum + outer_lr >= 1 without a gap penalty, to show that it diverges."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How the pseudo-gradient crosses the network. The other methods always send float32."""
    update: Pass = "fast"
    """How steps 3 to 7 are computed: fast (one pass over memory), plain (core/outer.py's own), or compiled (that, by
    torch.compile)."""
    steps: Literal["even", "by_speed"] = "even"
    """even: every worker takes tau local steps a round, and all count alike in the mean. by_speed: a slower worker
    takes fewer in proportion, so that nobody waits for it, and counts by its steps (core/adaptive/pace.py)."""
    outlier: float | None = 10.0
    """A worker is left out of a round's mean, and starts anew, where its difference is more than so many times as large
    as its own usual one (core/robust/guard.py); None: only where it is not finite."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: {remedy}")

        is_int = isinstance(self.tau, int) and not isinstance(self.tau, bool) and self.tau >= 1
        require(is_int or self.tau == "auto", "tau", "give a whole number of local steps, 1 or more, or auto")
        require(self.tau_max >= 1, "tau_max", "give a whole number of local steps, 1 or more")
        require(0 < self.outer_lr < LARGE, "outer_lr", "give a finite number above 0, as 1.0 is usual")
        require(0 <= self.outer_momentum < 1, "outer_momentum", "give a number in [0, 1)")
        require(self.gap in outer.GAPS, "gap", f"choose one of {', '.join(outer.GAPS)}")
        require(self.clip is None or self.clip > 0, "clip", "give a number above 0, or None for no clipping")
        require(self.merge in outer.MERGES, "merge", f"choose one of {', '.join(outer.MERGES)}")
        require(0 < self.mix <= 1, "mix", "give a number in (0, 1]; 1 continues from the outer iterate alone")
        whole = isinstance(self.sync_steps, int) and self.sync_steps >= 0
        require(whole, "sync_steps", "give a whole number of steps, 0 or more")
        self._check_delay(require)
        require(isinstance(self.wire, WireConfig), "wire", "give a WireConfig, such as core.WireConfig('int8')")
        require(self.steps in ("even", "by_speed"), "steps", "choose even or by_speed")
        require(self.outlier is None or self.outlier > 1, "outlier", "give a number above 1, or None for no limit")
        require(self.update in PASSES, "update", f"choose one of {', '.join(PASSES)}")

    @classmethod
    def recommended(cls, workers: int, steps: int | None = None, *, mesh: DeviceMesh | None = None) -> CO2Config:
        """What our measurements support in place of the paper's settings (results/RESULTS.md, "Hidden, and the loss").

        A mean is merged when it lands, the own progress since the sending is kept, for a copy of the parameters, and
        there is no penalty, for little is stale then. merge="mix" saves the copy and comes close. A mean crosses the
        network in int4, for 1 + 1/workers copies more, so that it lands sooner; where it would land within a local
        step anyway, in float32.

        workers: their number; outer momentum costs most with few of them: 0 up to 16, beyond that what the authors'
        release sets, 0.2 up to 32, 0.5 up to 64, 0.6 above. steps: of the whole run, if known, so that it has twenty
        rounds at least. tau set by dataclasses.replace holds. mesh: [nodes, workers of a node], for ShardedCO2: workers
        of a node must stay equal and hold only shares of the outer state, so of all this there is the outer momentum;
        a mean is merged in the paper's order, with its penalty, and crosses in float32.
        """
        beta = next(b for limit, b in ((16, 0.0), (32, 0.2), (64, 0.5), (float("inf"), 0.6)) if workers <= limit)
        tau_max = 192 if steps is None else min(192, max(1, steps // 20))
        if mesh is not None:
            check_mesh(mesh)
            return cls("auto", tau_max, outer_momentum=beta)
        return cls(
            "auto", tau_max, outer_momentum=beta, gap="none", merge="keep", delay="auto", wire=WireConfig("auto")
        )

    def _check_delay(self, require: Callable[[bool, str, str], None]) -> None:
        number = self.delay if isinstance(self.delay, int) and not isinstance(self.delay, bool) else None
        known = number is not None or self.delay in ("boundary", "auto")
        require(known and (number or 0) >= 0, "delay", "give boundary, auto, or a whole number of local steps")
        if number is not None:
            require(self.tau != "auto", "delay", "with tau auto give delay boundary or auto")
            require(number <= int(self.tau), "delay", f"give at most tau={self.tau} local steps")
        require(number != 0 or self.gap == "none", "delay", f"nothing is stale then: set gap none, not {self.gap}")
        thrown = "merge outer would throw the steps since the sending away: set merge mix or keep"
        require(self.merge != "outer" or self.at_boundary or number == 0, "delay", thrown)
        from_outer = "gap inner measures from the outer iterate: set merge outer, or another gap"
        require(self.merge == "outer" or self.gap != "inner", "merge", from_outer)

    @property
    def tau_margin(self) -> float:
        """Of tau auto: by how much the local steps should outlast the all-reduce. Where means are merged on arrival so
        much that they come in the first two fifths of a round: fresh means are worth more than frequent ones, to there
        (results/RESULTS.md, "Hidden, and the loss").
        """
        return 0.25 if self.at_boundary else 1.5

    @property
    def at_boundary(self) -> bool:
        """Whether a mean is merged at the boundary after the one at which it was sent, in the paper's order."""
        return self.delay == "boundary" or (self.delay != "auto" and self.delay == self.tau)


Schedule = Callable[[int], Mapping[str, Any]]


SCHEDULED = ("tau", "outer_lr", "outer_momentum", "clip")


def scheduled(c: CO2Config, schedule: Schedule | None, number: int) -> CO2Config:
    """The settings of round `number`."""
    changes = dict(schedule(number)) if schedule else {}
    if unknown := changes.keys() - set(SCHEDULED):
        raise UserError(f"the schedule changes {', '.join(sorted(unknown))}: only {', '.join(SCHEDULED)} may change")
    if "tau" in changes and "auto" in (c.tau, changes["tau"]):
        raise UserError(f"the schedule gives tau={changes['tau']!r} while tau is {c.tau!r}: give numbers, or only auto")
    changed = replace(c, **changes)
    if changed.at_boundary != c.at_boundary and c.merge != "keep":  # which has one order for both
        raise UserError(
            f"the schedule gives tau={changed.tau} after tau={c.tau}, with merge={c.merge!r} and delay={c.delay}: at "
            "the end of a round a mean is merged otherwise than within one; keep tau above delay, or set delay auto"
        )
    return changed


def check_stable(c: CO2Config) -> None:
    """Refuses a delayed outer step without a penalty that may diverge, and says why.

    Only the paper's order delays the outer step by a round. Else a difference is taken from the outer iterate as the
    means before have made it; and with merge keep the mean over the workers is SlowMo's, undelayed.
    """
    if c.merge == "keep" or not c.at_boundary:
        return
    if c.gap == "none" and not c.allow_unstable and not outer.settles(c.outer_lr, c.outer_momentum):
        raise UserError(unstable(c, "set gap='elementwise'", "a sum below 1"))


def check_shared(c: CO2Config) -> None:
    """check_stable, and refuses what needs the whole outer state in one place (ShardedCO2), all in one line."""
    check_stable(c)
    problems = []
    if c.gap == "inner":
        problems.append("gap='inner' needs unshared outer state: choose elementwise, norm or none")
    if c.merge == "keep" or (c.merge == "mix" and c.at_boundary) or c.delay == 0:
        problems.append(
            f"merge={c.merge!r} with delay={c.delay!r} needs the outer state whole: shared, it knows merge outer with "
            "delay boundary (the paper), and mix with delay auto, where no mesh is given, or a number of local steps"
        )
    if c.update != "fast":
        problems.append(f"update={c.update!r}: shared outer state has one pass of its own, leave it out")
    if c.wire.format != "float32":
        problems.append(f"wire.format={c.wire.format!r} needs unshared outer state: set wire.format float32")
    if problems:
        remedy = "or leave out shard, offload, per_node and zero"
        with_mesh = "with a mesh, CO2Config.recommended(..., mesh=mesh) is accepted"
        raise UserError("; ".join([*problems, remedy, with_mesh]))


def check_mesh(mesh: DeviceMesh) -> None:
    """Refuses a mesh of other than two dimensions."""
    if mesh.ndim == 2:
        return
    names, usual = mesh.mesh_dim_names or (), ("dp_replicate", "dp_shard")
    of = f" {', '.join(names)}" if names else ""
    remedy = f"give one of two, such as init_device_mesh(DEVICE, (NODES, WORKERS OF A NODE), mesh_dim_names={usual})"
    if len(names) > 1:
        across, inside = usual if {*usual} <= {*names} else names[:2]
        pair = "mesh[ACROSS, INSIDE], the names of the dimension across nodes and of the one inside a node"
        remedy = f'give two of a larger one, {pair}, such as mesh["{across}", "{inside}"]'
    raise UserError(f"a mesh of {mesh.ndim} dimension{'s' * (mesh.ndim != 1)}{of}: {remedy}")


def check_node(c: CO2Config) -> None:
    """Refuses what the workers of a node, which stay equal, cannot do (ShardedCO2 with an inner group)."""
    if c.delay == "auto":
        raise UserError(
            "delay='auto' lets every worker merge by itself, and those of a node must stay equal: give a number of "
            "local steps, at least what the all-reduce takes"
        )


def unstable(c: CO2Config, remedy: str, limit: str) -> str:
    """Why a delayed outer step without a penalty may diverge with these settings."""
    return (
        f"outer_momentum={c.outer_momentum} + outer_lr={c.outer_lr} = {c.outer_lr + c.outer_momentum:g} with "
        "gap='none' is unstable: a step delayed by one round settles only while beta + alpha rho / Lambda < 1, where "
        f"rho nears 1 in directions that tau local steps solve; {remedy}, or lower the two to {limit} "
        "(allow_unstable=True runs it regardless)"
    )
