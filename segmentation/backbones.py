"""Pretrained backbones: found in CO2_DATA/backbones, checked by the hash in their names, brought to mmseg's naming."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mmengine.runner import CheckpointLoader
from torch import Tensor

from core import UserError
from segmentation.data import data_root

SCHEME = "backbone:"  # in front of a checkpoint's name, it has mmengine load it by load_backbone
# Where mmseg's configs take them from (mmseg's Swin, mmcv's ResNet-V1c) and timm's ViT, which mmseg would convert.
SOURCES = {
    "resnet": "https://download.openmmlab.com/pretrain/third_party",
    "swin": "https://download.openmmlab.com/mmsegmentation/v0.5/pretrain/swin",
    "jx_vit": "https://github.com/rwightman/pytorch-image-models/releases/download/v0.1-vitjx",
}
# timm's names of a ViT's tensors -> mmseg's, as its tools/model_converters/vit2mmseg.py has them
TIMM_TO_MMSEG = (
    (r"^norm\.", "ln1."),
    (r"^patch_embed\.proj", "patch_embed.projection"),
    (r"^blocks\.(\d+)\.norm", r"layers.\1.ln"),
    (r"^blocks\.(\d+)\.mlp\.fc1", r"layers.\1.ffn.layers.0.0"),
    (r"^blocks\.(\d+)\.mlp\.fc2", r"layers.\1.ffn.layers.1"),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"layers.\1.attn.attn.in_proj_"),
    (r"^blocks\.(\d+)\.attn\.proj", r"layers.\1.attn.attn.out_proj"),
)


@CheckpointLoader.register_scheme(prefixes=SCHEME)
def load_backbone(name: str, map_location: Any = None) -> Mapping[str, Any]:
    """The weights in the file `name`, after SCHEME: {name in mmseg: tensor}, perhaps with "backbone." in front."""
    path = find_backbone(name.removeprefix(SCHEME))
    state = torch.load(path, map_location, weights_only=False)
    for key in ("state_dict", "model"):
        state = state.get(key, state)
    if not any(key.startswith("blocks.") for key in state):
        return state
    renamed = {}
    for key, value in state.items():
        for theirs, ours in TIMM_TO_MMSEG:
            key = re.sub(theirs, ours, key)
        renamed[key] = value
    return renamed


def find_backbone(name: str) -> Path:
    """The file, in CO2_DATA/backbones unless `name` is a full path; UserError where it is missing or another one."""
    path = data_root() / "backbones" / Path(name).expanduser()
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
    """UserError where the checkpoint is of another network; mmengine would only warn."""
    found = {key.removeprefix("backbone.") for key in load_backbone(name, "cpu")}
    missing = [key for key in wanted if key not in found]
    # the norms that segmentation adds behind Swin's stages are in no ImageNet checkpoint: a few may be missing
    if 2 * len(missing) > len(wanted):
        raise UserError(
            f"pretrained={name.removeprefix(SCHEME)}: lacks {len(missing)} of the backbone's {len(wanted)} tensors, "
            f"such as {missing[0]}; give a checkpoint of the same network in mmseg's or timm's naming"
        )
