"""Shared by all tests: their order, and what several folders need."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

import pytest
import torch

from core.testing import PRELOAD
from tests.scripts import Mistakes

# long files first: no worker is left alone with one
FOLDERS = ("e2e", "integrations", "training", "bench", "core", "domains")


gc.disable()  # until what all tests need is imported: hundreds of modules, none of which goes away


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """The server that forks the tests' ranks is this process, forked: it has imported what all of them need.

    A process that has asked CUDA for its devices cannot be forked: there the ranks have core.testing's own server. A
    test's own gc.collect() need not walk what is imported, a second each time.
    """
    forks = getattr(session, "items", ()) and not torch.cuda.is_available()  # no items: it only hands out tests
    for name in PRELOAD if forks else ():
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    if forks:
        resource_tracker.ensure_running()
        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # as in a test, for what ranks print
        _start_server()
        capture.suspend_global_capture()


@pytest.fixture(scope="module", autouse=True)
def preloaded(request: pytest.FixtureRequest) -> None:
    """A library of which only one file's ranks have need is imported by the process that runs this file, which is then
    forked anew."""
    if (names := getattr(request.module, "LIBRARY", ())) and not torch.cuda.is_available():
        for name in names:
            importlib.import_module(name)
        gc.freeze()
        forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
        _start_server()


def _start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork)
        forkserver.ensure_running()


def _fork(executable: bytes, arguments: list[str], files: list[int]) -> int:  # noqa: ARG001
    """As the function of multiprocessing's that starts a Python with a command."""
    if pid := os.fork():
        return pid
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in {int(name) for name in os.listdir("/dev/fd")} - {0, 1, 2, nowhere, *files}:
        with suppress(OSError):  # that of the listing itself
            os.fstat(file)
            os.dup2(nowhere, file)  # not closed: what pytest has buffered would go to who gets the number next
    try:
        exec(arguments[-1])
    finally:
        os._exit(1)


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Mistakes:
    return Mistakes(monkeypatch, capfd)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """A run in a test's own process installs its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
