"""Shared by all tests: their order, and what several folders need."""

import pytest

from tests.scripts import Mistakes

LONGEST_FIRST = ("e2e", "training", "bench", "core", "domains")  # so that no worker is left alone with a long file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.parent.name))


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Mistakes:
    return Mistakes(monkeypatch, capfd)
