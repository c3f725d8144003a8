"""The errors that users get, and checks of settings that raise them."""

import hashlib
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

_installed = [sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")]
# how names of files begin that are not the user's: files of this package and of installed ones, and code without a file
OTHERS = ("<", *(os.path.join(folder, "") for folder in (str(Path(__file__).parent), *_installed)))
log = logging.getLogger("co2_training")  # choices and repairs, at level INFO on the rank that reports


class UserError(ValueError):
    """A user's mistake, in one line that names the value and the remedy.

    Where nobody catches it, or one of the other two errors, Python prints it without a traceback, with the line of the
    user's script. The exit status is 1. It is 2 from the train scripts, and for a mistake under our launchers. With
    CO2_TRACEBACK in the environment, Python prints the traceback.
    """


class CollectiveError(RuntimeError):
    """A collective failed. The message names this rank, the round, and the ranks that did not answer."""


class DivergedError(RuntimeError):
    """Training cannot continue: the parameters are not finite, or a worker is excluded in too many rounds in a row."""


def first_to_say(text: str) -> bool:
    """Returns whether no other worker of this torchrun has printed this text. Marks are files in its error folder."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    mark = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:24]
    try:  # the folder is of one attempt of one launch
        os.close(os.open(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / mark, os.O_CREAT | os.O_EXCL))
    except (KeyError, OSError) as error:
        return not isinstance(error, FileExistsError)
    return True


def warn(text: str) -> None:
    """Warns at the user's line that has led here, outside of this package and of installed ones, on one worker."""
    if not first_to_say(text):
        return
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(OTHERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


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


def shown(name: str, value: Any) -> str:
    """Returns an argument for a message: with its value, or with the class of an object, whose text may be long."""
    plain = value is None or isinstance(value, str | int | float | tuple)
    return f"{name}={value!r}" if plain else f"{name}=<{type(value).__name__}>"


def require(settings: Any, ok: bool, name: str, remedy: str) -> None:
    """Raises UserError with a setting's value and the remedy, unless it is ok."""
    if not ok:
        raise UserError(f"{shown(name, getattr(settings, name))}: {remedy}")
