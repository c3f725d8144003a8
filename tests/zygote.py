"""Runs scripts by the hundred, each in a process forked from one that has imported what they need.

`python -m tests.zygote FILE MODULE...` imports the modules, then reads a request a line, as JSON, and answers with a
line to the open file of that number: a library may print on the standard ones, as onedl-mmengine does when imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEMORY = 24 << 30  # bytes of address space: what asks for more gets a MemoryError, and the machine stays whole


@dataclass(frozen=True)
class Outcome:
    """How a script ended. status: its exit status, negative for a signal; hung: it was killed after its time."""

    status: int
    hung: bool
    seconds: float
    out: str
    err: str


class Zygote:
    """The process that forks; use it as a context manager, from one thread."""

    def __init__(self, modules: Sequence[str]):
        answers, child_end = os.pipe()
        command = [sys.executable, "-m", "tests.zygote", str(child_end), *modules]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=2, pass_fds=[child_end], text=True
        )
        os.close(child_end)
        self._answers = os.fdopen(answers)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._answers.close()

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        seconds: float,
        file_limit: int,
    ) -> Outcome:
        """As `python -m module arguments` in `folder`; file_limit: bytes that a file may have, 0 for any number."""
        request = dict(module=module, arguments=[*arguments], env={**env}, folder=str(folder), file_limit=file_limit)
        assert self._process.stdin
        print(json.dumps(request | {"seconds": seconds}), file=self._process.stdin, flush=True)
        answer = self._answers.readline()
        assert answer, f"the process that forks has ended: status {self._process.wait()}"
        return Outcome(**json.loads(answer))


def serve(file: int, modules: Sequence[str]) -> None:
    os.set_inheritable(file, False)
    for name in modules:
        importlib.import_module(name)
    with os.fdopen(file, "w") as answers:
        for line in sys.stdin:
            print(json.dumps(vars(_fork(json.loads(line)))), file=answers, flush=True)


def _fork(request: dict[str, Any]) -> Outcome:
    started = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _become(request, out.fileno(), err.fileno())
        hung, status = False, None
        while status is None:
            ended, how = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(how)
            elif not hung and time.monotonic() - started > request["seconds"]:
                hung = True
                os.killpg(child, signal.SIGKILL)
            else:
                time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left behind
        out.seek(0), err.seek(0)
        texts = (file.read().decode(errors="replace") for file in (out, err))
        return Outcome(status, hung, time.monotonic() - started, *texts)


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """Runs the script in this process, and ends it."""
    from tests.scripts import run_script

    status = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1), os.dup2(err, 2)
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if request["file_limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"],) * 2)
        run_script(request["module"], *request["arguments"])
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
