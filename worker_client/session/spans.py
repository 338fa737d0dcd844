"""OpenTelemetry spans of a worker's steps, around the calls of its core. Knows those calls and the tracing API; no chief, no shard.

A session without spans runs none of this: its core calls the sides themselves.
"""

import importlib.util
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.chief import CommitPushRequest, DequeueTokenRequest, TokenReply, TokenResult

Side = TypeVar("Side")

_SCOPE = "lockstep"
# Descriptions of what a worker does within a step, by the name of the call, or by what the chief is asked with.
_NAMES: Mapping[str | type, str] = {
    "stage": "lockstep.stage",
    "push": "lockstep.push",
    CommitPushRequest: "lockstep.commit",
    DequeueTokenRequest: "lockstep.await_token",
    "fetch": "lockstep.read",
    "fetch_newest": "lockstep.read",
    "read_rows": "lockstep.read_rows",
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
        # The step of the worker's next contribution.
        self.local_step: Callable[[], int] = lambda: 0
        self._step: Any = None
        self._context: Any = None
        self._idle_since = time.time_ns()

    def around(self, side: Side) -> Side:
        """Returns a side of the core, with spans around the calls that take time."""
        return cast(Side, Traced(side, self._traced))

    def end(self) -> None:
        """Ends the span of the open step. Idempotent."""
        step, self._step = self._step, None
        if step is not None:
            step.end()

    async def _traced(self, name: str, call: Callable[..., Coroutine[Any, Any, Any]], *given: Any, **named: Any) -> Any:
        what = _NAMES.get(type(given[0]) if name == "ask" else name)
        if what is None:
            return await call(*given, **named)
        if self._step is None:
            self._begin(self.local_step())
        if name == "stage":
            self._tracer.start_span("lockstep.compute", context=self._context, start_time=self._idle_since).end()
        span = self._tracer.start_span(what, context=self._context)
        try:
            answer = await call(*given, **named)
        except BaseException as error:
            span.record_exception(error)
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()
            self._idle_since = time.time_ns()
        if isinstance(answer, TokenReply):
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

    def _begin(self, step: int) -> None:
        self._step = self._tracer.start_span("lockstep.step", attributes={**self._attributes, "lockstep.step": step})
        self._context = self._api.set_span_in_context(self._step)


class Traced:
    """A side of the core whose calls are traced."""

    def __init__(self, side: object, traced: Callable[..., Any]) -> None:
        self._side, self._traced = side, traced

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._side, name)
        return partial(self._traced, name, found) if name == "ask" or name in _NAMES else found
