"""Image classification with timm models."""
