"""The settings of L-GreCo, and the ways of sending a layer that it chooses from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..config import is_number, is_whole
from ..errors import UserError
from ..wires.formats import BITS, BLOCK, BLOCK_BYTES
from ..wires.quantized import chunk_of

Rule = Literal["lgreco", "uniform"]


@dataclass(frozen=True)
class LGrecoConfig:
    """Defaults are those of the released code, except `every` and `first`, which it counts in steps."""

    rule: Rule = "lgreco"
    """lgreco: the fewest bytes within the error of the uniform setting; uniform: that setting for all layers."""
    lowest_rank: float = 0.5
    """The lowest rank to try, in units of the uniform one: gamma."""
    highest_rank: float = 2.0
    """The highest rank to try, in units of the uniform one: beta."""
    every: int | None = None
    """The most reductions between two decisions; None for 20 rounds of CO2, or 100 steps of ddp."""
    first: int | None = None
    """The first reduction that decides; None for 3 rounds of CO2, or 10 steps of ddp. The time between two decisions
    doubles from there up to `every`."""

    def __post_init__(self) -> None:
        low, high, whole = self.lowest_rank, self.highest_rank, "give a whole number of reductions, 1 or more"
        for name, ok, remedy in (
            ("rule", self.rule in get_args(Rule), f"choose one of {', '.join(get_args(Rule))}"),
            ("lowest_rank", is_number(low) and 0 < low <= 1, "give a number in (0, 1]"),
            ("highest_rank", is_number(high) and 1 <= high < math.inf, "give a finite number, 1 or more"),
            ("every", self.every is None or is_whole(self.every), whole),
            ("first", self.first is None or is_whole(self.first), whole),
        ):
            if not ok:
                raise UserError(f"wire.lgreco.{name}={getattr(self, name)!r}: {remedy}")


Kind = Literal["raw", "int", "top", "rank"]
INT_BITS = sorted(BITS.values())
POINTS = 9  # densities, geometric, from a tenth of the given one to ten times it


@dataclass(frozen=True)
class Choice:
    """One way to send a layer: as it is, b bits an element, the largest k elements, or two factors of rank r.

    value: the bits, the share of the elements (density), or the rank.
    """

    kind: Kind
    value: float = 0.0

    def __str__(self) -> str:
        return "as it is" if self.kind == "raw" else f"{self.kind}{self.value:g}"

    @property
    def wire(self) -> str:
        """The name in core/wires/formats.py if it is of kind int."""
        return f"int{int(self.value)}"


RAW = Choice("raw")


@dataclass(frozen=True)
class Layer:
    """A parameter: its bucket, where its elements begin there, and its matrix [rows, columns]; [n, 1] of a vector."""

    bucket: int
    start: int
    numel: int
    rows: int
    columns: int
    itemsize: int
    shape: tuple[int, ...]

    def offers(self, choice: Choice) -> bool:
        """Returns whether the choice exists for this layer, and saves bytes."""
        if choice.kind == "rank" and choice.value > min(self.rows, self.columns):
            return False
        return choice.kind in ("raw", "int") or message_bytes(self, choice) < message_bytes(self, RAW)

    def kept(self, density: float) -> int:
        """Returns how many elements top-k sends."""
        return max(1, round(density * self.numel))


def message_bytes(layer: Layer, choice: Choice) -> float:
    """Returns the layer's bytes in one message; a block that it shares with other layers counts in part."""
    if choice.kind == "int":
        return layer.numel * BLOCK_BYTES[choice.wire] / BLOCK
    if choice.kind == "top":
        return layer.kept(choice.value) * (layer.itemsize + 4)  # a value and an int32 index
    elements = choice.value * (layer.rows + layer.columns) if choice.kind == "rank" else layer.numel
    return elements * layer.itemsize


def sent_bytes(layer: Layer, choice: Choice, world_size: int) -> float:
    """Returns the bytes that each worker sends for the layer in one reduction: the message 2 (n - 1) / n times, but
    n - 1 times with top-k, which everyone gathers. A single worker counts as one of two."""
    n = max(2, world_size)
    return message_bytes(layer, choice) * ((n - 1) if choice.kind == "top" else 2 * (n - 1) / n)


def padded_bytes(layers: Sequence[Layer], choices: Sequence[Choice], world_size: int) -> list[float]:
    """Returns sent_bytes of each layer, with its share of what pads the layers of one bucket and int format to whole
    blocks for each worker."""
    n = max(2, world_size)
    sizes = [sent_bytes(layer, choice, world_size) for layer, choice in zip(layers, choices, strict=True)]
    together: dict[tuple[int, Choice], list[int]] = {}
    for i, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
        if choice.kind == "int":
            together.setdefault((layer.bucket, choice), []).append(i)
    for members in together.values():
        elements = sum(layers[i].numel for i in members)
        for i in members:
            sizes[i] *= n * chunk_of(elements, n) / elements
    return sizes


def parse(text: str) -> Choice:
    """Returns the choice of a text such as int4, top0.01 or rank4."""
    name = str(text).rstrip("0123456789.")
    with contextlib.suppress(ValueError):
        value = float(str(text)[len(name) :])
        known = {"int": value in INT_BITS, "top": 0 < value < 0.5, "rank": value.is_integer() and value >= 1}
        if known.get(name):
            return Choice(name, value)  # pyright: ignore[reportArgumentType]
    raise UserError(
        f"wire.like={text!r}: give int2, int4, int8, topD with a density 0 < D < 0.5 such as top0.01, or rankR such as "
        "rank4"
    )


def uniform(layer: Layer, like: Choice) -> Choice:
    """Returns the layer's choice where all get `like`: RAW if that saves no bytes, or less than half of them with low
    rank, as released."""
    halves = like.kind != "rank" or 2 * message_bytes(layer, like) < message_bytes(layer, RAW)
    return like if halves and layer.offers(like) else RAW


def family(like: Choice, lowest: float, highest: float, most: float = math.inf) -> list[Choice]:
    """Returns the choices of the uniform setting's kind, without repetitions. lowest, highest: the range of ranks, in
    units of the given one. most: the highest rank of any layer."""
    if like.kind == "int":
        found = [Choice("int", bits) for bits in INT_BITS]
    elif like.kind == "rank":
        ranks = range(max(1, int(lowest * like.value)), int(min(highest * like.value, most)) + 1)
        found = [Choice("rank", r) for r in ranks]
    else:
        values = [like.value * 10 ** (2 * i / (POINTS - 1) - 1) for i in range(POINTS)]
        values[POINTS // 2] = like.value
        found = [Choice("top", value) for value in values if value < 0.5]
    return list(dict.fromkeys([RAW, like, *found]))


def may_take(layer: Layer, choices: Sequence[Choice], like: Choice) -> list[bool]:
    """Returns whether the layer may take each of the choices. A layer that is sent as it is stays so."""
    if uniform(layer, like) == RAW:
        return [c == RAW for c in choices]
    return [layer.offers(c) and c != RAW for c in choices]
