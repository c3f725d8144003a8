"""UPerNet (Xiao et al., ECCV 2018): mmseg's base configs with our sizes, built through its registries."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split

import hashlib
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mmseg
import torch
import torch.distributed as dist
from mmengine.config import Config as ConfigFile
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmengine.runner import CheckpointLoader
from mmseg.registry import MODELS
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core import UserError
from core.baselines.ddp import DDP
from core.baselines.table import Method
from core.groups import local_world_size
from segmentation.data import IGNORE
from segmentation.recipes import BackboneName
from training.data.files import data_root
from training.optim import count_once
from training.start.script import from_home
from training.start.workers import make_mesh
from training.weights.read import file_weights

if TYPE_CHECKING:
    from segmentation.recipes import SegmentationRecipe
    from training.loop.run import Run

SCHEME = "backbone:"  # before a checkpoint's name, it makes mmengine load the file by load_backbone
# Sources in mmseg's configs (mmseg's Swin, mmcv's ResNet-V1c), and of timm's ViT, which mmseg would convert.
SOURCES = {
    "resnet": "https://download.openmmlab.com/pretrain/third_party",
    "swin": "https://download.openmmlab.com/mmsegmentation/v0.5/pretrain/swin",
    "jx_vit": "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-vitjx",
}
# timm's names of a ViT's tensors -> mmseg's, as in mmseg's tools/model_converters/vit2mmseg.py
TIMM_TO_MMSEG = (
    (r"^norm\.", "ln1."),
    (r"^patch_embed\.proj", "patch_embed.projection"),
    (r"^blocks\.(\d+)\.norm", r"layers.\1.ln"),
    (r"^blocks\.(\d+)\.mlp\.fc1", r"layers.\1.ffn.layers.0.0"),
    (r"^blocks\.(\d+)\.mlp\.fc2", r"layers.\1.ffn.layers.1"),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"layers.\1.attn.attn.in_proj_"),
    (r"^blocks\.(\d+)\.attn\.proj", r"layers.\1.attn.attn.out_proj"),
)


# tensors of a classifier's checkpoint, and buffers, that no backbone of mmseg has or needs
UNUSED = re.compile(r"(fc|head|head_dist|pre_logits\.fc|norm|ln1|head\..*)\.(weight|bias)|.*(\.|^)num_batches_tracked|"
                    r".*\.(attn_mask|relative_position_index)|patch_embed\.projection\.bias")  # fmt: skip
# tensors that may be missing: norms that segmentation adds after Swin's stages, and buffers
ADDED = re.compile(r"norm[0-3]\.(weight|bias)|.*\.(num_batches_tracked|relative_position_index)")
RESIZED = re.compile(r"pos_embed|.*\.relative_position_bias_table")  # mmseg resizes them to the training images


@CheckpointLoader.register_scheme(prefixes=SCHEME)
def load_backbone(name: str, map_location: Any = None) -> Mapping[str, Tensor]:  # noqa: ARG001
    """Returns the weights in a file, as {name in mmseg: tensor}, or a segmentor's or classifier's backbone's.

    The file's name comes after SCHEME. mmengine gives "cpu" as map_location.

    Raises:
        UserError: If the file holds no weights, or content that could run code.
    """
    path = find_backbone(name.removeprefix(SCHEME))
    state = file_weights(path, "pretrained")
    parts = {match[0] for match in map(re.compile(r"(.*?\.)??backbone\.").match, state) if match}
    if len(parts) > 1:
        raise UserError(f"pretrained={path}: holds several backbones, {', '.join(sorted(parts))}: keep one in a file")
    for part in parts:
        state = {key.removeprefix(part): value for key, value in state.items() if key.startswith(part)}
    if any(key.startswith("blocks.") for key in state):  # timm's names
        for theirs, ours in TIMM_TO_MMSEG:
            state = {re.sub(theirs, ours, key): value for key, value in state.items()}
    return state


def find_backbone(name: str) -> Path:
    """Returns the file, in CO2_DATA/backbones unless `name` is a full path. Raises UserError if it is not there."""
    path = data_root() / "backbones" / from_home(name)
    if not path.is_file():
        source = next((url for start, url in SOURCES.items() if path.name.startswith(start)), None)
        remedy = f"fetch {source}/{path.name} there" if source else "give the file of a backbone's weights"
        raise UserError(f"pretrained={name}: no file {path}; {remedy}, or --pretrained None for random ones")
    published = re.search(r"-([0-9a-f]{8,64})\.", path.name)  # as torch.hub and openmmlab name their files
    if published:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if not found.startswith(published[1]):
            raise UserError(f"pretrained={path}: its SHA-256 is {found[:8]}..., not {published[1]}; fetch it again")
    return path


def check_backbone(name: str, wanted: Mapping[str, Tensor]) -> None:
    """Raises UserError if the checkpoint is of another network. mmengine would only warn."""
    found = load_backbone(name)
    shape = lambda key, tensor: tensor.shape[-1:] if RESIZED.fullmatch(key) else tensor.shape  # noqa: E731
    missing = [key for key in wanted if key not in found and not ADDED.fullmatch(key)]
    more = [key for key in found if key not in wanted and not UNUSED.fullmatch(key)]
    other = [key for key in found.keys() & wanted.keys() if shape(key, found[key]) != shape(key, wanted[key])]
    for wrong, what in (
        (missing, f"of the backbone's {len(wanted)} tensors, {{}} are missing"),
        (more, "it has {} tensors that the backbone has no place for"),
        (other, "{} tensors have other shapes than the backbone's"),
    ):
        if wrong:
            raise UserError(
                f"pretrained={name.removeprefix(SCHEME)}: {what.format(len(wrong))}, such as "
                f"{', '.join(sorted(wrong)[:3])}; give a checkpoint of the same network in mmseg's or timm's naming"
            )


# -- SyncBN -----------------------------------------------------------------------------------------------------------


DEVICES = ("cuda",)  # devices that torch's SyncBatchNorm supports


def check_sync_bn(run: Run, recipe: SegmentationRecipe) -> None:
    """Refuses SyncBatchNorm on devices that torch does not support, and in a node of one worker."""
    if recipe.sync_bn == "no":
        return
    given = f"sync_bn={recipe.sync_bn!r}"
    if run.device.type not in DEVICES:
        raise UserError(f"{given} needs GPUs, torch has no SyncBatchNorm for a CPU: give --sync_bn no")
    of_node = recipe.per_node if recipe.per_node > 1 else local_world_size()
    if of_node < 2 and recipe.sync_bn == "node":
        raise UserError(f"{given} with 1 worker a node shares nothing: give --sync_bn no")


def share_statistics(run: Run, model: nn.Module, method: Method) -> None:
    """Gives each SyncBatchNorm layer its process group, the gradients' if there is one. All workers must call it."""
    layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
    if not layers:
        return
    everyone = run.recipe.sync_bn == "all" and isinstance(method, DDP)
    group = method.group if everyone else node_group(run)
    for layer in layers:
        layer.process_group = group


