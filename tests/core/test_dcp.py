"""One dict for all workers, written and read by torch.distributed.checkpoint with nothing around it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from core import CO2, CO2Config, ShardedCO2, WireConfig
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from tests import problems
from tests.problems import flat, refusal

SAVE_AT, STEPS = 6, 13
KEEP = CO2Config(
    tau=3, outer_momentum=0.0, gap="none", clip=None, merge="keep", delay=2, wire=WireConfig("int4"), outlier=3.0
)
METHODS: dict[str, Any] = {
    "the paper's": lambda params: CO2(params, CO2Config(tau=3, outer_lr=0.4)),
    "as recommended": lambda params: CO2(params, KEEP),
    "shared by all": lambda params: ShardedCO2(params, CO2Config(tau=3, outer_lr=0.4), shard=True),
    "shared in a node": lambda params: ShardedCO2(params, CO2Config(tau=3), mesh=node_mesh("cpu", 2)),
}


def go(model: nn.Module, method: Any, rank: int, steps: range, inner: bool) -> None:
    """Plain gradient descent; inner: on the mean of the gradients."""
    for step in steps:
        grads = torch.autograd.grad(problems.loss(model, problems.batch(rank, step)), [*model.parameters()])
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                if inner:
                    dist.all_reduce(g)
                p.sub_(g, alpha=0.3 / (1 + step))
        method.step()


def saved_and_resumed(rank: int, world_size: int, folder: str) -> list[tuple[Tensor, Tensor]]:
    ends = []
    for i, (name, make) in enumerate(METHODS.items()):
        inner, path = name == "shared in a node", f"{folder}/{i}"
        model = problems.small_net()
        method = make(model.parameters())
        go(model, method, rank, range(SAVE_AT), inner)
        dcp.save({"co2": method.state_dict(), f"model{rank}": model.state_dict()}, checkpoint_id=path)
        go(model, method, rank, range(SAVE_AT, STEPS), inner)
        method.finish()

        other = problems.small_net(seed=1)
        resumed = make(other.parameters())
        state = {"co2": resumed.state_dict(), f"model{rank}": other.state_dict()}
        dcp.load(state, checkpoint_id=path)
        other.load_state_dict(state[f"model{rank}"])
        resumed.load_state_dict(state["co2"])
        go(other, resumed, rank, range(SAVE_AT, STEPS), inner)
        resumed.finish()
        ends.append((flat(model.parameters()), flat(other.parameters())))
        method.close()
        resumed.close()
    return ends


def test_a_run_resumed_from_one_dict_is_bit_identical(tmp_path: Path):
    for ends in run_distributed(saved_and_resumed, 2, str(tmp_path)):
        for name, (undisturbed, resumed) in zip(METHODS, ends, strict=True):
            assert torch.equal(undisturbed, resumed), name


def gone_on(rank: int, world_size: int, folder: str, saves: bool) -> tuple[int, Tensor]:
    model = problems.small_net(seed=rank)
    co2 = CO2(model.parameters(), KEEP)
    if saves:
        go(model, co2, rank, range(SAVE_AT), False)
        dcp.save({"co2": co2.state_dict(), f"model{rank}": model.state_dict()}, checkpoint_id=folder)
        if rank == 0:
            dcp_to_torch_save(folder, f"{folder}/whole.pt")
        return co2.rounds, flat(co2.state["sent"])
    state = torch.load(f"{folder}/whole.pt", weights_only=True)
    model.load_state_dict(state[f"model{rank % 2}"])
    co2.load_state_dict(state["co2"])
    sent = flat(co2.state["sent"])
    go(model, co2, rank, range(SAVE_AT, STEPS), False)
    co2.finish()
    return co2.rounds, sent


def test_another_number_of_workers_goes_on_from_one_dict(tmp_path: Path):
    saved = run_distributed(gone_on, 2, str(tmp_path), True)
    assert not torch.equal(saved[0][1], saved[1][1])
    for workers in (1, 3):
        for rank, (rounds, sent) in enumerate(run_distributed(gone_on, workers, str(tmp_path), False)):
            assert rounds > saved[0][0] and torch.equal(sent, saved[rank % 2][1])


def test_a_state_without_a_rank_is_refused_in_one_line():
    co2 = CO2(problems.small_net().parameters())
    (own,) = co2.state_dict().values()
    assert "no key with a worker's rank" in refusal(co2.load_state_dict, own)


def with_adam(rank: int, world_size: int, folder: str) -> list[Tensor]:
    """The lines of docs/checkpoints.md. (A new optimiser's own state_dict() asks DCP for no state, and gets none.)"""
    ends, mine = [], f"rank{rank}"
    for resumes in (False, True):
        model = problems.small_net(seed=rank)
        co2, optimizer = CO2(model.parameters(), CO2Config(tau=3)), torch.optim.AdamW(model.parameters(), 0.05)
        if resumes:
            state = {"co2": co2.state_dict(), mine: get_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=folder)
            of_model, of_optimizer = state[mine]
            set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
            co2.load_state_dict(state["co2"])
        for step in range(SAVE_AT + 1 if resumes else 0, STEPS):
            if step == SAVE_AT + 1 and not resumes:  # in mid-round
                dcp.save({"co2": co2.state_dict(), mine: get_state_dict(model, optimizer)}, checkpoint_id=folder)
            optimizer.zero_grad()
            problems.loss(model, problems.batch(rank, step)).backward()
            optimizer.step()
            co2.step()
        co2.finish()
        ends.append(flat(model.parameters()))
    return ends


def test_an_optimiser_goes_on_from_one_dict_by_its_parameters_names(tmp_path: Path):
    for undisturbed, resumed in run_distributed(with_adam, 2, str(tmp_path)):
        assert torch.equal(undisturbed, resumed)
