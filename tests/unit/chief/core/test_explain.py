import re

from chief.core import messages as ev
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import ClusterState, FinishTrainingRequest
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.chief_driver import Driver, Worker


def words(driver: Driver) -> str:
    return driver.coordinator.explain(driver.now)


def test_the_missing_worker_is_named_with_its_last_sign_of_life_and_what_to_do() -> None:
    driver = Driver(total_num_replicas=2, lease_s=10.0)
    first, _ = driver.train(0, 1)
    driver.pass_time(3.1)
    first.push()
    assert words(driver) == (
        "step 0 has 1 of 2 contributions; missing: worker 1 (last seen 3.1 s ago on host-b pid 912, lease ends in 6.9 s);"
        " if it does not come back, look at pid 912 on host-b (stopped? kill -CONT 912),"
        " or start another in its place once its process or its lease has ended"
    )
    driver.coordinator.cluster.address = "host-c:5000"
    assert words(driver).endswith("has ended: LOCKSTEP_WORKER_INDEX=1 LOCKSTEP_CHIEF=host-c:5000 PROGRAM")


def test_a_change_of_policy_that_waits_for_a_stopped_server_is_reported_as_such() -> None:
    driver = Driver(num_shards=2, total_num_replicas=2, applies_at_once=False)
    driver.train(0)
    driver.set_policy(PolicySpec(name=PolicyName.ASYNC))
    assert words(driver) == "new settings are on their way to the parameter servers"
    driver.send(ev.ShardUnreachable(shard=1, why="no answer"))
    driver.pass_time(4.0)
    assert words(driver) == (
        "ps 1 at host-p:5001 has not answered for 4.0 s (no answer); if it is gone its variables are lost and the cluster must be started"
        " again; new settings are on their way to the parameter servers"
    )
    assert driver.coordinator.status(driver.now).waiting_for == words(driver)


def test_a_lapsed_worker_is_named_with_the_end_of_its_lease() -> None:
    driver = Driver(total_num_replicas=2, lease_s=10.0)
    first, _ = driver.train(0, 1)
    driver.pass_time(6.0)
    first.push()
    driver.pass_time(6.0)
    assert (
        "missing: worker 1 (last seen 12.0 s ago on host-b pid 912, lease ended 2.0 s ago);"
        " look at pid 912 on host-b (stopped? kill -CONT 912), or start another in its place"
    ) in words(driver)


def test_with_a_known_address_of_the_chief_the_reason_has_the_command_that_starts_a_worker() -> None:
    driver = Driver(total_num_replicas=3, lease_s=10.0)
    driver.coordinator.cluster.address = "unix:/tmp/a b/chief.sock"
    first, second = driver.train(0, 1)
    first.push()
    assert words(driver).endswith("start the missing workers: LOCKSTEP_CHIEF='unix:/tmp/a b/chief.sock' PROGRAM")
    second.leave(failure="boom")
    assert words(driver).endswith("; start another in its place: LOCKSTEP_CHIEF='unix:/tmp/a b/chief.sock' PROGRAM")


def test_none_of_several_silent_workers_is_reported_lost() -> None:
    driver = Driver(total_num_replicas=3, lease_s=10.0)
    first, *_ = driver.train(0, 1, 2)
    first.push()
    look = "look at their processes (stopped? kill -CONT PID), or"
    assert words(driver).endswith(f"; if they do not come back, {look} start others in their place once their leases have ended")
    driver.pass_time(6.0)
    first.ask()
    driver.pass_time(6.0)
    assert words(driver).endswith(f"; {look} start others in their place")


def test_where_any_number_may_join_another_is_started_at_once() -> None:
    driver = Driver(replicas_to_aggregate=2, lease_s=10.0)
    first, _ = driver.train(0, 1)
    driver.pass_time(3.0)
    first.push()
    assert words(driver).endswith("(stopped? kill -CONT 912), or start another in its place")


