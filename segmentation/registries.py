"""Import this module before mmseg. It fills mmseg's registries.

No config of this project refers to another by `mmseg::`, because mmengine would then pip-install packages into the
running Python.
"""

import training.prepared  # noqa: F401

# isort: split
import contextlib
import io
import warnings

# mmcv and mmseg warn about compiled operators and a data service that nothing here uses.
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.filterwarnings("ignore", message="Fail to import", category=UserWarning)
    from mmseg.utils import register_all_modules

    register_all_modules()
