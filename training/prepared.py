"""Import this module before timm, transformers or mmseg. It lets torchvision import with a CPU build of torch."""

import importlib

import torch

_libraries: list[torch.library.Library] = []  # operators disappear with their Library


def prepare_torchvision() -> None:
    """Defines the operators without which PyPI's torchvision does not import with a CPU build of torch.

    PyPI's torchvision is a CUDA build and fails with "operator torchvision::nms does not exist". With the schemas of
    the missing operators, transforms, datasets and models work; nms itself, deform_conv2d and the image codecs still
    fail. Does nothing if torch has CUDA or ROCm, or if torchvision imports.
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
