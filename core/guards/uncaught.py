"""One line for a mistake or a failure that nobody catches."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from ..errors import OTHERS, CollectiveError, DivergedError, UserError, first_to_say


def _report(error: BaseException | None, at: TracebackType | None, otherwise: Callable[[], object], end: bool) -> None:
    """Prints an uncaught error of this package, with the last line outside of it and of installed packages.

    `end`: whether the process ends. Under our launchers its status is then 2 for a mistake, which restarts do not mend.
    """
    if not isinstance(error, UserError | CollectiveError | DivergedError) or "CO2_TRACEBACK" in os.environ:
        otherwise()
        return
    own = [frame for frame in traceback.extract_tb(at) if not frame.filename.startswith(OTHERS)]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    mistake = end and "CO2_LAUNCH" in os.environ and not isinstance(error, CollectiveError)
    if first_to_say(line := f"error: {' '.join(str(error).split())}{where}"):
        print(line, file=(mistake and sys.__stderr__) or sys.stderr, flush=True)  # torch's hook holds sys.stderr back
    if mistake:
        raise SystemExit(2)  # Python takes the status from its hook


_hook, _hook_of_threads = sys.excepthook, threading.excepthook
sys.excepthook = lambda kind, error, at: _report(error, at, lambda: _hook(kind, error, at), True)
threading.excepthook = lambda a: _report(a.exc_value, a.exc_traceback, lambda: _hook_of_threads(a), False)
