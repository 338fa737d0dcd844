"""A standing stream by grpcio's public interface: two threads, one reads and one writes. Knows bytes; no message."""

import queue
import threading
from collections.abc import Iterator

import grpc

from ps_protocol.errors import InternalError, PsError
from ps_protocol.standing_peer import Begin, FinishingHandler, Handler
from ps_protocol.status import defect, set_status


class ThreadedPeer:
    """See Peer. `serve` writes; a thread of its own reads."""

    def __init__(self, requests: Iterator[bytes], context: grpc.ServicerContext, *, server_name: str) -> None:
        self._requests, self._context, self._server_name = requests, context, server_name
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._is_ending = self._is_paused = False

    def serve(self, begin: Begin) -> Iterator[bytes]:
        """Yields what is to be sent, until the stream ends."""
        try:
            handler = begin(self, self._context)
        except PsError as error:
            set_status(self._context, error)
            return
        except Exception:
            set_status(self._context, defect(self._server_name))
            return
        self._context.add_callback(self.end)
        threading.Thread(target=self._read, args=(handler,), name="standing-stream", daemon=True).start()
        try:
            for answer in iter(self._answers.get, None):
                with self._changed:
                    self._changed.notify_all()
                yield answer
        finally:
            self.end()
            handler.close()

    @property
    def num_unsent(self) -> int:
        """See Peer."""
        return self._answers.qsize()

    def send(self, message: bytes) -> None:
        """See Peer."""
        if not self._is_ending:
            self._answers.put(message)

    def wait_for_room(self) -> bool:
        """See Peer."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ending or not self._answers.qsize())
        return not self._is_ending

    def pause(self) -> None:
        """See Peer."""
        self._is_paused = True

    def go_on(self) -> None:
        """See Peer."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def end(self, error: PsError | None = None) -> None:
        """See Peer."""
        with self._changed:
            if self._is_ending:
                return
            self._is_ending = True
            self._changed.notify_all()
            if error is not None:
                set_status(self._context, error)
        self._answers.put(None)

    def _read(self, handler: Handler) -> None:
        try:
            for message in self._requests:
                if self._is_ending:
                    return
                handler.take(message)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_ending or not self._is_paused)
            if isinstance(handler, FinishingHandler):
                handler.finish()
            else:
                self.end()
        except PsError as error:
            self.end(error)
        except grpc.RpcError:
            self.end()
        except Exception:
            self.end(defect(self._server_name) if self._context.is_active() else InternalError("the caller has gone"))
