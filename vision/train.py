"""Trains an image classifier: `torchrun --standalone --nproc-per-node 4 -m vision.train RECIPE [overrides]`."""

from training.checks import dry_run
from training.recipe import answer_help, parse
from training.start.script import launch
from vision.recipes import RECIPES, VisionRecipe

if __name__ == "__main__":
    answer_help(RECIPES, prog="vision.train")  # before the imports below, which take seconds

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.errors import UserError
from training.data.samples import eval_share, steps_per_epoch
from training.elastic import repeated
from training.loop.kinds import open_run
from training.loop.run import Run
from training.optim import Scalars, backward_in_parts, count_once, evaluating, make_optimizer, make_schedule
from training.start.errors import explained
from training.weights.read import keep_names, load_weights
from vision import data
from vision.data import ImageNet
from vision.model import SMALL, build_model, classifier_names
from vision.pictures import labelled

Dataset = data.Images | ImageNet
PICTURES = 8  # test images that TensorBoard shows


def main() -> None:
    recipe = parse(RECIPES, prog="vision.train")
    if recipe.dry_run:
        return dry_run(recipe, make_model)
    train_set, test_set = data.load(recipe.dataset)
    with open_run(recipe) as run:
        train(run, recipe, train_set, test_set)


def make_model(recipe: VisionRecipe, num_classes: int | None = None) -> nn.Module:
    """Returns the recipe's model. The default number of classes is the data set's."""
    shape = data.SHAPES[recipe.dataset]
    model = build_model(
        recipe.model,
        num_classes=num_classes or shape.num_classes,
        in_chans=shape.in_chans,
        image_size=shape.image_size,
        drop_path=recipe.drop_path,
    )
    if recipe.dataset == "imagenet":
        data.train_transform(recipe)  # refuses an unknown policy before the run's first batch
    elif recipe.model not in SMALL:
        check_images(model, recipe)
    if recipe.recompute:
        try:
            model.set_grad_checkpointing()  # timm's own
        except AssertionError:
            raise UserError(f"recompute=True: timm's {recipe.model} does not support it; leave it out") from None
        count_once(model)
    return model


def describe(model: nn.Module, recipe: VisionRecipe, of: Dataset) -> None:
    """Notes the classes and the normalization in the model, for load_weights, which compares them."""
    c = data.data_config(recipe) if isinstance(of, ImageNet) else vars(of)
    model.names, model.statistics = of.classes, (c["mean"], c["std"])  # pyright: ignore[reportAttributeAccessIssue]


def check_images(model: nn.Module, recipe: VisionRecipe) -> None:
    """Refuses a model of timm that does not take the data set's images."""
    shape = data.SHAPES[recipe.dataset]
    side = shape.image_size
    what = f"model {recipe.model!r} does not take the {side} x {side} pixels of {recipe.dataset}"
    with explained(what, f"choose another, such as {', '.join(SMALL)}"), torch.no_grad(), evaluating(model):
        model(torch.zeros(2, shape.in_chans, side, side))


def train(run: Run, recipe: VisionRecipe, train_set: Dataset, test_set: Dataset) -> None:
    """Runs the loop: optimizer steps, method.step(), and at round boundaries evaluations and checkpoints."""
    model = make_model(recipe, len(train_set.classes))
    describe(model, recipe, train_set)
    keep_names(run, train_set.classes)
    if recipe.init_from is not None:
        load_weights(model, recipe.init_from, heads=classifier_names(model))
    model = run.shard(model)
    optimizer = run.shard_optimizer(make_optimizer(model, recipe.optim))
    epoch = steps_per_epoch(len(train_set), recipe.batch_size)
    total = epoch * recipe.epochs
    schedule = make_schedule(optimizer, total, recipe.optim)
    wrapped, method = run.make_method(model, optimizer)
    run.begin(model, optimizer, schedule, method, epoch=epoch, total=total, samples=len(train_set))

    model.train()
    for images, labels in run.batches(functools.partial(train_set.train_batches, device=run.device)):
        scalars = backward(run, recipe, wrapped, images, labels)
        run.update(model, optimizer)
        schedule.step()
        due = run.after_step(method.step(last=run.at_last_step), **scalars)
        if due.evaluation:
            evaluate(run, recipe, model, test_set)
        if due.checkpoint:
            run.save()
        if due.stop:
            return run.stop()

    method.finish()
    run.end(evaluate(run, recipe, model, test_set))


def backward(run: Run, recipe: VisionRecipe, wrapped: nn.Module, images: Tensor, labels: Tensor) -> Scalars:
    """Adds the gradient of this worker's average loss. Returns train_loss and train_top1."""

    def part_of(part: tuple[Tensor, Tensor]) -> Scalars:
        some, wanted = part
        with run.autocast():
            logits = wrapped(some)
            smoothing = 0.0 if wanted.ndim == 2 else recipe.label_smoothing  # Mixup has smoothed its own labels
            loss = F.cross_entropy(logits, wanted, label_smoothing=smoothing)
        classes = wanted.argmax(1) if wanted.ndim == 2 else wanted  # Mixup gives shares of classes
        top1 = (logits.argmax(1) == classes).float().mean()
        share = len(some) / len(images)
        return {"train_loss": loss * share, "train_top1": top1 * share}

    parts = list(zip(images.chunk(recipe.accumulate), labels.chunk(recipe.accumulate), strict=True))
    return backward_in_parts(wrapped, parts, part_of, run.scaled)


def spread(images: int) -> list[int]:
    """Returns the test images that TensorBoard shows, spread over a set that is sorted by class."""
    return sorted({i * images // PICTURES for i in range(PICTURES)} if images else ())


@repeated
@torch.no_grad()
def evaluate(run: Run, recipe: VisionRecipe, model: nn.Module, test_set: Dataset) -> dict[str, float]:
    """Returns top-1, top-5 and loss over the whole test set. Each worker evaluates its share."""
    with run.paused():
        top1 = top5 = loss = 0.0
        count, few = 0, list[tuple[Tensor, Tensor, Tensor]]()
        shown = spread(len(eval_share(len(test_set), rank=run.rank, world_size=run.world_size)))
        for images, labels in test_set.test_batches(recipe, run.rank, run.world_size, run.device):
            with run.autocast():
                logits = model(images).float()
            if run.draws and (at := [i - count for i in shown if count <= i < count + len(labels)]):
                few.append((images[at], labels[at], logits[at].argmax(1)))
            # Counts add up exactly over workers. timm.utils.accuracy gives percentages of a batch, in float32.
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            top1 += best[:, 0].sum().item()
            top5 += best.any(dim=1).sum().item()
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            count += len(labels)
        if few:
            pictures = labelled(*map(torch.cat, zip(*few, strict=True)), test_set.classes)
            run.folder.writer.add_figure("test/images", pictures, run.step)
        top1, top5, loss, count = run.sum(top1, top5, loss, count)
        results = {"test_top1": top1 / count, "test_top5": top5 / count, "test_loss": loss / count}
    run.log_evaluation(results)
    return results


if __name__ == "__main__":
    launch(main)
