"""What is said of a cluster in each situation: colour, first line, second line, commands."""

import re
from pathlib import Path

import pytest

from chief.core import messages as ev
from chief.core.conditions import ROWS
from chief.options import CheckpointConfig
from ps_protocol.errors import InternalError, ModelMismatch
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import (
    ClusterState,
    Condition,
    FinishTrainingRequest,
    FollowerReport,
    HeartbeatRequest,
    Level,
    ParticipantKind,
    SaveCheckpointRequest,
    WorkerTraffic,
)
from ps_protocol.roles.shard import ShardReport, first_bytes
from tests.support.chief.chief_driver import Driver, Worker, model_of

GREEN, AMBER, RED = Level.GREEN, Level.AMBER, Level.RED
CHIEF = "host-c:5000"
START = f"LOCKSTEP_CHIEF={CHIEF} PROGRAM"


def said(driver: Driver) -> tuple[Condition, ...]:
    found = driver.coordinator.status(driver.now).conditions
    assert all(len(one.line.replace(" s ", "s ").replace(" %", "%").split()) <= 10 for one in found), found
    return found


def headline(driver: Driver) -> Condition:
    return said(driver)[0]


def names(driver: Driver) -> list[str]:
    return [one.name for one in said(driver)]


def trained(*workers: int, num_steps: int = 0, **options: object) -> tuple[Driver, list[Worker]]:
    driver = Driver(**options)  # type: ignore[arg-type]
    driver.coordinator.cluster.address = CHIEF
    members = driver.train(*workers)
    for _ in range(num_steps):
        driver.pass_time(0.2)
        calls = [(member.push(), member.ask())[1] for member in members]
        assert all(member.has_token(call) for member, call in zip(members, calls, strict=True))
    return driver, members


def test_a_cluster_at_work_is_green_unless_a_lost_server_would_end_it() -> None:
    driver, _ = trained(0, 1, num_steps=3, total_num_replicas=2)
    assert [(one.level, one.line) for one in said(driver)] == [
        (AMBER, "No checkpoints: a lost server ends this training"),
        (GREEN, "Training. Nothing is waited for"),
    ]
    assert headline(driver).advice == "Start the cluster with --checkpoint-dir DIR, or with standbys."


def test_servers_that_were_never_reached_are_named_with_the_cause() -> None:
    driver = Driver(num_shards=3, adopt=False)
    for shard in (1, 2):
        driver.send(ev.ShardUnreachable(shard=shard, why="connection refused; is it started?"))
    driver.pass_time(4.0)
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Waiting 4 s for ps 1 and 2 (connection refused)")
    assert one.advice == "Start what is missing, or check addresses. (ps 1: host-p:5001, ps 2: host-p:5002)"


def test_nobody_joined_yet() -> None:
    driver = Driver()
    driver.coordinator.cluster.address = CHIEF
    driver.pass_time(6.0)
    one = headline(driver)
    assert (one.level, one.line, one.advice, one.commands) == (AMBER, "Waiting 6 s for the first worker", "Start one.", (START,))


def test_workers_without_a_model_are_told_that_one_of_them_must_bring_it() -> None:
    driver = Driver()
    Worker(driver), Worker(driver)
    driver.pass_time(3.0)
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Waiting 3 s for a model (2 workers joined)")
    assert "create_or_join()" in one.advice


