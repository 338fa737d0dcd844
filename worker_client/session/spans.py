"""OpenTelemetry spans of a worker's steps, around its requests. Knows acts and the tracing API; no chief, no shard.

A session without spans runs none of this: its acts are used as they are.
"""

import importlib.util
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import TokenReply, TokenResult
from worker_client.core import requests as ask

_SCOPE = "lockstep"
# Descriptions of what a worker does within a step.
_NAMES: Mapping[type, str] = {
    ask.Stage: "lockstep.stage",
    ask.PushParts: "lockstep.push",
    ask.Count: "lockstep.commit",
    ask.AwaitToken: "lockstep.await_token",
    ask.Fetch: "lockstep.read",
    ask.FetchNewest: "lockstep.read",
    ask.ReadRows: "lockstep.read_rows",
}


def check_spans() -> None:
    """Raises InvalidSpec where OpenTelemetry's API is not installed."""
    if importlib.util.find_spec("opentelemetry") is None:
        raise InvalidSpec("spans need OpenTelemetry's API: pip install 'lockstep-ps[otel]', or leave out LOCKSTEP_OTEL and otel=True")


class StepSpans:
    """The spans of one session: one for each step, from its token to the next one, and in it one for each thing that takes time.

    What the program computes is the time from the end of the one to the next `stage`. For one thread. Without an SDK that the program sets
    up, the API drops all spans.
    """

    def __init__(self, *, worker: int, cluster: str) -> None:
        from opentelemetry import trace

        self._api, self._tracer = trace, trace.get_tracer(_SCOPE)
        self._attributes = {"lockstep.worker": worker, "lockstep.cluster": cluster}
        self._step: Any = None
        self._context: Any = None
        self._idle_since = time.time_ns()

    def around(self, acts: Mapping[type, Callable[[Any], Any]]) -> dict[type, Callable[[Any], Any]]:
        """Returns the acts, with spans around those that take time."""
        return {kind: partial(self._traced, kind, act) if kind in _NAMES else act for kind, act in acts.items()}

    def end(self) -> None:
        """Ends the span of the open step. Idempotent."""
        step, self._step = self._step, None
        if step is not None:
            step.end()

    def _traced(self, kind: type, act: Callable[[Any], Any], request: Any) -> Any:
        if self._step is None:
            self._begin(getattr(request, "step", None))
        if kind is ask.Stage:
            self._tracer.start_span("lockstep.compute", context=self._context, start_time=self._idle_since).end()
        span = self._tracer.start_span(_NAMES[kind], context=self._context)
        try:
            answer = act(request)
        except BaseException as error:
            span.record_exception(error)
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()
            self._idle_since = time.time_ns()
        if kind is ask.AwaitToken:
            self._note_token(answer)
        return answer

    def _note_token(self, reply: TokenReply) -> None:
        if reply.commit is not None and self._step is not None:
            self._step.set_attribute("lockstep.outcome", reply.commit.outcome.name.lower())
            self._step.set_attribute("lockstep.staleness", reply.commit.staleness)
        if reply.result is not TokenResult.WAIT:
            self.end()
        if reply.result is TokenResult.TOKEN:
            self._begin(reply.step)

    def _begin(self, step: int | None) -> None:
        about = {**self._attributes, **({} if step is None else {"lockstep.step": step})}
        self._step = self._tracer.start_span("lockstep.step", attributes=about)
        self._context = self._api.set_span_in_context(self._step)
