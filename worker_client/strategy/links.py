"""Messages to and from one other participant, each sent until it is answered. Knows mailboxes and the clock; not what messages mean."""

import logging
import secrets
import time

from ps_protocol.errors import AccumulatorNotFound, Cancelled, DeadlineExceeded, InvalidSpec, LimitExceeded, MalformedMessage, PsError
from worker_client.strategy.mailboxes import Mailboxes
from worker_client.strategy.messages import RUN_BITS, Message, Sender

log = logging.getLogger("lockstep.worker")

# A message without an answer for so long is sent again: a restarted parameter server has lost it.
AGAIN_S = 3.0
# A server without room is tried again for so long.
LIMIT_S = 3.0
# … but not before so many times as long as sending it took.
_PATIENCE = 8
_PAUSE_S = 0.2
# One call waits no longer: after 2 s it would log a warning of its own.
_SLICE_S = 1.5


def new_sender() -> Sender:
    """Returns the sender that numbers the messages of this run of a program."""
    return Sender(secrets.randbits(RUN_BITS))


class Link:
    """A mailbox each way: `outgoing` and `incoming` are their names. The latest message is sent again until it is settled."""

    def __init__(self, mailboxes: Mailboxes, *, outgoing: str, incoming: str) -> None:
        self._mailboxes, self._outgoing, self._incoming = mailboxes, outgoing, incoming
        self._latest: Message | None = None
        self._again_at_s = 0.0
        # The turn of the latest message: the message before it had the other one.
        self._turn = 0
        # Whether a message may still lie at the place of the next one: at first, the message of an earlier program.
        self._is_unclear = True
        # Whether the latest message was sent more than once, so that a copy may be left when it is settled.
        self._is_repeated = False

    def send(self, message: Message) -> None:
        """Sends a message, in place of one that is not settled; `receive` tries again if it cannot be sent now.

        Raises InvalidSpec, and LimitExceeded after 3 s, for a message that cannot be sent: then there is none.
        """
        self._is_repeated = self._latest is message
        self._turn ^= not self._is_repeated
        is_unclear = self._is_unclear or self._latest is not None
        self._latest, begin_s = message, time.monotonic()
        try:
            self._put(message, is_unclear=is_unclear)
        except (InvalidSpec, LimitExceeded):
            self._latest, self._is_unclear = None, True
            raise
        except PsError as error:
            self._fail(error)
        else:
            self._is_unclear = False
            # If sending takes long, the other participant needs as long to receive, and must find the message there.
            now = time.monotonic()
            self._again_at_s = now + max(AGAIN_S, _PATIENCE * (now - begin_s))

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next message; None if none has arrived in time. May resend the latest message, and raises the errors of `send`."""
        end_s = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            unanswered = self._latest if now >= self._again_at_s else None
            try:
                # What has come may say that the other has it: then it is not sent again.
                return self._mailboxes.receive(self._incoming, max(0.0, min(end_s - now, _SLICE_S)) if unanswered is None else 0.0)
            except (DeadlineExceeded, Cancelled, AccumulatorNotFound):
                pass  # the latter: it is just being sent again
            except MalformedMessage as error:
                log.debug("%s: the message is lost, and will be sent again: %s", self._incoming, error)
            except PsError as error:
                self._fail(error)
            if unanswered is not None:
                self.send(unanswered)
            if time.monotonic() >= end_s:
                return None

    def deliver(self, timeout_s: float) -> None:
        """Tries for so long to send a message that could not be sent before, or may have been lost. Raises what `send` does."""
        end_s = time.monotonic() + timeout_s
        while self._latest is not None and self._is_unclear and time.monotonic() < end_s:
            self.send(self._latest)

    def settle(self) -> None:
        """Notes that the other participant has the latest message, and removes a needless copy of it."""
        self._latest = None
        if self._is_repeated:
            self._is_repeated = False
            self.discard()

    def discard(self) -> None:
        """Removes the message that waits for the other participant."""
        try:
            self._mailboxes.discard(self._outgoing)
        except PsError as error:
            self._fail(error)

    def _put(self, message: Message, *, is_unclear: bool) -> None:
        end_s = time.monotonic() + LIMIT_S
        while True:
            try:
                return self._mailboxes.send(self._outgoing, message, turn=self._turn, again=is_unclear)
            except LimitExceeded:
                if time.monotonic() >= end_s:
                    raise
            is_unclear = True
            time.sleep(_PAUSE_S)  # other callers' messages and gradients fill the server for a moment; it does not say when it has room

    def _fail(self, error: PsError) -> None:
        log.debug("%s: %s", self._outgoing, error)
        # The message may be lost, or may have arrived after all.
        self._is_unclear = self._is_repeated = True
        self._again_at_s = 0.0
        self._mailboxes.close()  # it may be elsewhere now
        time.sleep(_PAUSE_S)  # the server may be lost: without a pause, the caller would call it again and again
