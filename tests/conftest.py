"""Shared by all tests: their order, and what several folders need."""

import pytest

from tests.scripts import Mistakes

FOLDERS = ("e2e", "training", "bench", "core", "domains")  # long files first: no worker is left alone with one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(FOLDERS)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))
    from core.testing import PRELOAD  # only where tests run: with -n, not in the process that hands them out

    PRELOAD.append("tests.preload")


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Mistakes:
    return Mistakes(monkeypatch, capfd)
