"""How a worker's session comes to the agreed model: the agreement, the first values, the memory. Knows no steps after the first."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ps_protocol.chief import ModelReply, ModelState, Participant
from ps_protocol.errors import NotInitializer
from ps_protocol.model import ModelSpec
from ps_protocol.placement import layouts
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.tensors import Array
from worker_client.cluster_link import ClusterLink
from worker_client.declarations import Declared
from worker_client.model_memory import ModelMemory
from worker_client.patience import Patience
from worker_client.shard_group import ShardGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What joining gives: the model, memory for variables and gradients, the open step, the policy, and whose the first values are.

    `gives_several`: memory is shared, and workers give several contributions to a step (T < R).
    """

    model: ModelSpec
    variables: ModelMemory
    gradients: ModelMemory
    global_step: int
    policy: PolicySpec
    has_initialized: bool
    gives_several: bool


def join_model(
    declared: Declared, *, link: ClusterLink, participant: Participant, shards: ShardGroup, create: bool, timeout_s: float | None
) -> Joined:
    """Agrees with the chief on the model and returns once its variables stand; creates them if that is this worker's task.

    Blocks while another worker creates them, says so after 2 s, and takes over if that one is lost; without `create` never does so.
    Raises ModelMismatch, DeadlineExceeded.
    """
    model = declared.model
    patience = Patience(f"worker {participant.index} joins the model", timeout_s=timeout_s)
    variables: ModelMemory | None = None
    has_initialized = False
    while True:
        reply = agree(model, link=link, participant=participant, max_wait_s=patience.slice_s(), create=create)
        if variables is None and reply.placement:
            variables = ModelMemory(model, layouts=layouts(reply.placement, num_shards=len(shards)), is_writable=False)
        if variables is not None and reply.state is ModelState.READY:
            break
        if variables is not None and reply.state is ModelState.INITIALIZE:
            shards.create(_filled(variables, declared.values), tables=declared.values, model=model, reply=reply)
            has_initialized = _is_accepted(reply, link=link, participant=participant)
        else:
            patience.explain(reply.waiting_for)
    shards.share(variables.layouts)
    is_shared = "shared_memory" in shards.transports
    if has_initialized and is_shared:
        # The first values need not stay where nothing will be read into.
        variables = ModelMemory(model, layouts=variables.layouts, is_writable=False)
    return Joined(
        model=model,
        variables=variables,
        gradients=ModelMemory(model, layouts=variables.layouts, is_writable=True),
        global_step=reply.global_step,
        policy=reply.policy,
        has_initialized=has_initialized,
        gives_several=is_shared and _gives_several(link),
    )


def agree(model: ModelSpec, *, link: ClusterLink, participant: Participant, max_wait_s: float, create: bool) -> ModelReply:
    """Presents the model to the chief and returns its answer; blocks at most `max_wait_s`. Raises ModelMismatch."""
    return link.ask(
        lambda chief: chief.register_model(participant, model, max_wait_s=max_wait_s, may_initialize=create),
        what="agree on the model",
        expected_s=max_wait_s,
    )


def _gives_several(link: ClusterLink) -> bool:
    status = link.ask(lambda chief: chief.status(max_ledger_entries=0), what="how many workers there are")
    return 0 < status.total_num_replicas < status.replicas_to_aggregate


def _filled(variables: ModelMemory, values: Mapping[str, Array]) -> ModelMemory:
    for name, array in variables.arrays.items():
        np.copyto(array, values[name])
    variables.pack()
    return variables


def _is_accepted(reply: ModelReply, *, link: ClusterLink, participant: Participant) -> bool:
    try:
        link.ask(lambda chief: chief.complete_initialization(participant, attempt=reply.attempt), what="complete the initialization")
    except NotInitializer as error:
        log.warning("the first values came too late, another worker gives them: %s", error)
        return False
    log.info("model created worker=%d attempt=%d", participant.index, reply.attempt)
    return True
