"""Shared by all tests: their order, and what several folders need."""

import pytest

from tests.scripts import Mistakes

# long files first: no worker is left alone with one
FOLDERS = ("e2e", "integrations", "training", "bench", "core", "domains")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    from core.testing import PRELOAD  # only where tests run: with -n, not in the process that hands them out

    if {"e2e", "bench"} & {item.path.parent.name for item in items}:
        PRELOAD.append("vision.train")  # with timm and torchvision, a second's import for each rank
    if "test_parallel.py" in {item.path.name for item in items}:
        PRELOAD.append("tests.layouts")  # with transformers and torch's pipelines, seconds
    PRELOAD.append("tests.preload")


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Mistakes:
    return Mistakes(monkeypatch, capfd)
