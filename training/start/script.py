"""How a script reads its options, and how it ends. A user's mistake, a full disk or too little memory ends in one line,
without a traceback. A signal to any worker ends the run of all workers, which then save and can be resumed. A lost
output ends no run.
"""

import contextlib
import dataclasses
import errno
import functools
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from core import UserError
from core.errors import CollectiveError, DivergedError, first_to_say
from training.start.workers import rank, refuse, world_size

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # to stop
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
OF_MEMORY = re.compile("out of memory|alloc(ate memory|_failed)|bad_alloc|could not (create|execute) a primitive(?! d)")
OF_A_PATH = (errno.EACCES, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EPERM, errno.EEXIST)


def from_home(path: str | Path) -> Path:
    """Returns the path with ~ and ~user replaced by that home folder. A shell does so only at the start of a word."""
    found = os.path.expanduser(path)
    if (first := found.split(os.sep)[0]).startswith("~") and not os.path.lexists(first):
        raise UserError(f"{path}: {first} is no user here: give the whole path")
    return Path(found)


def _expanded(value: Any) -> Any:
    """Returns an option's value with from_home applied to paths."""
    if isinstance(value, tuple):
        return tuple(map(_expanded, value))
    return from_home(value) if isinstance(value, Path) and str(value).startswith("~") else value


def parse_options(kind: Callable[..., T], **how: Any) -> T:
    """Returns what tyro.cli makes of the command line, with from_home applied to paths.

    On other ranks than 0, --help prints nothing.

    Args:
        kind: A dataclass, or a function that does the work of the command and is called with its options.
        how: See tyro.cli.

    Raises:
        UserError: tyro's complaint in one line, in place of its box.
    """
    import tyro  # here, because a launcher does not need it

    @functools.wraps(kind)
    def later(*args: Any, **kwargs: Any) -> Any:
        return lambda: kind(*map(_expanded, args), **{name: _expanded(value) for name, value in kwargs.items()})

    asked: Any = kind if isinstance(kind, type) else later
    said, shown = io.StringIO(), sys.stdout if rank() == 0 else io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
            found = tyro.cli(asked, **how)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise UserError(_complaint(lambda: tyro.cli(asked, **how))) from None
    sys.stderr.write(said.getvalue())  # warnings
    if asked is not kind:
        return found()
    given = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}  # pyright: ignore[reportArgumentType]
    changed = {name: _expanded(value) for name, value in given.items() if _expanded(value) != value}
    return dataclasses.replace(found, **changed) if changed else found  # pyright: ignore[reportArgumentType]


def _complaint(refuse_options: Callable[[], object]) -> str:
    """Returns the words of the box that tyro prints."""
    columns, said = os.environ.get("COLUMNS", ""), io.StringIO()
    os.environ["COLUMNS"] = "9999"  # for a box that breaks no line
    plain = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # no terminal, so the frame is known and without colors
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(plain), contextlib.suppress(SystemExit):
        refuse_options()
    os.environ["COLUMNS"] = columns  # "": as wide as the terminal
    lines = [re.sub("^│ | *│$", "", line) for line in said.getvalue().splitlines() if line[:1] not in "╭╰"]
    first, *rest = re.split("\n─+\n", "\n".join(lines).partition("For full helptext")[0])
    words, near = " ".join(first.split()), re.findall("(?m)^ {4}(--[^ ,]+)", "\n".join(rest))
    if own := re.match("Error parsing [^-].*?: (.*)", words):  # of a dataclass, which tyro names
        return own[1]
    near = near if "nrecognized" in words else []
    return words + f"; did you mean {', '.join(near)}?" * bool(near) + " (--help lists the options)"


def launch(main: Callable[[], None]) -> None:
    """Runs a train script's main without tracebacks.

    A user's mistake or a full disk ends in one line and exit status 2, and Ctrl-C in exit status 130. Workers that wait
    for this one to start are informed. A run outlives its output. For other commands a full disk under the output is
    an error, and a reader that has gone, such as `| head`, is none.
    """
    guard_output()
    threading.excepthook = functools.partial(_of_a_thread, threading.excepthook)
    try:
        main()
        _check_output()
    except (UserError, DivergedError) as error:
        _fail(str(error))
    except CollectiveError as error:  # each worker prints its own error
        _fail(str(error), status=1)
    except UnicodeEncodeError as error:
        _fail(f"{error.object[:100]!r} has bytes that are not UTF-8: give another name")
    except (OSError, RuntimeError, MemoryError) as error:
        if line := _of_memory(error):
            _fail(line, status=1)
        if not isinstance(error, OSError) or error.errno not in OF_THE_DISK + OF_A_PATH:
            raise
        remedy = "make room or choose another --out" if error.errno in OF_THE_DISK else "give another file or folder"
        _fail(f"{error.filename or 'the run folder'}: {error.strerror}; {remedy}")
    except SystemExit as stop:
        if not stop.code:
            _check_output()
        raise
    except KeyboardInterrupt:
        sys.stderr.flush()
        os._exit(130)
    if StopSignal.interrupted and world_size() == 1:  # with several workers, their launcher gets the signal too
        sys.exit(130)


