"""The actions that the page offers: finish, another policy, another learning rate, a checkpoint. Knows requests; decides nothing."""

import queue
import secrets
from collections.abc import Mapping
from typing import Any

from chief.core import messages as ev
from chief.page.recorder import Cluster
from ps_protocol.errors import DeadlineExceeded, InvalidSpec
from ps_protocol.http.messages import Request, Response, Route, json_response
from ps_protocol.model.optimizers import constant
from ps_protocol.model.policy import PolicyName, PolicySpec
from ps_protocol.roles.chief import (
    Answer,
    ChangeSettingsRequest,
    FinishTrainingRequest,
    HyperparameterChange,
    SaveCheckpointRequest,
)
from ps_protocol.roles.chief import Request as ChiefRequest

_SERVICE = "/ps_protocol.v1.ChiefService"
# The chief has callers wait no longer.
_WAIT_S, _ANSWER_S = 20.0, 25.0
_MAX_REASON = 200


def routes(cluster: Cluster) -> list[Route]:
    """Returns the paths that change something, each for the roles that may call the RPC that does the same."""

    def finish(request: Request) -> Response:
        given = _fields(request, "reason")
        reason = str(given.get("reason") or "requested on the page")[:_MAX_REASON]
        return json_response({"step": _ask(cluster, FinishTrainingRequest(reason=reason))})

    def change_policy(request: Request) -> Response:
        given = _fields(request, "policy", "replicas_to_aggregate", "staleness")
        return _changed(cluster, ChangeSettingsRequest(request_id=_new_id(), max_wait_s=_WAIT_S, policy=_policy(given)))

    def set_numbers(request: Request) -> Response:
        given = _fields(request, "variable", "learning_rate")
        change = HyperparameterChange(variable=_text(given, "variable"), learning_rate=constant(_number(given, "learning_rate")))
        return _changed(cluster, ChangeSettingsRequest(request_id=_new_id(), max_wait_s=_WAIT_S, hyperparameters=change))

    def save(request: Request) -> Response:
        _fields(request)
        saved = _ask(cluster, SaveCheckpointRequest(request_id=_new_id(), max_wait_s=_WAIT_S))
        if not saved.tag:
            return json_response({"waiting_for": saved.waiting_for}, status=202)
        return json_response({"tag": saved.tag, "step": saved.step})

    return [
        # What a reader may do is known before a button is pressed.
        Route(path="/api/may-act", rpc=f"{_SERVICE}/FinishTraining", answer=lambda _: json_response({})),
        Route(path="/api/finish", method="POST", rpc=f"{_SERVICE}/FinishTraining", answer=finish, may_wait=True),
        Route(path="/api/policy", method="POST", rpc=f"{_SERVICE}/ChangeSettings", answer=change_policy, may_wait=True),
        Route(path="/api/learning-rate", method="POST", rpc=f"{_SERVICE}/ChangeSettings", answer=set_numbers, may_wait=True),
        Route(path="/api/checkpoint", method="POST", rpc=f"{_SERVICE}/SaveCheckpoint", answer=save, may_wait=True),
    ]


def _changed(cluster: Cluster, request: ChangeSettingsRequest) -> Response:
    reply = _ask(cluster, request)
    if reply is None:
        return json_response({"waiting_for": "the step under way; the change is made after it"}, status=202)
    return json_response({"step": reply.step, "version": reply.version})


def _ask(cluster: Cluster, request: ChiefRequest[Answer]) -> Answer:
    """Asks the chief and returns its answer. Raises PsError."""
    answers: queue.SimpleQueue[ev.Reply | ev.Refuse] = queue.SimpleQueue()
    number = cluster.begin(request, answers.put)
    try:
        given = answers.get(timeout=_ANSWER_S)
    except queue.Empty:
        cluster.cancel(number)
        raise DeadlineExceeded(f"the chief gave no answer about {request.awaited} within {_ANSWER_S:g} s; it may still be done") from None
    if isinstance(given, ev.Refuse):
        raise given.error
    value: Any = given.value
    answer: Answer = value
    return answer


def _new_id() -> int:
    return secrets.randbits(63)


def _fields(request: Request, *names: str) -> Mapping[str, Any]:
    given = request.json()
    unknown = sorted(given.keys() - {*names})
    if unknown:
        raise InvalidSpec(f"{unknown[0][:40]!r}: want {' or '.join(names) or 'no field'}")
    return given


def _policy(given: Mapping[str, Any]) -> PolicySpec:
    word = given.get("policy")
    names = {name.name.lower(): name for name in PolicyName}
    if not isinstance(word, str) or word not in names:
        raise InvalidSpec(f"policy: want {' or '.join(names)}")
    numbers = {name: given[name] for name in ("replicas_to_aggregate", "staleness") if given.get(name) is not None}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidSpec(f"{name}: want a whole number")
    return PolicySpec(name=names[word], **numbers)


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name, "")
    if not isinstance(value, str):
        raise InvalidSpec(f"{name}: want a text")
    return value


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSpec(f"{name}: want a number")
    return float(value)
