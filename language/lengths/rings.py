"""Documents split over an island of workers that meet at every step: `--balance rings` of language.train and finetune.

A run measures the plan's costs at its start, by the model itself and by messages as a ring sends them, or takes
--rings.costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from core.errors import UserError
from core.groups import new_group, of_all
from core.sharded.mesh import local_world_size
from language.lengths.packed import Document, Packed, pack, pack_share
from language.lengths.plan import Island, plan
from language.metrics import token_loss
from language.recipe import TextRecipe
from training.workers import least_seconds

TOKENS, PARTS = 2048, 8  # of a row that is timed, as one document and as so many; fewer where there are fewer positions
REPEATS, SENT = 3, 12  # of a row, and of a message, of which the first ones wait for connections
MESSAGES = 3  # of a hop and layer: keys and values in both passes, and their gradients


@dataclass(frozen=True)
class Rings:
    """The workers among whom this one's documents are split."""

    group: dist.ProcessGroup
    island: Island

    @classmethod
    def of(
        cls, recipe: TextRecipe, model: nn.Module, mesh: DeviceMesh, longest: int, autocast: AbstractContextManager[Any]
    ) -> Rings:
        """The workers of a node of the mesh, each of whom must call it. longest: tokens of a document, at most."""
        device = next(model.parameters()).device
        group = new_group(mesh.get_group("shard"), recipe.timeout, device)
        assert group is not None
        size, here = mesh.size(1), local_world_size()
        nodes = size // here if 1 < here < size and size % here == 0 else 1
        given = recipe.rings.costs
        with autocast:
            costs = given or measured(model, group, size // nodes, min(TOKENS, longest))
        room = recipe.rings.room or float("inf")
        island = Island(nodes, size // nodes, *costs[:2], costs[2:4], costs[4:] or costs[2:4], room)  # pyright: ignore
        return cls(group, island)

    def split(self, documents: Sequence[Document]) -> Packed:
        """This worker's part of a row. Where a row has more tokens than there is room for, all have as many."""
        ends = torch.tensor([0, *(len(ids) for ids, _ in documents)]).cumsum(0)
        room = max(self.island.room, int(ends[-1]) / self.island.size)
        return pack_share(documents, plan(ends, replace(self.island, room=room)), self.group)

    def __str__(self) -> str:
        i = self.island
        nodes = f" on {i.nodes} machines" if i.nodes > 1 else ""
        costs = " ".join(f"{cost:.3g}" for cost in (i.attention, i.linear, *i.inside, *i.across))
        return f"islands of {i.size} workers{nodes}; --rings.costs {costs}"


# -- what a layer costs ---------------------------------------------------------------------------------------------


def measured(model: nn.Module, group: dist.ProcessGroup, devices: int, tokens: int) -> tuple[float, ...]:
    """The costs of an Island whose nodes have so many devices, the same on all its ranks: each time is that of the
    slowest. Seconds of a layer, both passes. tokens: of the row that is timed."""
    parts = max(1, min(PARTS, tokens // 2))
    tokens -= tokens % parts
    config: Any = model.config
    device = next(model.parameters()).device
    size = 2 if torch.is_autocast_enabled(device.type) else next(model.parameters()).element_size()
    nbytes = 2 * config.hidden_size * (2 * size + max(size, 4))  # of a token: keys, values, their gradients
    rows = [row_of(lengths).to(device) for lengths in ([tokens], [tokens // parts] * parts)]
    times = [least_seconds(lambda row=row: trained_on(model, row), device, REPEATS) for row in rows]  # pyright: ignore
    one, many = slowest(times, group)
    inside, across = (hop_of(group, ring, nbytes, tokens, device) for ring in (devices, dist.get_world_size(group)))
    layers = config.num_hidden_layers
    attention = max(0.0, one - many) / (layers * tokens**2 * (1 - 1 / parts)) if parts > 1 else 0.0
    linear = max(0.0, many / layers - attention * tokens**2 / parts) / tokens
    return attention, linear, *inside, *across


def hop_of(
    group: dist.ProcessGroup, devices: int, nbytes: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a hop in all, and of one for each token of so many bytes, in rings of so many ranks."""
    sends = [exchange(group, devices, n, device) for n in (MESSAGES, MESSAGES + tokens * nbytes)]
    few, much = slowest([least_seconds(send, device, SENT) for send in sends], group)
    return MESSAGES * few, max(0.0, much - few) / tokens


def row_of(lengths: Sequence[int]) -> Packed:
    """Documents of so many tokens, all of them the same one."""
    return pack([(torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)) for n in lengths])


def trained_on(model: nn.Module, row: Packed) -> None:
    """A step's two passes, which leave nothing behind."""
    logits = model(row.ids, position_ids=row.positions, documents=row.boundaries).logits
    token_loss(logits, row.targets).backward()
    model.zero_grad(set_to_none=True)


def exchange(group: dist.ProcessGroup, devices: int, nbytes: int, device: torch.device) -> Callable[[], None]:
    """Sends so many bytes to the next of each `devices` ranks of the group, and receives as many."""
    node, place = divmod(dist.get_rank(group), devices)
    following, before = (node * devices + (place + step) % devices for step in (1, -1))
    ours, theirs = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def send() -> None:
        if devices == 1:
            return
        how: dict[str, Any] = {"group": group}
        sends = dist.P2POp(dist.isend, ours, group_peer=following, **how)
        works = dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, theirs, group_peer=before, **how)])
        while works:
            works.pop().wait()

    return send


def slowest(seconds: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Each the largest that a rank of the group has."""
    return [max(of) for of in zip(*of_all(list(seconds), group), strict=True)]


def check_room(tokens: float, room: int | None, workers: int) -> None:
    """UserError where the tokens of a row, on average, or of a document are more than an island's devices hold."""
    if room is not None and tokens > room * workers:
        raise UserError(
            f"a row of {tokens:,.0f} tokens, but {workers} workers of rings.room={room} hold {room * workers}: give a "
            "larger --accumulate, a smaller --batch_size or --context, or more workers a node"
        )
