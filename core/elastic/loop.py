"""A training loop for your own script, whose workers come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.runs import load_model, load_optimizer, of_optimizer
from ..config import CO2Config, named_rule
from ..errors import UserError, is_whole
from ..local_update import LocalUpdateMethod
from .allreduce import Script
from .island import IslandCO2
from .joining import ElasticCO2
from .members import Members


def elastic_co2(
    params: Iterable[Tensor], config: CO2Config | None = None, *, members: Members, **args: Any
) -> ElasticCO2:
    """Makes CO2 whose workers come and go. A float32 all-reduce in flight holds one more copy of the parameters.

    Checkpoints hold no residuals of error feedback, so a resumed run starts with zeros.

    Make it on every worker before any process group exists, then call `join` on all of them.

    Args:
        params: As for CO2.
        config: As for CO2. Compression auto means float32.
        members: The worker's generation, see Members.
        **args: script, see Script. buffers, timeout, link, schedule and hooks as for CO2.
    """
    return (IslandCO2 if members.island > 1 else ElasticCO2)(params, named_rule(config), members=members, **args)


class ElasticLoop(Script):
    """Yields the steps of a run whose workers come and go, and averages the model over them with CO2.

        loop = ElasticLoop(model, optimizer, CO2Config.recommended(tau=5), steps=10_000)
        for step in loop:
            loss(model, batch(loop.place, step)).backward()
            optimizer.step(); optimizer.zero_grad()

    All workers take each step once, and a new worker begins at their present step. Start the script with
    `python -m co2_training.elastic.launch`.

    Args:
        model: The model, on this worker's device.
        optimizer: Its optimizer.
        config: As for CO2.
        steps: Optimizer steps of the run.
        timeout: Seconds until a silent worker is left out.
        others: More objects with a state, by name, such as a learning-rate schedule.
        first_state: The state with which the run begins, as `state_dict` returned it. The first worker's counts.
        **args: Other arguments of elastic_co2.

    Attributes:
        co2: The method.
        members: The worker's generation, see Members.
        place: This worker's place among the largest number of workers, from 0. A new worker has a lost worker's place.
        step: Steps taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: CO2Config | None = None,
        *,
        steps: int,
        timeout: float = 600.0,
        others: Mapping[str, Any] | None = None,
        first_state: dict[str, Any] | None = None,
        **args: Any,
    ):
        if not is_whole(steps):
            raise UserError(f"steps={steps!r}: give the number of steps, 1 or more")
        self.model, self.optimizer, self.others, self.steps = model, optimizer, dict(others or {}), steps
        self.step, self._first_state = 0, first_state
        self.members = Members.from_env(timeout)
        args = {"members": self.members, "script": self, "timeout": timeout, "buffers": model.buffers()} | args
        self.co2 = elastic_co2(model.parameters(), config, **args)
        self.place = self.co2.allreduce.place

    def __iter__(self) -> Iterator[int]:
        self.co2.join(self._begin)
        while self.step < self.steps:
            yield self.step
            self.step += 1
            self.co2.step(last=self.step == self.steps)
        self.co2.finish()
        self.co2.end()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run at the beginning of a step, tensors and plain values. One worker may call it."""
        state = {"co2": self.co2.state_dict(), "model": self.model.state_dict(), "step": self.step}
        others = {name: other.state_dict() for name, other in self.others.items()}
        return state | {"optimizer": of_optimizer(self.optimizer, self.model), "others": others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned."""
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, self.model, state["optimizer"])
        for name, other in self.others.items():
            other.load_state_dict(state["others"][name])
        self.co2.load_state_dict(state["co2"])
        self.step = state["step"]

    def give(self, method: LocalUpdateMethod) -> dict[str, Any]:  # noqa: ARG002
        return self.state_dict()

    def take(self, method: LocalUpdateMethod, state: dict[str, Any]) -> None:  # noqa: ARG002
        self.load_state_dict(state)

    def _begin(self) -> None:
        if self._first_state is not None:
            self.load_state_dict(self._first_state)
