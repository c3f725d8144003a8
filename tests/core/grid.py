"""CO2's settings by the places where they may run, as a grid: python -m tests.core.grid

Four gloo ranks of this machine train each cell on a toy for some rounds, or CO2 refuses the cell in one line. Every
element of the toy has a gradient of its own, so that a part of the parameters trains alike wherever it is. test_grid.py
compares each cell with the executable specification.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.chaos.crew import Crew
from core import CO2, CO2Config, CompressionConfig, UserError, node_mesh, testing
from core.elastic import elastic_co2
from core.elastic.members import Members
from core.errors import env_number
from core.testing import run_distributed
from tests.imports import ROOT
from training.folder.settings import commit

RANKS, PER_NODE, TAU, STEPS, LR = 4, 2, 3, 30, 0.1
SHAPES = ((31, 33), (30,), (8, 17), (9,))  # two of each pipeline stage; they tile no part
TIMEOUT = 60.0


@dataclass(frozen=True)
class Setting:
    """A row of the grid. taus: local steps of the rounds in turn, as a schedule."""

    config: CO2Config
    taus: tuple[int, ...] = ()

    @property
    def schedule(self) -> Callable[[int], dict[str, Any]] | None:
        return (lambda number: {"tau": self.taus[number % len(self.taus)]}) if self.taus else None

    @property
    def by_time(self) -> bool:
        """Whether measured times decide when an average is sent or merged."""
        return "auto" in (self.config.tau, self.config.delay)


def _late(form: str = "float32", **settings: Any) -> Setting:
    late: dict[str, Any] = {"gap": "none", "merge": "keep_local", "delay": 1, "outer_momentum": 0.3, "clip": None}
    taus = settings.pop("taus", ())
    like = {"like": "int4"} if form == "lgreco" else {}
    return Setting(CO2Config(TAU, **late | settings, compression=CompressionConfig(form, **like)), taus)  # pyright: ignore


def _paper(**settings: Any) -> Setting:
    return Setting(CO2Config.paper(**{"tau": TAU} | settings))


SETTINGS = {
    "paper": _paper(outer_momentum=0.0),
    "paper, outer momentum 0.5": _paper(),
    "keep_local, delay 1": _late(),
    "keep_local, delay auto": _late(delay="auto"),
    "keep_local, delay boundary": _late(delay="boundary"),
    "Nesterov": _late(nesterov=True, outer_lr=0.7),
    "gap elementwise": _late(gap="elementwise"),
    "gap norm": _late(gap="norm"),
    "gap none, restart": _paper(gap="none", outer_momentum=0.3, outer_lr=0.6),
    "bfloat16": _late("bfloat16"),
    "int8": _late("int8"),
    "int4": _late("int4"),
    "L-GreCo": _late("lgreco"),
    "tau auto": _paper(tau="auto", tau_max=6),
    "compression auto": _late("auto"),
    "recommended": Setting(CO2Config.recommended(steps=20 * 6)),
    "schedule of tau": _late(taus=(2, 3, 4)),
}

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one worker per rank": {},
    "nodes, DDP inside": {"mesh": True},
    "nodes, FSDP2 inside": {"mesh": True, "fsdp2": True},
    "nodes of stages": {"mesh": True, "shards": True},
    "`shard=True`": {"shard": True},
    "`shard=True` on nodes": {"mesh": True, "shard": True},
    "`offload=True`": {"offload": True},
    "elastic": {"elastic": True},
    "elastic nodes": {"elastic": True, "mesh": True},
}


@dataclass
class Trained:
    """One rank of a cell.

    Attributes:
        refused: Why CO2 refuses the cell; "" if it trains.
        rounds: The parameters after each round and at the end, [n].
        taus: Local steps of each round. The last one may be incomplete.
        place: Where the rank's elements are among all, [n], int64.
    """

    refused: str = ""
    rounds: Sequence[Tensor] = ()
    taus: Sequence[int] = ()
    place: Tensor | None = None


# -- the toy ----------------------------------------------------------------------------------------------------------


def values() -> list[Tensor]:
    """The parameters at the start, float64."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradient(x: Tensor, start: Tensor, rank: int | Tensor, step: int, *, by_time: bool) -> Tensor:
    """A rank's gradient, element by element. by_time: so that it does not depend on when averages are merged."""
    return (0.0 if by_time else 0.5 * x) + torch.sin((rank + 1) * (start if by_time else x) + step)


class Toy(nn.Module):
    """The parameters as a module, for FSDP2."""

    def __init__(self):
        super().__init__()
        for i, value in enumerate(values()):
            self.register_parameter(f"p{i}", nn.Parameter(value))


