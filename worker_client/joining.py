"""How a worker's session comes to the agreed model: its specification from values, the agreement, the first values. Knows no steps."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.chief import ModelReply, ModelState, Participant
from ps_protocol.errors import InvalidSpec, NotInitializer
from ps_protocol.model import ModelSpec, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec
from ps_protocol.placement import layouts
from ps_protocol.tensors import Array, VariableSpec, data_type_of
from worker_client.cluster_link import ClusterLink
from worker_client.model_memory import ModelMemory
from worker_client.patience import Patience
from worker_client.shard_group import ShardGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What joining gives: the model, memory for variables and gradients, the open step, and whether this worker gave the first values."""

    model: ModelSpec
    variables: ModelMemory
    gradients: ModelMemory
    global_step: int
    has_initialized: bool


def as_arrays(initial_values: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
    """Returns the initial values as arrays, arrays as they are. Raises InvalidSpec for what is no array of floats."""
    if not isinstance(initial_values, Mapping):
        raise InvalidSpec(f"initial_values: got a {type(initial_values).__name__}, want a dict from variable name to array")
    return {name: _as_array(name, value) for name, value in initial_values.items()}


def model_of(values: Mapping[str, Array], *, optimizer: OptimizerSpec, placement: PlacementPolicy) -> ModelSpec:
    """Returns the specification of a model that has these values. Raises InvalidSpec, LimitExceeded."""
    if not isinstance(optimizer, OptimizerSpec):
        raise InvalidSpec(f"optimizer: got {optimizer!r}, want what worker_client.sgd(0.1) or another optimizer function returns")
    variables = (VariableSpec(name=name, data_type=data_type_of(value, name=name), shape=value.shape) for name, value in values.items())
    return ModelSpec(variables=tuple(variables), optimizer=optimizer, placement=placement)


def join_model(
    model: ModelSpec,
    values: Mapping[str, Array],
    *,
    link: ClusterLink,
    participant: Participant,
    shards: ShardGroup,
    timeout_s: float | None,
) -> Joined:
    """Agrees with the chief on the model and returns once its variables stand; creates them if that is this worker's task.

    Blocks while another worker creates them, says so after 2 s, and takes over if that one is lost. Raises ModelMismatch, DeadlineExceeded.
    """
    patience = Patience(f"worker {participant.index} joins the model", timeout_s=timeout_s)
    variables: ModelMemory | None = None
    has_initialized = False
    while True:
        reply = _agree(model, link=link, participant=participant, max_wait_s=patience.slice_s())
        if variables is None and reply.placement:
            variables = ModelMemory(model, layouts=layouts(reply.placement, num_shards=len(shards)), is_writable=False)
        if variables is not None and reply.state is ModelState.READY:
            break
        if variables is not None and reply.state is ModelState.INITIALIZE:
            shards.create(_filled(variables, values), optimizer=model.optimizer, reply=reply)
            has_initialized = _is_accepted(reply, link=link, participant=participant)
        else:
            patience.explain(reply.waiting_for)
    gradients = ModelMemory(model, layouts=variables.layouts, is_writable=True)
    return Joined(model=model, variables=variables, gradients=gradients, global_step=reply.global_step, has_initialized=has_initialized)


def _agree(model: ModelSpec, *, link: ClusterLink, participant: Participant, max_wait_s: float) -> ModelReply:
    return link.ask(
        lambda chief: chief.register_model(participant, model, max_wait_s=max_wait_s), what="agree on the model", expected_s=max_wait_s
    )


def _filled(variables: ModelMemory, values: Mapping[str, Array]) -> ModelMemory:
    for name, value in values.items():
        np.copyto(variables.arrays[name], value)
    return variables


def _is_accepted(reply: ModelReply, *, link: ClusterLink, participant: Participant) -> bool:
    try:
        link.ask(lambda chief: chief.complete_initialization(participant, attempt=reply.attempt), what="complete the initialization")
    except NotInitializer as error:
        log.warning("the first values came too late, another worker gives them: %s", error)
        return False
    log.info("model created worker=%d attempt=%d", participant.index, reply.attempt)
    return True


def _as_array(name: object, value: object) -> Array:
    if value is None:
        raise InvalidSpec(f"variable {name!r}: its initial value is None; give an array of float32 or float64")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidSpec(f"variable {name!r}: its initial value, a {type(value).__name__}, cannot be read as an array: {error}") from error
    if array.dtype.kind in "iub":
        raise InvalidSpec(
            f"variable {name!r}: its initial value is {array.dtype}; want float32 or float64: write 0.0 for 0, or .astype(np.float32)"
        )
    return array
