"""Import this module before mmseg. It fills mmseg's registries.

mmengine finds `mmseg::` in a config by the distribution's name, which is another name for onedl-mmsegmentation.
"""

import training.prepared  # noqa: F401

# isort: split
import contextlib
import io
import warnings

# mmcv and mmseg warn about compiled operators and a data service that nothing here uses.
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.filterwarnings("ignore", message="Fail to import", category=UserWarning)
    from mmengine.config.utils import MODULE2PACKAGE
    from mmseg.utils import register_all_modules

    register_all_modules()

MODULE2PACKAGE["mmseg"] = "mmseg"
