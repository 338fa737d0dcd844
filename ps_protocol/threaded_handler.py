"""A standing stream whose messages are handled by a thread of its own, where they take long. Knows bytes; no message.

The message after the one at hand is received meanwhile, and an answer is made while the one before it leaves: one of each is in memory
besides gRPC's, whatever the peer does.
"""

import queue
import threading
from collections.abc import Callable, Iterator

from ps_protocol.errors import PsError
from ps_protocol.standing_peer import Peer
from ps_protocol.status import defect

Answers = Callable[[Iterator[bytes]], Iterator[bytes]]


class ThreadedHandler:
    """See FinishingHandler. `answers` yields answers to an iterator of messages, of which `first` has been taken already."""

    def __init__(self, peer: Peer, answers: Answers, *, first: bytes, server_name: str) -> None:
        self._peer, self._answers, self._server_name = peer, answers, server_name
        self._incoming: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.take(first)
        threading.Thread(target=self._run, name="standing-stream", daemon=True).start()

    def take(self, message: bytes) -> None:
        """Leaves a message to the thread."""
        self._peer.pause()
        self._incoming.put(message)

    def finish(self) -> None:
        """Has the iterator of messages end."""
        self._incoming.put(None)

    def close(self) -> None:
        """As `finish`: what is not whole is dropped."""
        self._incoming.put(None)

    def _messages(self) -> Iterator[bytes]:
        for message in iter(self._incoming.get, None):
            self._peer.go_on()
            yield message

    def _run(self) -> None:
        answers = self._answers(self._messages())
        try:
            for answer in answers:
                if not self._peer.wait_for_room():
                    return
                self._peer.send(answer)
            self._peer.end()
        except PsError as error:
            self._peer.end(error)
        except Exception:
            self._peer.end(defect(self._server_name))
        finally:
            close = getattr(answers, "close", None)
            if close is not None:
                close()
