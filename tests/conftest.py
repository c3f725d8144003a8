"""Shared by all tests: their order, and what several folders need."""

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

from tests.scripts import Mistakes

# long files first: no worker is left alone with one
FOLDERS = ("e2e", "integrations", "training", "bench", "core", "domains")


gc.disable()  # while hundreds of modules are imported, none of which goes away


def pytest_collection_finish() -> None:
    """A test's own gc.collect() need not walk what all tests have imported, a second each time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    from core.testing import PRELOAD

    if {"e2e", "bench"} & {item.path.parent.name for item in items}:
        PRELOAD.append("vision.train")  # with timm and torchvision, a second's import for each rank
    if "test_parallel.py" in {item.path.name for item in items}:
        PRELOAD.append("tests.layouts")  # with transformers and torch's pipelines, seconds
    PRELOAD.append("tests.preload")


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
