"""Storage of checkpoints that cannot be read when it is needed: it is said, and tried again until it can be."""

from chief.core import messages
from ps_protocol.roles.chief import ClusterState
from tests.core.recovery_driver import RecoveryDriver

BROKEN = "cannot list /ckpt: Input/output error"


def saved() -> RecoveryDriver:
    driver = RecoveryDriver(total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    driver.send(messages.SaveCheckpoint(call=None, request_id=1, max_wait_s=0.0))
    return driver


def test_a_chief_that_starts_waits_for_storage_and_goes_on_from_what_is_there() -> None:
    again = RecoveryDriver(total_num_replicas=1, storage=saved().storage, begin=False)
    again.unreadable = BROKEN
    again.begin()
    assert again.coordinator.state is ClusterState.RECOVERING
    assert f"{BROKEN}; it is tried again" in again.coordinator.explain(again.now)
    again.pass_time(60.0)
    assert again.coordinator.state is ClusterState.RECOVERING
    assert len([note for note in again.notes if BROKEN in note.text]) < 10, "said, but not for ever"
    again.unreadable = ""
    again.pass_time(10.0)
    assert (again.coordinator.state, again.step) == (ClusterState.TRAINING, 1)


def test_a_rollback_waits_for_storage_that_cannot_be_read_and_loses_nothing_by_it() -> None:
    driver = saved()
    driver.unreadable = BROKEN
    driver.restart(0)
    driver.pass_time(20.0)
    assert driver.coordinator.state is ClusterState.RECOVERING
    driver.unreadable = ""
    driver.pass_time(10.0)
    assert (driver.coordinator.state, driver.step) == (ClusterState.TRAINING, 1)


def test_servers_that_cannot_read_a_checkpoint_for_now_are_given_the_same_one_again() -> None:
    driver = saved()
    driver.is_manual = True
    driver.restart(0)
    driver.do(driver.orders.pop(0))  # found
    driver.unreadable, driver.is_manual = BROKEN, False
    driver.work_off()
    assert BROKEN in driver.coordinator.explain(driver.now)
    driver.unreadable = ""
    driver.pass_time(2.0)
    assert (driver.coordinator.state, driver.step) == (ClusterState.TRAINING, 1)


def test_training_that_is_ended_meanwhile_is_not_brought_back_any_more() -> None:
    driver = saved()
    driver.unreadable = BROKEN
    driver.restart(0)
    driver.send(messages.FinishTraining(call=None, reason="enough"))
    driver.unreadable = ""
    driver.pass_time(20.0)
    assert driver.coordinator.state is ClusterState.FINISHED
