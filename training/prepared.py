"""Imported for its effect, before timm, transformers or mmseg: makes the torchvision that they import importable,
also beside a CPU build of torch.

Modules do so, not packages: a train script's --help needs none of them, nor the seconds that they take.
"""

import importlib

import torch

# A Library's operators disappear with it, so the reference is kept for the life of the process.
_libraries: list[torch.library.Library] = []


def prepare_torchvision() -> None:
    """PyPI's torchvision is a CUDA build. Beside a CPU build of torch its extension does not load, and the
    import stops with "operator torchvision::nms does not exist". Declaring the missing operators' schemas
    is enough for transforms, datasets and models; nms itself, deform_conv2d and the image codecs still fail.

    Does nothing where torch has CUDA or ROCm, or where torchvision imports; calling it again does no harm.
    """
    if torch.version.cuda or torch.version.hip:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


prepare_torchvision()
