"""The grid of settings and placements: each cell trains as the specification says, or is refused in one line."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from core.testing.reference import Reference
from tests.core.grid import (
    LR,
    PER_NODE,
    PLACEMENTS,
    RANKS,
    SETTINGS,
    STEPS,
    Setting,
    Trained,
    gradient,
    run_cells,
    values,
)
from tests.imports import ROOT
from tests.problems import flat

NEAR = {"float32": 1e-12, "bfloat16": 5e-3, "int8": 5e-3, "int4": 0.1, "lgreco": 0.1, "auto": 0.3}
"""Of the distance that the parameters have moved: narrow formats are compared with their uncompressed twin. In
test_nodes.py they equal the specification, too."""


def expected(setting: Setting, nodes: list[list[int]], taus: list[int]) -> list[Tensor]:
    """[workers, n] after each round of so many steps and at the end."""
    c, start = setting.config, flat(values())
    # times decide when an average is merged, which changes nothing that is compared
    delay = {"boundary": None, "auto": 1}.get(c.delay, c.delay)  # pyright: ignore
    numbers: Any = taus[0], c.outer_lr, c.outer_momentum, c.gap, c.clip
    ref = Reference(start.expand(len(nodes), -1).clone(), *numbers, delay=delay, merge=c.merge, nesterov=c.nesterov)
    ranks, left = torch.tensor(nodes)[:, :, None], [*taus[1:]]
    for step in range(STEPS):
        each = gradient(ref.x[:, None], start, ranks.to(start), step, by_time=setting.by_time)
        ref.x.sub_(LR * each.mean(1))
        if ref.local_step():
            ref.tau = left.pop(0)
    rounds = [*ref.restarts]  # finish() appends more
    ref.finish()
    return [*rounds, ref.x]


def difference(name: str, placement: str, ranks: list[Trained]) -> tuple[float, float]:
    """How far the ranks are from the specification at most, and how far the parameters have moved."""
    size = PER_NODE if "mesh" in PLACEMENTS[placement] else 1
    nodes = [[*range(i, i + size)] for i in range(0, RANKS, size)]
    apart = moved = 0.0
    for rank, seen in enumerate(ranks):
        rows = expected(SETTINGS[name], nodes, [*seen.taus])
        assert len(rows) == len(seen.rounds) and seen.place is not None
        since = -1 if SETTINGS[name].config.fragments == "auto" else 0  # times decide what a round has merged
        for ours, theirs in zip(seen.rounds[since:], rows[since:], strict=True):
            apart = max(apart, (ours - theirs[rank // size][seen.place]).abs().max().item())
        moved = max(moved, (seen.rounds[-1] - flat(values())[seen.place]).abs().max().item())
    return apart, moved


FAST = ("nodes, DDP inside",)  # test_nodes.py compares the other two for some settings


@pytest.mark.parametrize(
    "placement", [pytest.param(p, marks=() if p in FAST else pytest.mark.slow) for p in PLACEMENTS]
)
def test_every_cell_trains_as_specified_or_is_refused(placement: str):
    """results/grid.json has the same refusals. docs/choosing.md names them."""
    refusals = {}
    for name, ranks in run_cells(placement, [*SETTINGS]).items():
        refusals[name] = ranks[0].refused
        assert len({seen.refused for seen in ranks}) == 1 and "\n" not in ranks[0].refused
        if not ranks[0].refused:
            apart, moved = difference(name, placement, ranks)
            form = SETTINGS[name].config.compression.format
            assert apart < NEAR[form] * moved and moved > 0.1, (name, apart, moved)
            assert form in ("float32", "auto") or apart > 1e-9, f"{name}: nothing was rounded"
    known = json.loads((ROOT / "results/grid.json").read_text())["rows"]
    assert refusals == {row["setting"]: row["refused"] for row in known if row["placement"] == placement}


def test_few_cells_are_refused():
    rows = json.loads((ROOT / "results/grid.json").read_text())["rows"]
    assert {(row["setting"], row["placement"]) for row in rows} == {(s, p) for s in SETTINGS for p in PLACEMENTS}
    assert sum(bool(row["refused"]) for row in rows) <= 8
