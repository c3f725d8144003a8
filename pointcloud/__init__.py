"""Point clouds: autoencoders that reconstruct 3-D shapes (the ShapeNet task of CO2, arXiv 2401.16265)."""

from training.compat import prepare_torchvision

prepare_torchvision()  # before anything here imports timm
