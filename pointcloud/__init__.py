"""Point clouds: autoencoders that reconstruct 3-D shapes (the ShapeNet task of CO2, arXiv 2401.16265)."""

from training import require

require("tasks", "timm", "matplotlib")
