"""Settings that no run could have, or that would be left unused: one line that names the value. And dry runs."""

import importlib
import math
import sys
from dataclasses import replace
from typing import Any

import pytest

from core import CO2Config, CompressionConfig, UserError
from language.finetune_recipes import LoraConfig, prompts_adamw
from language.recipe import RingsConfig
from language.recipes import RECIPES, gpt2_pydoc_small
from pointcloud.recipes import surfaces_small
from segmentation import recipes as segmentation
from tests.scripts import refused
from training.recipe import Recipe
from vision import recipes as vision

DOCUMENTS = replace(gpt2_pydoc_small(), balance="round", recommended=False)
ISLANDS = replace(DOCUMENTS, balance="rings", rings=RingsConfig(costs=(1.0, 0.0, 0.0, 0.0)), per_node=2)
GPT2, ZO = gpt2_pydoc_small(), RECIPES["gpt2_zo_small"]
DIGITS, SCENES, CLOUDS, PROMPTS = vision.digits_small(), segmentation.digits_small(), surfaces_small(), prompts_adamw()
INT8 = CompressionConfig("int8")
SYNC_BN, ELASTIC = replace(SCENES, sync_bn="node"), Recipe(elastic=True)
REFUSED: list[tuple[Recipe, dict[str, Any], str]] = [
    # numbers, of which RANGES below has the rest
    (DIGITS, {"label_smoothing": 2.0}, "label_smoothing=2.0: give a number from"),
    (GPT2, {"context": 3}, "context=3: give 4 or more"),
    (DIGITS, {"eval_every": "0steps"}, "eval_every=0steps: give "),
    (DIGITS, {"checkpoint_every": "-1minutes"}, "checkpoint_every=-1minutes: give "),
    # of another data set, model or method
    (DIGITS, {"method": "ddp", "co2": CO2Config(compression=INT8)}, "compression.format='int8' is CO2's own"),
    (DIGITS, {"mixup": 0.5}, "mixup=0.5 is for imagenet only, not digits: leave it out"),
    # fine-tuning
    (PROMPTS, {"lora": LoraConfig(-1)}, "lora rank=-1"),
    (PROMPTS, {"weights": "bfloat16"}, "weights=bfloat16 with method 'ddp'"),
    (PROMPTS, {"zero": 3, "per_node": 0}, "zero=3 does not go with tuning, where one worker"),
    (PROMPTS, {"lora": LoraConfig(2, alpha=math.nan)}, "lora.alpha=nan: give a finite number"),
    # without gradients
    (GPT2, {"method": "zo"}, "optim.name='adamw' with method 'zo', which has no gradients: give --optim.name sgd"),
    (ZO, {"optim": replace(ZO.optim, weight_decay=0.1)}, "give --optim.weight_decay 0.0"),
    (ZO, {"recompute": True}, "recompute=True with method 'zo'"),
    (ZO, {"per_node": 2}, "per_node=2 with method 'zo', which does not use it"),
    (GPT2, {"method": "ddp", "offload": True}, "offload=True is CO2's own"),
    (ZO, {"elastic": True}, "elastic does not go with method='zo'"),
    (DIGITS, {"method": "zo"}, "method='zo' is not of this task"),
    # whole documents
    (DOCUMENTS, {"dropout": 0.1}, "does not go with dropout=0.1, which attention to documents lacks"),
    (DOCUMENTS, {"model": "roberta_tiny"}, "does not go with model=roberta_tiny"),
    (DOCUMENTS, {"model": "transnormer_tiny"}, "does not go with model=transnormer_tiny: give a GPT-2"),
    (DOCUMENTS, {"per_node": 2}, "does not go with per_node=2"),
    # documents that are split
    (ISLANDS, {"per_node": 1}, "balance='rings' with per_node=1: nobody could split a document; add --per_node 2"),
    (ISLANDS, {"zero": 2}, "zero=2, whose parameters are not whole when a ring's costs are measured"),
    (ISLANDS, {"dry_run": True}, "does not go with dry_run"),
    (ISLANDS, {"rings": RingsConfig(costs=(1.0, 2.0))}, "rings.costs=1.0 2.0: give 4 or 6 numbers, 0 or more"),
    (ISLANDS, {"rings": RingsConfig(costs=(1.0, -2.0, 0.0, 0.0))}, "give 4 or 6 numbers, 0 or more"),
    (ISLANDS, {"rings": RingsConfig(costs=(1.0, math.nan, 0.0, 0.0))}, "give 4 or 6 numbers, 0 or more"),
    (ISLANDS, {"balance": "round", "per_node": 1}, "is balance rings' own: leave it out, or add"),
    # workers that come and go
    (ELASTIC, {"method": "ddp"}, "method='ddp'"),
    (ELASTIC, {"zero": 2}, "zero=2"),
    (ELASTIC, {"shard": True}, "shard=True does not go with elastic: leave it out"),
    (ELASTIC, {"offload": True}, "offload=True does not go with elastic: leave it out"),
    # SyncBN inside a node, of which one would wait in a forward pass for another that waits at its boundary
    (SYNC_BN, {"sync_bn": "all"}, "sync_bn='all' does not go with method='co2'"),
    (SYNC_BN, {"elastic": True}, "sync_bn='node' does not go with elastic"),
]


