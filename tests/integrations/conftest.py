"""Ranks that have imported what a test module names in MODULES, for all of its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(*request.module.MODULES) as ranks:
        yield ranks
