"""Semantic segmentation: UPerNet from mmsegmentation on ADE20K, CamVid, or digits pasted on photographs.

Importing the package fills mmseg's registries. No config of this project refers to another by `mmseg::`, which would
make mmengine pip-install packages into the running Python: configs are dictionaries made in Python.
"""

import contextlib
import io
import warnings

from training.compat import prepare_torchvision

prepare_torchvision()
# mmcv and mmseg tell of compiled operators and a data service that nothing here uses.
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.filterwarnings("ignore", message="Fail to import", category=UserWarning)
    from mmseg.utils import register_all_modules

    register_all_modules()
