"""Which meshes and settings shared outer state takes, and what is refused of them in one line."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from core import CO2, CO2Config, ShardedCO2, UserError, make_method
from core.methods import check_apart
from core.sharded.mesh import local_world_size, node_mesh
from core.testing import run_distributed
from tests.problems import refusal


@pytest.mark.parametrize(
    ("env", "n"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_TASKS_PER_NODE": "8(x16)"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2),8"}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "4"}, 2),
    ],
)
def test_workers_per_node_come_from_the_environment(env: dict[str, str], n: int):
    assert local_world_size(env) == n


def test_unlike_numbers_of_workers_on_slurms_nodes_are_refused():
    with pytest.raises(UserError, match="SLURM_TASKS_PER_NODE=8\\(x2\\),4: start equally many on each node"):
        local_world_size({"SLURM_TASKS_PER_NODE": "8(x2),4"})


def unlike_names(rank: int, world_size: int) -> list[str]:
    """All make a group of some, as a program must; only its members know it then."""
    mesh, lines = node_mesh("cpu", 2), list[str]()
    config, model = CO2Config(tau=2), nn.Linear(3, 2)
    CO2(model.parameters(), config, group=mesh.get_group(0), timeout=20).close()
    dist.new_group([0, 1])
    for make in (
        lambda: ShardedCO2(model.parameters(), config, mesh=mesh, timeout=20),
        lambda: CO2(model.parameters(), config, group=mesh.get_group(0), timeout=20),
        lambda: make_method("local", model, co2=config, mesh=mesh, timeout=20)[1],
    ):
        lines.append(refusal(make))
    CO2(model.parameters(), config, timeout=20).close()  # of all
    return lines


def test_ranks_that_know_unlike_numbers_of_groups_are_told_before_they_wait_in_vain():
    for lines in run_distributed(unlike_names, 4, timeout=60):
        assert all("process groups, so that torch would name" in line and "\n" not in line for line in lines), lines


@pytest.mark.parametrize("name", ["overlap_local", "delayed"])
def test_what_a_nodes_workers_would_choose_unlike_is_refused(name: str):
    with pytest.raises(UserError, match=f"tau='auto', .* with method '{name}' and 2 workers a node"):
        check_apart(name, CO2Config("auto"), 2)
    check_apart(name, CO2Config("auto"), 1)
    for other in ("co2", "ddp"):  # which agree among all, or read no tau
        check_apart(other, CO2Config("auto"), 2)


def three_in_twos(rank: int, world_size: int) -> None:
    node_mesh("cpu", 2)


def test_uneven_nodes_are_refused():
    with pytest.raises(RuntimeError, match="2 workers per node do not divide 3 workers"):
        run_distributed(three_in_twos, 3)


def meshes(rank: int, world_size: int) -> dict[str, str]:
    """What of a mesh, and of settings with it, is refused; nothing for what trains."""
    model, mesh = nn.Linear(3, 2), node_mesh("cpu", 1)
    cube = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    recommended, between = CO2Config.recommended(32, 400), ("pp", "dp_replicate", "dp_shard")
    told = {}
    for name, config, its_mesh in (
        ("recommended", recommended, mesh),
        ("for a mesh", CO2Config.recommended(32, 400, mesh=mesh), mesh),
        ("three dimensions", CO2Config(), cube),
        ("one dimension", CO2Config(), cube["tp"]),
        ("others between", CO2Config(), init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=between)),
        ("without names", CO2Config(), init_device_mesh("cpu", (1, 1, 1))),
        ("two of three", CO2Config(), cube["dp_replicate", "dp_shard"]),
    ):
        try:
            ShardedCO2(model.parameters(), config, mesh=its_mesh).close()
            told[name] = ""
        except UserError as error:
            told[name] = str(error)
    with pytest.raises(UserError, match="a mesh of 3 dimensions"):
        CO2Config.recommended(32, mesh=cube)
    with pytest.raises(UserError, match="a mesh of 3 dimensions"):
        make_method("local", model, co2=CO2Config(tau=2), mesh=cube)
    make_method("local", model, co2=CO2Config(tau=2), mesh=cube["dp_replicate", "dp_shard"])[1].close()
    return told


def test_what_is_refused_of_a_mesh_names_all_that_has_to_change():
    (told,) = run_distributed(meshes, 1)
    for part in ("merge='keep' with delay='auto'", "wire.format='auto'", "recommended(..., mesh=mesh) is accepted"):
        assert part in told["recommended"] and "\n" not in told["recommended"]
    assert "3 dimensions dp_replicate, dp_shard, tp" in told["three dimensions"]
    assert 'such as mesh["dp_replicate", "dp_shard"]' in told["three dimensions"]
    assert 'such as mesh["dp_replicate", "dp_shard"]' in told["others between"]
    assert "a mesh of 1 dimension tp: give one of two" in told["one dimension"]
    for name in ("one dimension", "without names"):
        assert "init_device_mesh(" in told[name] and "mesh_dim_names=" in told[name], "there are no two to take"
    assert told["for a mesh"] == told["two of three"] == ""


def test_recommended_settings_for_a_mesh_keep_the_momentum_that_goes_with_so_many_workers():
    mesh: Any = SimpleNamespace(ndim=2)
    config = CO2Config.recommended(32, 400, mesh=mesh)
    assert (config.tau, config.tau_max, config.outer_momentum) == ("auto", 20, 0.2)
    assert config == CO2Config("auto", tau_max=20, outer_momentum=0.2)
