"""Zeroth-order training by its name."""

from __future__ import annotations

from torch import nn

from core.errors import UserError
from . import ZerothConfig
from .method import Zeroth
from core.methods.registry import Entry, Given, Settings


def _make(given: Given) -> tuple[nn.Module, Zeroth]:
    raise UserError("method 'zo' takes the place of an optimiser: make a language.zeroth.ZerothOrder, and call its step")


ENTRY = Entry(
    "zo",
    _make,
    "optimizer",
    Settings("zeroth", ZerothConfig, "Of method zo."),
    takes=frozenset({"offload", "elastic"}),
)
