"""SyncBN inside a node: the order of collectives, what is refused, and which layers a recipe has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from core import CO2Config
from core.testing import run_distributed
from segmentation import model
from segmentation.data import build_dataset
from segmentation.recipes import RECIPES, digits_small
from segmentation.train import make_model, train
from tests.domains.sync_bn_on_cpu import be_in_a_node, log_collectives, of_two_images, one_pass
from tests.scripts import Mistakes
from training.checks import dry_run
from training.run import Run

# -- on four workers, two a node ----------------------------------------------------------------------------------


def work(rank: int, world_size: int, folder: str, passes: list[dict], jobs: dict[str, dict]) -> tuple[list, list[str]]:
    """(what each pass found, the collectives of the loop in their order); the loop: 24 scenes, three steps an epoch."""
    kernels = be_in_a_node(rank, world_size)
    found = [one_pass(rank, {"out": Path(folder, f"pass{i}")} | settings) for i, settings in enumerate(passes)]
    log: list[str] = []
    log_collectives(log)
    train_set = build_dataset("digits", "train").get_subset(24)
    eval_sets = {"val": build_dataset("digits", "val").get_subset(4)}
    for name, changes in jobs.items():
        recipe = of_two_images(**{"epochs": 2, "log_every": 1, "sync_bn": "node", "out": Path(folder, name)} | changes)
        with Run(recipe) as run:
            train(run, recipe, train_set, eval_sets)
    del kernels
    return found, log


ON_ARRIVAL = CO2Config(tau=2, outer_momentum=0.0, gap="none", merge="keep", delay="auto")
NODES, ALL = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 1, 2, 3]] * 4


PASSES = [
    ({"method": "co2"}, NODES, False),
    ({"method": "local", "per_node": 2}, NODES, True),
    ({"method": "ddp"}, NODES, False),
    ({"method": "ddp", "sync_bn": "all"}, ALL, True),
]
JOBS = {
    "on_arrival": {"co2": ON_ARRIVAL},
    "co2": {},
    "ddp": {"method": "ddp"},
    "local": {"method": "local", "per_node": 2},
    "auto": {"co2": CO2Config(tau="auto")},
    "overlap": {"method": "overlap_local"},
}


@pytest.mark.slow  # a pass of two workers is in test_segmentation_two_workers
def test_a_nodes_workers_share_statistics_and_start_all_collectives_in_one_order(tmp_path: Path) -> None:
    """One order is what torch asks of processes that use two of NCCL's groups; where a pass's workers synchronise
    gradients, too, both go over one group. Statistics and gradients are those of all the images that are shared."""
    settings = [{"sync_bn": "node"} | of for of, _, _ in PASSES]
    ranks = run_distributed(work, 4, str(tmp_path), settings, JOBS, timeout=600)
    for i, (_, members, of_gradients) in enumerate(PASSES):
        found = [of_rank[i] for of_rank, _ in ranks]
        assert [f["members"] for f in found] == members
        assert all(f["layers"] > 20 and f["same group"] == of_gradients and f["error"] < 1e-3 for f in found), found
    first, *others = [log for _, log in ranks]
    assert all(log == first for log in others) and {"all_gather 2", "all_reduce 2", "all_reduce 4"} <= set(first)
    for name in JOBS:
        assert json.loads((tmp_path / name / "summary.json").read_text())["steps"] == 6


# -- what is refused, and what is built ---------------------------------------------------------------------------


def test_a_run_that_cannot_share_statistics_is_refused(tmp_path: Path, mistake: Mistakes) -> None:
    out = ("--out", str(tmp_path / "run"), "--device", "cpu", "--batch_size", "4")
    text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' needs GPUs, torch has no SyncBatchNorm for a CPU: give --sync_bn no" in text
    with mock.patch.object(model, "DEVICES", ("cpu",)):
        text = mistake("segmentation.train", "digits_small", "--no_recommended", "--sync_bn", "node", *out)
    assert "error: sync_bn='node' with 1 worker a node shares nothing: give --sync_bn no" in text


def test_a_dry_run_stands_for_the_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    recipe = replace(digits_small(), sync_bn="node")
    dry_run(recipe, lambda: make_model(recipe))
    text = capsys.readouterr().out
    assert '"sync_bn": "node"' in text and "16 workers of 2 samples a step" in text


@pytest.mark.parametrize(("setting", "kind"), [("no", "BatchNorm2d"), ("node", "SyncBatchNorm")])
def test_the_layers_are_what_the_recipe_says(setting: Any, kind: str) -> None:
    recipe = replace(RECIPES["ade20k_resnet50"], sync_bn=setting)
    with torch.device("meta"):
        assert {type(m).__name__ for m in make_model(recipe).modules() if "BatchNorm" in type(m).__name__} == {kind}
