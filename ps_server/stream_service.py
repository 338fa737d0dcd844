"""The standing streams between a worker and a parameter server."""

from ps_protocol.call_deadlines import CallDeadlines
from ps_protocol.direct_serving import standing_method_handler
from ps_server.idle_streams import IdleStreams
from ps_server.push_streams import PushStream
from ps_server.store import ParameterStore
from ps_server.variables_streams import VariablesStreamOut


class StreamService:
    """Serves one store. Thread-safe; events serve a stream as long as what it carries is small."""

    def __init__(self, store: ParameterStore, *, idle_streams: IdleStreams) -> None:
        name = f"ps {store.index}"
        self._deadlines = deadlines = CallDeadlines()
        self.StreamPushes = standing_method_handler(
            lambda peer, context: PushStream(store, peer, context, idle_streams=idle_streams, name=name), server_name=name
        )
        self.StreamVariables = standing_method_handler(
            lambda peer, context: VariablesStreamOut(store, peer, context, idle_streams=idle_streams, deadlines=deadlines, name=name),
            server_name=name,
        )

    def close(self) -> None:
        """Lets go of what the streams share, when they are over. Idempotent."""
        self._deadlines.close()
