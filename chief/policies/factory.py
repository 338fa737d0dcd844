"""Makes the policy that a configuration asks for, and checks what goes with which. Knows all of them; no leases, calls or clocks."""

from collections.abc import Iterable, Sequence

from chief.options import CoordinationConfig
from chief.policies.base import Policy, TokenRule
from chief.policies.fifo import FifoTokens
from chief.policies.ordered import OrderedPolicy
from chief.policies.sync import StrictTokens, SyncPolicy
from chief.policies.unlocked import UnlockedPolicy
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.checkpoint import ChosenPush


def check_model(spec: PolicySpec, model: ModelSpec) -> None:
    """Raises InvalidSpec if a policy cannot keep the model's limits."""
    if spec.merge.needs_norms and model.clip.value:
        raise InvalidSpec(f"clip: by value, which changes the norms that {spec.merge} goes by; clip by a norm, or merge in another way")
    if spec.applies_on_arrival and model.clip.needs_norms:
        raise InvalidSpec(
            "clip: a norm over all parameter servers needs a step that they apply together, and under async without locking"
            " there is none; use use_locking=True, or clip by value"
        )


def new_policy(
    config: CoordinationConfig, *, step: int = 0, counted: Sequence[ChosenPush] = (), workers: Iterable[int] = (), is_start: bool = True
) -> Policy:
    """Returns a policy that continues from `step`, with what is `counted` and not applied, and the workers that live.

    Without a lock nothing can be taken over: `counted` must be empty. Not `is_start`: workers are at work already, perhaps with variables
    of steps gone by, and what they push now may be dropped; so a queue of tokens begins with at least one for each.
    """
    spec = config.policy
    if spec.applies_on_arrival:
        assert not counted
        return UnlockedPolicy(spec=spec, step=step)
    if not spec.has_common_steps:
        return OrderedPolicy(spec=spec, step=step, counted=counted, workers=workers, max_step=config.max_steps)
    tokens: TokenRule
    if spec.needs_many_workers:
        tokens = StrictTokens(
            num_extras=config.num_extras, step=step, contributed=[entry.push_id.worker for entry in counted if entry.step == step]
        )
    else:
        num_tokens = config.num_initial_tokens if is_start else max(config.num_initial_tokens, config.tokens_per_step)
        tokens = FifoTokens(tokens_per_step=config.tokens_per_step, num_tokens=num_tokens, step=step)
    return SyncPolicy(spec=spec, num_required=config.num_required, tokens=tokens, step=step, counted=counted, workers=workers)
