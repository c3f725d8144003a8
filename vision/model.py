"""The classifiers: four small models for images of 8 to 32 pixels, and every model that timm has by name."""

import training.prepared  # noqa: F401

# isort: split
import difflib
from typing import Any

import timm
from timm.models import SwinTransformer, VisionTransformer
from timm.models.regnet import RegNet, RegNetCfg
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from core import UserError
from core.checkpoint.stored import reason

SMALL = ("resnet_small", "vit_small", "swin_small", "regnet_small")


def build_model(
    name: str, *, num_classes: int, in_chans: int = 3, image_size: int = 32, drop_path: float = 0.0
) -> nn.Module:
    """Returns a randomly initialized classifier, from float [n, in_chans, size, size] to logits [n, num_classes].

    The name is in SMALL, for our models of timm's classes, or any of timm's names, such as resnet50 or
    vit_base_patch16_224. timm's models fix their own image size. drop_path is the rate of stochastic depth.

    Raises:
        UserError: For an unknown name, a model that timm cannot build or that has no classes, or a model without
            stochastic depth if `drop_path` is given.
    """
    if name in SMALL and drop_path:
        raise UserError(f"drop_path={drop_path}: {name} has no stochastic depth; leave it out, or choose timm's models")
    if name in SMALL:
        return _small(name, num_classes, in_chans, image_size)
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, [*SMALL, *timm.list_models()], n=3)
        raise UserError(f"model {name!r} is unknown to timm; did you mean {', '.join(near) or 'one of ' + str(SMALL)}?")
    options = {"drop_path_rate": drop_path} if drop_path else {}  # not every timm model has this argument
    try:
        model = timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_chans, **options)
    except TypeError as error:
        if "drop_path_rate" not in str(error):
            raise
        raise UserError(f"drop_path={drop_path}: timm's {name} has no stochastic depth; leave it out") from None
    except (RuntimeError, AssertionError) as error:  # such as an unknown tag after the name
        raise UserError(f"model {name!r}: timm cannot build it ({reason(error)}): choose another") from None
    if not hasattr(model, "get_classifier"):
        raise UserError(f"model {name!r} of timm is no classifier: choose another")
    return model


def weights_config(name: str) -> Any:
    """Returns timm's settings of a model's weights, or None if there are none."""
    return timm.get_pretrained_cfg(name, allow_unregistered=True)


def image_size(name: str) -> int:
    """Returns the side of the images that a timm model was made for, or 224 if it accepts any size."""
    shape = getattr(weights_config(name), "input_size", None)
    return shape[-1] if shape else 224


def classifier_names(model: nn.Module) -> list[str]:
    """Returns the names of the layers behind the features, whose last outputs are the classes."""
    found = model.get_classifier()  # pyright: ignore
    heads = found if isinstance(found, tuple) else (found,)  # two, of a distilled model
    layers = {layer for head in heads for layer in head.modules()}
    return [name for name, module in model.named_modules() if module in layers]


def _small(name: str, num_classes: int, in_chans: int, image_size: int) -> nn.Module:
    """Returns a model in SMALL. The ResNet's and RegNetY's stems keep the resolution, as is usual for small images."""
    if name == "resnet_small":  # ResNet-10 with 16 to 128 channels
        channels = (16, 32, 64, 128)
        model = ResNet(BasicBlock, layers=(1,) * 4, channels=channels, num_classes=num_classes, in_chans=in_chans)
        model.conv1 = nn.Conv2d(in_chans, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        return model
    if name == "regnet_small":  # a RegNetY of 8 blocks in 4 stages, 16 to 96 channels
        config = RegNetCfg(w0=16, wa=12.0, wm=1.8, depth=8, group_size=8, se_ratio=0.25, stem_width=16)
        model = RegNet(config, in_chans, num_classes)
        model.stem.conv.stride = (1, 1)
        return model
    sides = (image_size, max(2, image_size // 8), in_chans, num_classes)  # 64 tokens at 32 x 32, 16 at 8 x 8
    if name == "vit_small":
        return VisionTransformer(*sides, embed_dim=96, depth=4, num_heads=3, mlp_ratio=2.0)
    swin = {"embed_dim": 48, "depths": (2, 2), "num_heads": (2, 4), "window_size": 2, "mlp_ratio": 2.0}
    return SwinTransformer(*sides, **swin, drop_path_rate=0.0)
