"""What a wait is explained with: the conditions by which training stands (`test_conditions` has them), the step, who was seen when."""

from chief.core import messages as ev
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import FinishTrainingRequest
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.chief_driver import Driver, Worker


def words(driver: Driver) -> str:
    return driver.coordinator.cluster.explain(driver.now)


def test_the_missing_worker_is_named_with_its_last_sign_of_life_what_to_do_and_the_commands() -> None:
    driver = Driver(total_num_replicas=2, lease_s=10.0)
    driver.coordinator.cluster.address = "unix:/tmp/a b/chief.sock"
    first, _ = driver.train(0, 1)
    first.push()
    driver.pass_time(6.0)
    first.ask()
    driver.pass_time(5.1)
    assert words(driver) == (
        "Waiting 11 s for worker 1 (lease ended). See whether its process is stopped (on host-b pid 912) or has ended: let it go on,"
        " or start another in its place; kill -CONT 912 || LOCKSTEP_WORKER_INDEX=1 LOCKSTEP_CHIEF='unix:/tmp/a b/chief.sock' PROGRAM;"
        " step 0 has 1 of 2 contributions; last seen: worker 1 11.1 s ago on host-b pid 912"
    )
    assert driver.coordinator.status(driver.now).waiting_for == words(driver)


def test_the_reason_says_that_a_waiting_worker_has_not_pushed_yet_however_young_the_step_is() -> None:
    driver = Driver(total_num_replicas=1, lease_s=1e9)
    (worker,) = driver.train(0)
    for max_wait_s in (0.0, 2.0):
        call = worker.ask(max_wait_s=max_wait_s)
        driver.pass_time(max_wait_s)
        assert worker.answer(call).waiting_for == (
            "Worker 0 waits for a token without pushing. Step 0 needs their contributions first: the program must push before it asks for"
            " the next token; step 0 has 0 of 1 contributions"
        )


def test_a_token_that_nobody_has_taken_is_mentioned() -> None:
    driver = Driver(replicas_to_aggregate=2, total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    assert words(driver) == "step 0 has 1 of 2 contributions; 1 token of it can be had by any worker that asks"
    worker.ask()
    assert "last seen: worker 0 0.0 s ago on host-b pid 912" in words(driver)


def test_lost_workers_are_named_first_and_only_the_number_of_further_ones_is_given() -> None:
    driver = Driver(total_num_replicas=1000, lease_s=10.0)
    workers = driver.train(*range(900))
    workers[500].leave(failure="boom")
    text = words(driver)
    assert text.startswith("Waiting 0 s for worker 500 (program failed). It said: Boom.")
    assert "last seen: worker 500" in text and "and 895 more" in text
    assert len(text) < 800


def test_without_a_model_the_reason_names_the_worker_that_initialises_it() -> None:
    driver = Driver()
    assert words(driver) == "Waiting 0 s for the first worker. Start one"
    worker = Worker(driver)
    assert words(driver).startswith("Waiting 0 s for a model (1 worker joined)")
    driver.ask_model(worker)
    assert words(driver) == "Worker 0 is initialising the model. Training begins as soon as it has"
    driver.send(ev.ShardSeen(shard=0, process_incarnation=7, report=ShardReport(created_bytes=6)))
    assert words(driver) == "Worker 0 is initialising the model (9 %). Ps 0 receives its first values: 9 %"
    worker.leave(failure="boom")
    assert words(driver) == "Waiting 0 s for a worker. Start one"


def test_while_a_shard_is_unreachable_it_is_the_cause_and_no_live_worker_is_blamed() -> None:
    driver = Driver(num_shards=2, total_num_replicas=2)
    first, _ = driver.train(0, 1)
    first.push()
    driver.send(ev.ShardUnreachable(shard=1, why="connection refused"))
    driver.pass_time(4.0)
    assert words(driver) == (
        "Waiting 4 s for ps 1 (connection refused). Its variables are lost, and there are no checkpoints: start the cluster again,"
        " with --checkpoint-dir DIR. (ps 1: host-p:5001); step 0 has 1 of 2 contributions"
    )
    driver.send(ev.ShardSeen(shard=1, process_incarnation=7))
    assert "last seen: worker 1 4.0 s ago" in words(driver)


def test_a_change_of_policy_that_waits_for_a_stopped_server_is_reported_as_such() -> None:
    driver = Driver(num_shards=2, total_num_replicas=2, applies_at_once=False)
    driver.train(0)
    driver.set_policy(PolicySpec(name=PolicyName.ASYNC))
    assert words(driver) == "Waiting 0 s for the servers' new settings"
    driver.send(ev.ShardUnreachable(shard=1, why="no answer"))
    driver.pass_time(4.0)
    assert words(driver).startswith("Waiting 4 s for ps 1 (no answer). See whether its process is stopped")


def test_after_the_end_the_reason_names_the_workers_that_have_not_left() -> None:
    driver = Driver()
    driver.train(0, 1)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    assert words(driver) == "Training is finished at step 0. Enough. Waiting for worker 0, worker 1 to leave"
    assert driver.coordinator.status(driver.now).waiting_for == words(driver)


def test_a_cluster_that_makes_progress_reports_no_wait() -> None:
    driver = Driver(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    first.push()
    assert driver.coordinator.status(driver.now).waiting_for == ""
    driver.pass_time(1.5)
    assert "for worker 1" in driver.coordinator.status(driver.now).waiting_for
