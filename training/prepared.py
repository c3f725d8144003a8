"""Imported for its effect, before timm, transformers or mmseg: makes the torchvision that they import importable.

Modules do so, not packages: a train script's --help needs none of them, nor the seconds that they take.
"""

from training.compat import prepare_torchvision

prepare_torchvision()