@pytest.mark.parametrize(("recipe", "changes", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_what_no_run_could_do_is_refused_in_one_line(recipe: Recipe, changes: dict[str, Any], message: str):
    with refused(message):
        replace(recipe, **changes)


# -- numbers that no option can have ----------------------------------------------------------------------------------

# A number outside these ends cannot be: [least, most]. Which numbers belong is written here once more, apart from the
# recipes, so that a check that is lost is missed. What has no entry has no number that is impossible.
SHARE, BELOW_ONE, LARGE, COUNT = (0, 1), (0, 1 - 1e-9), 1e4, (1, 1e9)
POSITIVE, DECAY = (5e-324, LARGE), (0, LARGE)
RANGES: dict[str, tuple[float, float]] = {
    "co2.tau": COUNT, "co2.tau_max": COUNT, "co2.outer_lr": POSITIVE, "co2.outer_momentum": BELOW_ONE,
    "co2.clip": (5e-324, 1e9), "co2.delay": (0, 1e9),
    "slowmo.outer_lr": POSITIVE, "slowmo.outer_momentum": BELOW_ONE,
    "overlap_local.pull": (5e-324, 1), "overlap_local.anchor_momentum": BELOW_ONE,
    "optim.lr": POSITIVE, "optim.momentum": BELOW_ONE, "optim.eps": POSITIVE, "optim.weight_decay": DECAY,
    "optim.power": POSITIVE, "optim.warmup_steps": (0, 1e9), "optim.min_lr_share": SHARE,
    "optim.clip_grad_norm": POSITIVE, "batch_size": COUNT, "epochs": COUNT, "seed": (0, 1e9), "accumulate": COUNT,
    "per_node": (0, 1e9), "timeout": (5e-324, 1e9), "link_mbit": (5e-324, 1e9), "eval_every": POSITIVE,
    "checkpoint_every": (0, 1e9), "log_every": COUNT, "gpu_gb": (5e-324, 1e9),
    "label_smoothing": BELOW_ONE, "mixup": (0, 100), "cutmix": (0, 100), "color_jitter": SHARE,
    "random_erasing": SHARE, "repeats": COUNT, "drop_path": BELOW_ONE, "loader_workers": (0, 1000),
    "vocab_size": (1, 1e6), "context": (4, 1e6), "dropout": BELOW_ONE, "epoch_steps": COUNT, "eval_tokens": COUNT,
    "autoencoder.latent": (1, 1e6), "autoencoder.folding_width": (1, 1e6), "mae.groups": (2, 1e6),
    "mae.group_size": (1, 1e6), "mae.mask_ratio": (1e-9, 1 - 1e-9), "mae.dim": (1, 1e6), "mae.depth": (1, 1e4),
    "mae.heads": (1, 1e6), "mae.decoder_depth": (1, 1e4), "mae.drop_path": BELOW_ONE, "points": (1, 1e6),
}  # fmt: skip
NUMBERS = (-1, 0, math.nan, math.inf, -math.inf, 1e308, -1e308, 1e20, 10**20, 1e-320, -0.5, 1.5)


def value_of(recipe: Any, option: str) -> Any:
    """Of an option such as co2.tau; Ellipsis where the recipe has none of that name."""
    for part in option.split("."):
        recipe = getattr(recipe, part, ...)
    return recipe


def changed(recipe: Any, option: str, value: float) -> Any:
    part, _, rest = option.partition(".")
    return replace(recipe, **{part: changed(getattr(recipe, part), rest, value) if rest else value})


@pytest.mark.parametrize("option", RANGES)
def test_numbers_outside_an_options_range_are_refused(option: str):
    recipe = next(recipe for recipe in (DIGITS, SCENES, CLOUDS, GPT2) if value_of(recipe, option) is not ...)
    least, most = RANGES[option]
    whole = isinstance(value_of(recipe, option), int)
    impossible = [x for x in NUMBERS if not least <= x <= most and not (whole and isinstance(x, float))]
    assert impossible
    for number in impossible:
        with pytest.raises(UserError):
            changed(recipe, option, number)


@pytest.mark.parametrize(
    ("task", "name"),
    [(t, "digits_small") for t in ("vision", "segmentation")]
    + [("pointcloud", "surfaces_small"), ("language", "roberta_pydoc_small")],
)
def test_a_train_scripts_dry_run_estimates_the_memory(task: str, name: str, monkeypatch, capsys):
    for key, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["train", name, "--dry_run", "--device", "cuda"])  # as on a login node
    importlib.import_module(f"{task}.train").main()
    printed = capsys.readouterr().out
    assert f'"name": "{name}"' in printed and " 4 workers of " in printed and "activations" in printed
