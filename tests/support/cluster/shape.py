"""What a cluster of a test is to be, and a cluster as tests see it. Starts nothing."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import worker_client
from chief.config import parse_config
from chief.options import CoordinationConfig
from ps_protocol.errors import PsError
from ps_protocol.roles.chief import Chief, ClusterStatus
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.chief import GrpcChief
from tests.support.waiting import wait_until
from worker_client import Follower, Observer, Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster is to be, wherever it runs. `chief_flags`: what else `lockstep chief` is told."""

    num_ps: int = 1
    num_workers: int | None = None
    replicas_to_aggregate: int | None = None
    max_steps: int | None = None
    lease_s: float = 10.0
    reject_nonfinite: bool = False
    chief_flags: Sequence[str] = ()

    @property
    def flags(self) -> list[str]:
        """All that `lockstep chief` is told of coordination."""
        values = {
            "--workers": self.num_workers,
            "--replicas-to-aggregate": self.replicas_to_aggregate or (None if self.num_workers else 1),
            "--max-steps": self.max_steps,
            "--lease": self.lease_s,
        }
        words = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
        return [*words, *(["--reject-nonfinite"] if self.reject_nonfinite else []), *self.chief_flags]

    def coordination(self) -> CoordinationConfig:
        """What a chief makes of these flags."""
        addresses = (f"localhost:{1 + index}" for index in range(self.num_ps))
        return parse_config(["--ps", ",".join(addresses), *self.flags], environment={}).coordination


class Cluster:
    """A running cluster. All that is opened through it is closed with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def session(self, worker_index: int | None = None) -> Session:
        """Returns another worker's session, without a model."""
        raise NotImplementedError

    def observer(self) -> Observer:
        """Returns an observer."""
        raise NotImplementedError

    def follower(self, wire: str = "bfloat16", **more: Any) -> Follower:
        """Returns a follower of the weights."""
        raise NotImplementedError

    def client(self) -> Chief:
        """Returns the chief, for questions of the test."""
        raise NotImplementedError

    def status(self) -> ClusterStatus | None:
        """What the chief says; None if it does not."""
        try:
            return self.client().status()
        except PsError:
            return None

    def await_status(self, is_there: Callable[[ClusterStatus], object], *, what: str, timeout_s: float = 40.0) -> ClusterStatus:
        """Waits until the chief says that, and returns what it said; it may be away meanwhile."""
        found: list[ClusterStatus] = []

        def has_come() -> object:
            status = self.status()
            found.extend([status] if status is not None else [])
            return status is not None and is_there(status)

        self.await_(has_come, what=what, timeout_s=timeout_s)
        return found[-1]

    def await_(self, condition: Callable[[], object], *, what: str, timeout_s: float = 40.0) -> None:
        """Waits until that is so."""
        wait_until(condition, what=what, timeout_s=timeout_s)


class ServingCluster(Cluster):
    """A cluster whose chief serves at `chief_address`. `transport` is that of the sessions; `access`: how the test calls the chief."""

    def __init__(self, stack: ExitStack, *, chief_address: str, transport: str, access: Access = DEFAULT_ACCESS) -> None:
        super().__init__(stack)
        self.chief_address, self.transport, self._access = chief_address, transport, access
        self._client: GrpcChief | None = None

    def session(self, worker_index: int | None = None) -> Session:
        session = worker_client.connect(self.chief_address, worker_index=worker_index, timeout_s=20, transport=self.transport)
        return self._stack.enter_context(closing(session))

    def observer(self) -> Observer:
        return self._stack.enter_context(closing(worker_client.observe(self.chief_address, timeout_s=20)))

    def follower(self, wire: str = "bfloat16", **more: Any) -> Follower:
        return self._stack.enter_context(closing(worker_client.follow(self.chief_address, wire=wire, timeout_s=20, **more)))

    def client(self) -> Chief:
        if self._client is None:
            self._client = self._stack.enter_context(closing(GrpcChief(self.chief_address, cluster="lockstep", access=self._access)))
        return self._client


# Starts a cluster, which ends with the test.
Start = Callable[[Shape], Cluster]
