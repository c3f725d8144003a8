"""Refuses arguments that do not fit a call, in one line with the names of its arguments."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

from ..errors import UserError, shown

Kind = TypeVar("Kind", bound=type)


def refuse_unknown(owner: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises UserError for a keyword that the owner of these arguments does not know."""
    for name in [name for name in given if name not in known]:
        near = "".join(f" (did you mean {each}?)" for each in difflib.get_close_matches(name, known, 1))
        what = f"it has no argument {shown(name, given[name])}{near}"
        raise UserError(f"{owner}: {what}; its arguments are {', '.join(known)}")


def checked(kind: Kind, *methods: str) -> Kind:
    """Decorates a class: arguments that fit neither its constructor nor its class methods `methods` are a UserError."""
    for name in ("__init__", *methods):
        own = vars(kind)[name]
        wrapped = _checked(getattr(own, "__func__", own))
        setattr(kind, name, classmethod(wrapped) if isinstance(own, classmethod) else wrapped)
    return kind


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with a check of its arguments. `**args` stands for the keywords of its TypedDict."""
    signature = inspect.signature(function)
    *named, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        more = get_args(get_type_hints(function)[last.name])[0].__annotations__
        named += [inspect.Parameter(name, last.KEYWORD_ONLY, default=None) for name in more]
        signature = signature.replace(parameters=named)
    known = [*signature.parameters][1:]  # without self

    @functools.wraps(function)
    def checking(*args: Any, **given: Any) -> Any:
        name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
        refuse_unknown(name, given, known)
        try:
            signature.bind(*args, **given)
        except TypeError as error:  # too few, or too many without a name
            raise UserError(f"{name}: {error}; its arguments are {', '.join(known)}") from None
        return function(*args, **given)

    return checking