def parameters(how: dict[str, Any], mesh: Any) -> tuple[list[nn.Parameter], Tensor]:
    """This rank's parameters, and where their elements are among all."""
    sizes = [value.numel() for value in values()]
    numbers = list(torch.arange(sum(sizes)).split(sizes))
    params = [nn.Parameter(value) for value in values()]
    if how.get("shards"):
        half = slice(2 * (dist.get_rank() % PER_NODE), None if dist.get_rank() % PER_NODE else 2)
        return params[half], torch.cat(numbers[half])
    if how.get("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        toy = Toy()
        fully_shard(toy, mesh=mesh["shard"])
        rank = mesh.get_local_rank(1)
        chunks = [n.view(s).chunk(PER_NODE)[rank] for n, s in zip(numbers, SHAPES, strict=True)]
        return [*toy.parameters()], torch.cat([c.reshape(-1) for c in chunks])
    return params, torch.cat(numbers)


def train(co2: CO2, params: list[nn.Parameter], place: Tensor, ranks: Sequence[int], setting: Setting) -> Trained:
    """Trains the toy. Each local step takes the average of the gradients of `ranks`."""
    local: list[Any] = [p.to_local() if hasattr(p, "to_local") else p for p in params]  # pyright: ignore
    starts, seen, taus, steps = [p.detach().clone() for p in local], [], [], 0

    def read() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in local])

    for step in range(STEPS):
        with torch.no_grad():
            for p, start in zip(local, starts, strict=True):
                each = [gradient(p, start, rank, step, by_time=setting.by_time) for rank in ranks]
                p.sub_(LR * torch.stack(each).mean(0))
        steps += 1
        if co2.step():
            seen, taus, steps = [*seen, read()], [*taus, steps], 0
    taus = [*taus, co2.tau]
    co2.finish()
    return Trained(rounds=[*seen, read()], taus=taus, place=place)


def ranks_of(how: dict[str, Any], rank: int) -> list[int]:
    """The ranks whose data this rank's worker has."""
    return [*range(rank // PER_NODE * PER_NODE, (rank // PER_NODE + 1) * PER_NODE)] if "mesh" in how else [rank]


# -- cells ------------------------------------------------------------------------------------------------------------


def run_cells(placement: str, names: Sequence[str]) -> dict[str, list[Trained]]:
    """Trains settings in a placement; of each what its ranks have seen."""
    if "elastic" in PLACEMENTS[placement]:
        return {name: elastic(placement, name) for name in names}
    of_ranks = run_distributed(fixed, RANKS, placement, list(names), timeout=600)
    return {name: [each[name] for each in of_ranks] for name in names}


def fixed(rank: int, world_size: int, placement: str, names: list[str]) -> dict[str, Trained]:
    """The cells of one rank, one after the other."""
    how = PLACEMENTS[placement]
    mesh = node_mesh("cpu", PER_NODE) if "mesh" in how else None
    args = {name: how[name] for name in ("shards", "shard", "offload") if name in how} | {"mesh": mesh}
    return {name: cell(how, args, mesh, SETTINGS[name], rank) for name in names}


def cell(how: dict[str, Any], args: dict[str, Any], mesh: Any, setting: Setting, rank: int) -> Trained:
    params, place = parameters(how, mesh)
    try:
        co2 = CO2(params, setting.config, schedule=setting.schedule, timeout=TIMEOUT, **args)
    except UserError as error:
        return Trained(str(error))
    trained = train(co2, params, place, ranks_of(how, rank), setting)
    co2.close()
    return trained


def elastic(placement: str, name: str) -> list[Trained]:
    """Elastic workers have their own processes for each cell."""
    size = PER_NODE if "mesh" in PLACEMENTS[placement] else 1
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(testing._context(), elastic_rank, (folder, placement, name), RANKS, island=size)
        if crew.run() or crew.timed_out:
            raise RuntimeError(f"{placement}, {name}: some elastic worker failed")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    return [
        Trained("", [torch.tensor(x, dtype=torch.float64) for x in rounds], taus, torch.tensor(place))
        for rounds, taus, place in found
    ]


def elastic_rank(folder: str, placement: str, name: str) -> None:
    """One rank of elastic workers that neither come nor go."""
    torch.set_num_threads(1)
    how, setting, rank = PLACEMENTS[placement], SETTINGS[name], env_number("RANK", 0)
    params, place = parameters({}, None)
    options = {"members": Members.from_env(TIMEOUT), "timeout": TIMEOUT, "schedule": setting.schedule}
    co2 = elastic_co2(params, setting.config, **options)
    co2.join()
    trained = train(co2, params, place, ranks_of(how, rank), setting)
    seen = [x.tolist() for x in trained.rounds], trained.taus, place.tolist()
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    co2.end()


def main() -> None:
    """Writes a row for each cell to results/grid.json, with CO2's own line if it refuses the cell."""
    found = {placement: run_cells(placement, [*SETTINGS]) for placement in PLACEMENTS}
    rows = [
        {"setting": name, "placement": placement, "refused": ranks[0].refused}
        for placement, cells in found.items()
        for name, ranks in cells.items()
    ]
    about = {"commit": commit(), "command": "python -m tests.core.grid"}
    (ROOT / "results/grid.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
