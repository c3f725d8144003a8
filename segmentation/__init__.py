"""Semantic segmentation: UPerNet from mmsegmentation on ADE20K, CamVid, or digits pasted on photographs."""

from training import require

require("segmentation", "mmengine", "mmcv", "mmseg")
