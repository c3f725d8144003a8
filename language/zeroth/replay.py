"""What a zeroth-order run was: its seed and one number a step, from which its weights follow."""

from __future__ import annotations

import json
import math
import struct
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import UserError

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
