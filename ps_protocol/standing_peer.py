"""What serves a standing stream and what it sees of the caller: two interfaces. Knows bytes and errors; no way to carry them."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import grpc

from ps_protocol.errors import PsError


class Peer(Protocol):
    """The other end of one stream. Thread-safe; no method waits but `wait_for_room`."""

    @property
    def num_unsent(self) -> int:
        """Messages that wait behind the one that is leaving."""

    def send(self, message: bytes) -> None:
        """Sends a message after those before it. Does nothing once the stream is over."""

    def wait_for_room(self) -> bool:
        """Waits until nothing waits behind the message that is leaving; False if the stream is over. For threads of their own."""

    def pause(self) -> None:
        """Asks for no message after those that have been asked for, until `go_on`; for `take`. Idempotent."""

    def go_on(self) -> None:
        """Asks for the next message. Idempotent."""

    def end(self, error: PsError | None = None) -> None:
        """Ends the stream, with the error's status if there is one, once what was given to `send` has left. Idempotent."""


class Handler(Protocol):
    """What is done with one stream. `take` is called for one message after the other, never for two at once."""

    def take(self, message: bytes) -> None:
        """Handles a message. Must not wait: the server's other streams stand still meanwhile. A PsError ends the stream with its status."""

    def close(self) -> None:
        """The stream is over, for whatever reason. Called once; messages may still be under way to the peer only if it ended well."""


@runtime_checkable
class FinishingHandler(Handler, Protocol):
    """A handler that may have answers to give when no more messages come."""

    def finish(self) -> None:
        """No more messages will come; the stream lasts until `Peer.end`. Without this method it ends at once."""


Begin = Callable[[Peer, grpc.ServicerContext], Handler]
