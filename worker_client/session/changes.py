"""The changes that a participant may request of a cluster: another policy, other numbers, a checkpoint. Knows the chief; no variables."""

import enum
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ps_protocol.errors import DeadlineExceeded, InvalidSpec, Unavailable
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import (
    AgreedModel,
    ChangeSettingsRequest,
    ClusterStatusRequest,
    GetModelRequest,
    HyperparameterChange,
    SaveCheckpointRequest,
    SavedCheckpoint,
    SettingsReply,
)
from worker_client.cluster.chief import ChiefLink
from worker_client.model.optimizers import Rate, plain_number, rate_of

# How long the chief may take to say what a change waits for.
_STATUS_S = 1.0


# Asks the chief once: `ask(request, timeout_s=…)` returns its answer.
Ask = Callable[..., Any]


def set_hyperparameters(
    link: ChiefLink,
    *,
    who: str,
    learning_rate: Rate | None,
    variable: str | None,
    hyperparameters: dict[str, float],
    timeout_s: float | None,
) -> int:
    """Gives an optimizer new numbers from the next step on, and returns the version of the settings.

    Raises InvalidSpec, VariableNotFound, NotInitialized; DeadlineExceeded as `await_change`.
    """
    if learning_rate is None and not hyperparameters:
        raise InvalidSpec("set_hyperparameters: nothing to change; give a learning_rate or a hyper-parameter by name")
    change = HyperparameterChange(
        variable=variable or "",
        learning_rate=None if learning_rate is None else rate_of(learning_rate),
        hyperparameters={name: _number(value) for name, value in hyperparameters.items()},
    )
    wait = Wait(f"{who} sets hyper-parameters", timeout_s=timeout_s)
    return await_change(partial(link.ask, what="set hyper-parameters"), wait, hyperparameters=change).version


class OnOptimizerChange(enum.Enum):
    """What a worker does whose optimizers have other numbers than the cluster's."""

    REFUSE = "refuse"
    KEEP = "keep"
    ADOPT = "adopt"


def on_optimizer_change(name: str) -> OnOptimizerChange:
    """Returns the member of this name. Raises InvalidSpec."""
    known = {one.value: one for one in OnOptimizerChange}
    if name not in known:
        raise InvalidSpec(f"on_optimizer_change: got {name!r}, want one of {', '.join(map(repr, known))}")
    return known[name]


def agreed_model(link: ChiefLink) -> AgreedModel:
    """Returns the model that the cluster trains, with the numbers that its optimizers have by now."""
    return link.ask(GetModelRequest(max_wait_s=0.0), what="the model")


def adopt(link: ChiefLink, model: ModelSpec, *, who: str, timeout_s: float | None) -> None:
    """Gives the cluster's optimizers the numbers of this model, where they are others: of the same model but for these."""
    agreed = agreed_model(link)
    assert agreed.model is not None
    current = {original.key: one for original, one in agreed.optimizers}
    wait = Wait(f"{who} gives the optimizers its numbers", timeout_s=timeout_s)
    for key, (variable, new) in (agreed.model.optimizer_changes(model) or {}).items():
        if (current[key].key if key in current else key) == new.key:
            continue
        numbers = {name: value for name, value in new.numbers.items() if name not in new.fixed_hyperparameters}
        set_hyperparameters(
            link, who=who, learning_rate=new.learning_rate, variable=variable, hyperparameters=numbers, timeout_s=wait.left_s()
        )


def await_checkpoint(ask: Ask, wait: Wait) -> SavedCheckpoint:
    """Has the cluster saved and returns the checkpoint once it is whole.

    Raises DeadlineExceeded, with what is waited for: it is saved all the same; InvalidSpec where the cluster keeps no checkpoints.
    """
    request_id = secrets.randbits(63)
    while True:
        saved: SavedCheckpoint = ask(SaveCheckpointRequest(request_id=request_id, max_wait_s=wait.slice_s()), timeout_s=wait.left_s())
        if saved.tag:
            return saved
        wait.explain(f"{saved.waiting_for}; it will be saved all the same")


def await_change(
    ask: Ask, wait: Wait, *, policy: PolicySpec | None = None, hyperparameters: HyperparameterChange | None = None
) -> SettingsReply:
    """Requests a change until it has been made. Raises DeadlineExceeded, with what is waited for: it is made all the same."""
    request = ChangeSettingsRequest(policy=policy, hyperparameters=hyperparameters, request_id=secrets.randbits(63))
    while True:
        reply: SettingsReply | None = ask(replace(request, max_wait_s=wait.slice_s()), timeout_s=wait.left_s())
        if reply is not None:
            return reply
        wait.explain(f"{_waiting_for(ask)}; the change will be made all the same")


def _waiting_for(ask: Ask) -> str:
    try:
        waiting_for: str = ask(ClusterStatusRequest(), timeout_s=_STATUS_S).waiting_for
    except (Unavailable, DeadlineExceeded) as error:
        return error.message
    return waiting_for or "a step is being applied"


def _number(value: float) -> float:
    return float(value) if isinstance(value, bool) else plain_number(value)
