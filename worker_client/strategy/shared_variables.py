"""Variables with one copy, on the parameter servers of a session: the session's model. Knows the session; no replica, no reduction."""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ps_protocol.errors import InvalidSpec, PsError, Unavailable
from ps_protocol.model.policy import PolicySpec, TokenMode
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import PushOutcome
from worker_client.model.declarations import Buffer, Placement
from worker_client.model.optimizers import sgd
from worker_client.session.session import Session
from worker_client.strategy.exchange import Moment
from worker_client.strategy.group import Cell
from worker_client.strategy.reduction import frozen

log = logging.getLogger("lockstep.worker")

# A write waits for the other workers' parts of its step for so long.
TIMEOUT_S = 60.0
_TOO_MUCH = (PushOutcome.LATE, PushOutcome.STALE)


class SharedVariables:
    """The variables with one copy: buffers in the session's model. Every worker makes the same writes; one worker sends the values.

    A write can be read here at once, and reaches the parameter servers with all other writes of its block.
    """

    def __init__(
        self, session: Session, devices: tuple[str, ...], *, writes: bool, stepping: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._session, self._devices, self._writes = session, devices, writes
        # Encloses the wait for the other workers' parts of a step.
        self._stepping = stepping
        self._declared: dict[str, tuple[Array, int]] = {}
        self._values: dict[str, Array] | None = None
        # Whether the values here may not be those on the parameter servers, since a write has failed.
        self._is_stale = False
        # Of the present block.
        self._pending: dict[str, Array] = {}
        self._is_in_block = False
        self._has_written = False

    def declare(self, name: str, value: Array, *, beside: str | None) -> Cell:
        """Returns the cell of a new variable: on the device `beside`, else on the one with the fewest bytes so far."""
        if self._values is not None:
            raise RuntimeError(f'variable "{name}": the model has been created already; create all variables before the first is used')
        if name in self._declared:
            raise ValueError(f'variable "{name}" exists already; on parameter servers every variable needs a name of its own')
        loads = [0] * len(self._devices)
        for known, shard in self._declared.values():
            loads[shard] += max(known.nbytes, 1)
        shard = self._devices.index(beside) if beside is not None else loads.index(min(loads))
        self._declared[name] = (value, shard)
        return _SharedCell(self._devices[shard], read=lambda: self.read(name), write=lambda new: self.write(name, new))

    @property
    def moment(self) -> Moment:
        """The epoch and the step of the variables, where all workers make each step together, and not before there are variables."""
        is_common = self._declared and self._values is not None and not self._session.policy.reads_latest
        return Moment(self._session.epoch, self._session.local_step) if is_common else Moment()

    def follow(self) -> None:
        """Reads the variables again if the cluster has gone back to a checkpoint since."""
        if self._values is not None and self._session.membership.participant.era.epoch != self._session.epoch:
            self._refresh()

    def begin(self) -> None:
        """Creates the model or joins it, if there is anything in it."""
        if self._values is None:
            pins = {name: shard for name, (_, shard) in self._declared.items()}
            if self._declared:
                self._check_steps()
                buffers = {name: Buffer(value) for name, (value, _) in self._declared.items()}
                self._session.create_or_join(buffers, optimizer=sgd(1.0), placement=Placement(pins=pins, split_bytes=0))
            self._refresh()
        elif self._is_stale:
            self._refresh()

    def read(self, name: str) -> Array:
        """Returns a variable's value."""
        self.begin()
        assert self._values is not None
        return self._values[name]

    def write(self, name: str, value: Array) -> None:
        """Sets a variable, here at once, and on its parameter server when the block ends."""
        with self.together():
            self.begin()
            assert self._values is not None
            self._values[name] = self._pending[name] = value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Sends the writes of the block when it ends; if it fails, drops them. Of nested blocks, the outermost counts."""
        if self._is_in_block:
            yield
            return
        self._is_in_block = True
        try:
            yield
        except BaseException:
            if self._pending:
                self._pending = {}
                self._undo()
            raise
        else:
            if self._pending:
                self._send()
        finally:
            self._is_in_block = False

    def _check_steps(self) -> None:
        """Raises InvalidSpec where a step may be made without worker 0, which writes, or needs two contributions of it."""
        status, num_workers = self._session.status(), self._session.num_workers
        if _drops(status.policy):
            raise InvalidSpec(
                f"a strategy's variables on parameter servers need steps that drop no contribution, and this cluster's policy is "
                f"{status.policy.text}; start it without --tokens fifo and --max-staleness"
            )
        if not status.policy.reads_latest and status.replicas_to_aggregate != num_workers:
            raise InvalidSpec(
                f"a strategy's variables on parameter servers need steps of one contribution of each of the {num_workers} workers, "
                f"and a step of this cluster has {status.replicas_to_aggregate}; start it without --backup-workers "
                "and --replicas-to-aggregate"
            )

    def _send(self) -> None:
        written, self._pending = self._pending, {}
        is_first, self._has_written = not self._has_written, True
        try:
            with self._stepping():
                push = self._session.step({}, updates=written if self._writes else {}, timeout_s=TIMEOUT_S)
        except BaseException:
            self._undo()
            raise
        # A program that was lost may have made its part of the step before, and then this one, which made the same, is too much.
        is_made = is_first and self._session.membership.may_have_predecessor and push.outcome in _TOO_MUCH
        if push.outcome is not PushOutcome.ACCEPTED and not is_made:
            self._undo()
            names = ", ".join(map(repr, sorted(written)))
            policy = self._session.policy
            reason = (
                f"the policy, {policy.text}, drops contributions"
                if _drops(policy) and push.outcome in _TOO_MUCH
                else "the cluster went back to an earlier step, or training is finished"
            )
            raise Unavailable(f"not written: variables {names}: the contribution is {push.outcome.name}; {reason}")
        self._refresh()

    def _undo(self) -> None:
        """Takes the values of the parameter servers again, now or at their next use: writes of this process have not reached them."""
        self._is_stale = self._values is not None
        try:
            self._refresh()
        except PsError as error:
            log.debug("the variables are read again when one is next used: %s", error)

    def _refresh(self) -> None:
        self._values = {name: frozen(value) for name, value in self._session.read().items()} if self._declared else {}
        self._is_stale = False


def _drops(policy: PolicySpec) -> bool:
    """Whether a policy drops contributions that come too late, or lowers their weight."""
    return policy.tokens is TokenMode.FIFO or policy.max_staleness is not None


class _SharedCell:
    """The one copy of a variable on a parameter server."""

    def __init__(self, device: str, *, read: Callable[[], Array], write: Callable[[Array], None]) -> None:
        self.device, self._read, self._write = device, read, write

    def read(self) -> Array:
        """Returns the value; the array cannot be written."""
        return self._read()

    def write(self, value: Array) -> None:
        """Replaces the value, in all workers."""
        self._write(value)
