"""Local-SGD, and what every method shares that waits for the mean of the parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Unpack

from torch import Tensor, nn

from ..assembly import CO2Config, Options, plugs
from ..errors import UserError
from ..flat import copy, rescale
from ..rounds import Rounds
from .registry import Entry, Given


class Blocking(Rounds):
    """A method that waits for the mean of the parameters at every boundary."""

    def __init__(self, params: Iterable[Tensor], tau: int, **options: Unpack[Options]):
        super().__init__(params, **plugs(CO2Config(tau=tau), lambda number: tau, options, hidden=False))

    def close_round(self, *, finished: bool) -> bool:
        for bucket in self.buckets:
            bucket.flatten(bucket.payload)
        self.send(finished=finished)
        landing = self.land(finished=finished)
        if not landing.empty:
            for bucket in self.buckets:
                rescale(bucket.payload, self.scale)
            self.apply()
        return landing.last

    @abstractmethod
    def apply(self) -> None:
        """Uses the mean parameters, which the payloads hold."""


class LocalSGD(Blocking):
    """Local-SGD (Stich, ICLR 2019): every tau local steps the parameters are averaged, and everyone waits. options: see
    core.assembly.Options."""

    name = "LocalSGD"

    def apply(self) -> None:
        for bucket in self.buckets:
            copy(bucket.params, bucket.payload_views)


def tau_of(given: Given) -> int:
    """UserError for auto, which chooses the fewest local steps that hide the communication."""
    if given.co2.tau == "auto":
        raise UserError("tau='auto' with a method that hides no communication: give a number of local steps")
    return given.co2.tau


def _make(given: Given) -> tuple[nn.Module, LocalSGD]:
    return given.model, LocalSGD(given.params, tau_of(given), **given.options)


ENTRY = Entry("local", _make, "blocking", check=tau_of)
