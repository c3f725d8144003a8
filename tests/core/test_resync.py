"""Weights that are loaded into a model after construction: resync() starts anew from them."""

import contextlib
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core import CO2, CO2Config, ShardedCO2, UserError, make_method
from core.assembly.config import WireConfig
from core.methods import METHODS
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from tests import problems
from tests.problems import flat, sgd_step, take_steps

LOCAL = [m for m in METHODS if m != "ddp"]
CONFIG = CO2Config(tau=2, outer_momentum=0.4, clip=0.3)


def load(params: list[nn.Parameter], value: float) -> None:
    """Other weights, of which only the first worker's should count."""
    with torch.no_grad():
        for p in params:
            p.fill_(value)


def go(method: Any, params: list[nn.Parameter], rank: int) -> Tensor:
    take_steps(method, params, rank, range(7))
    method.finish()
    return flat(params)


def resynced(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """By method: trained from loaded weights after five other steps and resync(), and in a fresh object."""
    kinds = {name: lambda model, name=name: make_method(name, model, co2=CONFIG)[1] for name in LOCAL}
    kinds["int8"] = lambda model: make_method("co2", model, co2=CO2Config(tau=2, wire=WireConfig("int8")))[1]
    kinds["shard"] = lambda model: ShardedCO2(list(model.parameters()), CONFIG, shard=True)
    ends = {}
    for name, build in kinds.items():
        pair = []
        for early in (5, 0):
            params = problems.odd_parameters()
            method = build(nn.ParameterList(params)) if early else None
            take_steps(method, params, rank, range(early))
            load(params, 0.5 + rank)
            method = method or build(nn.ParameterList(params))
            if early:
                method.resync()
            pair.append(go(method, params, rank))
        ends[name] = tuple(pair)
    return ends


def test_after_resync_training_goes_on_as_in_a_fresh_object():
    results = run_distributed(resynced, 2)
    for result in results:
        for name, (again, fresh) in result.items():
            assert torch.equal(again, fresh), name
            assert torch.equal(again, results[0][name][0]), name


def node_apart(rank: int, world_size: int, kind: str) -> str:
    mesh = node_mesh("cpu", 2)
    params = [nn.Parameter(torch.ones(4 if kind == "shapes" and rank == 1 else 3))]
    with pytest.raises(UserError) as caught:
        co2 = ShardedCO2(params, CO2Config(tau=1), mesh=mesh)
        with torch.no_grad():
            params[0].sub_(0.1 * rank)  # without a synchronisation of gradients
        co2.step()
    return str(caught.value)


def test_a_node_whose_workers_train_apart_is_refused_at_the_first_boundary():
    for text in run_distributed(node_apart, 2, "values"):
        assert "synchronise gradients every step" in text and "mesh.get_group(1)" in text and "\n" not in text


def test_unequal_shapes_in_a_node_are_refused_before_any_tensor_is_sent():
    for text in run_distributed(node_apart, 2, "shapes"):
        assert "workers differ" in text and "(3,)" in text and "(4,)" in text


def loaded_under_it(rank: int, world_size: int) -> dict[str, list[int]]:
    """By method: how many warnings came in a round that begins with each kind of change to the weights."""
    found: dict[str, list[int]] = {}
    for name in (*LOCAL, "shard", "keep"):
        params = [nn.Parameter(torch.full((3,), 0.5)), nn.Parameter(torch.ones(2))]
        if name == "shard":
            method: Any = ShardedCO2(params, CONFIG, shard=True)
        elif name == "keep":
            method = make_method("co2", nn.ParameterList(params), co2=replace(CONFIG, merge="keep"))[1]
        else:
            method = make_method(name, nn.ParameterList(params), co2=CONFIG)[1]
        optimizer = torch.optim.SGD(params, 0.01)
        found[name] = []
        for change in ("none", "swapped", "loaded", "in mid-round", "no memory of its own", "resynced", "none"):
            with warnings.catch_warnings(record=True, action="always") as caught:
                apply_change(change, params, method)
                for step in range(2):
                    for p in params:
                        p.grad = torch.ones_like(p)
                    optimizer.step()
                    if change == "in mid-round" and not step:
                        load(params, 2.0)
                    method.step()
            found[name] += [len(caught)]
            assert all("call resync() on all workers" in str(w.message) for w in caught)
        method.finish()
    return found


def test_finish_notices_loaded_weights_as_a_step_does():
    params = problems.odd_parameters()
    method = make_method("co2", nn.ParameterList(params), co2=CONFIG)[1]
    told = []
    for change in (False, True, False):
        take_steps(method, params, 0, range(2))
        if change:
            load(params, 1.5)
        with warnings.catch_warnings(record=True, action="always") as caught:
            method.finish()
        told.append([str(w.message) for w in caught])
    assert [len(texts) for texts in told] == [0, 1, 0] and "call resync() on all workers" in told[1][0]


def averaged_twice(rank: int, world_size: int) -> dict[str, list[str]]:
    """What is warned of in two rounds: of a plain model, of one in DistributedDataParallel, put there before or after,
    of one that is there and not called, or only without gradients, and of one that is averaged inside nodes. Of runs
    before, in this process, there are two more: of another model, and of the plain one."""
    told, gone = {}, dist.new_group()
    others = [DistributedDataParallel(nn.Linear(3, 2), process_group=gone)]
    for kind in ("plain", "before", "after", "not called", "evaluated", "inside nodes"):
        model = nn.Linear(3, 2)
        if kind == "plain":
            others.append(DistributedDataParallel(model, process_group=gone))
            dist.destroy_process_group(gone)
        mesh = node_mesh("cpu", 2) if kind == "inside nodes" else None
        wrapped = DistributedDataParallel(model) if kind in ("before", "not called", "evaluated") else model
        if mesh is not None:
            wrapped, method = make_method("co2", model, co2=CONFIG, mesh=mesh)
        else:
            method = CO2(model.parameters(), CONFIG)
        wrapped = DistributedDataParallel(model) if kind == "after" else wrapped
        called = model if kind in ("not called", "evaluated") else wrapped
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(2 * CONFIG.tau):
                called(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                method.step()
                if kind == "evaluated":
                    with torch.no_grad():
                        wrapped(torch.ones(1, 3))
        method.finish()
        told[kind] = [str(w.message) for w in caught if "DistributedDataParallel" in str(w.message)]
    assert len(others) == 2  # they were there
    return told


def test_a_model_left_in_ddp_is_noticed_once():
    for told in run_distributed(averaged_twice, 4):
        assert not any(told[kind] for kind in ("plain", "not called", "evaluated", "inside nodes")), told
        for (text,) in (told["before"], told["after"]):
            assert "averages gradients among 4 of these workers" in text and "give the plain model" in text


def apply_change(change: str, params: list[nn.Parameter], method: Any) -> None:
    if change in ("loaded", "resynced"):
        load(params, 1.5)
    if change == "resynced":
        method.resync()
    if change == "swapped":  # an evaluation of other weights, which come back
        kept = [p.detach().clone() for p in params]
        load(params, 7.0)
        with torch.no_grad():
            for p, own in zip(params, kept, strict=True):
                p.copy_(own)
    if change == "no memory of its own":
        params[0].data = params[0].data + 1.0


def test_weights_loaded_under_a_method_are_noticed_at_the_rounds_first_step():
    """Once, and by those methods that would pull them back; one that keeps no start cannot tell a swap from a load."""
    (found,) = run_distributed(loaded_under_it, 1)
    for name in ("co2", "slowmo", "keep", "overlap_local"):
        assert found[name] == [0, 0, 1, 0, 1, 0, 0], name
    assert found["local"] == [0] * 7, "it takes the mean of whatever is there"
    assert found["shard"] == [0, 1, 1, 0, 1, 0, 0]


def test_a_boundary_inside_inference_mode_leaves_nothing_that_training_cannot_write_to():
    """finish() before an evaluation may be the first boundary, and makes what later ones use."""
    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        params = problems.odd_parameters()
        method = make_method("co2", nn.ParameterList(params), co2=CONFIG)[1]
        for step in range(6):
            sgd_step(params, 0, step)
            with mode() if not step else contextlib.nullcontext():
                method.finish() if not step else method.step()
        ends.append(flat(params))
    assert torch.equal(*ends)
