"""Exports a segmentation model for mmsegmentation: `python -m segmentation.export RUN OUT.pth`.

OUT.py is written too: a config of mmseg for its test tool, also with --tta.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS
from torch import nn

from segmentation.data import CROP, EVAL_BATCH, NUM_CLASSES, dataset_config
from segmentation.model import upernet
from segmentation.recipes import SegmentationRecipe
from segmentation.train import make_model
from training.start.script import launch
from training.weights.export import Exporter, export_run


def example(recipe: SegmentationRecipe, model: nn.Module) -> Any:
    size = CROP[recipe.dataset]
    images = torch.zeros(2, 3, *size)  # normalized
    return lambda x: model.encode_decode(x, [{"img_shape": size}]), images


def test_config(recipe: SegmentationRecipe) -> dict[str, Any]:
    """Returns a config of mmseg that tests the model on the validation split, as the run's end did."""
    name = recipe.dataset
    dataset = dataset_config(name, "val")
    loading, packing = [t for t in dataset["pipeline"] if "Load" in t["type"]], {"type": "PackSegInputs"}
    resizing = [t for t in dataset["pipeline"] if t["type"] == "Resize"] or [{"type": "Resize", "scale_factor": 1.0}]
    flips = [{"type": "RandomFlip", "prob": float(flip), "direction": "horizontal"} for flip in (0, 1)]
    images, masks = loading[:1], loading[1:]
    augmented = {"type": "TestTimeAug", "transforms": [resizing, flips, *([masks] if masks else []), [packing]]}
    loader = {"batch_size": EVAL_BATCH[name], "num_workers": 0, "dataset": dataset}
    return {
        "custom_imports": {"imports": ["segmentation.data"], "allow_failed_imports": False},
        "default_scope": "mmseg",
        "model": upernet(recipe.backbone, NUM_CLASSES[name], CROP[name]),
        "test_dataloader": loader | {"sampler": {"type": "DefaultSampler", "shuffle": False}},
        "test_evaluator": {"type": "IoUMetric", "iou_metrics": ["mIoU"]},
        "test_cfg": {"type": "TestLoop"},
        "tta_pipeline": [*images, augmented],
        "tta_model": {"type": "SegTTAModel"},
    }


def beside(recipe: SegmentationRecipe, model: nn.Module, out: Path) -> dict[str, Any]:  # noqa: ARG001
    """Writes OUT.py. Returns the classes' names and colors, which mmseg's tools read."""
    Config(test_config(recipe)).dump(out.with_suffix(".py"))
    kind: Any = DATASETS.get(dataset_config(recipe.dataset, "val")["type"])
    names = {"metainfo": dict(kind.METAINFO), "reduce_zero_label": recipe.dataset == "ade20k"}
    empty = BaseSegDataset(**names, lazy_init=True)  # reads no images, and makes a palette where there is none
    return {"meta": {"dataset_meta": dict(empty.metainfo)}}


TASK = Exporter(
    SegmentationRecipe, lambda recipe, _: make_model(replace(recipe, pretrained=None)), example, beside=beside
)

if __name__ == "__main__":
    launch(lambda: export_run(TASK, "segmentation.export"))
