"""Meshes: which are taken, whose ranks they are, and the collectives on parts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from core import CO2, CO2Config, make_method
from core.comm import gather_parts, sum_parts
from core.groups import local_world_size
from core.nodes import node_mesh
from tests.on_ranks import on_ranks
from tests.problems import refusal


@on_ranks(3)
def test_parts_are_summed_and_gathered(rank: int):
    group, values = dist.new_group(), torch.arange(150, dtype=torch.float64) + rank
    assert isinstance(group, dist.ProcessGroup)
    for works, _ in sum_parts(values, group):
        for work in works:
            work.wait()
    whole = 3 * torch.arange(150, dtype=torch.float64) + 3
    assert torch.equal(values.view(3, -1)[rank], whole.view(3, -1)[rank])
    for works, sent in gather_parts(values.view(3, -1), group):
        works[0].wait()
        assert sent == 2 * 50 * 8
    assert torch.equal(values, whole)


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


@on_ranks(4)
def test_ranks_that_know_unlike_numbers_of_groups_are_told_before_they_wait_in_vain(rank: int):
    """All make a group of some, as a program must; only its members know it then."""
    mesh, config, model = node_mesh("cpu", 2), CO2Config(tau=2), nn.Linear(3, 2)
    CO2(model.parameters(), config, group=mesh.get_group(0), timeout=20).close()
    dist.new_group([0, 1])
    for make in (
        lambda: CO2(model.parameters(), config, mesh=mesh, timeout=20),
        lambda: CO2(model.parameters(), config, group=mesh.get_group(0), timeout=20),
        lambda: make_method("local", model, co2=config, mesh=mesh, timeout=20)[1],
    ):
        assert "process groups, so torch would give" in refusal(make)
    CO2(model.parameters(), config, timeout=20).close()  # of all


@on_ranks(3)
def test_uneven_nodes_are_refused(rank: int):
    assert "2 workers per node do not divide 3 workers" in refusal(node_mesh, "cpu", 2)


@on_ranks(1)
def test_what_is_refused_of_a_mesh_names_all_that_has_to_change(rank: int):
    model, mesh = nn.Linear(3, 2), node_mesh("cpu", 1)
    cube = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    between = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    take, make = 'such as mesh["dp_replicate", "dp_shard"]', ("init_device_mesh(", "mesh_dim_names=")  # no two to take
    for its_mesh, parts in (
        (cube, ("3 dimensions dp_replicate, dp_shard, tp", take)),
        (between, (take,)),
        (cube["tp"], ("a mesh of 1 dimension tp: give a mesh of two", *make)),
        (init_device_mesh("cpu", (1, 1, 1)), make),
    ):
        said = refusal(CO2, model.parameters(), CO2Config.paper(2), mesh=its_mesh)
        assert all(part in said for part in parts), said
    two = cube["dp_replicate", "dp_shard"]
    for config, its_mesh in ((CO2Config.recommended(steps=400), mesh), (CO2Config.paper(2), two)):
        CO2(model.parameters(), config, mesh=its_mesh).close()
    assert "a mesh of 3 dimensions" in refusal(make_method, "local", model, co2=CO2Config(tau=2), mesh=cube)
    make_method("local", model, co2=CO2Config(tau=2), mesh=two)[1].close()
