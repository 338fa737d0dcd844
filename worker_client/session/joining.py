"""How a worker's session comes to the agreed model: the agreement, the first values, the memory. Knows no steps after the first."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ps_protocol.errors import NotInitializer, TrainingFailed
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, layouts
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import ClusterState, ModelReply, ModelState, Participant
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.waiting import Wait
from worker_client.model.declarations import Declared
from worker_client.model.memory import ModelMemory
from worker_client.session.membership import Membership

log = logging.getLogger("lockstep.worker")


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


def join_model(declared: Declared, *, member: Membership, create: bool, wait: Wait) -> Joined:
    """Agrees with the chief on the model and returns once its variables stand; creates them if that is this worker's task.

    Blocks while another worker creates them, says so after 2 s, and takes over if that one is lost; without `create` never does so.
    Raises ModelMismatch, DeadlineExceeded.
    """
    model, participant, link = declared.model, member.participant, member.link
    shards = member.shards()
    variables: ModelMemory | None = None
    has_initialized = False
    while True:
        reply = agree(model, member=member, participant=participant, max_wait_s=wait.slice_s(), create=create)
        if variables is None and reply.placement:
            variables = ModelMemory(model, layouts=layouts(reply.placement, num_shards=len(shards)), is_writable=False)
        if variables is not None and reply.state is ModelState.READY:
            break
        if variables is not None and reply.state is ModelState.INITIALIZE:
            shards.create(_filled(variables, declared.values), tables=declared.values, model=model, reply=reply)
            has_initialized = _is_accepted(reply, member=member, participant=participant)
        else:
            wait.explain(reply.waiting_for)
    member.hear_of_shards()
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


def join_again(joined: Joined, *, member: Membership, wait: Wait) -> Joined:
    """Returns once the model stands again for a member who is another participant now, in memory that is the same where that can be.

    Blocks while servers are brought back, and says so after 2 s. Raises TrainingFailed if the cluster has begun anew, without a model;
    DeadlineExceeded.
    """
    model, participant = joined.model, member.participant
    while True:
        reply = agree(model, member=member, participant=participant, max_wait_s=wait.slice_s(), create=False)
        if reply.state is ModelState.READY and reply.placement:
            break
        if reply.state is ModelState.ABSENT:
            _check_not_anew(member)
        wait.explain(reply.waiting_for)
    # Only now: a server that is away is the chief's affair, which has the words for it.
    shards = member.shards()
    arrangement = layouts(reply.placement, num_shards=len(shards))
    member.hear_of_shards()
    shards.share(arrangement)
    variables, gradients = joined.variables, joined.gradients
    if tuple(layout.hash for layout in arrangement) != tuple(layout.hash for layout in variables.layouts):
        variables = ModelMemory(model, layouts=arrangement, is_writable=False)
        gradients = ModelMemory(model, layouts=arrangement, is_writable=True)
    return replace(joined, variables=variables, gradients=gradients, global_step=reply.global_step, policy=reply.policy)


def agree(model: ModelSpec, *, member: Membership, participant: Participant, max_wait_s: float, create: bool) -> ModelReply:
    """Presents the model to the chief and returns its answer; blocks at most `max_wait_s`. Raises ModelMismatch."""
    return member.ask(
        lambda chief: chief.register_model(participant, model, max_wait_s=max_wait_s, joins_only=not create),
        participant=participant,
        what="agree on the model",
        expected_s=max_wait_s,
    )


def _check_not_anew(member: Membership) -> None:
    status = member.status(max_ledger_entries=0)
    if status.state is ClusterState.WAITING_FOR_MODEL:
        raise TrainingFailed(
            "the cluster has begun anew, and its model is lost: there was no checkpoint to go back to; start the workers again"
        )


def _gives_several(link: ChiefLink) -> bool:
    status = link.ask(lambda chief: chief.status(max_ledger_entries=0), what="how many workers there are")
    return 0 < status.total_num_replicas < status.replicas_to_aggregate


def _filled(variables: ModelMemory, values: Mapping[str, Array]) -> ModelMemory:
    for name, array in variables.arrays.items():
        np.copyto(array, values[name])
    variables.pack()
    return variables


def _is_accepted(reply: ModelReply, *, member: Membership, participant: Participant) -> bool:
    try:
        member.ask(
            lambda chief: chief.complete_initialization(participant, attempt=reply.attempt),
            participant=participant,
            what="complete the initialization",
        )
    except NotInitializer as error:
        log.warning("the first values came too late, another worker gives them: %s", error)
        return False
    log.info("model created worker=%d attempt=%d", participant.index, reply.attempt)
    return True
