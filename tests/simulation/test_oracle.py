"""The oracle wants the states of workers' programs in a checkpoint that its steps were given, and no other."""

from collections.abc import Mapping

import numpy as np
import pytest

from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.roles.chief import DEFAULT_POLICY
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import ApplyRequest, ShardSpec
from tests.simulation.oracle import LEARNING_RATE, BrokenPromise, Oracle, gradient_of, rate_of
from tests.simulation.rules import PolicyRules

SERVER, SIZE = "ps-0", 4
PUSH_ID = PushId(worker=0, incarnation=1, sequence=1)
FIRST = np.zeros(SIZE, np.float32)


class OneShard:
    """An oracle, and one server that does what it looks at: in each life a step 0, of one contribution."""

    def __init__(self) -> None:
        rules = PolicyRules(spec=DEFAULT_POLICY, num_workers=1, num_required=1, min_required=1, min_if_strict=1)
        self.oracle = Oracle(servers=[SERVER], size=SIZE, is_durable_at_once=False, rules=rules)

    def train(self, *, life: int, brings: str) -> None:
        """A life begins, and makes a step of a contribution that brings this state."""
        spec = ShardSpec(epoch=1, shard=0, layout=Layout(()), optimizer=OptimizerSpec(name="sgd", learning_rate=constant(LEARNING_RATE)))
        self.oracle.created(SERVER, life, spec, FIRST, is_new=True)
        self.oracle.contributed(life, PUSH_ID, 0, (), brings)
        value = FIRST - gradient_of(PUSH_ID, shard=0, size=SIZE) * np.float32(rate_of(PUSH_ID.worker, PUSH_ID.sequence) or LEARNING_RATE)
        request = ApplyRequest(fence=Fence(era=Era(life=life, epoch=1), chief_incarnation=1), step=0, contributors=(PUSH_ID,))
        self.oracle.applied(SERVER, life, request, value)

    def save(self, user_states: Mapping[int, str], *, life: int) -> None:
        """A checkpoint of that step is whole."""
        self.oracle.committed_checkpoint("step-1", (life, 1), 1, set(), user_states)


def test_a_contribution_without_a_state_that_is_named_like_one_of_a_lost_life_wants_none() -> None:
    shard = OneShard()
    shard.train(life=1, brings='{"of":1}')
    shard.train(life=2, brings="")
    shard.save({}, life=2)


@pytest.mark.parametrize("user_states", [{}, {0: '{"of":1}'}, {0: '{"of":2}', 1: '{"of":1}'}])
def test_a_checkpoint_with_other_states_than_the_contributions_of_its_life_brought_breaks_the_promise(user_states: dict[int, str]) -> None:
    shard = OneShard()
    shard.train(life=1, brings='{"of":1}')
    shard.train(life=2, brings='{"of":2}')
    with pytest.raises(BrokenPromise, match=r"^9: "):
        shard.save(user_states, life=2)
    shard.save({0: '{"of":2}'}, life=2)
