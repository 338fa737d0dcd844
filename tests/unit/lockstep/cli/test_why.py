"""`lockstep why` and the recovery lines of `lockstep status`: their words in every state of a cluster."""

import dataclasses

import pytest

from lockstep.cli.watch.text import as_text, loss_text, why_text
from ps_protocol.roles.chief import CheckpointStatus, ClusterState, DataStatus
from ps_protocol.roles.shard import ShardReport
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status

CHECKPOINT = CheckpointStatus(durability="interval", tag="step-000000030", step=30, age_s=12.4)


STATUS = cluster_status(
    worker_status(0, is_waiting=True),
    worker_status(1, state="lapsed", seen_ago_s=13.0),
    epoch=2,
    replicas_to_aggregate=3,
    total_num_replicas=3,
    waiting_for="step 41 has 1 of 3 contributions; missing: worker 1 (last seen 3.0 s ago)",
    step_age_s=3.0,
    shards=(server_status(0), server_status(1)),
    checkpoint=CHECKPOINT,
)


def test_the_step_its_missing_workers_their_silence_and_the_next_event_are_named() -> None:
    lines = why_text(STATUS).splitlines()
    assert lines[0] == "cluster 'digits', step 41 of 600, epoch 2: open for 3.0 s, with 1 of 3 contributions"
    assert lines[1] == "waits for: step 41 has 1 of 3 contributions; missing: worker 1 (last seen 3.0 s ago)"
    assert lines[2] == "  worker 1: silent: its lease has ended, last seen 13.0 s ago (here pid 101)"
    assert lines[3] == "  worker 0: waits for the step, last seen 100 ms ago (here pid 100)"
    assert lines[4] == "  worker 2: has never joined"
    assert "next: as soon as what is missing has come" in "\n".join(lines)


def test_why_does_not_report_a_worker_that_misses_a_heartbeat_as_computing() -> None:
    text = why_text(dataclasses.replace(STATUS, participants=(worker_status(0), worker_status(1, seen_ago_s=9.8, is_silent=True))))
    assert "  worker 1: silent, last seen 9.8 s ago" in text and "  worker 0: at work, last seen" in text


def test_with_min_replicas_why_says_that_the_step_will_need_fewer_contributions() -> None:
    assert "when a lease ends, the step needs a contribution less, 1 at least" in why_text(dataclasses.replace(STATUS, min_replicas=1))


def test_a_silent_parameter_server_is_named_with_the_consequence_for_its_model() -> None:
    text = why_text(dataclasses.replace(STATUS, shards=(server_status(0), server_status(1, is_reachable=False))))
    assert "  ps 1 at unix:/ps1: DOES NOT ANSWER" in text
    assert "if it was started anew, the cluster goes back to step-000000030" in text
    lost = dataclasses.replace(STATUS, checkpoint=None, shards=(server_status(0), server_status(1, is_reachable=False)))
    assert "if its model is lost, so is the training" in why_text(lost)


def test_parameter_servers_at_different_steps_are_shown() -> None:
    assert "steps of the parameter servers: ps 0 at 41, ps 1 at 42" in why_text(
        dataclasses.replace(STATUS, shards=(server_status(0), server_status(1, step=42)))
    )


def test_why_reports_gradients_that_are_not_finite() -> None:
    link = server_status(1, report=ShardReport(num_nonfinite=3))
    assert "ps 1: the gradient of the last step had 3 elements that are NaN or infinite" in why_text(
        dataclasses.replace(STATUS, shards=(server_status(0), link))
    )


@pytest.mark.parametrize("state", [state for state in ClusterState if state is not ClusterState.TRAINING])
def test_why_describes_every_state_of_a_cluster_and_what_happens_next(state: ClusterState) -> None:
    text = why_text(dataclasses.replace(STATUS, state=state, reason="since it is so"))
    assert text.startswith("cluster 'digits', step 41 of 600, epoch 2: ")
    assert "reason: since it is so" in text
    assert "\nnext: " in text


def test_a_cluster_at_work_waits_for_nothing() -> None:
    assert "waits for nothing: a step is under way" in why_text(dataclasses.replace(STATUS, waiting_for=""))


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        (None, "would cost the whole training"),
        (CheckpointStatus(durability=""), "would cost the whole training"),
        (CheckpointStatus(durability="interval"), "would cost all steps of this run"),
        (CHECKPOINT, "would cost 11 steps, those since step-000000030"),
        (dataclasses.replace(CHECKPOINT, step=40), "would cost 1 step, those since"),
        (dataclasses.replace(CHECKPOINT, step=41, tag="step-000000041"), "would cost no step, since all are in step-000000041"),
    ],
)
def test_why_says_what_the_loss_of_a_parameter_server_would_cost(checkpoint: CheckpointStatus | None, words: str) -> None:
    assert words in loss_text(dataclasses.replace(STATUS, checkpoint=checkpoint))


def test_the_status_tells_of_checkpoints_rollbacks_successors_and_data() -> None:
    status = dataclasses.replace(
        STATUS,
        checkpoint=dataclasses.replace(CHECKPOINT, saving="step-000000040", failure="no space left"),
        num_rollbacks=2,
        last_rollback="epoch 2: back to step 30, since ps 1 was restarted",
        chief_incarnation=3,
        min_replicas=1,
        data=DataStatus(name="train", epoch=1, num_done=5, num_leased=2, num_ranges=10),
    )
    text = as_text(status)
    assert "checkpoints: at intervals; latest step-000000030 (step 30, 12 s ago); step-000000040 is being written" in text
    assert "THE LAST ATTEMPT FAILED: no space left" in text
    assert "rolled back 2 times; the latest: epoch 2: back to step 30, since ps 1 was restarted" in text
    assert "the chief has been replaced 2 times: its process ended, and another one took over" in text
    assert "data 'train': pass 2, 5 of 10 ranges done, 2 leased" in text
    assert "(when workers are gone as many as are left, 1 at least)" in text


def test_text_from_the_network_cannot_move_the_cursor() -> None:
    failed = dataclasses.replace(STATUS, participants=(worker_status(0, state="left", failure="\x1b[2Jbad"),))
    assert "\x1b" not in why_text(failed)
