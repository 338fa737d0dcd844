"""What a chief may be told of workers, contributions and leases."""

import pytest

from chief.options import CoordinationConfig
from ps_protocol.errors import (
    InvalidSpec,
)
from ps_protocol.model.policy import PolicySpec, TokenMode
from ps_protocol.roles.chief import PushOutcome

ACCEPTED, STALE, DUPLICATE, LATE = PushOutcome.ACCEPTED, PushOutcome.STALE, PushOutcome.DUPLICATE, PushOutcome.LATE


@pytest.mark.parametrize("name", ["replicas_to_aggregate", "total_num_replicas", "max_steps"])
@pytest.mark.parametrize(
    ("value", "text"), [(0, "got 0, want >= 1"), (-3, "got -3, want >= 1"), (1.5, "got 1.5, want an"), (True, "got True")]
)
def test_counts_that_make_no_sense_are_refused_by_name(name: str, value: object, text: str) -> None:
    with pytest.raises(InvalidSpec, match=f"{name}: {text}"):
        CoordinationConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("r", "t", "required", "extras"), [(None, None, 1, 0), (None, 3, 3, 0), (2, None, 2, 0), (3, 1, 3, 2), (2, 3, 2, 0)]
)
def test_counts_left_out_follow_from_each_other(r: int | None, t: int | None, required: int, extras: int) -> None:
    config = CoordinationConfig(replicas_to_aggregate=r, total_num_replicas=t)
    assert (config.num_required, config.num_extras) == (required, extras)


@pytest.mark.parametrize("lease_s", [0, -1, float("nan")])
def test_a_lease_that_makes_no_sense_is_refused(lease_s: float) -> None:
    with pytest.raises(InvalidSpec, match="lease: got"):
        CoordinationConfig(lease_s=lease_s)


@pytest.mark.parametrize(
    ("r", "t", "required", "extras", "tokens_per_step", "num_workers"),
    [(None, None, 2, 0, 3, 3), (1, None, 1, 0, 3, 3), (5, None, 5, 2, 5, 3), (None, 1, 2, 1, 2, 1), (3, 4, 3, 0, 4, 4)],
)
def test_counts_of_the_policy_hold_before_those_of_the_start(
    r: int | None, t: int | None, required: int, extras: int, tokens_per_step: int, num_workers: int
) -> None:
    started = CoordinationConfig(replicas_to_aggregate=2, total_num_replicas=3)
    config = started.with_policy(PolicySpec(replicas_to_aggregate=r, total_num_replicas=t))
    assert (config.num_required, config.num_extras) == (required, extras)
    assert (config.tokens_per_step, config.num_workers) == (tokens_per_step, num_workers)
    assert config.with_policy(PolicySpec()) == started


def test_the_fifo_queue_begins_with_as_many_tokens_as_contributions_unless_told() -> None:
    tokens = [
        CoordinationConfig(replicas_to_aggregate=2, policy=PolicySpec(tokens=TokenMode.FIFO, num_tokens=number)).num_initial_tokens
        for number in (-1, 0, 7)
    ]
    assert tokens == [2, 0, 7]