def test_the_worker_that_initialises_the_model_is_named_with_how_far_it_is() -> None:
    driver = Driver()
    worker = Worker(driver)
    driver.ask_model(worker)
    assert (headline(driver).level, headline(driver).line) == (GREEN, "Worker 0 is initialising the model")
    report = ShardReport(created_bytes=first_bytes(driver.coordinator.cluster.model.layouts[0]) // 2)
    driver.send(ev.ShardSeen(shard=0, process_incarnation=7, report=report))
    assert headline(driver).line == "Worker 0 is initialising the model (50 %)"
    assert headline(driver).advice == "Ps 0 receives its first values: 50 %."
    driver.send(ev.ShardSeen(shard=0, process_incarnation=7, report=ShardReport(variables_bytes=1 << 10)))
    assert headline(driver).line == "Worker 0 is initialising the model (100 %)", "a server that is done is not at its beginning"


def test_a_silent_worker_is_amber_with_the_commands_that_wake_or_replace_it() -> None:
    driver, (first, _) = trained(0, 1, total_num_replicas=2, lease_s=10.0)
    first.push()
    driver.pass_time(6.0)
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Waiting 6 s for worker 1 (silent)")
    assert one.advice == "See whether its process is stopped (on host-b pid 912) or has ended: let it go on, or start another in its place."
    assert one.commands == (f"kill -CONT 912 || LOCKSTEP_WORKER_INDEX=1 {START}",)


def test_a_worker_whose_lease_has_ended_is_red() -> None:
    driver, (first, _) = trained(0, 1, total_num_replicas=2, lease_s=10.0)
    first.push()
    for _ in range(8):
        driver.pass_time(6.0)
        first.heartbeat()
    one = headline(driver)
    assert (one.level, one.line) == (RED, "Waiting 48 s for worker 1 (lease ended)")
    assert one.commands == (f"kill -CONT 912 || LOCKSTEP_WORKER_INDEX=1 {START}",)


def test_several_silent_workers_are_one_line() -> None:
    driver, (first, *_) = trained(0, 1, 2, 3, 4, total_num_replicas=5, lease_s=10.0)
    driver.pass_time(6.0)
    first.push()
    one = headline(driver)
    assert one.line == "Waiting 6 s for workers 1, 2 and 2 others (silent)"


def test_a_wait_for_a_worker_begins_when_it_joins() -> None:
    driver, (first,) = trained(0, total_num_replicas=2, lease_s=10.0)
    first.push()
    driver.pass_time(4.0)
    first.heartbeat()
    assert headline(driver).line == "Waiting 4 s for worker 1 (not joined)"
    Worker(driver, 1)
    driver.pass_time(3.0)
    assert said(driver)[-1].line == "Waiting 3 s for worker 1 (heard 3 s ago)", "it was not there to be waited for before"


def test_a_program_that_ended_early_is_named_as_that() -> None:
    driver, (first, second) = trained(0, 1, total_num_replicas=2)
    first.push()
    second.leave()
    driver.pass_time(2.0)
    one = headline(driver)
    assert (one.level, one.line) == (RED, "Waiting 2 s for worker 1 (program ended early)")
    assert (one.advice, one.commands) == (
        "Start it again, or end the training.",
        (f"LOCKSTEP_WORKER_INDEX=1 {START}", "lockstep finish"),
    )


def test_a_program_that_failed_is_named_with_its_error() -> None:
    driver, (first, second) = trained(0, 1, total_num_replicas=2)
    first.push()
    second.leave(failure="ValueError: bad batch")
    driver.pass_time(2.0)
    one = headline(driver)
    assert (one.level, one.line) == (RED, "Waiting 2 s for worker 1 (program failed)")
    assert one.advice == "It said: ValueError: bad batch. Mend that, then start another in its place."


def test_a_worker_with_another_model_is_named_with_the_difference() -> None:
    driver, _ = trained(0, total_num_replicas=2)
    stranger = Worker(driver, 1)
    with pytest.raises(ModelMismatch) as caught:
        driver.ask_model(stranger, model_of(4))
    stranger.leave(failure=f"ModelMismatch: {caught.value}")
    driver.pass_time(2.0)
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Worker 1 runs another program: its model differs")
    assert one.advice.startswith("Start it with the program that is trained, or restart the cluster to train its model. ")


def test_what_to_do_about_another_model_is_whole_however_much_differs() -> None:
    driver, _ = trained(0, total_num_replicas=2)
    stranger = Worker(driver, 1)
    differences = "; ".join(f"layer_{number}/weights: (4, 4), want (4, 8)" for number in range(9))
    stranger.leave(
        failure=f"ModelMismatch: your model is not the one that this cluster trains: {differences}. If the cluster's is right, …"
    )
    advice = headline(driver).advice
    assert "restart the cluster to train its model. Worker 1: layer_0/weights: (4, 4), want (4, 8); " in advice and advice.endswith("…")
    stranger = Worker(driver, 1)
    stranger.leave(failure="ModelMismatch: your model is not the one that this cluster trains: w: (4,), want (3,). If the cluster's is ri…")
    assert headline(driver).advice.endswith("restart the cluster to train its model. Worker 1: w: (4,), want (3,)."), (
        "no advice of which the end is missing"
    )


def test_a_worker_that_never_joined_is_named() -> None:
    driver, (first,) = trained(0, total_num_replicas=2)
    first.push()
    driver.pass_time(2.0)
    one = headline(driver)
    assert (one.level, one.line, one.commands) == (AMBER, "Waiting 2 s for worker 1 (not joined)", (START,))


def test_with_any_number_of_workers_the_number_that_lacks_is_named() -> None:
    driver, (first,) = trained(0, replicas_to_aggregate=3)
    first.push()
    driver.pass_time(2.0)
    assert headline(driver).line == "Waiting 2 s for 2 more workers"


def test_a_worker_that_asks_before_it_pushes_is_told_so() -> None:
    driver, (first, second) = trained(0, 1, total_num_replicas=2)
    first.push()
    second.ask()
    driver.pass_time(2.0)
    assert (headline(driver).level, headline(driver).line) == (AMBER, "Worker 1 waits for a token without pushing")


def test_training_on_arrival_without_a_worker_is_red() -> None:
    driver, (only,) = trained(0, policy=PolicySpec(name=PolicyName.ASYNC))
    only.leave(failure="KeyError: 'x'")
    driver.pass_time(2.0)
    one = headline(driver)
    assert (one.name, one.level, one.line) == ("nobody left", RED, "Waiting 2 s for a worker (none is live)")
    assert one.commands == (START, "lockstep finish")


def test_a_rollback_is_amber_until_its_steps_are_computed_again() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(every_steps=100))
    (worker,) = driver.train(0)
    for _ in range(3):
        assert worker.has_token(worker.ask(commit=worker.next_commit()))
    driver.is_manual = True
    driver.restart(1)
    assert (headline(driver).name, headline(driver).level) == ("recovering", AMBER)
    assert headline(driver).line == "Recovering: servers are brought to one step"
    assert headline(driver).advice.endswith("Workers continue by themselves.")
    driver.is_manual = False
    driver.work_off()
    driver.come_back(worker)
    assert (headline(driver).level, headline(driver).line) == (AMBER, "Computing 3 steps again after a rollback")
    for _ in range(3):
        assert worker.has_token(worker.ask(commit=worker.next_commit()))
    assert "redoing" not in names(driver)


