"""Semantic segmentation: UPerNet from mmsegmentation on ADE20K, CamVid, or digits pasted on photographs."""

from training import refuse_both, require

refuse_both({"mmcv": "onedl-mmcv", "mmengine": "onedl-mmengine", "mmsegmentation": "onedl-mmsegmentation"})
require("segmentation", "mmengine", "mmcv", "mmseg")
