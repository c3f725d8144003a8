"""Pretrained backbones: found in CO2_DATA/backbones, checked by the hash in their names, brought to mmseg's naming.

A file is read by torch's unpickler for weights, so that no code runs from it; what cannot be used is refused by name.
"""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split
import argparse
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from mmengine.runner import CheckpointLoader
from torch import Tensor

from core import UserError
from core.checkpoints.untrusted import reason
from training.data import data_root, from_home

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


# tensors of a checkpoint for classifying, and buffers, for which no backbone of mmseg has a place or a need
UNUSED = re.compile(r"(fc|head|head_dist|pre_logits\.fc|norm|ln1|head\..*)\.(weight|bias)|.*(\.|^)num_batches_tracked|"
                    r".*\.(attn_mask|relative_position_index)|patch_embed\.projection\.bias")  # fmt: skip
# tensors that may be missing: norms that segmentation adds behind Swin's stages, and buffers
ADDED = re.compile(r"norm[0-3]\.(weight|bias)|.*\.(num_batches_tracked|relative_position_index)")
RESIZED = re.compile(r"pos_embed|.*\.relative_position_bias_table")  # by mmseg, to the size of the training images


def _harmless() -> list[Any]:
    """Classes and functions that training codes' checkpoints hold beside weights: to call them runs no code of the
    file's. NumPy 1 called its modules otherwise."""
    made_by = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    named = [(f, f"numpy.{core}.multiarray.{f.__name__}") for f in made_by for core in ("core", "_core")]  # pyright: ignore
    kinds = {type(np.dtype(code)) for code in "?bhilqBHILQefdUS"}
    return [argparse.Namespace, PosixPath, np.ndarray, np.dtype, *kinds, *named]


@CheckpointLoader.register_scheme(prefixes=SCHEME)
def load_backbone(name: str, map_location: Any = None) -> Mapping[str, Tensor]:
    """The weights in the file `name`, after SCHEME: {name in mmseg: tensor}. Of a whole segmentor or classifier, the
    backbone's. UserError where the file holds no weights, or what could run code."""
    path = find_backbone(name.removeprefix(SCHEME))
    state = _read(path, map_location)
    for key in ("state_dict", "model"):
        state = state.get(key, state) if isinstance(state, Mapping) else state
    if not isinstance(state, Mapping) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"pretrained={path}: holds no weights by name; give the file of a backbone's state_dict")
    state = {str(key).removeprefix("module."): value for key, value in state.items()}
    inner = {key.removeprefix("backbone."): v for key, v in state.items() if key.startswith("backbone.")}
    state = inner or state
    timms = any(key.startswith("blocks.") for key in state)
    return {_name_in_mmseg(key): value for key, value in state.items()} if timms else state


def _read(path: Path, map_location: Any) -> Any:
    """What torch.load makes of a file nobody should trust; it raises nearly any error."""
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location, weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(
                f"pretrained={path}: holds {found[1]}, which may run code when it is read: keep its weights alone, "
                'where you trust its source, torch.save(torch.load(FILE, weights_only=False)["state_dict"], NEW)'
            ) from None
        raise UserError(f"pretrained={path}: cannot be read ({reason(error)}): fetch it again") from None


def _name_in_mmseg(key: str) -> str:
    for theirs, ours in TIMM_TO_MMSEG:
        key = re.sub(theirs, ours, key)
    return key


def find_backbone(name: str) -> Path:
    """The file, in CO2_DATA/backbones unless `name` is a full path; UserError where it is missing or another one."""
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
    """UserError where the checkpoint is of another network; mmengine would only warn."""
    found = load_backbone(name, "cpu")
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