def test_a_failed_worker_is_named_with_its_failure() -> None:
    driver = Driver(total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    second.leave(failure="ValueError: bad batch")
    assert "worker 1 (failed 0.0 s ago: ValueError: bad batch; on host-b pid 912)" in words(driver)


def test_with_any_number_of_workers_the_reason_says_how_many_more_are_needed() -> None:
    driver = Driver(replicas_to_aggregate=3)
    (first,) = driver.train(0)
    first.push()
    assert words(driver) == "step 0 has 1 of 3 contributions; 2 more worker(s) needed than are live: start them"


def test_the_reason_says_that_a_waiting_worker_has_not_pushed_yet() -> None:
    driver = Driver(total_num_replicas=1, lease_s=1e9)
    (worker,) = driver.train(0)
    for max_wait_s in (0.0, 2.0):
        call = worker.ask(max_wait_s=max_wait_s)
        driver.pass_time(max_wait_s)
        assert worker.answer(call).waiting_for == (
            "step 0 has 0 of 1 contributions; worker 0 waits for a token but has not pushed for step 0; it must push first"
        )


def test_the_reason_tells_workers_that_must_push_first_from_workers_that_compute() -> None:
    driver = Driver(total_num_replicas=4, lease_s=10.0)
    workers = driver.train(0, 1, 2)
    for worker in workers[:2]:
        worker.ask()
    text = words(driver)
    assert "worker 0, worker 1 wait for a token but have not pushed for step 0; they must push first; missing: worker 3 (not" in text
    assert text.endswith("worker 2 (last seen 0.0 s ago on host-b pid 912, lease ends in 10.0 s); start the missing workers")


def test_a_lease_that_does_not_end_is_not_mentioned() -> None:
    driver = Driver(total_num_replicas=2, lease_s=1e9)
    first, _ = driver.train(0, 1)
    first.push()
    assert "missing: worker 1 (last seen 0.0 s ago on host-b pid 912);" in words(driver)


def test_a_token_that_nobody_has_taken_is_mentioned() -> None:
    driver = Driver(replicas_to_aggregate=2, total_num_replicas=1)
    (worker,) = driver.train(0)
    worker.push()
    assert words(driver) == "step 0 has 1 of 2 contributions; 1 more token(s) of it are free for any worker that asks"
    worker.ask()
    assert "worker 0 (last seen 0.0 s ago on host-b pid 912, lease ends in 10.0 s, has a token for one more contribution)" in words(driver)


def test_lost_workers_are_named_first_and_only_the_number_of_further_ones_is_given() -> None:
    driver = Driver(total_num_replicas=1000, lease_s=10.0)
    workers = driver.train(*range(900))
    workers[500].leave(failure="boom")
    text = words(driver)
    assert text.index("worker 500 (failed") < text.index("worker 900 (not joined)")
    assert "and 995 more" in text
    assert len(text) < 800


def test_before_all_shards_are_reached_the_reason_names_the_missing_ones() -> None:
    driver = Driver(num_shards=3, adopt=False)
    driver.send(ev.ShardAdopted(shard=0, process_incarnation=1))
    driver.send(ev.ShardUnreachable(shard=1, why="connection refused"))
    driver.pass_time(4.0)
    assert driver.coordinator.state is ClusterState.CONNECTING
    assert words(driver) == (
        "2 of 3 parameter servers not reached yet: ps 1 at host-p:5001 unreachable for 4.0 s (connection refused),"
        " ps 2 at host-p:5002 unreachable for 4.0 s; start them or check their addresses"
    )


def test_without_a_model_the_reason_names_the_worker_that_initialises_it() -> None:
    driver = Driver()
    assert words(driver) == "no worker has joined yet; start one"
    worker = Worker(driver)
    assert words(driver) == "none of the 1 live workers has registered a model yet"
    driver.ask_model(worker)
    assert re.fullmatch(r"worker 0 \(last seen .* on host-b pid 912, .*\) is initialising the model \(attempt 1\)", words(driver))
    driver.send(ev.ShardSeen(shard=0, process_incarnation=7, report=ShardReport(created_bytes=6)))
    assert words(driver).endswith(" is initialising the model (attempt 1): ps 0 receives its first values: 9 %")
    worker.leave(failure="boom")
    assert words(driver) == "the worker that was initialising the model is gone; the next worker that asks takes over"


def test_a_step_that_waits_for_an_unreachable_shard_names_the_shard() -> None:
    driver = Driver(num_shards=2, applies_at_once=False)
    (worker,) = driver.train(0)
    worker.push()
    assert words(driver) == "step 0 is being applied"
    driver.send(ev.ShardUnreachable(shard=1, why=""))
    driver.pass_time(4.0)
    assert words(driver) == (
        "ps 1 at host-p:5001 has not answered for 4.0 s;"
        " if it is gone its variables are lost and the cluster must be started again; step 0 waits"
    )
    driver.send(ev.ShardSeen(shard=1, process_incarnation=7))
    assert words(driver) == "step 0 is being applied"


def test_while_a_shard_is_unreachable_it_is_the_cause_and_no_live_worker_is_blamed() -> None:
    driver = Driver(num_shards=2, total_num_replicas=2)
    first, second = driver.train(0, 1)
    first.push()
    second.ask()
    driver.send(ev.ShardUnreachable(shard=1, why="connection refused"))
    driver.pass_time(4.0)
    cause = (
        "ps 1 at host-p:5001 has not answered for 4.0 s (connection refused);"
        " if it is gone its variables are lost and the cluster must be started again"
    )
    assert words(driver) == f"{cause}; step 0 has 1 of 2 contributions"
    second.leave(failure="Unavailable: ps 1")
    assert words(driver) == f"{cause}; step 0 has 1 of 2 contributions", "it gave up because of the shard"
    driver.send(ev.ShardSeen(shard=1, process_incarnation=7))
    assert "missing: worker 1 (failed 0.0 s ago: Unavailable: ps 1; on host-b pid 912); start another in its place" in words(driver)


def test_a_worker_that_was_gone_before_the_shard_is_still_named_after_it() -> None:
    driver = Driver(num_shards=2, total_num_replicas=2)
    _, second = driver.train(0, 1)
    second.leave(failure="boom")
    driver.pass_time(1.0)
    for shard in (0, 1):
        driver.send(ev.ShardUnreachable(shard=shard, why=""))
    assert words(driver) == (
        "ps 0 at host-p:5000 has not answered for 0.0 s, ps 1 at host-p:5001 has not answered for 0.0 s; if one of them is gone its"
        " variables are lost and the cluster must be started again; step 0 has 0 of 2 contributions;"
        " missing: worker 1 (failed 1.0 s ago: boom; on host-b pid 912)"
    )


def test_a_shard_that_is_gone_before_there_are_variables_needs_only_be_started_again() -> None:
    driver = Driver()
    driver.send(ev.ShardUnreachable(shard=0, why=""))
    assert words(driver) == (
        "ps 0 at host-p:5000 has not answered for 0.0 s; if it is gone start it again; no worker has joined yet; start one"
    )


def test_after_the_end_the_reason_names_the_workers_that_have_not_left() -> None:
    driver = Driver()
    driver.train(0, 1)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    assert words(driver).startswith("enough; waiting for worker 0 (last seen 0.0 s ago")


def test_a_cluster_that_makes_progress_reports_no_wait() -> None:
    driver = Driver(total_num_replicas=2)
    first, _ = driver.train(0, 1)
    first.push()
    assert driver.coordinator.status(driver.now).waiting_for == ""
    driver.pass_time(1.5)
    assert "missing: worker 1" in driver.coordinator.status(driver.now).waiting_for
