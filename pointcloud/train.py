"""Trains a point-cloud autoencoder: torchrun --standalone --nproc-per-node 4 -m pointcloud.train RECIPE [overrides]."""

from pointcloud.recipes import RECIPES, PointCloudRecipe
from training.checks import dry_run
from training.recipe import answer_help, parse
from training.start.script import launch

if __name__ == "__main__":
    answer_help(RECIPES, prog="pointcloud.train")  # before the imports below, which take seconds


from collections.abc import Mapping, Sequence

import matplotlib.image
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

from pointcloud import data
from pointcloud.data import PointClouds
from pointcloud.losses import chamfer_distance, earth_mover_distance
from pointcloud.model import Autoencoder, MaskedAutoencoder
from training.data.samples import generator, steps_per_epoch
from training.elastic import repeated
from training.loop.kinds import open_run
from training.loop.run import Run
from training.optim import Scalars, backward_in_parts, make_optimizer, make_schedule, recompute
from training.weights.read import load_weights

EMD_POINTS = 256  # at most so many points of each cloud, because matching them takes cubic time


def main() -> None:
    recipe = parse(RECIPES, prog="pointcloud.train")
    if recipe.dry_run:
        return dry_run(recipe, make_model)
    train_set, test_set = data.load(recipe)
    with open_run(recipe) as run:
        train(run, recipe, train_set, test_set)


def make_model(recipe: PointCloudRecipe) -> nn.Module:
    if recipe.model == "mae":
        mae = MaskedAutoencoder(recipe.points, recipe.mae)
        if recipe.recompute:
            recompute([*mae.encoder.blocks, *mae.decoder.blocks])
        return mae
    return Autoencoder(recipe.points, recipe.autoencoder)


def train(run: Run, recipe: PointCloudRecipe, train_set: PointClouds, test_set: PointClouds) -> None:
    """Runs the loop: optimizer steps, method.step(), and at round boundaries evaluations and checkpoints."""
    model = make_model(recipe)
    if recipe.init_from is not None:
        load_weights(model, recipe.init_from)
    model = run.shard(model)
    optimizer = run.shard_optimizer(make_optimizer(model, recipe.optim))
    epoch = steps_per_epoch(len(train_set), recipe.batch_size)
    total = epoch * recipe.epochs
    schedule = make_schedule(optimizer, total, recipe.optim)
    wrapped, method = run.make_method(model, optimizer)
    run.begin(model, optimizer, schedule, method, epoch=epoch, total=total, samples=len(train_set))

    model.train()
    for points in run.batches(train_set.train_batches):
        scalars = backward(run, recipe, wrapped, points.to(run.device, non_blocking=True))
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


def backward(run: Run, recipe: PointCloudRecipe, wrapped: nn.Module, points: Tensor) -> Scalars:
    """Adds the gradient of this worker's average loss over clouds [B, n, 3]. Returns train_loss."""

    def part_of(part: Tensor) -> Scalars:
        with run.autocast():
            out = wrapped(part)
        return {"train_loss": chamfer_distance(out.prediction, out.target).mean() * (len(part) / len(points))}

    return backward_in_parts(wrapped, points.chunk(recipe.accumulate), part_of, run.scaled)


@repeated
@torch.no_grad()
def evaluate(run: Run, recipe: PointCloudRecipe, model: nn.Module, test_set: PointClouds) -> dict[str, float]:
    """Returns Chamfer distance and EMD of whole clouds over the test set, and saves a picture.

    Each worker evaluates its share. test_loss is the training loss, which a masked autoencoder computes on masked
    patches only.
    """
    with run.paused():
        chamfer = emd = loss = count = 0.0
        for points in test_set.test_batches(recipe, run.rank, run.world_size):
            points = points.to(run.device, non_blocking=True)
            with run.autocast():
                out = model(points)
            chamfer += chamfer_distance(out.cloud, points).sum().item()
            size = min(EMD_POINTS, out.cloud.shape[1], points.shape[1])
            emd += earth_mover_distance(subset(out.cloud, size), subset(points, size)).sum().item()
            loss += chamfer_distance(out.prediction, out.target).mean().item() * len(points)
            count += len(points)
        if run.draws:
            save_picture(run, recipe, model, test_set)
        chamfer, emd, loss, count = run.sum(chamfer, emd, loss, count)
        results = {"test_chamfer": chamfer / count, "test_emd": emd / count, "test_loss": loss / count}
    run.log_evaluation(results)
    return results


def subset(clouds: Tensor, size: int) -> Tensor:
    """Returns the same `size` random points of each cloud in [B, n, 3]."""
    order = torch.randperm(clouds.shape[1], generator=generator(0))
    return clouds[:, order[:size].to(clouds.device)]


@torch.no_grad()
def save_picture(run: Run, recipe: PointCloudRecipe, model: nn.Module, test_set: PointClouds) -> None:
    """Draws six test clouds and their reconstructions, in reconstructions.png in the run folder and TensorBoard."""
    index = [i * len(test_set) // 6 for i in range(6)]
    points = torch.stack([test_set[0, 0, i] for i in index])
    out = model(points.to(run.device))
    rows = {"input": points}
    if recipe.model == "mae":
        rows["visible"] = out.visible
    rows["reconstruction"] = out.cloud
    drawn = {name: clouds.float().cpu().numpy() for name, clouds in rows.items()}
    image = draw_clouds(drawn, caption=f"{recipe.name}, {recipe.method}, step {run.step}")
    matplotlib.image.imsave(run.folder.path / "reconstructions.png", image)
    run.folder.writer.add_image("reconstructions", image, run.step, dataformats="HWC")


def draw_clouds(rows: Mapping[str, Sequence[np.ndarray]], caption: str = "") -> np.ndarray:
    """Draws 3-D scatter plots with equal limits, colored by height, as uint8 [height, width, 3].

    Args:
        rows: Title of each row ("input", "reconstruction") -> clouds, float [n, 3] each, as many in each row.
        caption: Title of the figure.
    """
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(2.2 * columns + 0.4, 2.2 * len(rows) + 0.4), dpi=100)
    canvas = FigureCanvasAgg(figure)  # pyplot would open windows and keep every figure
    figure.suptitle(caption, fontsize=9)
    for row, (name, clouds) in enumerate(rows.items()):
        for column, cloud in enumerate(clouds):
            axes = figure.add_subplot(len(rows), columns, row * columns + column + 1, projection="3d")
            axes.scatter(*np.asarray(cloud, dtype=np.float64).T, c=cloud[:, 2], cmap="viridis", vmin=-1, vmax=1, s=2)
            axes.set(xlim=(-0.8, 0.8), ylim=(-0.8, 0.8), zlim=(-0.8, 0.8))
            axes.set_box_aspect((1, 1, 1), zoom=1.15)
            axes.set_axis_off()
            axes.set_title(name, fontsize=8, y=0.99)
    figure.subplots_adjust(0, 0, 1, 0.9, 0, 0.08)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


if __name__ == "__main__":
    launch(main)
