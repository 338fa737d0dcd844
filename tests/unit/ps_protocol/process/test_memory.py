"""The garbage collector is off while a role imports, leaves those objects out afterwards, and then runs as before."""

import gc
from collections.abc import Iterator

import pytest

from ps_protocol.process.memory import importing_for_good


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_the_collector_is_off_during_imports_and_leaves_out_their_objects() -> None:
    gc.enable()
    with importing_for_good():
        assert not gc.isenabled()
        made: list[list[int]] = [[] for _ in range(1000)]
    assert gc.isenabled()
    collected = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in collected for one in made)
    assert any(one is later for later in [[made]] for one in gc.get_objects())


def test_collector_is_on_again_after_an_import_that_failed() -> None:
    gc.enable()
    with pytest.raises(ImportError), importing_for_good():
        raise ImportError
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with importing_for_good():
        pass
    assert not gc.isenabled()
