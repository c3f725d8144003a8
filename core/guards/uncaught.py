"""One line for a user's mistake that nobody catches."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from ..errors import OTHERS, UserError


def _report(error: BaseException | None, at: TracebackType | None, otherwise: Callable[[], object]) -> None:
    """Prints an uncaught UserError, with the last line outside of this package and of installed ones."""
    if not isinstance(error, UserError) or "CO2_TRACEBACK" in os.environ:
        otherwise()
        return
    own = [frame for frame in traceback.extract_tb(at) if not frame.filename.startswith(OTHERS)]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    print(f"error: {' '.join(str(error).split())}{where}", file=sys.stderr)


_hook, _hook_of_threads = sys.excepthook, threading.excepthook
sys.excepthook = lambda kind, error, at: _report(error, at, lambda: _hook(kind, error, at))
threading.excepthook = lambda args: _report(args.exc_value, args.exc_traceback, lambda: _hook_of_threads(args))
