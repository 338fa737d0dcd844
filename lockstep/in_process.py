"""A whole cluster inside this process: parameter servers and chief as objects. Puts roles together; decides nothing."""

import time
from collections.abc import Callable

from chief.options import CoordinationConfig
from chief.serving.in_process import InProcessChief
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import DEFAULT_POLICY, Chief
from ps_protocol.roles.shard import Shard
from ps_server.serving.local import InProcessShard

# All roles end together with this process, so leases are not renewed and never end.
LEASE_S = 1e9


class InProcessCluster:
    """Parameter servers and a chief in this process, for tests and notebooks; `worker_client.local(cluster)` joins it.

    `policy`: the first policy (None: sync). `reject_nonfinite`: refuses gradients that are not finite. `clock`: the chief's clock, in
    seconds; a test may give its own. Thread-safe. Holds only memory, so there is nothing to close.
    """

    def __init__(
        self,
        *,
        num_ps: int = 1,
        replicas_to_aggregate: int | None = None,
        total_num_replicas: int | None = None,
        max_steps: int | None = None,
        policy: PolicySpec | None = None,
        reject_nonfinite: bool = False,
        name: str = "lockstep",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if type(num_ps) is not int or num_ps < 1:
            raise InvalidSpec(f"num_ps: got {num_ps!r}, want a whole number >= 1")
        if policy is not None and not isinstance(policy, PolicySpec):
            raise InvalidSpec(f"policy: got {policy!r}, want what sync_policy(), ssp_policy(2) or async_policy() returns")
        self.shards: tuple[Shard, ...] = tuple(InProcessShard(index=index) for index in range(num_ps))
        config = CoordinationConfig(
            cluster=name,
            replicas_to_aggregate=replicas_to_aggregate,
            total_num_replicas=total_num_replicas,
            max_steps=max_steps,
            lease_s=LEASE_S,
            policy=policy or DEFAULT_POLICY,
            reject_nonfinite=reject_nonfinite,
        )
        self.chief: Chief = InProcessChief(self.shards, config=config, clock=clock)
