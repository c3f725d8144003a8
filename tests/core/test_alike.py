"""Workers that hold the same tensors send none of them when they begin: on a slow link a model takes minutes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from core import make_method
from core.groups import broadcast
from core.testing import run_distributed
from tests import problems


def base() -> list[Tensor]:
    """Of many types, with a scalar, an empty one and one that is not contiguous."""
    rows = torch.arange(6.0).view(2, 3)
    half, flags = torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([True, False])
    more = torch.tensor(7), torch.tensor(40), torch.zeros(0), torch.zeros(2, dtype=torch.cfloat)
    return [rows, rows.t().double() + 1, half, flags, *more]


CHANGES: dict[str, Callable[[list[Tensor]], Any]] = {
    "one bit": lambda t: t[2].view(torch.int16)[1:].bitwise_xor_(1),
    "two elements swapped": lambda t: t[3].copy_(t[3].flip(0)),
    "swapped between tensors, so that their sum stays": lambda t: (t[0][0, 1].zero_(), t[1][0, 0].fill_(2.0)),
    "the sign of a zero": lambda t: t[0][0, 0].fill_(-0.0),
    "two signs in float64, each the highest of 64 bits": lambda t: t[1][0].neg_(),
    "what weights of 1 and 3 would cancel": lambda t: t[0].view(torch.int32).view(-1)[:2].add_(torch.tensor([3, -1])),
    "two scalars, by 1 and by 31": lambda t: (t[4].add_(1), t[5].sub_(31)),
    "the last element": lambda t: t[-1][1].fill_(1j),
    "nothing": lambda t: None,
}


def begun(rank: int, world_size: int) -> dict[str, tuple[int, bool]]:
    """For each change on the last worker alone: tensors sent, and whether the first worker's came."""
    found, send = {}, dist.broadcast
    for name, change in CHANGES.items():
        tensors = base()
        if rank == world_size - 1:
            change(tensors)
        with mock.patch.object(dist, "broadcast", side_effect=send) as sent:
            broadcast(tensors, dist.group.WORLD, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        bits, wanted = ([t.contiguous().view(-1).view(torch.uint8) for t in some] for some in (tensors, base()))
        found[name] = sent.call_count, all(map(torch.equal, bits, wanted))
    return found


def test_tensors_are_sent_where_a_bit_of_them_differs_and_only_there():
    for found in run_distributed(begun, 3):
        assert found == dict.fromkeys(CHANGES, (len(base()), True)) | {"nothing": (0, True)}


def starts(rank: int, world_size: int) -> dict[tuple[str, str], bool]:
    """Whether a method sends tensors when it is made, where all have one seed and where each has its own."""
    sent = {}
    for method, (what, seed) in product(("co2", "ddp"), (("alike", 0), ("apart", rank))):
        model = problems.small_net(seed=seed)
        # torch's own module states go through _broadcast_coalesced
        with (
            mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as ours,
            mock.patch.object(dist, "_broadcast_coalesced", side_effect=dist._broadcast_coalesced) as torchs,
        ):
            _, made = make_method(method, model)
        sent[method, what] = ours.call_count + torchs.call_count > 0
        made.close()
    return sent


def test_a_method_that_begins_alike_sends_no_model():
    for sent in run_distributed(starts, 2):
        assert sent == {(method, what): what == "apart" for method in ("co2", "ddp") for what in ("alike", "apart")}
