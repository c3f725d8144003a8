"""SyncBN inside a node, and between the workers of ddp: whose statistics are shared, and what is refused."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core import CO2Config
from core.baselines.ddp import DDP
from segmentation import model as built
from segmentation.recipes import RECIPES, digits_small
from segmentation.train import make_model
from tests.on_ranks import on_ranks
from tests.scripts import Mistakes
from training.loop.run import Run


@on_ranks(4)
def test_a_nodes_workers_share_statistics_and_those_of_ddp_all(rank: int, tmp_path: Path) -> None:
    """Over the gradients' own group where it is the same. torch computes with it on a GPU only."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    node = [0, 1] if rank < 2 else [2, 3]
    small = replace(digits_small(), device="cpu", batch_size=8, co2=CO2Config(tau=3))
    cases: list[tuple[dict[str, Any], list[int], bool]] = [
        ({"sync_bn": "node"}, node, False),
        ({"sync_bn": "node", "per_node": 2}, node, True),
        ({"sync_bn": "all", "method": "ddp"}, [0, 1, 2, 3], True),
    ]
    for number, (settings, members, is_gradients) in enumerate(cases):
        with Run(replace(small, out=tmp_path / str(number), **settings)) as run:
            model = run.shard(make_model(run.recipe))
            with mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None):
                _, method = run.make_method(model, torch.optim.SGD(model.parameters(), lr=0.1))
            built.share_statistics(run, model, method)
            layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
            (group,) = {layer.process_group for layer in layers}
            of_gradients = method.group if isinstance(method, DDP) else run.mesh and run.mesh.get_group("shard")
            assert len(layers) > 20 and dist.get_process_group_ranks(group) == members, settings
            assert (group is of_gradients) == is_gradients, settings
            method.finish()
            method.close()


def test_a_run_that_cannot_share_statistics_is_refused(tmp_path: Path, mistake: Mistakes) -> None:
    out = ("--out", str(tmp_path / "run"), "--device", "cpu", "--batch_size", "4")
    text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' needs GPUs, torch has no SyncBatchNorm for a CPU: give --sync_bn no" in text
    with mock.patch.object(built, "DEVICES", ("cpu",)):
        text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' with 1 worker a node shares nothing: give --sync_bn no" in text


@pytest.mark.parametrize(("setting", "kind"), [("no", "BatchNorm2d"), ("node", "SyncBatchNorm")])
def test_the_layers_are_what_the_recipe_says(setting: Any, kind: str) -> None:
    recipe = replace(RECIPES["ade20k_resnet50"], sync_bn=setting)
    with torch.device("meta"):
        assert {type(m).__name__ for m in make_model(recipe).modules() if "BatchNorm" in type(m).__name__} == {kind}
