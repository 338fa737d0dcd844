"""What an earlier chief has left at the shards for its successor: the newest of the records that they keep. Knows bytes; no connection."""

import logging
from collections.abc import Sequence

from chief.recovery_events import RecordFound
from ps_protocol.codec_record import unpack_record
from ps_protocol.errors import PsError
from ps_protocol.shard import Adoption

log = logging.getLogger("lockstep.chief")


def record_found(adoptions: Sequence[Adoption]) -> list[RecordFound]:
    """Returns the event that reports the newest readable record, or none: a chief can do without, so one that cannot be read is said."""
    kept = sorted((adoption for adoption in adoptions if adoption.record), key=lambda adoption: adoption.record_version, reverse=True)
    for adoption in kept:
        try:
            return [RecordFound(record=unpack_record(adoption.record))]
        except PsError as error:
            log.warning("cannot read the record of an earlier chief version=%d cause=%s", adoption.record_version, error.message)
    return []
