"""Shared outer state on real processes: equal to the unshared run and the reference; which meshes it takes."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from core import CO2, CO2Config, UserError, make_method
from core.comm import gather_parts, sum_parts
from core.methods import check_apart
from core.placement import local_world_size, node_mesh
from tests import problems
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import LR, assert_traces_equal, flat, gradient, node_step, refusal, trace_of
from tests.reference import Reference

TAU, STEPS = 3, 17  # 5 rounds and an incomplete one
CONFIGS = [
    CO2Config(tau=TAU, outer_momentum=beta, outer_lr=alpha, gap=gap, clip=clip, allow_unstable=True)
    for (beta, alpha), gap, clip in product([(0.5, 1.0), (0.3, 0.6)], ["elementwise", "norm", "none"], [None, 0.2])
]

CORNERS = [CONFIGS[i] for i in (0, 3, 7, 10)]  # every value of every setting
GRIDS = [pytest.param(CORNERS, id="corners"), pytest.param(CONFIGS, id="whole", marks=pytest.mark.slow)]


def run_co2(config: CO2Config, ranks: list[int], **how: Any) -> tuple[list[Tensor], Any]:
    """how: what CO2 takes; CO2 itself without."""
    params = problems.odd_parameters()
    co2 = CO2(params, config, **how) if how else CO2(params, config)
    return trace_of(co2, lambda step: node_step(params, ranks, step), lambda: flat(params), STEPS), co2


def expected(config: CO2Config, nodes: list[list[int]]) -> list[Tensor]:
    x = flat(problems.odd_parameters()).expand(len(nodes), -1).clone()
    c = config
    ref = Reference(x, c.tau, c.outer_lr, c.outer_momentum, c.gap, c.clip)
    workers = torch.tensor(nodes, dtype=torch.float64)[:, :, None]  # [nodes, workers, 1]
    ref.run(lambda rows, step: gradient(rows[:, None], workers, step).mean(1), LR, STEPS)
    rounds = ref.outer[1:]
    ref.finish()
    return [*rounds, ref.x[0].clone()]


@pytest.mark.parametrize("configs", GRIDS)
@pytest.mark.parametrize("shard", [pytest.param(False, marks=pytest.mark.slow), True], ids=["node", "all"])
@on_ranks(4, timeout=200)
def test_two_nodes_of_two_equal_the_reference(rank: int, shard: bool, configs: list[CO2Config]):
    """x and m in halves inside the node, or in quarters over all; gradients synchronised inside the node."""
    node, mesh = rank // 2, node_mesh("cpu", 2)
    for config in configs:
        trace, co2 = run_co2(config, [2 * node, 2 * node + 1], mesh=mesh, shard=shard)
        assert len(co2._x[0]) == -(-co2._buckets[0].numel // (4 if shard else 2))
        assert_traces_equal(trace, expected(config, [[0, 1], [2, 3]]))
        assert alike(*trace)


WAYS: list[dict[str, bool]] = [{}, {"shard": True}, {"offload": True}, {"shard": True, "offload": True}]


@pytest.mark.parametrize("configs", GRIDS)
@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@on_ranks(timeout=400)
def test_shared_or_offloaded_equals_unshared(rank: int, workers: int, configs: list[CO2Config]):
    for config in configs:
        unshared, *others = (run_co2(config, [rank], **how)[0] for how in WAYS)
        for shared in others:
            assert_traces_equal(shared, unshared)


@on_ranks(3)
def test_parts_are_summed_and_gathered(rank: int):
    group, values = dist.new_group(), torch.arange(150, dtype=torch.float64) + rank
    assert isinstance(group, dist.ProcessGroup)
    for works, _ in sum_parts(values, group):
        for work in works:
            work.wait()
    whole = 3 * torch.arange(150, dtype=torch.float64) + 3
    assert torch.equal(values.view(3, -1)[rank], whole.view(3, -1)[rank])
    works, sent = gather_parts(values, group)
    works[0].wait()
    assert sent == 2 * 50 * 8 and torch.equal(values, whole)


@on_ranks(2)
def test_sixteen_bit_parameters_equal_unshared(rank: int):
    for dtype in (torch.bfloat16, torch.float16):
        ends = []
        for kind in (partial(CO2, shard=True), partial(CO2, offload=True), CO2):
            params = [nn.Parameter(torch.linspace(-1, 1, 37).to(dtype)), nn.Parameter(torch.ones(3))]
            co2 = kind(params, CO2Config(tau=2, outer_momentum=0.3, clip=None))
            for _ in range(30):
                with torch.no_grad():
                    for p in params:
                        p.sub_(torch.full_like(p, 0.01 * (rank + 1)) + 0.02 * p)
                co2.step()
            co2.finish()
            ends.append(flat(params))
        for shared in ends[:2]:
            torch.testing.assert_close(shared, ends[2], rtol=1e-6, atol=1e-6)


@on_ranks(4)
def test_buffers_are_averaged_over_everybody(rank: int):
    """BatchNorm's statistics are means over all four workers, one round late."""
    values = []
    for kind in (partial(CO2, mesh=node_mesh("cpu", 2)), CO2):
        params, statistics = [nn.Parameter(torch.zeros(5))], torch.zeros(3)
        co2 = kind(params, CO2Config(tau=2), buffers=[statistics])
        for step in range(8):
            statistics.add_(rank + 1 + step)
            co2.step()
        co2.finish()
        values.append(statistics.clone())
    torch.testing.assert_close(*values)


@on_ranks(2)
def test_statistics_are_of_the_whole_model(rank: int):
    seen = []
    for kind in (CO2, partial(CO2, shard=True)):
        params = [nn.Parameter(torch.linspace(0, 1, 11, dtype=torch.float64))]
        co2 = kind(params, CO2Config(tau=2, clip=None))
        for step in range(12):
            node_step(params, [rank], step)
            co2.step()
        seen.append(co2.stats.as_dict())
        co2.finish()
    unshared, shared = seen
    assert shared["pseudo_gradient_norm"] == pytest.approx(unshared["pseudo_gradient_norm"])
    assert shared["allreduce_seconds"] > 0 and unshared["gap_max"] > 1
    most, means = (total_world_size(shared[name]) for name in ("gap_max", "gap_mean"))
    assert max(most) == pytest.approx(unshared["gap_max"]) and min(means) <= unshared["gap_mean"] <= max(means)


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


@pytest.mark.parametrize("name", ["overlap_local", "diloco"])
def test_what_a_nodes_workers_would_choose_unlike_is_refused(name: str):
    with pytest.raises(UserError, match=f"tau='auto', .* with method '{name}' and 2 workers a node"):
        check_apart(name, CO2Config("auto"), 2)
    check_apart(name, CO2Config("auto"), 1)
    for other in ("co2", "ddp"):  # which agree among all, or read no tau
        check_apart(other, CO2Config("auto"), 2)


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
    for config, its_mesh in ((CO2Config.recommended(32, 400), mesh), (CO2Config.paper(2), two)):
        CO2(model.parameters(), config, mesh=its_mesh).close()
    assert "a mesh of 3 dimensions" in refusal(make_method, "local", model, co2=CO2Config(tau=2), mesh=cube)
    make_method("local", model, co2=CO2Config(tau=2), mesh=two)[1].close()
