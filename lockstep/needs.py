"""What a step needs of the workers, as the chief has it now: programs may change the policy. Knows the chief's reports; no process."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.cluster import ClusterSpec
from lockstep.own_chief import own_chief
from ps_protocol.chief import ClusterState, ClusterStatus
from ps_protocol.errors import PsError
from ps_protocol.policy_spec import PolicySpec, TokenMode

_PERIOD_S = 0.1
# A program sets its policy before it makes the model; one that never does is judged by what there is.
_PATIENCE_S = 3.0
_TRAINING_PERIOD_S = 1.0
_BEFORE = (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)
_OVER = (ClusterState.FINISHED, ClusterState.FAILED)
_STRICT, _FIFO = PolicySpec().text, PolicySpec(tokens=TokenMode.FIFO).text


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """How many workers training cannot go on without, and what a step needs, in words."""

    num_workers: int
    text: str


def needs_of(status: ClusterStatus | None, *, spec: ClusterSpec) -> StepNeeds:
    """Returns what the chief's report says; without one, what the cluster was started with."""
    if status is None:
        return StepNeeds(num_workers=spec.num_workers_needed, text=spec.needs_text)
    needs = f"a step needs {status.replicas_to_aggregate}"
    if status.policy == _STRICT:
        places = status.total_num_replicas or spec.num_workers
        num_workers = min(status.replicas_to_aggregate, places, spec.num_workers)
        if status.min_replicas:
            num_workers, needs = min(num_workers, status.min_replicas), f"{needs}, or what is left of them, {status.min_replicas} at least"
        return StepNeeds(num_workers=num_workers, text=needs)
    text = needs if status.policy == _FIFO else "every contribution is a step"
    return StepNeeds(num_workers=1, text=f"policy {status.policy}: {text}")


class Inquiry:
    """Asks the chief again and again, in a thread of its own: once training is over, and the chief gone, nobody can tell any more."""

    def __init__(self, address: str, *, cluster: str, token_file: Path | None = None) -> None:
        self._address, self._token_file = address, token_file
        self._cluster = cluster
        self._changed = threading.Condition()
        self._wanted = threading.Event()
        self._status: ClusterStatus | None = None
        self._asked_at = 0.0
        self._is_over = False
        threading.Thread(target=self._ask, name="inquiry", daemon=True).start()

    @property
    def status(self) -> ClusterStatus | None:
        """The latest answer; None: there was none."""
        return self._status

    def knows(self, *, since: float, max_wait_s: float) -> bool:
        """Whether it is known what a step needs that was asked for after `since`, or there is nothing more to wait for."""
        self._wanted.set()
        with self._changed:
            self._changed.wait_for(lambda: self._is_known(since), timeout=max_wait_s)
            return self._is_known(since)

    def close(self) -> None:
        """Asks no more."""
        self._is_over = True
        self._wanted.set()

    def _is_known(self, since: float) -> bool:
        has_policy = self._status is not None and self._status.state not in _BEFORE
        return self._is_over or (self._asked_at >= since and has_policy) or time.monotonic() >= since + _PATIENCE_S

    def _ask(self) -> None:
        chief = own_chief(self._address, cluster=self._cluster, token_file=self._token_file)
        try:
            while not self._is_over:
                self._wanted.clear()
                with suppress(PsError):  # a chief that is gone ends everything anyway, and one that is busy is asked again
                    asked_at = time.monotonic()
                    self._note(chief.status(), asked_at=asked_at)
                self._wanted.wait(_PERIOD_S if self._status is None or self._status.state in _BEFORE else _TRAINING_PERIOD_S)
        finally:
            chief.close()

    def _note(self, status: ClusterStatus, *, asked_at: float) -> None:
        with self._changed:
            self._status, self._asked_at = status, asked_at
            self._is_over = self._is_over or status.state in _OVER
            self._changed.notify_all()
