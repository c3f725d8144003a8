"""Image classification with timm models."""

from training.compat import prepare_torchvision

prepare_torchvision()  # before anything here imports timm
