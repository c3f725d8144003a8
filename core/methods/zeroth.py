"""Zeroth-order training by its name."""

from __future__ import annotations

from torch import nn

from ..errors import UserError
from ..zeroth import ZerothConfig
from ..zeroth.method import Zeroth
from .registry import Entry, Given, Settings


def _make(given: Given) -> tuple[nn.Module, Zeroth]:
    raise UserError("method 'zo' takes the place of an optimiser: make a core.zeroth.ZerothOrder, and call its step")


ENTRY = Entry(
    "zo",
    _make,
    "optimizer",
    Settings("zeroth", ZerothConfig, "Of method zo."),
    takes=frozenset({"offload", "elastic"}),
)
