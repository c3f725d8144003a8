"""What a run refuses before its first step a dry run refuses, too: every recipe on both clusters, by one function."""

import functools
import importlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core import CO2Config, UserError, WireConfig
from reproduce import NODES, fitting_batch
from results.paper import GPUS
from training import checks, run
from training.checks import check_batch_norm, check_start, dry_run
from training.data import smallest_part
from training.optim import backward_in_parts
from training.recipe import Recipe
from training.run import Run

TASKS = ("vision", "segmentation", "pointcloud", "language")
RECIPES = [(task, name) for task in TASKS for name in importlib.import_module(f"{task}.recipes").RECIPES]
FULL = ("imagenet", "ade20k", "shapenet", "_owt", "_wikibooks", "_wikitext103")


@dataclass(frozen=True)
class Toy(Recipe):
    name: str = "toy"
    device: Any = "cpu"


@functools.cache  # on the meta device, once for both clusters
def build(task: str, name: str) -> nn.Module:
    script, pad = importlib.import_module(f"{task}.train"), {"pad": 1} if task == "language" else {}
    return script.make_model(script.RECIPES[name], **pad)


@pytest.mark.parametrize("cluster", NODES)
@pytest.mark.parametrize(("task", "name"), RECIPES)
def test_every_recipe_starts_on_its_clusters_or_is_refused_in_one_line(task, name, cluster, monkeypatch, capsys):
    """With the batch that slurm/'s scripts give it (tests/e2e/test_slurm.py), a small one on four workers; and with its
    own."""
    recipe, gpus = importlib.import_module(f"{task}.recipes").RECIPES[name], NODES[cluster] * GPUS
    workers = gpus if any(mark in name for mark in FULL) else 4
    monkeypatch.setenv("WORLD_SIZE", str(workers))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(GPUS))
    fit = replace(recipe, batch_size=fitting_batch(recipe, workers))
    dry_run(fit, lambda: build(task, name))
    shown, rest = capsys.readouterr().out.split("\n}\n")
    settings = json.loads(shown[shown.index("{") :] + "}")  # mmcv prints at its import, too
    assert settings["batch_size"] == fit.batch_size and float(rest.split()[0]) > 0.03
    assert f"{workers} workers of {fit.batch_size // fit.data_workers(workers)} samples" in rest
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    try:
        dry_run(recipe, lambda: nn.Linear(1, 1))
    except UserError as error:
        (line,) = str(error).splitlines()
        assert re.search(r"over \d+ workers: (choose a positive multiple of \d+, such as|.* Mixup .*; give) \d+", line)


@pytest.mark.parametrize("name", ["check_start", "check_batch_norm"])
def test_a_run_asks_the_functions_that_a_dry_run_asks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise UserError("no")

    for module in (checks, run):
        monkeypatch.setattr(module, name, refuse)
    recipe = Toy(out=tmp_path)
    with pytest.raises(UserError, match="^no$"):
        dry_run(recipe, lambda: nn.Linear(1, 1))
    with pytest.raises(UserError, match="^no$"), Run(recipe) as started:
        started.shard(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 100}, r"batch_size=100 \(global\) over 16 workers: .*, such as 96$"),
        ({"per_node": 3}, "per_node=3 does not divide 16 workers"),
        ({"per_node": 8, "co2": CO2Config(merge="keep", gap="none")}, "merge='keep' .* needs the outer state whole"),
        ({"per_node": 8, "co2": CO2Config(wire=WireConfig("int8"))}, "wire.format='int8' needs unshared"),
        (
            {"per_node": 8, "co2": CO2Config(merge="mix", delay="auto", gap="none")},
            "merge='mix' with delay='auto' needs the outer state whole",
        ),
        ({"method": "ddp", "per_node": 8, "zero": 2, "ddp_wire": WireConfig("int8")}, "ddp_wire.format='int8' with"),
    ],
)
def test_what_does_not_go_with_the_workers_is_refused_before_the_run(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        check_start(Toy(**changes), 16)


class Norm(nn.Sequential):
    def __init__(self, kind: type[nn.Module] = nn.BatchNorm1d):
        super().__init__(nn.Linear(2, 2), kind(2))


@pytest.mark.parametrize(
    ("batch", "workers", "accumulate", "message"),
    [
        (128, 128, 1, r"batch_size=128 \(global\) over 128 workers: BatchNorm .* a worker; give 256 or more"),
        (128, 128, 4, "two samples a worker; give 256 or more"),
        (256, 128, 2, "^accumulate=2 with .*: BatchNorm .* in each part .*, and one part has one; give --accumulate 1"),
        (7, 1, 3, "a worker's 7, and one part has one; give --accumulate 2"),  # 3, 3, 1; with 2: 4, 3
        (6, 1, 3, ""),
    ],
)
def test_batch_norm_needs_two_samples_in_each_part(batch: int, workers: int, accumulate: int, message: str):
    """So does torch, in the step itself."""
    recipe = Toy(batch_size=batch, accumulate=accumulate)
    check_batch_norm(recipe, nn.Linear(1, 1), workers)
    check_batch_norm(recipe, Norm(nn.SyncBatchNorm), workers)
    parts = torch.randn(batch // workers, 2).chunk(accumulate)
    assert min(map(len, parts)) == smallest_part(batch // workers, accumulate)
    model = Norm()
    if not message:
        check_batch_norm(recipe, model, workers)
        backward_in_parts(model, parts, lambda part: {"train_loss": model(part).sum()})
        return
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        backward_in_parts(model, parts, lambda part: {"train_loss": model(part).sum()})
    with pytest.raises(UserError, match=message):
        check_batch_norm(recipe, model, workers)


@pytest.mark.parametrize("name", ["surfaces_small", "modelnet10_mae_small"])
def test_one_cloud_is_enough_for_batch_norm_over_its_points(name: str):
    train = importlib.import_module("pointcloud.train")
    recipe = replace(train.RECIPES[name], points=64, batch_size=1)
    model = train.make_model(recipe)
    check_batch_norm(recipe, model, 1)
    out = model(torch.randn(1, recipe.points, 3))
    out.prediction.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
