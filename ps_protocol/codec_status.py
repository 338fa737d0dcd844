"""Protobuf to values and back, for the cluster's status. Knows messages; no RPC."""

from ps_protocol import codec
from ps_protocol.chief import (
    CheckpointStatus,
    ClusterState,
    ClusterStatus,
    DataStatus,
    LedgerEntry,
    ParticipantKind,
    ParticipantStatus,
    ShardLink,
)
from ps_protocol.v1 import chief_service_pb2 as pb


def encode_cluster_status(status: ClusterStatus) -> pb.GetClusterStatusResponse:
    """Encodes the cluster at one moment."""
    return pb.GetClusterStatusResponse(
        cluster=status.cluster,
        epoch=status.epoch,
        state=f"CLUSTER_STATE_{status.state.name}",
        reason=status.reason,
        global_step=status.global_step,
        max_steps=status.max_steps,
        policy=status.policy,
        replicas_to_aggregate=status.replicas_to_aggregate,
        total_num_replicas=status.total_num_replicas,
        num_contributions=status.num_contributions,
        waiting_for=status.waiting_for,
        step_age=codec.encode_duration(status.step_age_s),
        participants=[_encode_participant(participant) for participant in status.participants],
        shards=[_encode_shard(shard) for shard in status.shards],
        ledger=[_encode_entry(entry) for entry in status.ledger],
        num_accepted=status.num_accepted,
        num_stale=status.num_stale,
        num_late=status.num_late,
        hyperparameters_version=status.hyperparameters_version,
        optimizer=status.optimizer,
        max_observed_staleness=status.max_observed_staleness,
        chief_incarnation=status.chief_incarnation,
        checkpoint=None if status.checkpoint is None else _encode_checkpoint(status.checkpoint),
        num_rollbacks=status.num_rollbacks,
        last_rollback=status.last_rollback,
        min_replicas=status.min_replicas,
        data=None if status.data is None else _encode_data(status.data),
    )


def decode_cluster_status(message: pb.GetClusterStatusResponse) -> ClusterStatus:
    """Decodes the cluster at one moment."""
    return ClusterStatus(
        cluster=message.cluster,
        epoch=message.epoch,
        state=codec.decode_choice(ClusterState, message.state, field="state"),
        reason=message.reason,
        global_step=message.global_step,
        max_steps=message.max_steps if message.HasField("max_steps") else None,
        policy=message.policy,
        replicas_to_aggregate=message.replicas_to_aggregate,
        total_num_replicas=message.total_num_replicas,
        num_contributions=message.num_contributions,
        waiting_for=message.waiting_for,
        step_age_s=codec.decode_duration(message.step_age),
        participants=codec.decode_each(message.participants, _decode_participant, field="participants"),
        shards=codec.decode_each(message.shards, _decode_shard, field="shards"),
        ledger=codec.decode_each(message.ledger, _decode_entry, field="ledger"),
        num_accepted=message.num_accepted,
        num_stale=message.num_stale,
        num_late=message.num_late,
        hyperparameters_version=message.hyperparameters_version,
        optimizer=message.optimizer,
        max_observed_staleness=message.max_observed_staleness,
        chief_incarnation=message.chief_incarnation,
        checkpoint=_decode_checkpoint(message.checkpoint) if message.HasField("checkpoint") else None,
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        min_replicas=message.min_replicas,
        data=_decode_data(message.data) if message.HasField("data") else None,
    )


def _encode_participant(status: ParticipantStatus) -> pb.ParticipantStatus:
    return pb.ParticipantStatus(
        kind=f"PARTICIPANT_KIND_{status.kind.name}",
        index=status.index,
        incarnation=status.incarnation,
        host=status.host,
        pid=status.pid,
        state=status.state,
        seen_ago=codec.encode_duration(status.seen_ago_s),
        num_accepted=status.num_accepted,
        num_stale=status.num_stale,
        num_late=status.num_late,
        is_waiting=status.is_waiting,
        failure=status.failure,
    )


def _decode_participant(message: pb.ParticipantStatus) -> ParticipantStatus:
    return ParticipantStatus(
        kind=codec.decode_choice(ParticipantKind, message.kind, field="kind"),
        index=message.index,
        incarnation=message.incarnation,
        host=message.host,
        pid=message.pid,
        state=message.state,
        seen_ago_s=codec.decode_duration(message.seen_ago),
        num_accepted=message.num_accepted,
        num_stale=message.num_stale,
        num_late=message.num_late,
        is_waiting=message.is_waiting,
        failure=message.failure,
    )


def _encode_shard(link: ShardLink) -> pb.ShardLink:
    return pb.ShardLink(
        index=link.index,
        address=link.address,
        is_reachable=link.is_reachable,
        step=link.step,
        arena_bytes=link.arena_bytes,
        num_slices=link.num_slices,
        standby=link.standby,
        standby_missing=link.standby_missing,
    )


def _decode_shard(message: pb.ShardLink) -> ShardLink:
    return ShardLink(
        index=message.index,
        address=message.address,
        is_reachable=message.is_reachable,
        step=message.step if message.HasField("step") else None,
        arena_bytes=message.arena_bytes,
        num_slices=message.num_slices,
        standby=message.standby,
        standby_missing=message.standby_missing,
    )


def _encode_entry(entry: LedgerEntry) -> pb.LedgerEntry:
    return pb.LedgerEntry(
        step=entry.step,
        contributors=[codec.encode_push_id(push_id) for push_id in entry.contributors],
        num_stale=entry.num_stale,
        num_late=entry.num_late,
        duration=codec.encode_duration(entry.duration_s),
        apply_duration=codec.encode_duration(entry.apply_duration_s),
        last_worker=entry.last_worker,
    )


def _decode_entry(message: pb.LedgerEntry) -> LedgerEntry:
    return LedgerEntry(
        step=message.step,
        contributors=codec.decode_each(message.contributors, codec.decode_push_id, field="contributors"),
        num_stale=message.num_stale,
        num_late=message.num_late,
        duration_s=codec.decode_duration(message.duration),
        apply_duration_s=codec.decode_duration(message.apply_duration),
        last_worker=message.last_worker,
    )


def _encode_checkpoint(status: CheckpointStatus) -> pb.CheckpointStatus:
    return pb.CheckpointStatus(
        durability=status.durability,
        tag=status.tag,
        step=status.step,
        age=codec.encode_duration(status.age_s) if status.tag else None,
        saving=status.saving,
        failure=status.failure,
    )


def _decode_checkpoint(message: pb.CheckpointStatus) -> CheckpointStatus:
    return CheckpointStatus(
        durability=message.durability,
        tag=message.tag,
        step=message.step,
        age_s=codec.decode_duration(message.age),
        saving=message.saving,
        failure=message.failure,
    )


def _encode_data(status: DataStatus) -> pb.DataStatus:
    return pb.DataStatus(
        name=status.name,
        epoch=status.epoch,
        num_done=status.num_done,
        num_leased=status.num_leased,
        num_ranges=status.num_ranges,
    )


def _decode_data(message: pb.DataStatus) -> DataStatus:
    return DataStatus(
        name=message.name,
        epoch=message.epoch,
        num_done=message.num_done,
        num_leased=message.num_leased,
        num_ranges=message.num_ranges,
    )