def test_a_step_much_slower_than_others_is_amber() -> None:
    driver, (first, second) = trained(0, 1, num_steps=5, total_num_replicas=2, lease_s=100.0)
    first.push()
    driver.pass_time(0.9)
    assert "held up" not in names(driver)
    driver.pass_time(2.0)
    second.heartbeat()
    assert names(driver)[0] == "held up"
    assert headline(driver).line == "Waiting 3 s for worker 1 (heard just now)"


def test_a_server_that_is_gone_is_the_reason_and_no_worker_is_named() -> None:
    driver, (first, _) = trained(0, 1, num_steps=25, num_shards=2, total_num_replicas=2, lease_s=1000.0)
    first.push()
    driver.send(ev.ShardUnreachable(shard=1, why="connection refused; is it started?"))
    driver.pass_time(4.0)
    one = headline(driver)
    assert (one.level, one.line) == (RED, "Waiting 4 s for ps 1 (connection refused)")
    assert one.advice.startswith(
        "Its variables are lost, and there are no checkpoints: start the cluster again, with --checkpoint-dir DIR."
    )
    assert "worker" not in " ".join(f"{one.line} {one.advice}" for one in said(driver))


def test_a_server_that_is_cut_off_is_told_from_one_that_is_gone() -> None:
    driver, _ = trained(0, num_shards=2)
    driver.send(ev.ShardUnreachable(shard=1, why="no answer; is its machine up?"))
    driver.pass_time(4.0)
    one = headline(driver)
    assert (one.name, one.level, one.line) == ("server cut off", RED, "Waiting 4 s for ps 1 (no answer)")
    assert "or the network there is cut" in one.advice


