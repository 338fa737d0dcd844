"""How a participant leaves its cluster: quickly, whatever the state of things. Knows the chief and threads; no model."""

import logging

from ps_protocol import retry
from ps_protocol.chief import Chief, Participant
from ps_protocol.errors import PsError
from worker_client.bounded import run_bounded
from worker_client.cluster_link import ClusterLink
from worker_client.heartbeat import Heartbeat
from worker_client.shard_calls import CLOSE_WAIT_S
from worker_client.shard_group import ShardGroup

log = logging.getLogger("lockstep.worker")

# With three waits of a quarter, and the end of an interpreter, Ctrl-C brings the prompt back within 2 s.
DEREGISTER_WAIT_S = 1.0
MAX_FAILURE_CHARACTERS = 500


def failure_text(error: BaseException | None) -> str:
    """Returns what to tell the chief about an exception that ends a session; empty for none, and for an exit that is no failure."""
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return ""
    text = str(error)
    return f"{type(error).__name__}: {text}"[:MAX_FAILURE_CHARACTERS] if text else type(error).__name__


def leave(link: ClusterLink, participant: Participant, *, heartbeat: Heartbeat | None, shards: ShardGroup | None, failure: str) -> None:
    """Stops the heartbeat, ends the lease, releases all connections. Takes 2 s at most; a silent chief only misses the news."""

    def deregister() -> None:
        _deregister(link.present_chief, participant, failure)

    if link.is_in_process:
        deregister()  # there is nothing else to release
        return
    try:
        if heartbeat is not None:
            heartbeat.stop()
        if not run_bounded([deregister], name="lockstep-farewell", timeout_s=DEREGISTER_WAIT_S):
            log.warning("the chief did not take note that worker=%d leaves; its lease will end by itself", participant.index)
    finally:
        if shards is not None:
            shards.close()
        if link.watch is not None:
            link.watch.close()
        run_bounded([link.present_chief.close], name="lockstep-close", timeout_s=CLOSE_WAIT_S)


def _deregister(chief: Chief, participant: Participant, failure: str) -> None:
    try:
        retry.call(lambda _: chief.deregister_worker(participant, failure=failure), what="the chief: leave", timeout_s=DEREGISTER_WAIT_S)
    except PsError as error:
        # There is nobody left to raise it to, and the lease ends by itself.
        log.debug("deregistration failed worker=%d: %s", participant.index, error)
