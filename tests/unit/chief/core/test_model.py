import pytest

from chief.core.cluster.model import ModelRegistry
from ps_protocol.errors import ModelMismatch, NotInitializer
from ps_protocol.roles.chief import ModelState
from tests.support.chief.chief_driver import MODEL, model_of


def test_the_first_worker_initialises_and_the_others_wait() -> None:
    registry = ModelRegistry(num_shards=2)
    assert registry.state is ModelState.ABSENT
    assert registry.join(0, 1, MODEL) is ModelState.INITIALIZE
    assert registry.join(1, 1, MODEL) is ModelState.WAIT
    assert registry.join(0, 1, MODEL) is ModelState.INITIALIZE, "a repeated call gets the same task"
    assert registry.attempt == 1
    assert registry.complete(0, 1, attempt=1)
    registry.make_ready()
    assert registry.join(1, 1, MODEL) is ModelState.READY


def test_both_workers_of_two_models_are_named_since_either_may_be_right() -> None:
    registry = ModelRegistry(num_shards=1)
    registry.join(3, 1, MODEL)
    difference = r"variables\['w'\].shape is \(4,\), the cluster's is \(3,\)"
    with pytest.raises(ModelMismatch, match=rf"your model .* which worker 3 presented: .*{difference}.*; if yours is, begin anew"):
        registry.join(1, 1, model_of(4))
    assert registry.model == MODEL


def test_after_the_initialiser_is_lost_the_next_worker_that_asks_gets_its_task() -> None:
    registry = ModelRegistry(num_shards=1)
    registry.join(0, 1, MODEL)
    assert not registry.release(1)
    assert registry.release(0)
    assert registry.join(1, 1, MODEL) is ModelState.INITIALIZE
    assert registry.attempt == 2
    with pytest.raises(NotInitializer, match=r"worker 1 has it \(attempt 2\)"):
        registry.complete(0, 1, attempt=1)
    assert not registry.is_ready


def test_completing_an_initialisation_twice_changes_nothing_and_another_attempt_is_refused() -> None:
    registry = ModelRegistry(num_shards=1)
    registry.join(0, 1, MODEL)
    assert registry.complete(0, 1, attempt=1)
    assert not registry.complete(0, 1, attempt=1)
    with pytest.raises(NotInitializer):
        registry.complete(0, 1, attempt=2)


def test_a_model_that_is_ready_is_not_initialised_again() -> None:
    registry = ModelRegistry(num_shards=1)
    registry.join(0, 1, MODEL)
    registry.complete(0, 1, attempt=1)
    assert not registry.release(0)
    registry.make_ready()
    assert registry.join(0, 2, MODEL) is ModelState.READY


def test_every_shard_has_a_layout_even_an_empty_one() -> None:
    registry = ModelRegistry(num_shards=3)
    registry.join(0, 1, MODEL)
    assert [len(layout.slices) for layout in registry.layouts] == [1, 0, 0]
