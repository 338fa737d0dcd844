"""Tests with real engines, which `make test-engines ENGINE=…` runs."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """They need root and programs that are not Python's. Asked of the tests in this folder only."""
    item.add_marker("engine")
