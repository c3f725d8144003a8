"""The segmentation runs. Batch sizes are global, over all workers."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from core import CO2Config, UserError
from training.optim import OptimConfig
from training.recipe import Recipe

DataName = Literal["ade20k", "camvid", "digits"]
BackboneName = Literal[
    "resnet50", "resnet101", "swin_tiny", "swin_small", "swin_base", "vit_base",
    "resnet_mini", "swin_mini", "vit_mini",
]  # fmt: skip


@dataclass(frozen=True)
class SegmentationRecipe(Recipe):
    """Settings of UPerNet, its backbone and its data."""

    backbone: BackboneName = "resnet_mini"
    """The backbone. Names with `mini` are for small images on a CPU."""
    dataset: DataName = "digits"
    """The data set. digits needs no data. ade20k and camvid are read from the folder CO2_DATA."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(schedule="poly"))
    pretrained: Path | None = None
    """File of the backbone's weights, in mmseg's or (for ViT) timm's naming: a file in CO2_DATA/backbones, or a full
    path. If its name ends in a hash, as published names do, the hash is checked."""
    sync_bn: Literal["no", "node", "all"] = "no"
    """On GPUs, which images share BatchNorm's statistics in every forward pass: a worker's own (no), all images of a
    node (node), or with ddp all images (all). mmseg's published runs share them over 16 images. In any case
    a round averages the running statistics."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_bn == "no" or self.method == "ddp":
            return
        given = f"sync_bn={self.sync_bn!r} does not go with"
        if self.sync_bn == "all":
            raise UserError(f"{given} method={self.method!r}, which lets nodes run apart: give --sync_bn node")
        if self.elastic:
            raise UserError(f"{given} elastic, which lets workers of a node come and go")


def _ade20k(backbone: BackboneName, optim: OptimConfig, pretrained: str) -> SegmentationRecipe:
    """Returns a recipe for ADE20K on 128 GPUs, with two 512 x 512 crops each. We did not run it.

    The paper's settings for this task are not known, so these are ours. They are mmsegmentation's for 160,000
    iterations of 16 images (127 epochs), with 16 times the batch. The learning rate is scaled by 16 (SGD) or its square
    root (AdamW). The 100 steps of warm-up are ours for ResNet. BatchNorm's statistics come from a node's 8 x 2 images.
    Backbones start from weights trained on ImageNet.
    """
    return SegmentationRecipe(
        backbone=backbone,
        dataset="ade20k",
        epochs=127,
        batch_size=256,
        optim=optim,
        pretrained=Path(pretrained),
        sync_bn="node",
        co2=CO2Config(tau=48, outer_momentum=0.6),
        precision="bfloat16",
        loader_workers=4,
        eval_every=10,
        checkpoint_every="10minutes",
    )


SGD = OptimConfig(
    "sgd",
    lr=0.16,
    momentum=0.9,
    weight_decay=5e-4,
    schedule="poly",
    power=0.9,
    min_lr_share=0.01,
    warmup_steps=100,
    undecayed=(),
)
# parameters that mmseg's paramwise rules exclude; these find norms by "norm" in their names, which Swin's have
SWIN_UNDECAYED = ("absolute_pos_embed", "relative_position_bias_table", "norm")
VIT_UNDECAYED = ("pos_embed", "cls_token", "norm")
ADAMW = OptimConfig("adamw", lr=2.4e-4, weight_decay=0.01, schedule="poly", warmup_steps=100)
SWIN, VIT = replace(ADAMW, undecayed=SWIN_UNDECAYED), replace(ADAMW, undecayed=VIT_UNDECAYED)


def ade20k_resnet50() -> SegmentationRecipe:
    """UPerNet with ResNet-50 (V1c)."""
    return _ade20k("resnet50", SGD, "resnet50_v1c-2cccc1ad.pth")


def ade20k_resnet101() -> SegmentationRecipe:
    """UPerNet with ResNet-101 (V1c)."""
    return _ade20k("resnet101", SGD, "resnet101_v1c-e67eebb6.pth")


def ade20k_swin_tiny() -> SegmentationRecipe:
    """UPerNet with Swin-T."""
    return _ade20k("swin_tiny", SWIN, "swin_tiny_patch4_window7_224_20220317-1cdeb081.pth")


def ade20k_swin_base() -> SegmentationRecipe:
    """UPerNet with Swin-B."""
    return _ade20k("swin_base", SWIN, "swin_base_patch4_window7_224_20220317-e9b98025.pth")


def ade20k_vit_base() -> SegmentationRecipe:
    """UPerNet with ViT-B/16 and a multi-level neck."""
    return _ade20k("vit_base", VIT, "jx_vit_base_p16_224-80ecf9dd.pth")


def digits_small() -> SegmentationRecipe:
    """A small ResNet on digits pasted on photographs. It needs no data.

    With --no_recommended, 4 workers and one seed we measured a mIoU of 65.0 % and a pixel accuracy of 94.0 % on the
    validation split. For the first 20 epochs it predicts background only (7.3 %).
    """
    return SegmentationRecipe(
        epochs=100,
        batch_size=32,
        optim=OptimConfig("adamw", lr=4e-3, weight_decay=0.01, schedule="poly", warmup_steps=32),
        co2=CO2Config(tau=8, outer_momentum=0.0),  # the default of the authors' class for up to 16 GPUs
        recommended=True,
        eval_every=10,
        checkpoint_every=10,
    )


def _transformer(small: SegmentationRecipe, backbone: BackboneName, undecayed: tuple[str, ...]) -> SegmentationRecipe:
    """Returns a small recipe with another backbone and its weight decay."""
    return replace(small, backbone=backbone, optim=replace(small.optim, undecayed=undecayed))


def digits_swin() -> SegmentationRecipe:
    """A small Swin on the same data. We did not run it to its end."""
    return _transformer(digits_small(), "swin_mini", SWIN_UNDECAYED)


def digits_vit() -> SegmentationRecipe:
    """A small ViT on the same data. We did not run it to its end."""
    return _transformer(digits_small(), "vit_mini", VIT_UNDECAYED)


def camvid_small() -> SegmentationRecipe:
    """A small ResNet on CamVid at 240 x 180, from scratch. It needs camvid_240x180.npz in CO2_DATA.

    With --no_recommended, an outer momentum of 0.5 and one seed we measured a mIoU of 32.8 % on the validation split
    and 28.5 % on the test split. Pixel accuracy was 78.0 and 73.3 %.
    """
    small = digits_small()
    return replace(small, dataset="camvid", epochs=40, batch_size=16, optim=replace(small.optim, warmup_steps=22))


_ALL = (
    ade20k_resnet50, ade20k_resnet101, ade20k_swin_tiny, ade20k_swin_base, ade20k_vit_base,
    digits_small, digits_swin, digits_vit, camvid_small,
)  # fmt: skip
RECIPES = {f.__name__: f() for f in _ALL}