def test_a_socket_of_this_machine_is_never_printed() -> None:
    driver, _ = trained(0)
    driver.coordinator.cluster.servers[0].address = "unix:/tmp/lockstep-1/ps-0.sock"
    driver.send(ev.ShardUnreachable(shard=0, why="there is no such socket; is it started?"))
    driver.pass_time(4.0)
    assert "/tmp" not in "".join(f"{one.line}{one.advice}" for one in said(driver))


def test_workers_that_are_no_longer_needed_are_not_named_while_a_server_is_the_reason() -> None:
    driver, (first, *_) = trained(0, 1, 2, num_shards=2, total_num_replicas=3, min_replicas=1, lease_s=10.0)
    for _ in range(8):
        driver.pass_time(6.0)
        first.heartbeat()
    driver.send(ev.ShardUnreachable(shard=1, why="connection refused"))
    driver.pass_time(4.0)
    assert "missing: worker" not in driver.coordinator.cluster.explain(driver.now)
    assert headline(driver).line == "Waiting 4 s for ps 1 (connection refused)"


def test_steps_that_need_fewer_contributions_are_amber() -> None:
    driver, (first, second, _) = trained(0, 1, 2, total_num_replicas=3, min_replicas=1, lease_s=10.0)
    for _ in range(3):
        driver.pass_time(6.0)
        first.heartbeat(), second.heartbeat()
    assert "Worker 2 is gone; training goes on" in [one.line for one in said(driver)]


def race(driver: Driver, workers: list[Worker], *, num_steps: int, step_s: float) -> None:
    """All workers contribute to each step, one after the other: the first ones count."""
    for _ in range(num_steps):
        driver.pass_time(step_s)
        step = driver.step
        for worker in workers:
            worker.commit(step)


def test_backup_workers_that_take_turns_are_as_it_should_be_however_fast_steps_are() -> None:
    driver, workers = trained(0, 1, 2, replicas_to_aggregate=2)
    for _ in range(6):
        race(driver, workers, num_steps=75, step_s=0.05)
        workers.append(workers.pop(0))
        assert "in vain" not in names(driver), "that nothing of it counts for some seconds is its turn"
    assert all(one.num_late + one.num_stale >= 75 for one in driver.coordinator.status(driver.now).participants)


def test_a_worker_that_came_to_nothing_a_few_times_in_long_steps_is_not_one_of_which_nothing_ever_counts() -> None:
    driver, workers = trained(0, 1, 2, replicas_to_aggregate=2, lease_s=100.0)
    race(driver, workers, num_steps=15, step_s=5.0)
    assert "in vain" not in names(driver)
    race(driver, workers, num_steps=10, step_s=5.0)
    assert headline(driver).line == "Contributions of worker 2 never count"


def test_workers_that_joined_and_never_count_are_told_the_policy_and_no_restart() -> None:
    driver = Driver(replicas_to_aggregate=2)
    fast = driver.train(0, 1)
    for worker in fast:
        worker.push()
    slow = [Worker(driver), Worker(driver)]
    for _ in range(25):
        driver.pass_time(1.5)
        calls = [worker.ask() for worker in fast]
        assert all(worker.has_token(call) for worker, call in zip(fast, calls, strict=True))
        for worker in (*fast, *slow):
            worker.push()
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Contributions of workers 2 and 3 never count")
    assert one.commands == ("lockstep policy sync --replicas-to-aggregate 4",)
    assert "start" not in one.advice


def test_checkpoints_that_fail_are_amber_with_the_reason_until_one_is_whole() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(every_steps=1))
    (worker,) = driver.train(0)
    driver.full = True
    assert worker.has_token(worker.ask(commit=worker.next_commit()))
    assert {note.kind for note in driver.notes if "failed" in note.text} == {ev.NoteKind.NOT_SAVED}, "no event is a checkpoint"
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Checkpoints fail: the disk is full")
    assert one.advice == "No space left on device. The newest is of step 0. Make room there: the chief tries again by itself."
    driver.full = False
    assert worker.has_token(worker.ask(commit=worker.next_commit()))
    assert "checkpoints fail" not in names(driver)


