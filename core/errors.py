"""The errors that users get, and checks of settings that raise them."""

import difflib
import functools
import hashlib
import inspect
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

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


def refuse_unknown(owner: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises UserError for a keyword that the owner of these arguments does not know."""
    for name in [name for name in given if name not in known]:
        near = "".join(f" (did you mean {each}?)" for each in difflib.get_close_matches(name, known, 1))
        what = f"it has no argument {shown(name, given[name])}{near}"
        raise UserError(f"{owner}: {what}; its arguments are {', '.join(known)}")


Call = TypeVar("Call", bound=Callable[..., Any])


def checked(call: Call) -> Call:
    """Decorates a function, a constructor or a dataclass. Arguments that do not fit it are then a UserError.

    The keywords of its `**args` are those of the TypedDict in their annotation.
    """
    target: Any = call
    function = target.__init__ if isinstance(call, type) else target
    signature = inspect.signature(function)
    *named, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        more = get_args(get_type_hints(function)[last.name])[0].__annotations__
        named += [inspect.Parameter(name, last.KEYWORD_ONLY, default=None) for name in more]
        signature = signature.replace(parameters=named)
    known = [name for name in signature.parameters if name not in ("self", "cls")]

    @functools.wraps(function)
    def checking(*args: Any, **given: Any) -> Any:
        name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
        refuse_unknown(name, given, known)
        try:
            signature.bind(*args, **given)
        except TypeError as error:  # too few, or too many without a name
            raise UserError(f"{name}: {error}; its arguments are {', '.join(known)}") from None
        return function(*args, **given)

    if not isinstance(call, type):
        return checking  # pyright: ignore[reportReturnType]
    target.__init__ = checking
    return target
