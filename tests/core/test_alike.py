"""Workers that hold the same tensors send none of them when they begin: on a slow link a model takes minutes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
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
    return [
        rows,
        rows.t().double() + 1,
        half,
        flags,
        torch.tensor(7),
        torch.tensor(40),
        torch.zeros(0),
        torch.zeros(2, dtype=torch.cfloat),
    ]


def one_bit(tensors: list[Tensor]) -> None:
    tensors[2].view(torch.int16)[1] ^= 1


def swapped(tensors: list[Tensor]) -> None:
    tensors[3][:2] = tensors[3][:2].flip(0)


def swapped_tensors(tensors: list[Tensor]) -> None:
    """The sum of all elements stays."""
    tensors[0][0, 1], tensors[1][0, 0] = 0.0, 2.0


def sign_of_zero(tensors: list[Tensor]) -> None:
    tensors[0][0, 0] = -0.0


def two_signs(tensors: list[Tensor]) -> None:
    """In float64, where a sign is the highest of 64 bits."""
    tensors[1][0].neg_()


def few_bits(tensors: list[Tensor]) -> None:
    """As three times the second element's bits, which weights of 1 and 3 would not tell apart."""
    tensors[0].view(torch.int32).view(-1)[:2] += torch.tensor([3, -1])


def two_scalars(tensors: list[Tensor]) -> None:
    """A sum of one element each, of which the one before would be taken 31 times."""
    tensors[4] += 1
    tensors[5] -= 31


def last(tensors: list[Tensor]) -> None:
    tensors[-1][1] = 1j


CHANGES = one_bit, swapped, swapped_tensors, sign_of_zero, two_signs, few_bits, two_scalars, last


def begun(rank: int, world_size: int) -> list[tuple[int, bool]]:
    """For each change, and for none, on the last worker alone: tensors sent, and whether the first one's came."""
    found, send = [], dist.broadcast
    for change in (*CHANGES, lambda tensors: None):
        tensors = base()
        if rank == world_size - 1:
            change(tensors)
        with mock.patch.object(dist, "broadcast", side_effect=send) as sent:
            broadcast(tensors, dist.group.WORLD, torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
        wanted = [t.contiguous().view(-1).view(torch.uint8) for t in base()]
        found.append((sent.call_count, all(map(torch.equal, bits, wanted))))
    return found


def test_tensors_are_sent_where_a_bit_of_them_differs_and_only_there():
    for found in run_distributed(begun, 3):
        assert found == [(len(base()), True)] * len(CHANGES) + [(0, True)]


def bytes_of_start(rank: int, world_size: int, method: str) -> dict[str, Any]:
    """Tensors that a method sends when it is made, where all have one seed and where each has its own."""
    sent = {}
    for what, seed in (("alike", 0), ("apart", rank)):
        model = problems.small_net(seed=seed)
        # torch's own module states go through _broadcast_coalesced
        with (
            mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as ours,
            mock.patch.object(dist, "_broadcast_coalesced", side_effect=dist._broadcast_coalesced) as torchs,
        ):
            _, made = make_method(method, model)
        sent[what] = ours.call_count + torchs.call_count > 0
        made.close()
    return sent


@pytest.mark.parametrize("method", ["co2", "ddp"])
def test_a_method_that_begins_alike_sends_no_model(method: str):
    assert run_distributed(bytes_of_start, 2, method) == [{"alike": False, "apart": True}] * 2