def test_a_step_that_cannot_be_saved_under_durability_step_is_red() -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.STEP))
    (worker,) = driver.train(0)
    driver.full = True
    worker.ask(commit=worker.next_commit())
    driver.pass_time(2.5)
    one = headline(driver)
    assert (one.level, one.line) == (RED, "Waiting 2 s for a checkpoint (the disk is full)")


def test_gradients_that_are_not_finite_are_amber() -> None:
    driver, _ = trained(0)
    driver.send(ev.ShardSeen(shard=0, process_incarnation=7, report=ShardReport(num_nonfinite=3)))
    assert "The last gradient had 3 NaN or infinite numbers" in [one.line for one in said(driver)]


def test_a_server_whose_tables_grow_is_named_before_its_memory_is_full() -> None:
    driver, _ = trained(0)

    def heard(allocated: int, *, num_rows: int = 5, limit: int = 1000) -> list[Condition]:
        report = ShardReport(allocated_bytes=allocated, limit_bytes=limit, num_rows=num_rows)
        driver.send(ev.ShardSeen(shard=0, process_incarnation=7, report=report))
        return [one for one in said(driver) if one.name == "memory short"]

    assert not heard(849)
    assert not heard(990, num_rows=0), "what does not grow is as large as it will be"
    assert not heard(990, limit=0)
    (one,) = heard(850)
    assert (one.level, one.line) == (AMBER, "Ps 0 uses 85 % of its memory")
    assert "start more servers" in one.advice


def test_a_follower_that_stays_behind_is_named_until_it_has_the_newest_weights() -> None:
    driver, _ = trained(0)
    watcher = driver.register(kind=ParticipantKind.OBSERVER).participant

    def heard(lag: int, behind_s: float, step: int | None = 1_200) -> str:
        traffic = WorkerTraffic(follower=FollowerReport(step=step, lag=lag, behind_s=behind_s))
        driver.ask(HeartbeatRequest(participant=watcher, traffic=traffic))
        return next(one.doing for one in driver.coordinator.status(driver.now).participants if one.kind is ParticipantKind.OBSERVER)

    assert heard(0, 0.0) == "follows at step 1,200"
    assert heard(3, 2.0) == "follows at step 1,200, 3 behind"
    assert "follower behind" not in names(driver)
    heard(40, 12.0)
    (one,) = [one for one in said(driver) if one.name == "follower behind"]
    assert (one.level, one.line) == (AMBER, "Observer 0 lags behind the newest weights")
    assert "have been behind for 12 s, by 40 steps" in one.advice
    heard(0, 0.0)
    assert "follower behind" not in names(driver)
    assert heard(0, 15.0, step=None) == "has taken no weights yet"
    (one,) = [one for one in said(driver) if one.name == "follower behind"]
    assert "has taken none for 15 s when it was heard: see whether its program takes them" in one.advice


def test_a_worker_that_lost_shared_memory_is_amber_until_it_has_it_again() -> None:
    driver, (first, second) = trained(0, 1)
    first.heartbeat("shared_memory"), second.heartbeat("grpc")
    assert "shared memory lost" not in names(driver)
    first.heartbeat("sockets"), first.heartbeat("sockets")
    (one,) = [one for one in said(driver) if one.name == "shared memory lost"]
    assert (one.level, one.line) == (AMBER, "Worker 0 lost shared memory")
    assert one.advice.startswith("Its gradients and variables travel by sockets now")
    first.heartbeat("shared_memory")
    assert "shared memory lost" not in names(driver)


