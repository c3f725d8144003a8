"""A library's error, of whatever class, as one line with a remedy."""

import contextlib
from collections.abc import Iterator

from core.checkpoint.stored import reason
from core.errors import UserError


@contextlib.contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turns an error in the block into a UserError, `WHAT (the error): REMEDY`.

    A UserError passes as it is, and so does a lack of memory, which is no fault of what is read.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{what} ({reason(error)}): {remedy}") from None
