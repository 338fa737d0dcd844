"""Calls that tests of named accumulators make again and again. Asserts nothing."""

from ps_protocol.roles.accumulators import (
    Accumulators,
    AccumulatorSpec,
    AccumulatorStatus,
    AccumulatorStatusRequest,
    CreateAccumulatorRequest,
)


def create(accumulators: Accumulators, spec: AccumulatorSpec) -> bool:
    """Creates an accumulator; False if it was there."""
    return accumulators.call(CreateAccumulatorRequest(spec=spec)).created


def status_of(accumulators: Accumulators, name: str) -> AccumulatorStatus:
    """Returns what an accumulator reports."""
    return accumulators.call(AccumulatorStatusRequest(name=name))
