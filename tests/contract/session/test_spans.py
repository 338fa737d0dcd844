"""OpenTelemetry spans of a worker's steps: their names and parents, and that a session without spans runs none of their code.

A stand-in has the place of OpenTelemetry's API; tests/frameworks has the same with its SDK.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec, ShapeMismatch
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client import Session
from worker_client.session.spans import StepSpans
from worker_client.session.training import Training

STEP = ["lockstep.compute", "lockstep.stage", "lockstep.push", "lockstep.await_token", "lockstep.read"]


class Span:
    def __init__(self, name: str, parent: "Span | None", attributes: dict[str, Any]) -> None:
        self.name, self.parent, self.attributes = name, parent, attributes
        self.is_ended, self.errors, self.status = False, list[BaseException](), ""

    def set_attribute(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def record_exception(self, error: BaseException) -> None:
        self.errors.append(error)

    def set_status(self, status: str) -> None:
        self.status = status

    def end(self) -> None:
        assert not self.is_ended, f"{self.name} is ended twice"
        self.is_ended = True


class Api:
    """The part of opentelemetry.trace that is used."""

    StatusCode = SimpleNamespace(ERROR="error")

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def get_tracer(self, name: str) -> "Api":
        return self

    def start_span(
        self, name: str, context: Span | None = None, attributes: dict[str, Any] | None = None, start_time: int | None = None
    ) -> Span:
        self.spans.append(Span(name, context, dict(attributes or {})))
        return self.spans[-1]

    def set_span_in_context(self, span: Span) -> Span:
        return span

    def Status(self, code: str, words: str) -> str:
        return f"{code}: {words}"

    def of(self, step: Span) -> list[str]:
        return [span.name for span in self.spans if span.parent is step]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    api = Api()
    monkeypatch.setitem(
        sys.modules, "opentelemetry", SimpleNamespace(trace=api, __spec__=importlib.util.spec_from_loader("opentelemetry", None))
    )
    return api


@pytest.fixture
def cluster(socket_dir: Path) -> Iterator[ServedCluster]:
    with ExitStack() as stack:
        yield ServedCluster(Shape(num_ps=2), stack, directory=socket_dir)


def connected(cluster: ServedCluster, **words: Any) -> Session:
    session = worker_client.connect(cluster.chief_address, transport="grpc", timeout_s=20, **words)
    session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
    return session


def test_each_step_is_a_span_with_its_parts(api: Api, cluster: ServedCluster) -> None:
    with connected(cluster, otel=True) as session:
        for _ in range(3):
            session.step({"w": np.ones(3)}, timeout_s=20)
    steps = [span for span in api.spans if span.name == "lockstep.step"]
    assert [api.of(step) for step in steps[1:3]] == [["lockstep.read", *STEP[:-1]]] * 2
    assert [step.attributes["lockstep.step"] for step in steps] == [0, 1, 2, 3]
    assert steps[1].attributes == {
        "lockstep.worker": 0,
        "lockstep.cluster": "lockstep",
        "lockstep.step": 1,
        "lockstep.outcome": "accepted",
        "lockstep.staleness": 0,
    }
    assert all(span.is_ended for span in api.spans), [span.name for span in api.spans if not span.is_ended]


def test_push_wait_and_read_are_the_same_spans(api: Api, cluster: ServedCluster) -> None:
    with connected(cluster, otel=True) as session:
        for _ in range(2):
            session.read()
            session.push({"w": np.ones(3)})
            session.wait(timeout_s=20)
    step = [span for span in api.spans if span.name == "lockstep.step"][1]
    assert api.of(step) == [
        "lockstep.read",
        "lockstep.compute",
        "lockstep.stage",
        "lockstep.push",
        "lockstep.commit",
        "lockstep.await_token",
    ]


def test_a_failed_part_of_a_step_is_recorded_in_its_span_and_raised(api: Api, cluster: ServedCluster) -> None:
    with connected(cluster, otel=True) as session, pytest.raises(ShapeMismatch):
        session.step({"w": np.ones(4)}, timeout_s=20)
    (failed,) = [span for span in api.spans if span.errors]
    assert (failed.name, failed.status) == ("lockstep.stage", "error: ShapeMismatch")
    assert all(span.is_ended for span in api.spans)


@pytest.mark.parametrize(("given", "has_spans"), [(None, True), (False, False)])
def test_variable_turns_spans_on_and_the_argument_wins(
    api: Api, cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch, given: bool | None, has_spans: bool
) -> None:
    monkeypatch.setenv("LOCKSTEP_OTEL", "1")
    with connected(cluster, otel=given) as session:
        session.step({"w": np.ones(3)}, timeout_s=20)
    assert bool(api.spans) is has_spans


def test_a_session_without_spans_runs_none_of_their_code(cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSpans, "__init__", lambda *_, **__: pytest.fail("spans are made"))
    with connected(cluster) as session:
        session.step({"w": np.ones(3)}, timeout_s=20)
        assert session._worker.chief is session.membership
        assert type(session._worker.model_side) is Training


def test_spans_without_the_api_are_refused_before_anything_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidSpec, match=r"lockstep-ps\[otel\]"):
        worker_client.connect("127.0.0.1:1", otel=True)
