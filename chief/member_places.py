"""Which index a newcomer is given. Knows who is in, and where; changes nothing. `now` is an argument."""

import itertools
from collections.abc import Mapping

from chief.coordination import MAX_PARTICIPANTS
from chief.member import Member, is_free, taken_error
from chief.wording import lease_end, seconds
from ps_protocol.chief import ParticipantKind, RegisterRequest
from ps_protocol.errors import ClusterFull, WorkerIndexOutOfRange


def wanted_index(request: RegisterRequest, members: Mapping[int, Member], *, num_places: int, now: float) -> int:
    """Returns the index that was asked for, or the former one, or the lowest free one; `members` are those of the kind, by index.

    Raises WorkerIndexTaken, WorkerIndexOutOfRange or ClusterFull.
    """
    if request.index is None:
        former = request.former
        if former is not None and former.index < num_places and _is_free(members.get(former.index), now):
            return former.index
        return _free_index(request.kind, members, num_places, now)
    if request.index >= num_places:
        is_chosen = request.kind is ParticipantKind.WORKER and num_places < MAX_PARTICIPANTS
        why = f" (total_num_replicas is {num_places})" if is_chosen else ""
        raise WorkerIndexOutOfRange(f"{request.kind.name.lower()} index {request.index}: want 0..{num_places - 1}{why}")
    holder = members.get(request.index)
    if holder is not None and not is_free(holder, now) and not request.takeover:
        raise taken_error(holder, now)
    return request.index


def _is_free(holder: Member | None, now: float) -> bool:
    return holder is None or is_free(holder, now)


def _free_index(kind: ParticipantKind, members: Mapping[int, Member], num_places: int, now: float) -> int:
    for index in itertools.islice(itertools.count(), num_places):
        if _is_free(members.get(index), now):
            return index
    left_s = min(member.last_seen + member.lease_s for member in members.values()) - now
    text = f"{num_places} of {num_places} {kind.name.lower()} places taken"
    if lease_end(left_s):
        text += f"; the next lease ends in {seconds(left_s)} if its holder is gone. Wait for that, or name an index and take it over"
    else:
        text += ". Close one of them first, or name an index and take it over"
    raise ClusterFull(text, facts={"lease_left_s": f"{left_s:.3f}"})
