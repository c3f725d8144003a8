"""Image classification with timm models."""

from training import require

require("tasks", "torchvision", "timm", "matplotlib", "sklearn")
