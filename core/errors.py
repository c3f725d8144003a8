"""The errors that users get, and checks of settings that raise them."""

import logging
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from types import TracebackType
from typing import Any

log = logging.getLogger("co2_training")  # choices and repairs, at level INFO on the rank that reports


class UserError(ValueError):
    """A user's mistake, in one line that names the value and the remedy.

    Where nobody catches it, Python prints it without a traceback, with the line of the user's script. The exit status
    is 1, and 2 from the train scripts. With CO2_TRACEBACK in the environment, Python prints the traceback.
    """


def _report(error: BaseException | None, at: TracebackType | None, otherwise: Callable[[], object]) -> None:
    """Prints an uncaught UserError, with the last line outside of this package and of installed ones."""
    if not isinstance(error, UserError) or "CO2_TRACEBACK" in os.environ:
        otherwise()
        return
    paths = sysconfig.get_paths()
    others = (os.path.dirname(__file__), *(paths[key] for key in ("stdlib", "purelib", "platlib")))
    others = ("<", *(os.path.join(folder, "") for folder in others))
    own = [frame for frame in traceback.extract_tb(at) if not frame.filename.startswith(others)]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    print(f"error: {' '.join(str(error).split())}{where}", file=sys.stderr)


_hook, _hook_of_threads = sys.excepthook, threading.excepthook
sys.excepthook = lambda kind, error, at: _report(error, at, lambda: _hook(kind, error, at))
threading.excepthook = lambda args: _report(args.exc_value, args.exc_traceback, lambda: _hook_of_threads(args))


class CollectiveError(RuntimeError):
    """A collective failed. The message names this rank, the round, and the ranks that did not answer."""


class DivergedError(RuntimeError):
    """Training cannot continue: the parameters are not finite, or a worker is excluded in too many rounds in a row."""


def is_number(value: Any) -> bool:
    """Returns whether value is a real number. Text and booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Returns whether value is an integer above 0, such as a number of local steps."""
    return isinstance(value, int) and is_number(value) and value >= 1


def env_number(
    name: str, default: int, env: Mapping[str, str] = os.environ, *, least: int = 0, most: int = 10**9
) -> int:
    """Returns the whole number in an environment variable, or `default` if it is not set.

    Raises:
        UserError: If the variable holds anything but a whole number from `least` to `most`.
    """
    given = env.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 11 and least <= int(given) <= most):
        raise UserError(f"{name}={given[:40]!r} in the environment: set a whole number, {least} to {most}, or unset it")
    return int(given)


def require(settings: Any, ok: bool, name: str, remedy: str) -> None:
    """Raises UserError with a setting's value and the remedy, unless it is ok."""
    if not ok:
        raise UserError(f"{name}={getattr(settings, name)!r}: {remedy}")