def _of_a_thread(before: Callable[[Any], Any], args: Any) -> None:
    """Silences TensorBoard's thread. Its error is raised again when the next line is written."""
    if type(args.thread).__name__ != "_AsyncWriterThread":
        before(args)


def _of_memory(error: Exception) -> str:
    """Returns a line with a remedy for an error that too little memory has caused, or "" for any other error."""
    first, *_, last = 2 * (str(error).strip().splitlines() or [type(error).__name__])
    if "shared memory" in last or "DataLoader worker" in last:  # torch puts a loading process's traceback before it
        remedy = "make /dev/shm larger (docker run --shm-size), or give --loader_workers 0"
        return f"the loading processes failed ({last.partition('. ')[0]}): {remedy}"
    lacks = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if lacks or OF_MEMORY.search(first.lower()):
        remedy = "give a smaller --batch_size, --accumulate or --recompute; --dry_run counts the memory of a step"
        return f"{first.partition('. GPU')[0]}: {remedy}"  # torch lists what is in use behind it
    return ""


def _fail(reason: str, status: int = 2) -> None:
    reason = " ".join(reason.split())  # a library's message, which this may quote, can have many lines
    if len(reason) > 600:
        reason = f"{reason[:300]} ... {reason[-300:]}"
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun reads the error there, in its own format
        more = {"py_callstack": f"error: {reason}", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError, ValueError):  # no launcher made that folder
            Path(path).write_text(json.dumps({"message": {"message": f"error: {reason}", "extraInfo": more}}))
    said = path and "CO2_LAUNCH" in os.environ  # training.launch prints it at its end
    if (not said or status != 2) and first_to_say(reason):
        print(f"error: {reason}", file=sys.stderr, flush=True)
    refuse(reason)
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: peers may be waiting in a collective that will never complete


class Output:
    """A standard stream that never raises. It replaces sys.stdout or sys.stderr, and keeps its first error.

    Args:
        name: stdout or stderr. A stream that was closed when Python started becomes /dev/null.

    Attributes:
        error: The first error, until it is reported.
    """

    def __init__(self, name: str):
        self.name = {"stdout": "standard output", "stderr": "standard error"}[name]
        self.error: Exception | None = None
        self._stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream of another kind, or one that is lost
            self._stream.reconfigure(errors="backslashreplace")  # for a locale that lacks a letter
        self._lost = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[[], object]) -> None:
        """Tries each time, because a disk can have room again."""
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if not self._lost:
                self._lost, self.error = True, error


def guard_output() -> None:
    """Lets no write to a standard stream raise from now on, and gives closed ones to /dev/null.

    Otherwise the run's next file would get the number of a closed stream, and libraries would print into that file.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), Output):
            setattr(sys, name, Output(name))


def lost_output() -> list[str]:
    """Returns a text for each standard stream that has failed, once."""
    lost = []
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Output) and stream.error is not None:
            reason = getattr(stream.error, "strerror", None) or stream.error
            lost.append(f"{stream.name} is lost ({reason}): the run goes on without it")
            stream.error = None
    return lost


def _check_output() -> None:
    """Ends a command that could not print, unless it was a run, which has reported that, or nobody reads any more."""
    sys.stdout.flush()
    error = getattr(sys.stdout, "error", None)
    if error is not None and not isinstance(error, BrokenPipeError):
        _fail(f"standard output: {getattr(error, 'strerror', None) or error}; make room or print to another file")


class StopSignal:
    """Whether a signal has asked to end the run.

    Attributes:
        number: The signal that this worker got, 0 for none.
        interrupted: Whether Ctrl-C has ended this process's run.
    """

    interrupted = False

    def __init__(self) -> None:
        self.number = 0
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Handles the signals from now on."""
        StopSignal.interrupted = False
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def ignore(self) -> None:
        """Restores the handlers, unless a signal has come. A second signal must not change the exit status."""
        if not self.number:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        """Ends the run at one of the next boundaries. A second signal, over 2 s later, ends it at once."""
        now = time.monotonic()
        if self.number and now - self._asked_at > 2:  # torchrun and the terminal each send one signal
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._asked_at = number, now
            StopSignal.interrupted = number == signal.SIGINT
