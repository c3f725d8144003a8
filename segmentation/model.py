"""UPerNet (Xiao et al., ECCV 2018): mmseg's base configs with our sizes, built through its registries."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mmseg
import torch
from mmengine.config import Config as ConfigFile
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmseg.registry import MODELS
from torch import nn
from torch.overrides import TorchFunctionMode

from segmentation.backbones import SCHEME, check_backbone
from segmentation.data import IGNORE
from segmentation.recipes import BackboneName

Config = dict[str, Any]
Norm = Literal["BN", "SyncBN"]

# mmseg's base models, which its wheel brings; by path, for a reference `mmseg::` would have mmengine install packages
BASES = Path(mmseg.__path__[0], ".mim", "configs", "_base_", "models")


@dataclass(frozen=True)
class Backbone:
    """An mmseg backbone and what UPerNet must know of it."""

    base: str  # mmseg's file
    changes: Config  # of its backbone
    channels: tuple[int, ...]  # of the four feature maps, finest first


def _resnet(depth: int, width: int = 64) -> Backbone:
    """ResNet-V1c (a stem of three 3x3 convolutions). width: channels of the first stage."""
    changes = {"depth": depth, "base_channels": width, "stem_channels": width}
    expansion = 4 if depth >= 50 else 1
    return Backbone("upernet_r50", changes, tuple(width * expansion * 2**i for i in range(4)))


def _swin(dim: int, depths: tuple[int, ...], heads: tuple[int, ...], **more: Any) -> Backbone:
    changes = {"embed_dims": dim, "depths": depths, "num_heads": heads, **more}
    return Backbone("upernet_swin", changes, tuple(dim * 2**i for i in range(4)))


def _vit(dim: int, depth: int, heads: int, patch: int) -> Backbone:
    """A plain ViT whose features after each quarter of its depth a MultiLevelNeck brings to four resolutions."""
    changes = {"patch_size": patch, "embed_dims": dim, "num_layers": depth, "num_heads": heads}
    changes |= {"out_indices": tuple(depth * (i + 1) // 4 - 1 for i in range(4))}
    return Backbone("upernet_vit-b16_ln_mln", changes, (dim,) * 4)


# Those named `mini` are ours, for small images on a CPU; the others are mmseg's.
BACKBONES: dict[BackboneName, Backbone] = {
    "resnet50": _resnet(50),
    "resnet101": _resnet(101),
    "swin_tiny": _swin(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "swin_small": _swin(96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "swin_base": _swin(128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "vit_base": _vit(768, 12, 12, patch=16),
    "resnet_mini": _resnet(18, width=16),
    "resnet34_mini": _resnet(34, width=16),
    "swin_mini": _swin(32, (2, 2, 2, 2), (1, 2, 4, 8), window_size=4, drop_path_rate=0.0),
    "swin_mini_wide": _swin(48, (2, 2, 2, 2), (2, 4, 8, 16), window_size=4, drop_path_rate=0.0),
    "vit_mini": _vit(96, 4, 3, patch=8),
}


def upernet(
    name: BackboneName,
    num_classes: int,
    crop: tuple[int, int],
    *,
    norm: Norm = "BN",
    pretrained: Path | None = None,
) -> Config:
    """The config of UPerNet with an FCN auxiliary head (loss weight 0.4): mmseg's base model with the backbone's sizes.

    crop: (height, width) of training images. norm: see segmentation.sync_bn. pretrained: see segmentation.backbones.
    """
    b = BACKBONES[name]
    config: Config = ConfigFile.fromfile(BASES / f"{b.base}.py").model.to_dict() | {"pretrained": None}
    backbone, heads = config["backbone"], (config["decode_head"], config["auxiliary_head"])
    backbone |= b.changes
    if pretrained:
        backbone["init_cfg"] = {"type": "Pretrained", "checkpoint": f"{SCHEME}{pretrained}"}
    config["data_preprocessor"]["size"] = crop
    if neck := config.get("neck"):  # to the strides of a convolutional backbone
        backbone["img_size"] = crop  # for its position embeddings
        neck |= {"in_channels": list(b.channels), "out_channels": b.channels[0]}
        neck["scales"] = [backbone["patch_size"] / stride for stride in (4, 8, 16, 32)]
    for part in (backbone, *heads):
        if part["norm_cfg"]["type"] == "SyncBN":
            part["norm_cfg"] = {"type": norm}
    for head in heads:
        every = isinstance(head["in_index"], list)
        head["in_channels"] = list(b.channels) if every else b.channels[head["in_index"]]
        head |= {"num_classes": num_classes, "ignore_index": IGNORE}
        if "_mini" in name:
            head["channels"] = 32
    return config


class _LinspaceOnCpu(TorchFunctionMode):
    """mmseg's Swin reads its drop-path rates from torch.linspace, which has no values on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linspace:
            return func(*args, **{**(kwargs or {}), "device": "cpu"})
        return func(*args, **(kwargs or {}))


def build_model(config: Config) -> nn.Module:
    """An mmseg segmentor with initialised weights, from a config such as upernet's; also under torch.device("meta").

    UserError when the backbone's checkpoint is missing or of another network, where mmengine would only warn.
    """
    with _LinspaceOnCpu(), warnings.catch_warnings():
        # as in mmseg's published runs, the loss's mean counts ignored pixels: it warns of this default every time
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore``")
        model = MODELS.build(ConfigDict(config))
    start = config["backbone"].get("init_cfg")
    if not next(model.parameters()).is_meta:
        if start is not None:
            check_backbone(start["checkpoint"], model.backbone.state_dict())
        logger = MMLogger.get_current_instance()
        level = logger.level
        logger.setLevel(logging.ERROR)  # not a line for every parameter
        model.init_weights()
        logger.setLevel(level)
    return model
