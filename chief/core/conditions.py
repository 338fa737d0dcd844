"""The one table of what is to be said of a cluster: each condition, how bad it is, its line of at most ten words, and what to do.

All that shows a cluster reads it: the page, `lockstep status`, `why` and `top`, `doctor`, the metrics. Pure: reads the core's state.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from chief.core.cluster.members import Member, MemberState
from chief.core.cluster.parameter_servers import ShardRecord
from chief.core.lacking import Missing, missing
from chief.core.wording import counted, lease_end, listed, percent, seconds
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import ClusterState, Condition, End, Level, ParticipantKind

if TYPE_CHECKING:
    from chief.core.state import Cluster

# A younger step is at work, and waits for nobody.
PATIENCE_S = 1.0
# A step that is open for so many times as long as one takes holds training up.
_HELD_UP = 4.0
# A worker of which so many contributions in a row, and for so long, counted for nothing is one of which nothing ever will. Backup workers
# take turns: each of them counts now and then.
_IN_VAIN, _IN_VAIN_S = 20, 30.0
# A worker that is the last in so large a part of so many steps is slow.
_SLOW_SHARE, _LEAST_STEPS, _MOST_STEPS = 0.6, 20, 200
# Others wait for it, if they do so during at least this part of the time.
_WAITED_SHARE = 0.05
# A follower that has been behind for so long does not keep up, or does not take what it has.
_BEHIND_S = 10.0
# Tables that grow are to be seen to before a server has no memory left.
_MEMORY_SHARE = 0.85
# What tells that a server's process has ended, rather than that it is stopped or cut off.
_ENDED = ("connection refused", "no such socket", "connection lost")


class Said(NamedTuple):
    """What is said of a condition that holds."""

    line: str
    advice: str = ""
    commands: tuple[str, ...] = ()


@light_dataclass(frozen=True, slots=True)
class Scene:
    """A cluster at a moment, and the workers that its step lacks; None: it lacks none, or has no use for more."""

    at: "Cluster"
    now: float
    missing: Missing | None
    patience_s: float

    @property
    def is_young(self) -> bool:
        """Whether the open step is at work, and waits for nobody yet."""
        return self.age_s < self.patience_s

    @property
    def age_s(self) -> float:
        """How long the open step has been open."""
        return self.at.ledger.step_age_s(self.now)

    def waited_s(self, members: Sequence[Member]) -> float:
        """How long the step has waited for workers: since it opened, or since they joined or gave their latest contribution to it."""
        return min(self.age_s, max(self.now - member.counted_at for member in members))

    def silent_s(self, member: Member) -> float:
        """How long nothing has been heard of a worker."""
        return max(0.0, self.now - member.last_seen)

    @property
    def unreachable(self) -> list[ShardRecord]:
        """The servers that do not answer."""
        return [record for record in self.at.servers if not record.is_reachable]

    def wait(self, who: str, why: str = "", *, since_s: float | None = None) -> str:
        """For example "Waiting 6 s for worker 2 (silent)"."""
        waited_s = self.age_s if since_s is None else since_s
        return f"Waiting {whole(waited_s)} for {who}" + (f" ({why})" if why else "")

    def wait_for(self, members: Sequence[Member], why: str) -> str:
        """As `wait`, for workers."""
        return self.wait(named("worker", [member.index for member in members]), why, since_s=self.waited_s(members))

    def start_command(self, index: int | None = None) -> tuple[str, ...]:
        """The command that starts a worker; none while no worker can reach the chief from outside."""
        named = f"LOCKSTEP_WORKER_INDEX={index} " if index is not None else ""
        return (f"{named}LOCKSTEP_CHIEF={shlex.quote(self.at.address)} PROGRAM",) if self.at.address else ()


def conditions(cluster: "Cluster", *, now: float, patience_s: float = PATIENCE_S) -> tuple[Condition, ...]:
    """Returns all conditions that hold, the most urgent first; there is always one. A step younger than `patience_s` waits for nobody."""
    policy = cluster.policy
    is_open = cluster.state is ClusterState.TRAINING and not (policy.is_complete or cluster.training.is_configuring)
    scene = Scene(cluster, now, missing(cluster) if is_open and policy.spec.has_common_steps else None, patience_s)
    found = [
        Condition(
            name=row.name,
            level=row.level,
            line=said.line,
            advice=said.advice,
            commands=said.commands,
            is_standstill=row.is_standstill,
        )
        for row in ROWS
        if (said := row.find(scene)) is not None
    ]
    urgent = [one for level in (Level.RED, Level.AMBER) for one in found if one.level is level]
    # Where something holds training up, what it does otherwise is no news.
    doing = [one for one in found if one.level is Level.GREEN][: not any(one.is_standstill for one in urgent)]
    return tuple(urgent + doing) or (Condition(name="training", level=Level.GREEN, line="Training"),)


def whole(value_s: float) -> str:
    """Returns a duration in whole seconds, or in minutes from ten on."""
    return f"{value_s:.0f} s" if value_s < 600 else f"{value_s / 60:.0f} min"


def named(kind: str, indices: Sequence[int]) -> str:
    """Returns for example "workers 1, 4 and 6", and of more than three "workers 1, 4 and 3 others"."""
    texts = [str(index) for index in sorted(indices)]
    if len(texts) == 1:
        return f"{kind} {texts[0]}"
    if len(texts) > 3:
        texts = [*texts[:2], f"{len(texts) - 2} others"]
    plural = kind if kind == "ps" else f"{kind}s"
    return f"{plural} {', '.join(texts[:-1])} and {texts[-1]}"


def _names(members: Sequence[Member]) -> str:
    return named("worker", [member.index for member in members])


# What stops a cluster.


def _failed(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.FAILED:
        return None
    return Said(f"Training has failed at step {scene.at.policy.step}", _sentence(scene.at.ending.reason))


def _is_gone(record: ShardRecord) -> bool:
    return _short(record.why) in _ENDED


def _server_gone(scene: Scene) -> Said | None:
    return _server(scene, [record for record in scene.unreachable if _is_gone(record)], is_cut_off=False)


def _server_cut_off(scene: Scene) -> Said | None:
    return _server(scene, [record for record in scene.unreachable if not _is_gone(record)], is_cut_off=True)


def _server(scene: Scene, records: Sequence[ShardRecord], *, is_cut_off: bool) -> Said | None:
    if not records or scene.at.state in (ClusterState.FAILED, ClusterState.FINISHED, ClusterState.CONNECTING):
        return None
    one = len(records) == 1
    if is_cut_off:
        which = "its process is" if one else "their processes are"
        advice = f"See whether {which} stopped (kill -CONT lets {'it' if one else 'them'} go on), or the network there is cut."
    else:
        advice = f"Start {'it' if one else 'them'} again"
        if scene.at.model.model is None:
            advice += "."
        elif scene.at.settings.config.checkpoints is not None:
            advice += ", if nothing does that by itself: all go back to the newest checkpoint."
        else:
            advice = "Its variables are lost, and there are no checkpoints: start the cluster again, with --checkpoint-dir DIR."
    since_s = scene.now - min(record.unreachable_since for record in records)
    return Said(scene.wait(_servers(records), _short(records[0].why), since_s=since_s), _with_places(advice, records))


def _servers(records: Sequence[ShardRecord]) -> str:
    return named("ps", [record.index for record in records])


def _short(why: str) -> str:
    """Returns the cause without what is to be done about it."""
    words = why.partition(";")[0].removeprefix("there is ").removeprefix("the ")
    return words.replace(" was ", " ").removesuffix(" any more") or "no answer"


def _with_places(advice: str, records: Sequence[ShardRecord]) -> str:
    """Adds where servers of other machines are. Sockets of this one have names that nobody needs."""
    places = [f"ps {record.index}: {record.address}" for record in records if not record.address.startswith("unix:")]
    return f"{advice} ({', '.join(places[:3])})" if places else advice


def _gone(scene: Scene, *, why: str, has_cause: Callable[[Member], bool], advice: str) -> Said | None:
    gone = [member for member in scene.missing.gone if has_cause(member)] if scene.missing is not None else []
    if not gone:
        return None
    index = gone[0].index if scene.at.settings.config.num_workers is not None else None
    failure = f"It said: {_sentence(gone[0].failure)} " if gone[0].failure else ""
    return Said(scene.wait_for(gone, why), f"{failure}{advice}", scene.start_command(index))


def _is_of_other_program(member: Member) -> bool:
    return member.failure.startswith("ModelMismatch")


def _program_failed(scene: Scene) -> Said | None:
    def has_failed(member: Member) -> bool:
        return bool(member.failure) and not _is_of_other_program(member)

    return _gone(scene, why="program failed", has_cause=has_failed, advice="Mend that, then start another in its place.")


def _program_ended(scene: Scene) -> Said | None:
    def has_ended(member: Member) -> bool:
        return member.state is MemberState.LEFT and not member.failure

    said = _gone(scene, why="program ended early", has_cause=has_ended, advice="Start it again, or end the training.")
    return said and said._replace(commands=(*said.commands, "lockstep finish"))


def _worker_gone(scene: Scene) -> Said | None:
    def has_lapsed(member: Member) -> bool:
        return member.state in (MemberState.LAPSED, MemberState.EXPELLED) and not _is_of_other_program(member)

    said = _gone(scene, why="lease ended", has_cause=has_lapsed, advice="")
    if said is None or scene.missing is None:
        return said
    lost = [member for member in scene.missing.gone if has_lapsed(member)]
    return Said(said.line, *_remedy(scene, lost))


def _wrong_program(scene: Scene) -> Said | None:
    found = [member for member in scene.at.members.workers() if not member.is_live and _is_of_other_program(member)]
    if not found or scene.at.state in (ClusterState.FAILED, ClusterState.FINISHED):
        return None
    verb, which, whose = ("runs", "it", "its model") if len(found) == 1 else ("run", "them", "theirs")
    # The worker's words may be cut at their end: of them only what differs is said here.
    difference = found[0].failure.removeprefix("ModelMismatch: ").partition(": ")[2].partition(". ")[0]
    said = _sentence(difference and f"worker {found[0].index}: {difference}")
    advice = f"Start {which} with the program that is trained, or restart the cluster to train {whose}. {said}"
    return Said(f"{_names(found).capitalize()} {verb} another program: its model differs", advice)


def _nobody_left(scene: Scene) -> Said | None:
    members = scene.at.members
    is_waiting = scene.at.state is ClusterState.TRAINING and scene.missing is None
    if not is_waiting or members.live_workers or not members.num_known_workers:
        return None
    return Said(scene.wait("a worker", "none is live"), "Start one, or end the training.", (*scene.start_command(), "lockstep finish"))


def _checkpoint_holds(scene: Scene) -> Said | None:
    checkpoints = scene.at.checkpoints
    if not checkpoints.failure or not checkpoints.is_holding:
        return None
    return Said(scene.wait("a checkpoint", _disk(checkpoints.failure)), _checkpoint_advice(scene))


# What needs a look.


def _interrupted(scene: Scene) -> Said | None:
    if scene.at.ending.end is not End.INTERRUPTED:
        return None
    again = "Start the cluster again to train on"
    if scene.at.settings.config.checkpoints is not None:
        again += " from its newest checkpoint"
    return Said(
        f"Training was interrupted at step {scene.at.policy.step}", f"{_sentence(scene.at.ending.reason)} {again}.{_who_stays(scene)}"
    )


def _connecting(scene: Scene) -> Said | None:
    absent = [record for record in scene.at.servers if record.why] or [record for record in scene.at.servers if not record.is_adopted]
    if scene.at.state is not ClusterState.CONNECTING or not absent:
        return None
    since_s = scene.now - min((record.unreachable_since for record in absent if not record.is_reachable), default=scene.now)
    why = _short(absent[0].why) if absent[0].why else ""
    return Said(scene.wait(_servers(absent), why, since_s=since_s), _with_places("Start what is missing, or check addresses.", absent))


def _recovering(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.RECOVERING:
        return None
    recovery, restoring = scene.at.recovery, scene.at.servers.restoring_progress
    far = f" ({percent(*restoring)})" if restoring is not None else ""
    parts = (recovery.why, recovery.plan, listed(scene.at.servers.explain_restoring()))
    advice = " ".join([*map(_sentence, filter(None, parts)), "Workers continue by themselves."])
    return Said(f"Recovering: servers are brought to one step{far}", advice)


def _no_worker(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.WAITING_FOR_MODEL or scene.at.members.live_workers:
        return None
    which = "a worker" if scene.at.members.num_known_workers else "the first worker"
    return Said(scene.wait(which), "Start one.", scene.start_command())


def _no_model(scene: Scene) -> Said | None:
    registry, live = scene.at.model, scene.at.members.live_workers
    if scene.at.state is not ClusterState.WAITING_FOR_MODEL or not live or registry.initializer is not None:
        return None
    advice = "One of them must give the model its first values: create_or_join()."
    return Said(scene.wait("a model", f"{counted(len(live), 'worker')} joined"), advice)


def _worker_silent(scene: Scene) -> Said | None:
    silent = [member for member in _awaited(scene) if member.is_silent(scene.now)]
    return Said(scene.wait_for(silent, "silent"), *_remedy(scene, silent)) if silent else None


def _awaited(scene: Scene) -> Sequence[Member]:
    """The live workers that the cluster waits for, whatever its policy."""
    if scene.is_young or scene.at.servers.unreachable_since is not None:
        return []
    if scene.missing is not None:
        return [one for one in scene.missing.owing if scene.waited_s([one]) >= scene.patience_s]
    at, policy, live = scene.at, scene.at.policy, scene.at.members.live_workers
    if at.state is ClusterState.WAITING_FOR_MODEL and at.model.initializer is not None:
        member = at.members.find(ParticipantKind.WORKER, at.model.initializer[0])
        return [member] if member is not None and member.is_live else []
    if at.state is ClusterState.TRAINING and not policy.spec.has_common_steps:
        slowest = set(policy.slowest()) - at.training.waiting_workers
        return [one for one in live if one.index in slowest] or live
    return []


def _worker_idle(scene: Scene) -> Said | None:
    if scene.missing is None or not scene.missing.idle or scene.is_young:
        return None
    idle, step = scene.missing.idle, scene.at.policy.step
    verb = "waits" if len(idle) == 1 else "wait"
    if scene.at.policy.tokens.advice_to_all_waiting and len(idle) == len(scene.at.members.live_workers):
        return Said("All workers wait for a token", _sentence(scene.at.policy.tokens.advice_to_all_waiting))
    advice = f"Step {step} needs their contributions first: the program must push before it asks for the next token."
    return Said(f"{_names(idle).capitalize()} {verb} for a token without pushing", advice)


def _worker_absent(scene: Scene) -> Said | None:
    lacking = scene.missing
    if lacking is None or lacking.gone or not lacking.num_more or scene.is_young:
        return None
    if scene.at.policy.tokens.advice_to_all_waiting and not lacking.owing and scene.at.members.live_workers:
        return Said("All workers wait for a token", _sentence(scene.at.policy.tokens.advice_to_all_waiting))
    if lacking.absent:
        return Said(scene.wait(named("worker", lacking.absent), "not joined"), "Start what is missing.", scene.start_command())
    return Said(scene.wait(f"{counted(lacking.num_more, 'more worker')}"), "A step needs more than are live.", scene.start_command())


def _held_up(scene: Scene) -> Said | None:
    usual_s = scene.at.ledger.usual_s
    if usual_s is None or scene.age_s < max(PATIENCE_S, _HELD_UP * usual_s):
        return None
    slow = [member for member in _awaited(scene) if not member.is_silent(scene.now)]
    if not slow or scene.waited_s(slow) < _HELD_UP * usual_s:
        return None
    busy = f"it is busy with ({slow[0].where})" if len(slow) == 1 else "they are busy with"
    return Said(_waiting_for(scene, slow), f"A step usually takes {_short_time(usual_s)}. See what {busy}.")


def _short_time(value_s: float) -> str:
    return f"{1000 * value_s:.0f} ms" if value_s < 1 else seconds(value_s)


def _waiting_for(scene: Scene, members: Sequence[Member]) -> str:
    longest_s = max(scene.silent_s(member) for member in members)
    return scene.wait_for(members, f"heard {whole(longest_s)} ago" if longest_s >= 0.5 else "heard just now")


def _fewer_workers(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.TRAINING or not scene.at.training.is_quorum_lowered:
        return None
    gone = [member for member in scene.at.members.workers() if not member.is_live]
    policy, config = scene.at.policy, scene.at.settings.config
    if not gone:
        return None
    advice = f"A step takes {policy.num_required} instead of {config.num_required} contributions, until others join."
    return Said(f"{_names(gone).capitalize()} {'is' if len(gone) == 1 else 'are'} gone; training goes on", advice, scene.start_command())


def _checkpoints_fail(scene: Scene) -> Said | None:
    checkpoints = scene.at.checkpoints
    if not checkpoints.failure or checkpoints.is_holding:
        return None
    return Said(f"Checkpoints fail: {_disk(checkpoints.failure)}", _checkpoint_advice(scene))


def _is_full(failure: str) -> bool:
    return any(words in failure.lower() for words in ("no space left", " free on ", "quota"))


def _disk(failure: str) -> str:
    """Returns in a few words why a checkpoint failed, and of which server, of what the storage said."""
    server = re.match(r"ps \d+", failure)
    of = f" of {server[0]}" if server else ""
    known = {
        "no space left": f"the disk{of} is full",
        " free on ": f"the disk{of} is full",
        "quota": f"the quota{of} is used up",
        "read-only": f"the place{of} is read-only",
        "permission denied": f"the place{of} is not writable",
        "no such file": f"the place{of} is gone",
    }
    who = server[0] if server else "the chief"
    if "started without --checkpoint-dir" in failure:
        return f"{who} has no --checkpoint-dir"
    return next((words for found, words in known.items() if found in failure.lower()), f"{who} could not save")


def _checkpoint_advice(scene: Scene) -> str:
    status = scene.at.checkpoints.status(scene.now)
    kept = f"The newest is of step {status.step}." if status is not None and status.tag else "There is no checkpoint yet."
    failure = scene.at.checkpoints.failure
    must_make_room = _is_full(failure) and "make room" not in failure
    do = "Make room there: the chief tries again by itself." if must_make_room else "The chief tries again by itself."
    return f"{_sentence(failure)} {kept} {do}"


def _in_vain(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.TRAINING or not scene.at.policy.spec.has_common_steps:
        return None
    policy, live = scene.at.policy, scene.at.members.live_workers
    found = [
        one for one in live if one.num_in_vain >= _IN_VAIN and scene.now - one.counted_at >= _IN_VAIN_S and not one.is_silent(scene.now)
    ]
    if not found or len(live) <= policy.num_required:
        return None
    advice = f"A step takes the first {policy.num_required}, and theirs come later. Let a step take one of each worker:"
    if policy.num_required == 1:
        advice = "A step takes the first contribution, and theirs come later. Let a step take one of each worker:"
    command = f"lockstep policy {policy.spec.name.name.lower()} --replicas-to-aggregate {len(live)}"
    return Said(f"Contributions of {_names(found)} never count", advice, (command,))


def _unshared(scene: Scene) -> Said | None:
    lost = [member for member in scene.at.members.live_workers if member.has_lost_sharing]
    # Memory that was shared with a server that is gone comes back with it.
    if not lost or scene.at.state is not ClusterState.TRAINING or scene.unreachable:
        return None
    ways = [way for way in lost[0].transport.split(", ") if way != "shared_memory"]
    which = " to some servers" if "shared_memory" in lost[0].transport else ""
    whose, log = ("Its", "Its log says") if len(lost) == 1 else ("Their", "Their logs say")
    advice = f"{whose} gradients and variables travel by {' and '.join(ways)}{which} now, which is slower. {log} why."
    return Said(f"{_names(lost).capitalize()} lost shared memory", advice)


def _standby_missing(scene: Scene) -> Said | None:
    without = [record for record in scene.at.servers if record.standby_missing]
    if not without or scene.at.state is ClusterState.CONNECTING:
        return None
    return Said(
        f"{_servers(without)} {'has' if len(without) == 1 else 'have'} no standby".replace("ps", "Ps", 1),
        _sentence(without[0].standby_missing),
    )


def _memory_short(scene: Scene) -> Said | None:
    # Other variables take all of their memory when they are created: only tables with keys grow.
    growing = [record for record in scene.at.servers if record.report is not None and record.report.num_rows and record.report.limit_bytes]
    share, worst = max(((_memory_share(record), record) for record in growing), key=lambda one: one[0], default=(0.0, None))
    if worst is None or share < _MEMORY_SHARE or scene.at.state is not ClusterState.TRAINING:
        return None
    advice = "Its tables with keys grow; gradients that do not fit are refused. Save, and start more servers, or give this one more memory."
    return Said(f"Ps {worst.index} uses {percent(share, 1.0)} of its memory", _with_places(advice, [worst]))


def _memory_share(record: ShardRecord) -> float:
    return record.report.allocated_bytes / record.report.limit_bytes if record.report is not None else 0.0


def _nonfinite(scene: Scene) -> Said | None:
    found = [record for record in scene.at.servers if record.report is not None and record.report.num_nonfinite]
    if not found or scene.at.state is not ClusterState.TRAINING:
        return None
    count = sum(record.report.num_nonfinite for record in found if record.report is not None)
    advice = "Look at the loss and the learning rate. A cluster started with lockstep up --reject-nonfinite refuses such gradients."
    return Said(f"The last gradient had {count} NaN or infinite numbers", advice)


def _redoing(scene: Scene) -> Said | None:
    left = scene.at.recovery.reached - scene.at.policy.step
    if scene.at.state is not ClusterState.TRAINING or left <= 0:
        return None
    return Said(f"Computing {counted(left, 'step')} again after a rollback", _sentence(scene.at.recovery.last_rollback))


def _nothing_kept(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.TRAINING or scene.at.settings.config.checkpoints is not None:
        return None
    if all(record.standby for record in scene.at.servers):
        return None
    return Said("No checkpoints: a lost server ends this training", "Start the cluster with --checkpoint-dir DIR, or with standbys.")


# What a cluster does that is as it should be. The first of these counts.


def _finished(scene: Scene) -> Said | None:
    if scene.at.ending.end is not End.FINISHED:
        return None
    return Said(f"Training is finished at step {scene.at.policy.step}", f"{_sentence(scene.at.ending.reason)}{_who_stays(scene)}")


def _who_stays(scene: Scene) -> str:
    live = [member for member in scene.at.members.all() if member.is_live]
    waits = f" Waiting for {', '.join(member.name for member in live[:3])} to leave." if live else ""
    if scene.at.ending.awaited_workers:
        waits += f" Waiting for {scene.at.ending.awaited_workers} to come and read it."
    return waits


def _initialising(scene: Scene) -> Said | None:
    registry, servers = scene.at.model, scene.at.servers
    if scene.at.state is not ClusterState.WAITING_FOR_MODEL or registry.initializer is None:
        return None
    progress = servers.creation_progress(registry.layouts)
    far = f" ({percent(*progress)})" if progress is not None else ""
    doing = "; ".join(servers.explain_creating(registry.layouts)[:3])
    return Said(
        f"Worker {registry.initializer[0]} is initialising the model{far}", _sentence(doing) or "Training begins as soon as it has."
    )


def _saving(scene: Scene) -> Said | None:
    if scene.at.state is not ClusterState.TRAINING or not scene.at.training.saving or scene.is_young:
        return None
    return Said(scene.wait("a checkpoint"), _sentence(scene.at.training.saving))


def _waiting(scene: Scene) -> Said | None:
    policy, is_step = scene.at.policy, scene.missing is not None
    is_waited = is_step or (bool(policy.slowest()) and bool(scene.at.training.waiting_workers))
    awaited = [member for member in _awaited(scene) if not member.is_silent(scene.now)] if is_waited else []
    advice = "The step is applied once it has what is missing."
    if policy.is_in_grace:
        advice = f"The step has enough contributions, and is applied without these after {policy.spec.grace_s:g} s of grace."
    elif not is_step:
        advice = f"Others may be {policy.spec.staleness} ahead of the slowest."
    return Said(_waiting_for(scene, awaited), advice) if awaited else None


def _slow_worker(scene: Scene) -> Said | None:
    live = scene.at.members.live_workers
    if _training(scene) is None or not scene.at.policy.spec.has_common_steps or len(live) < 2:
        return None
    usual = sorted(one.num_accepted for one in live)[(len(live) - 1) // 2]
    for member in live:
        dropped, all_of_it = member.num_stale + member.num_late, member.num_stale + member.num_late + member.num_accepted
        if dropped >= max(_LEAST_STEPS, _SLOW_SHARE * all_of_it) and member.num_accepted < usual / 2:
            return Said(
                f"Training; worker {member.index} is too slow for most steps", f"{percent(dropped, all_of_it)} of its work is dropped."
            )
    entries = scene.at.ledger.entries(_MOST_STEPS)
    if len(entries) < _LEAST_STEPS:
        return None
    last = [entry.last_worker for entry in entries]
    worker = max({*last}, key=last.count)
    if last.count(worker) < _SLOW_SHARE * len(entries):
        return None
    waited_s, all_s = sum(entry.wait_duration_s for entry in entries), sum(entry.duration_s for entry in entries)
    if waited_s < _WAITED_SHARE * all_s:
        return None
    line = f"Training; worker {worker} is last in {percent(last.count(worker), len(last))} of steps"
    return Said(line, f"Workers waited for the last one during {percent(waited_s, all_s)} of the time.")


def _applying(scene: Scene) -> Said | None:
    at = scene.at
    if at.state is not ClusterState.TRAINING or scene.is_young or at.servers.unreachable_since is not None:
        return None
    if at.training.is_configuring:
        return Said(scene.wait("the servers' new settings"))
    return Said(scene.wait(f"the servers to apply step {at.policy.step}")) if at.policy.is_complete else None


def _follower_behind(scene: Scene) -> Said | None:
    behind = [
        (report, member)
        for member in scene.at.members.observers()
        if member.is_live and (report := member.follower) is not None and report.behind_s >= _BEHIND_S
    ]
    if not behind:
        return None
    report, worst = max(behind, key=lambda one: one[0].behind_s)
    verb = "lags" if len(behind) == 1 else "lag"
    if report.step is None:
        how = f"Observer {worst.index} ({worst.where}) has taken none for {whole(report.behind_s)}"
    else:
        behind_by = f"for {whole(report.behind_s)}, by {counted(report.lag, 'step')}"
        how = f"Those of observer {worst.index} ({worst.where}) have been behind {behind_by}"
    return Said(
        f"{named('observer', [member.index for _, member in behind]).capitalize()} {verb} behind the newest weights",
        f"{how} when it was heard: see whether its program takes them (wait, into), or whether its link is too slow for each step.",
    )


def _training(scene: Scene) -> Said | None:
    """Holds where no step is waited for, or each contribution is one."""
    at = scene.at
    if at.state is not ClusterState.TRAINING or not at.members.live_workers or at.servers.unreachable_since is not None:
        return None
    is_at_work = scene.is_young or not at.policy.spec.has_common_steps
    return Said("Training. Nothing is waited for") if is_at_work else None


def _remedy(scene: Scene, lost: Sequence[Member]) -> tuple[str, tuple[str, ...]]:
    """Returns what to do about silent workers: their processes may be stopped, or may have ended."""
    one = lost[0] if len(lost) == 1 else None
    index = one.index if one is not None and scene.at.settings.config.num_workers is not None else None
    start = scene.start_command(index)
    if one is None:
        return (
            "See whether their processes are stopped (kill -CONT lets them go on) or have ended: then start others in their place.",
            start,
        )
    if not lease_end(one.lease_s):  # it lives in this process
        return "See what it is busy with.", ()
    return (
        f"See whether its process is stopped ({one.where}) or has ended: let it go on, or start another in its place.",
        # A process that has ended takes no signal, and then another is started.
        (" || ".join([f"kill -CONT {one.pid}", *start]),),
    )


def _sentence(text: str) -> str:
    text = text.strip()
    return text and f"{text[:1].upper()}{text[1:]}" + ("" if text[-1] in ".!?:…" else ".")


class Row(NamedTuple):
    """One row of the table. `is_standstill`: training stands while it holds."""

    name: str
    level: Level
    find: Callable[[Scene], Said | None]
    is_standstill: bool = False


ROWS: tuple[Row, ...] = (
    Row("failed", Level.RED, _failed),
    Row("server gone", Level.RED, _server_gone, is_standstill=True),
    Row("server cut off", Level.RED, _server_cut_off, is_standstill=True),
    Row("checkpoint holds steps", Level.RED, _checkpoint_holds, is_standstill=True),
    Row("program failed", Level.RED, _program_failed, is_standstill=True),
    Row("program ended", Level.RED, _program_ended, is_standstill=True),
    Row("worker gone", Level.RED, _worker_gone, is_standstill=True),
    Row("nobody left", Level.RED, _nobody_left, is_standstill=True),
    Row("interrupted", Level.AMBER, _interrupted),
    Row("connecting", Level.AMBER, _connecting, is_standstill=True),
    Row("recovering", Level.AMBER, _recovering, is_standstill=True),
    Row("wrong program", Level.AMBER, _wrong_program),
    Row("nobody joined", Level.AMBER, _no_worker, is_standstill=True),
    Row("no model", Level.AMBER, _no_model, is_standstill=True),
    Row("worker silent", Level.AMBER, _worker_silent, is_standstill=True),
    Row("worker idle", Level.AMBER, _worker_idle, is_standstill=True),
    Row("worker absent", Level.AMBER, _worker_absent, is_standstill=True),
    Row("held up", Level.AMBER, _held_up, is_standstill=True),
    Row("checkpoints fail", Level.AMBER, _checkpoints_fail),
    Row("in vain", Level.AMBER, _in_vain),
    Row("fewer workers", Level.AMBER, _fewer_workers),
    Row("shared memory lost", Level.AMBER, _unshared),
    Row("standby missing", Level.AMBER, _standby_missing),
    Row("memory short", Level.AMBER, _memory_short),
    Row("not finite", Level.AMBER, _nonfinite),
    Row("redoing", Level.AMBER, _redoing),
    Row("nothing kept", Level.AMBER, _nothing_kept),
    Row("finished", Level.GREEN, _finished),
    Row("initialising", Level.GREEN, _initialising, is_standstill=True),
    Row("saving", Level.GREEN, _saving, is_standstill=True),
    Row("waiting", Level.GREEN, _waiting, is_standstill=True),
    Row("applying", Level.GREEN, _applying, is_standstill=True),
    Row("follower behind", Level.AMBER, _follower_behind),
    Row("slow worker", Level.GREEN, _slow_worker),
    Row("training", Level.GREEN, _training),
)