def node_group(run: Run) -> dist.ProcessGroup:
    """Returns the group in which a node's workers synchronize gradients, or a new group of this machine's workers.

    torch needs the same order of two NCCL groups' collectives on all ranks. It also needs a wait() between an
    asynchronous collective and the other group's next one (torch.distributed.new_group). The workers of a node close
    rounds at the same steps, and the reduction's side stream waits, so both hold in addition to the method's own group.
    We did not run this on GPUs.
    """
    mesh = run.mesh or make_mesh(run.device, 0, 0, run.recipe.timeout)
    assert mesh is not None, "check_sync_bn refuses a node of one worker"
    return mesh.get_group("shard")


# -- UPerNet ----------------------------------------------------------------------------------------------------------


Config = dict[str, Any]
Norm = Literal["BN", "SyncBN"]

# mmseg's base models from its wheel, by path, because with `mmseg::` mmengine would install packages
BASES = Path(mmseg.__path__[0], ".mim", "configs", "_base_", "models")


@dataclass(frozen=True)
class Backbone:
    """An mmseg backbone and the properties on which UPerNet depends."""

    base: str  # mmseg's config file
    changes: Config  # changes to its backbone
    channels: tuple[int, ...]  # channels of the four feature maps, finest first


def _resnet(depth: int, width: int = 64) -> Backbone:
    """Returns ResNet-V1c, with a stem of three 3x3 convolutions and `width` channels in its first stage."""
    changes = {"depth": depth, "base_channels": width, "stem_channels": width}
    expansion = 4 if depth >= 50 else 1
    return Backbone("upernet_r50", changes, tuple(width * expansion * 2**i for i in range(4)))


