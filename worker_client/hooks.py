"""What a session's hooks are: five moments, and what they are given. Knows no session and none of the ready-made hooks.

Source: tf.compat.v1.train.SessionRunHook.
"""

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionRunArgs:
    """What a hook wants from a run: `fetches` besides the caller's, and `feed_dict`, which is merged with the caller's.

    `options` is accepted and means nothing here.
    """

    fetches: Any
    feed_dict: Any = None
    options: Any = None


@dataclass(frozen=True, slots=True)
class SessionRunValues:
    """What a hook gets after a run: `results`, in the structure of its fetches (None if it had none). The rest is None."""

    results: Any
    options: Any = None
    run_metadata: Any = None


class SessionRunContext:
    """One call of `session.run()`, as hooks see it."""

    def __init__(self, original_args: SessionRunArgs, session: Any) -> None:
        self._original_args = original_args
        self._session = session
        self._stop_requested = False

    @property
    def original_args(self) -> SessionRunArgs:
        """What the caller gave to `run()`."""
        return self._original_args

    @property
    def session(self) -> Any:
        """The session that runs, without hooks: its `run()` calls none, so that a hook may look at more."""
        return self._session

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked for the end of this worker's training in this run."""
        return self._stop_requested

    def renew(self, session: Any) -> None:
        """Puts another session in the place of one that was lost during the run."""
        self._session = session

    def request_stop(self) -> None:
        """Has `should_stop()` of the session be true from now on."""
        self._stop_requested = True


class Coordinator:
    """Whether a worker's training shall end. Thread-safe."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.is_set()

    def request_stop(self, ex: BaseException | None = None) -> None:
        """Asks for the end; `ex` is accepted, errors of a run are raised by it."""
        del ex
        self._stop.set()

    def clear_stop(self) -> None:
        """Takes the request back."""
        self._stop.clear()

    def wait_for_stop(self, timeout: float | None = None) -> bool:
        """Blocks until a stop is requested, at most `timeout` seconds; returns whether it was."""
        return self._stop.wait(timeout)


class SessionRunHook:
    """A base for hooks: does nothing at each moment. An error that a hook raises ends the session, as an error of the run does."""

    def begin(self) -> None:
        """Called once, before there is a session: the last moment to declare variables."""

    def after_create_session(self, session: Any, coord: Coordinator) -> None:
        """Called when a session stands and its model has values; again each time that a lost session was replaced."""
        del session, coord

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each run; returns what to evaluate besides, or None."""
        del run_context
        return None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each run, with the results of what `before_run` asked for; not if the run raised."""
        del run_context, run_values

    def end(self, session: Any) -> None:
        """Called once at the end, while the session can still be used; not if training ended by an error."""
        del session
