"""Which tests of benchmarks `make test` leaves out."""

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` runs those marked `quick`, `make test-benchmarks` all. Asked of the tests in this folder only."""
    if item.get_closest_marker("quick") is None:
        item.add_marker("benchmark")
