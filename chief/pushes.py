"""What has been applied of each worker lately, put together from the latest steps. Knows push ids and steps."""

from collections.abc import Iterable, Mapping

from ps_protocol.shard import AppliedPush, PushId, WorkerPushes

# Contributions remembered of each worker.
MAX_PUSHES = 16


def merged_pushes(steps: Iterable[tuple[int, tuple[PushId, ...]]], *, earlier: Mapping[int, WorkerPushes]) -> tuple[WorkerPushes, ...]:
    """Returns the newest contributions of each worker's newest incarnation; `steps` with what they were made of, the newest step first.

    `earlier`: what is known of the time before those steps.
    """
    found: dict[int, tuple[int, dict[int, int]]] = {
        worker: (pushed.incarnation, {push.sequence: push.step for push in pushed.applied}) for worker, pushed in earlier.items()
    }
    for step, contributors in steps:
        for push_id in contributors:
            incarnation, applied = found.get(push_id.worker, (0, {}))
            if push_id.incarnation > incarnation:
                found[push_id.worker] = push_id.incarnation, {push_id.sequence: step}
            elif push_id.incarnation == incarnation:
                applied[push_id.sequence] = step
    return tuple(
        WorkerPushes(
            worker=worker,
            incarnation=incarnation,
            applied=tuple(AppliedPush(sequence=sequence, step=applied[sequence]) for sequence in sorted(applied)[-MAX_PUSHES:]),
        )
        for worker, (incarnation, applied) in sorted(found.items())
    )


def newest_pushes(reports: Iterable[Iterable[WorkerPushes]]) -> tuple[WorkerPushes, ...]:
    """Returns what several shards report in one: all of them apply the same, but one may be a step behind."""
    merged: dict[int, WorkerPushes] = {}
    for report in reports:
        for pushed in report:
            known = merged.get(pushed.worker)
            if known is None or (pushed.incarnation, _last(pushed)) > (known.incarnation, _last(known)):
                merged[pushed.worker] = pushed
    return tuple(merged[worker] for worker in sorted(merged))


def _last(pushed: WorkerPushes) -> int:
    return pushed.applied[-1].sequence if pushed.applied else 0
