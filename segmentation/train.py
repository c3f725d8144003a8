"""Trains UPerNet: `torchrun --standalone --nproc-per-node 4 -m segmentation.train RECIPE [overrides]`.

With `--config FILE.py` it trains a config file of mmsegmentation instead, see segmentation/runner.py.
"""

import sys

from segmentation.recipes import RECIPES, SegmentationRecipe
from training.checks import dry_run
from training.recipe import answer_help, parse
from training.start.script import launch

OF_MMSEG = any(word.startswith("--config") for word in sys.argv[1:2])
if __name__ == "__main__" and not OF_MMSEG:
    answer_help(RECIPES, prog="segmentation.train")  # before the imports below, which take seconds

from typing import Any

import torch
from torch import Tensor, nn

from segmentation.data import CROP, EVAL_BATCH, EVAL_SPLITS, NUM_CLASSES, Scenes, build_dataset, unpack
from segmentation.metrics import areas_of, metrics_of, side_by_side
from segmentation.model import build_model, check_sync_bn, share_statistics, upernet
from training.data.samples import steps_per_epoch
from training.elastic import repeated
from training.loop.kinds import open_run
from training.loop.run import Run
from training.optim import Scalars, backward_in_parts, make_optimizer, make_schedule
from training.start.workers import to_device
from training.weights.read import keep_names, load_weights

PICTURES = 4  # samples shown at each evaluation


def main() -> None:
    recipe = parse(RECIPES, prog="segmentation.train")
    if recipe.dry_run:
        return dry_run(recipe, make_model)
    train_set = Scenes(build_dataset(recipe.dataset, "train"))
    eval_sets = {split: Scenes(build_dataset(recipe.dataset, split)) for split in EVAL_SPLITS[recipe.dataset]}
    with open_run(recipe) as run:
        train(run, recipe, train_set, eval_sets)


def make_model(recipe: SegmentationRecipe) -> nn.Module:
    """Returns the recipe's UPerNet."""
    norm = "BN" if recipe.sync_bn == "no" else "SyncBN"
    crop, classes = CROP[recipe.dataset], NUM_CLASSES[recipe.dataset]
    config = upernet(recipe.backbone, classes, crop, norm=norm, pretrained=recipe.pretrained)
    config["backbone"]["with_cp"] = recipe.recompute
    return build_model(config)


def train(run: Run, recipe: SegmentationRecipe, train_set: Scenes, eval_sets: dict[str, Scenes]) -> None:
    """Runs the loop: optimizer steps, method.step(), and at round boundaries evaluations and checkpoints."""
    check_sync_bn(run, recipe)
    model = make_model(recipe)
    model.names = train_set.classes  # pyright: ignore[reportAttributeAccessIssue]
    keep_names(run, train_set.classes)
    if recipe.init_from is not None:
        load_weights(model, recipe.init_from, heads=["decode_head.conv_seg", "auxiliary_head.conv_seg"])
    model = run.shard(model)
    optimizer = run.shard_optimizer(make_optimizer(model, recipe.optim))
    epoch = steps_per_epoch(len(train_set), recipe.batch_size)
    total = epoch * recipe.epochs
    schedule = make_schedule(optimizer, total, recipe.optim)
    wrapped, method = run.make_method(model, optimizer)
    share_statistics(run, model, method)
    run.begin(model, optimizer, schedule, method, epoch=epoch, total=total, samples=len(train_set))

    model.train()
    for batch in run.batches(train_set.train_batches):
        inputs = model.data_preprocessor(unpack(batch, run.device), training=True)
        images = to_device(inputs["inputs"], run.device)
        scalars = backward(run, recipe, model, wrapped, images, inputs["data_samples"])
        run.update(model, optimizer)
        schedule.step()
        due = run.after_step(method.step(last=run.at_last_step), **scalars)
        if due.evaluation:
            evaluate(run, model, "val", eval_sets["val"])
        if due.checkpoint:
            run.save()
        if due.stop:
            return run.stop()

    method.finish()
    results = {}
    for split, eval_set in eval_sets.items():
        results |= evaluate(run, model, split, eval_set)
    run.end(results)


def backward(
    run: Run, recipe: SegmentationRecipe, model: nn.Module, wrapped: nn.Module, images: Tensor, labels: list[Any]
) -> Scalars:
    """Adds the gradient of this worker's average loss over normalized images [b, 3, h, w] and mmseg's SegDataSamples.

    Returns:
        train_loss and train_aAcc (percent of the pixels).
    """

    def part_of(places: range) -> Scalars:
        some = slice(places.start, places.stop)
        with run.autocast():
            loss, terms = model.parse_losses(wrapped(inputs=images[some], data_samples=labels[some], mode="loss"))
        share = len(places) / len(images)
        return {"train_loss": loss * share, "train_aAcc": terms["decode.acc_seg"] * share}

    size = -(-len(images) // recipe.accumulate)
    parts = [range(i, min(i + size, len(images))) for i in range(0, len(images), size)]
    return backward_in_parts(wrapped, parts, part_of, run.scaled)


@repeated
@torch.no_grad()
def evaluate(run: Run, model: nn.Module, split: str, eval_set: Scenes) -> dict[str, float]:
    """Returns mIoU, mAcc and aAcc over the whole split. Each worker evaluates its share.

    It also logs each class's IoU and some pictures. The model runs in float32 at any training precision, as in mmseg's
    published results.
    """
    areas = torch.zeros(4, len(eval_set.classes), dtype=torch.float64, device=run.device)
    shown = 0
    with run.paused():
        size = EVAL_BATCH[run.recipe.dataset]
        for packed in eval_set.test_batches(run.recipe, run.rank, run.world_size, size):
            batch = unpack(packed, run.device)
            samples = model(**model.data_preprocessor(batch, training=False), mode="predict")
            for image, sample in zip(batch["inputs"], samples, strict=True):
                prediction, label = sample.pred_sem_seg.data[0], sample.gt_sem_seg.data[0]
                areas += areas_of(prediction, label, len(eval_set.classes)).to(run.device)
                if run.draws and shown < PICTURES:
                    picture = side_by_side(image, label, prediction, eval_set.classes, eval_set.palette)
                    run.folder.writer.add_figure(f"{split}/image_label_prediction_{shown}", picture, run.step)
                    shown += 1
        metrics = metrics_of(run.sum_tensor(areas), eval_set.classes)
        results = {f"{split}_{key}": value for key, value in metrics.items()}
    run.log_evaluation(results)
    return {key: value for key, value in results.items() if "IoU/" not in key}


if __name__ == "__main__":
    if OF_MMSEG:
        from segmentation.runner import train_config as main  # noqa: F811
    launch(main)
