"""Arrays from files that nobody should trust, and names of such files that are shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from core.checkpoints.untrusted import reason


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Arrays of an .npz file; ValueError, of one line, where it is none or lacks one of them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [np.asarray(file[name]) for name in names]
    except Exception as error:  # zipfile, zlib and NumPy raise nearly any
        raise ValueError(reason(error)) from None


def printable(text: str) -> str:
    """The text in one line of what a terminal shows: of a file's name or content, each other character as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
