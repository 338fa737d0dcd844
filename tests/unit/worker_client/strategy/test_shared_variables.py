"""Variables of a strategy on parameter servers, with a session that cannot send."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ps_protocol.errors import Unavailable
from ps_protocol.model.policy import PolicySpec
from worker_client.session.session import Session
from worker_client.strategy.exchange import exchange_number
from worker_client.strategy.shared_variables import SharedVariables


class _Cut:
    """A session whose steps reach nobody."""

    num_workers, local_step, policy = 1, 0, PolicySpec()

    def status(self) -> Any:
        return SimpleNamespace(policy=self.policy, replicas_to_aggregate=1)

    def create_or_join(self, variables: Any, **options: Any) -> None:
        assert [*variables] == ["v"]

    def read(self) -> dict[str, Any]:
        return {"v": np.zeros(2)}

    def step(self, gradients: Any, **options: Any) -> None:
        raise Unavailable("cut off")


def _variables() -> SharedVariables:
    variables = SharedVariables(cast("Session", _Cut()), ("ps",), writes=True, stepping=nullcontext)
    variables.declare("v", np.zeros(2), beside=None)
    return variables


def test_a_write_that_cannot_be_sent_from_one_worker_leaves_the_numbers_of_its_exchanges_as_the_others_have_them() -> None:
    variables = _variables()
    with pytest.raises(Unavailable):
        variables.write("v", np.ones(2))
    assert variables.numbers(1)[0] == exchange_number(1, 1)


def test_a_call_that_fails_before_its_exchanges_counts_as_one_that_has_some() -> None:
    variables = _variables()
    with pytest.raises(KeyError), variables.together():
        raise KeyError("in this worker alone")
    assert variables.numbers(1)[0] == exchange_number(2, 1)
