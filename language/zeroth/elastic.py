"""Zeroth-order training among workers that come and go: see core/elastic/joining.py for generations of them.

A run is its list of scalars, so little can be lost. A step counts where one survivor has all of its scalars: the others
get them with what all report when they meet again. Otherwise the step is given up by all, as where a loss is not
finite, for those that are left may have had one pair's samples, or another's. Neither moves the weights apart.

A newcomer has the weights that the run began with. It gets the list of scalars, 8 bytes a step, replays it, and holds
the others' weights, bit for bit; no weights are sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from core.elastic.members import Came, Members, Report, Workers
from core.errors import CollectiveError, UserError
from core.groups import set_timeout
from .config import ZerothConfig
from .exchange import Place
from .forward import Loss, evaluating
from .method import Zeroth
from .replay import ScalarLog, Update
from .weights import digest

LOOK_EVERY = 0.2  # seconds between two looks of the first worker whether newcomers wait
REPORTED = 3  # last steps, whose scalars are reported: survivors are one step apart at most


class ElasticZeroth(Zeroth, Workers):
    """Zeroth whose workers come and go: see this module. The plain one's options but for pairs=True, several directions
    and a delay.

    Make it on every worker before any process group exists, with equal weights, then call `join` on all. members: see
    Members. Set, before `join`: give, which returns what a newcomer needs, this object's state_dict() included; take,
    which takes it there; may_join, whether newcomers may join after the step that has been taken, alike on all workers.
    """

    def __init__(
        self, model: nn.Module, config: ZerothConfig, *, members: Members, timeout: float = 600.0, **options: Any
    ):
        check_elastic(config)
        Zeroth.__init__(self, model, config, timeout=timeout, **options)
        Workers.__init__(self, members)
        self._timeout = timeout
        self._initial = digest([*model.parameters(), *model.buffers()])
        self._joining = False  # whether all have heard that they may
        self._looked_at = 0.0
        self._begun = 0  # steps, the one under way among them
        self.give: Callable[[], dict[str, Any]] = self.state_dict
        self.take: Callable[[dict[str, Any]], None] = self.load_state_dict
        self.may_join: Callable[[], bool] = lambda: True

    def join(self, found: Callable[[], None] = lambda: None) -> bool:
        """Comes among the workers; whether others were training. found: called on the first worker where nobody has
        taken any step: it may load what is to be continued.

        UserError where its weights are not those that the first worker began with; CollectiveError where others train.
        """
        while True:
            self._leave()
            reports = self.members.meet(None, "empty")
            self._adopt(reports)
            founding = all(r is None for r in reports)
            if founding and self.members.rank == 0:
                found()
                self._serve(len(reports) - 1)
                return False
            try:
                state = self.members.fetch()
            except RuntimeError:  # its sender was lost
                continue
            try:
                self.take(state)
            except UserError as error:
                if founding:
                    raise
                raise CollectiveError(str(error)) from None  # the others go on without it
            return not founding

    def measure(self, loss: Loss, count: float) -> Tensor:
        """See Zeroth. Where a worker is lost meanwhile, the others have taken the step, or given it up, at its end."""
        if self.order.steps > self.rounds:  # it was given up while this worker was behind
            with torch.no_grad(), evaluating(self.order.model):
                return torch.tensor(float(loss(self.order.model)), dtype=torch.float64)
        wishes, self._begun = set(self._requests.asked), self.rounds + 1
        try:
            found = super().measure(loss, count)
            self._joining |= self.order.heard[-1] > 0
            return found
        except CollectiveError:
            pass
        self._requests.asked = wishes  # out here, where no traceback keeps the group
        self.mend()
        return torch.tensor(self.order.own_loss, dtype=torch.float64)

    def step(self, *, last: bool = False) -> bool:
        """See Zeroth; lets newcomers join."""
        super().step(last=last)
        if self._joining and "stop" not in self._requests.granted and self.may_join():
            reports = self.mend("planned")
            first = next(rank for rank, r in enumerate(reports) if r is not None)
            if self.members.rank == first:
                self._serve(sum(r is None for r in reports))
        return True

    def mend(self, came: Came = "failed") -> list[Report | None]:
        """See Workers; all that are left have taken, or given up, the same steps then."""
        self._leave()
        reports = self.members.meet(self._report(), came)
        self._adopt(reports)
        return reports

    def _leave(self) -> None:
        self.order.group = None
        self.members.leave()

    def _report(self) -> Report:
        log = self.order.log
        last = [tuple(update) for update in log.updates(max(0, len(log) - REPORTED))]
        mine = {"begun": max(self._begun, len(log)), "last": last, "stop": "stop" in self._requests.granted}
        return mine | self.of_sums() | self.tell()

    def _adopt(self, reports: list[Report | None]) -> None:
        """Another generation has begun."""
        members, order = self.members, self.order
        assert members.group is not None
        set_timeout(members.group, self._timeout)
        order.place = Place.make(members.rank, members.size, order.config)
        order.group = members.group if members.size > 1 else None
        if members.rank > 0:
            order.weights.leave_warning()
        known = [r for r in reports if r is not None]
        self.adopt_sums(known)
        if reports[members.rank] is not None:
            self._come_level(known)
        self.on_change(reports)

    def _come_level(self, known: list[Report]) -> None:
        """Takes the steps that another survivor knows, and gives up those that some have begun and nobody has ended."""
        order = self.order
        ended = {step: Update(step, lr, tuple(g)) for r in known for step, lr, g in r["last"]}
        for step in range(len(order.log), max(r["begun"] for r in known)):
            rate = order.log.lrs[-1][1] if order.log.lrs else 0.0
            order.adopt([ended.get(step, Update(step, rate, (math.nan,)))])
        order.adopt([])  # forgets what has failed
        self._requests.granted = {"stop"} if any(r["stop"] for r in known) else set()
        self._joining = False

    def _serve(self, newcomers: int) -> None:
        if newcomers:
            self.members.serve(self.give(), newcomers)

    def more_news(self) -> list[float]:
        return [float(self._newcomers_wait())]

    def _newcomers_wait(self) -> bool:
        """Asked of the launcher now and then, by the first worker alone."""
        if self.members.rank > 0 or time.monotonic() - self._looked_at < LOOK_EVERY:
            return False
        self._looked_at = time.monotonic()
        return self.members.wanted()

    def state_dict(self) -> dict[str, Any]:
        """The scalars, and which weights they begin with."""
        return {"initial": self._initial, "log": self.order.log.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replays what the state has beyond this worker's own steps; it must have begun with the same weights."""
        if state["initial"] != self._initial:
            raise UserError(
                f"worker {self.members.name} has not the weights that the run began with, and replays it from these: "
                "give it the same model (--init_from, --model) and the same version of torch"
            )
        self.order.replay(ScalarLog.from_state(state["log"]))
        self.rounds = self._begun = self.order.steps

    def close(self) -> None:
        """Leaves the others."""
        self._leave()


def check_elastic(config: ZerothConfig) -> None:
    """UserError for what does not go with workers that come and go."""
    for ok, name, why in (
        (config.pairs is not True, "pairs", "their number may become odd"),
        (config.directions == 1, "directions", "their number may not divide it"),
        (config.delay == 0, "delay", "two steps would be lost with a worker"),
    ):
        if not ok:
            raise UserError(f"elastic does not go with zeroth.{name}={getattr(config, name)!r}, {why}: leave it out")
