"""Train scripts started inside the test's own process, which has imported what they need."""

import os
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core import UserError
from core.testing import _context


def run_script(module: str, *arguments: str) -> None:
    """As `python -m module arguments`: what stands under `if __name__ == "__main__"` runs too."""
    before, sys.argv = sys.argv, [module, *arguments]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def run_on_worker(rank: int, world_size: int, module: str, *arguments: str) -> None:
    """The same on one of the workers of run_distributed."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    run_script(module, *arguments)


def fork_script(said: Path, module: str, *arguments: str, **env: str) -> Any:
    """As `python -m module arguments`, in a process forked from one that has imported torch: it has a pid, is_alive(),
    join() and exitcode. What it says goes to the file `said`."""
    process = _context().Process(target=_in_file, args=(said, env, module, *arguments), daemon=True)
    process.start()
    return process


def _in_file(said: Path, env: dict[str, str], module: str, *arguments: str) -> None:
    os.environ |= env
    with said.open("w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    run_script(module, *arguments)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 600.0) -> None:
    """Returns once it has become true; where the process has ended, or takes longer, fails with what it has said."""
    until = time.monotonic() + seconds
    while not true():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            pytest.fail(process.communicate()[0])
        time.sleep(0.05)


@contextmanager
def refused(part: str) -> Iterator[None]:
    """Inside, a user's mistake is to be told in one line that has this part."""
    with pytest.raises(UserError) as caught:
        yield
    assert part in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


class Mistakes:
    """What a script says on stderr about a user's mistake, after which it must exit with status 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
        monkeypatch.setattr(os, "_exit", sys.exit)
        self.capfd: Any = capfd

    def __call__(self, module: str, *arguments: str) -> str:
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_script(module, *arguments)
        assert ended.value.code == 2
        return self.capfd.readouterr().err