def _swin(dim: int, depths: tuple[int, ...], heads: tuple[int, ...], **more: Any) -> Backbone:
    changes = {"embed_dims": dim, "depths": depths, "num_heads": heads, **more}
    return Backbone("upernet_swin", changes, tuple(dim * 2**i for i in range(4)))


def _vit(dim: int, depth: int, heads: int, patch: int) -> Backbone:
    """Returns a plain ViT. A MultiLevelNeck brings the features after each quarter of its depth to four resolutions."""
    changes = {"patch_size": patch, "embed_dims": dim, "num_layers": depth, "num_heads": heads}
    changes |= {"out_indices": tuple(depth * (i + 1) // 4 - 1 for i in range(4))}
    return Backbone("upernet_vit-b16_ln_mln", changes, (dim,) * 4)


# Names with `mini` are ours, for small images on a CPU. All other backbones are mmseg's.
BACKBONES: dict[BackboneName, Backbone] = {
    "resnet50": _resnet(50),
    "resnet101": _resnet(101),
    "swin_tiny": _swin(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "swin_small": _swin(96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "swin_base": _swin(128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "vit_base": _vit(768, 12, 12, patch=16),
    "resnet_mini": _resnet(18, width=16),
    "swin_mini": _swin(32, (2, 2, 2, 2), (1, 2, 4, 8), window_size=4, drop_path_rate=0.0),
    "vit_mini": _vit(96, 4, 3, patch=8),
}


def upernet(
    name: BackboneName, num_classes: int, crop: tuple[int, int], *, norm: Norm = "BN", pretrained: Path | None = None
) -> Config:
    """Returns the config of UPerNet with an FCN auxiliary head (loss weight 0.4), from mmseg's base model.

    `crop` is the height and width of training images. find_backbone finds the file of the backbone's weights.
    """
    b = BACKBONES[name]
    config: Config = ConfigFile.fromfile(BASES / f"{b.base}.py").model.to_dict() | {"pretrained": None}
    backbone, heads = config["backbone"], (config["decode_head"], config["auxiliary_head"])
    backbone |= b.changes
    if pretrained:
        backbone["init_cfg"] = {"type": "Pretrained", "checkpoint": f"{SCHEME}{pretrained}"}
    config["data_preprocessor"]["size"] = crop
    if neck := config.get("neck"):  # it brings features to the strides of a convolutional backbone
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
    """Runs torch.linspace on the CPU. mmseg's Swin reads drop-path rates from it, but meta tensors have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linspace:
            return func(*args, **{**(kwargs or {}), "device": "cpu"})
        return func(*args, **(kwargs or {}))


def build_model(config: Config) -> nn.Module:
    """Returns an mmseg segmentor with initialized weights, from a config such as upernet's.

    It also works under torch.device("meta").

    Raises:
        UserError: If the backbone's checkpoint is missing or of another network. mmengine would only warn.
    """
    with _LinspaceOnCpu(), warnings.catch_warnings():
        # As in mmseg's published runs, the loss's average counts ignored pixels. mmseg warns of it every time.
        warnings.filterwarnings("ignore", message="Default ``avg_non_ignore``")
        model = MODELS.build(ConfigDict(config))
    count_once(model)  # a backbone's with_cp computes its forward pass again
    if not next(model.parameters()).is_meta:
        start = config["backbone"].get("init_cfg")
        if start is not None:
            check_backbone(start["checkpoint"], model.backbone.state_dict())
        logger = MMLogger.get_current_instance()
        level = logger.level
        logger.setLevel(logging.ERROR)  # suppresses a line for every parameter
        model.init_weights()
        logger.setLevel(level)
    return model