def test_a_worker_that_lost_the_shared_memory_of_one_of_its_servers_is_amber() -> None:
    driver, (worker, _) = trained(0, 1, num_shards=2)
    for transports in ((), ("grpc", "shared_memory"), ("shared_memory",)):
        worker.heartbeat(*transports)
        assert "shared memory lost" not in names(driver), "it begins to share"
    worker.heartbeat("grpc", "shared_memory")
    (one,) = [one for one in said(driver) if one.name == "shared memory lost"]
    assert one.advice.startswith("Its gradients and variables travel by grpc to some servers now")
    worker.heartbeat("shared_memory")
    assert "shared memory lost" not in names(driver)


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("ps 0: checkpoint: need 391.1 KiB, 0 bytes free on /disk; make room", "the disk of ps 0 is full"),
        ("ps 1: no chief has adopted it since it started, you have epoch 3; reconnect", "ps 1 could not save"),
        ("manifest.json: Input/output error", "the chief could not save"),
        ("ps 0 at unix:/p0: checkpoint: need 469.4 KiB, 300.0 KiB free on /disk; make room", "the disk of ps 0 is full"),
        ("ps 0: it was started without --checkpoint-dir; give all roles the same one", "ps 0 has no --checkpoint-dir"),
    ],
)
def test_a_checkpoint_that_fails_names_the_cause_and_the_server(why: str, words: str) -> None:
    driver = Driver.outlived(total_num_replicas=1, checkpoints=CheckpointConfig(durability=Durability.NONE))
    driver.train(0)
    driver.is_manual = True
    driver.ask(SaveCheckpointRequest(request_id=9))
    (order,) = [order for order in driver.orders if isinstance(order, ev.CopyStep)]
    driver.fail(order, InternalError(why))
    assert headline(driver).line == f"Checkpoints fail: {words}"
    assert "unix:" not in str(driver.coordinator.status(driver.now)), "a socket has a name that nobody needs"
    assert not any("unix:" in note.text for note in driver.notes)


def test_a_missing_standby_is_amber() -> None:
    driver, _ = trained(0)
    driver.coordinator.cluster.servers.miss_standby(0, why="it was restarted; it is given the values again")
    one = headline(driver)
    assert (one.level, one.line, one.advice) == (AMBER, "Ps 0 has no standby", "It was restarted; it is given the values again.")


def test_a_failed_training_says_why() -> None:
    driver, _ = trained(0)
    driver.send(ev.ShardFailed(shard=0, why="it is another server"))
    assert driver.coordinator.cluster.state is ClusterState.FAILED
    one = headline(driver)
    assert (one.level, one.line) == (RED, "Training has failed at step 0")
    assert "it is another server" in one.advice
    assert len(said(driver)) == 1, "nothing else matters"


def test_a_finished_training_is_green_and_names_who_has_not_left() -> None:
    driver, _ = trained(0, 1)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="enough")))
    one = headline(driver)
    assert (one.level, one.line) == (GREEN, "Training is finished at step 0")
    assert one.advice == "Enough. Waiting for worker 0, worker 1 to leave."


def test_a_training_that_was_interrupted_is_amber_and_not_called_finished() -> None:
    driver, _ = trained(0, num_steps=2)
    driver.send(ev.Asked(call=None, request=FinishTrainingRequest(reason="ended by SIGINT", interrupts=True)))
    one = headline(driver)
    assert (one.level, one.line) == (AMBER, "Training was interrupted at step 2")
    assert one.advice == "Ended by SIGINT. Start the cluster again to train on. Waiting for worker 0 to leave."
    assert len(said(driver)) == 1


def test_a_worker_that_is_last_in_most_steps_is_named() -> None:
    driver, workers = trained(0, 1, num_steps=25, total_num_replicas=2)
    assert said(driver)[-1].line == "Training. Nothing is waited for", "nobody waits for the one that is last by a hair"
    for _ in range(25):
        driver.pass_time(0.1)
        calls = [workers[0].ask(commit=workers[0].next_commit())]
        driver.pass_time(0.1)
        calls.append(workers[1].ask(commit=workers[1].next_commit()))
        assert all(worker.has_token(call) for worker, call in zip(workers, calls, strict=True))
    green = said(driver)[-1]
    assert (green.level, green.line) == (GREEN, "Training; worker 1 is last in 100 % of steps")
    assert green.advice == "Workers waited for the last one during 24 % of the time."


def test_each_condition_has_its_row_in_the_guide() -> None:
    guide = Path(__file__).parents[4] / "docs/how-to/watch.md"
    rows = re.findall(r"^\| `([a-z ]+)` \| (green|amber|red) \|", guide.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(one.name, one.level.name.lower()) for one in ROWS]
