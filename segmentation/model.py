"""UPerNet (Xiao et al., ECCV 2018) as mmengine configs made in Python and built through mmseg's registries."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmseg.registry import MODELS
from torch import nn
from torch.overrides import TorchFunctionMode

from core import UserError
from segmentation.backbones import SCHEME, check_backbone
from segmentation.data import IGNORE
from segmentation.recipes import BackboneName

Config = dict[str, Any]
Norm = Literal["BN", "SyncBN"]

# ImageNet statistics of 8-bit RGB, as in every mmseg config
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


@dataclass(frozen=True)
class Backbone:
    """An mmseg backbone and what UPerNet must know of it."""

    config: Config
    channels: tuple[int, int, int, int]
    """Of the four feature maps, finest first."""
    head_channels: int = 512
    aux_channels: int = 256
    aux_level: int = 2
    """The feature map that the auxiliary FCN head reads."""
    neck: Config | None = None


def _resnet(depth: int, norm: Norm, width: int = 64, **sizes: int) -> Backbone:
    """ResNet-V1c (a stem of three 3x3 convolutions). width: channels of the first stage."""
    expansion = 4 if depth >= 50 else 1
    config = {
        "type": "ResNetV1c",
        "depth": depth,
        "base_channels": width,
        "stem_channels": width,
        "norm_cfg": {"type": norm},
        "norm_eval": False,
        "contract_dilation": True,
        "dilations": (1, 1, 1, 1),
        "strides": (1, 2, 2, 2),
    }
    return Backbone(config, tuple(width * expansion * 2**i for i in range(4)), **sizes)


def _swin(
    dim: int, depths: tuple[int, ...], heads: tuple[int, ...], window: int = 7, drop_path: float = 0.3, **sizes: int
) -> Backbone:
    config = {
        "type": "SwinTransformer",
        "embed_dims": dim,
        "depths": depths,
        "num_heads": heads,
        "window_size": window,
        "drop_path_rate": drop_path,
        "norm_cfg": {"type": "LN"},
    }
    return Backbone(config, tuple(dim * 2**i for i in range(4)), **sizes)


def _vit(dim: int, depth: int, heads: int, patch: int, crop: tuple[int, int], **sizes: int) -> Backbone:
    """A plain ViT whose features after each quarter of its depth a MultiLevelNeck brings to four resolutions."""
    config = {
        "type": "VisionTransformer",
        "img_size": crop,
        "patch_size": patch,
        "embed_dims": dim,
        "num_layers": depth,
        "num_heads": heads,
        "out_indices": tuple(depth * (i + 1) // 4 - 1 for i in range(4)),
        "norm_cfg": {"type": "LN", "eps": 1e-6},
        "interpolate_mode": "bicubic",
    }
    scales = [patch / stride for stride in (4, 8, 16, 32)]  # to the strides of a convolutional backbone
    neck = {"type": "MultiLevelNeck", "in_channels": [dim] * 4, "out_channels": dim, "scales": scales}
    return Backbone(config, (dim,) * 4, aux_level=3, neck=neck, **sizes)


def backbone(name: BackboneName, crop: tuple[int, int], norm: Norm = "BN") -> Backbone:
    """The backbone of that name. The three `mini` ones are ours, for small images on a CPU; the others are mmseg's.

    crop: (height, width) of training images, for ViT's position embeddings. UserError for an unknown name.
    """
    mini = {"head_channels": 32, "aux_channels": 32}
    match name:
        case "resnet50":
            return _resnet(50, norm)
        case "resnet101":
            return _resnet(101, norm)
        case "swin_tiny":
            return _swin(96, (2, 2, 6, 2), (3, 6, 12, 24))
        case "swin_small":
            return _swin(96, (2, 2, 18, 2), (3, 6, 12, 24))
        case "swin_base":
            return _swin(128, (2, 2, 18, 2), (4, 8, 16, 32))
        case "vit_base":
            return _vit(768, 12, 12, 16, crop)
        case "resnet_mini":
            return _resnet(18, norm, width=16, **mini)
        case "swin_mini":
            return _swin(32, (2, 2, 2, 2), (1, 2, 4, 8), window=4, drop_path=0.0, **mini)
        case "vit_mini":
            return _vit(96, 4, 3, 8, crop, **mini)
    raise UserError(f"backbone {name!r}: choose one of {', '.join(get_args(BackboneName))}")


def upernet(
    name: BackboneName,
    num_classes: int,
    crop: tuple[int, int],
    *,
    norm: Norm = "BN",
    pretrained: Path | None = None,
) -> Config:
    """The config of UPerNet with an FCN auxiliary head (loss weight 0.4), as mmseg's base models have it.

    crop: (height, width) of training images. norm: SyncBN shares batch statistics in every forward pass, with whom
    segmentation.sync_bn says. pretrained: the backbone's weights, see segmentation.backbones.
    """
    b = backbone(name, crop, norm)
    common = {
        "num_classes": num_classes,
        "norm_cfg": {"type": norm},
        "align_corners": False,
        "dropout_ratio": 0.1,
        "ignore_index": IGNORE,
    }
    start = {"init_cfg": {"type": "Pretrained", "checkpoint": f"{SCHEME}{pretrained}"}} if pretrained else {}
    return {
        "type": "EncoderDecoder",
        "data_preprocessor": {
            "type": "SegDataPreProcessor",
            "mean": MEAN,
            "std": STD,
            "bgr_to_rgb": True,
            "pad_val": 0,
            "seg_pad_val": IGNORE,
            "size": crop,
        },
        "backbone": b.config | start,
        "neck": b.neck,
        "decode_head": common
        | {
            "type": "UPerHead",
            "in_channels": list(b.channels),
            "in_index": [0, 1, 2, 3],
            "channels": b.head_channels,
            "loss_decode": {"type": "CrossEntropyLoss", "loss_weight": 1.0},
        },
        "auxiliary_head": common
        | {
            "type": "FCNHead",
            "in_channels": b.channels[b.aux_level],
            "in_index": b.aux_level,
            "channels": b.aux_channels,
            "num_convs": 1,
            "concat_input": False,
            "loss_decode": {"type": "CrossEntropyLoss", "loss_weight": 0.4},
        },
        "train_cfg": {},
        "test_cfg": {"mode": "whole"},
    }


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
