"""The setting of a run: size, transport, sockets, wire and policy; checks the transport that sessions used. Starts nothing."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.harness.arguments import WrongArguments, parse_bytes
from benchmarks.harness.workload import Workload
from benchmarks.report.figures import human_bytes
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.process.options import DURABILITIES
from worker_client import async_policy, sync_policy
from worker_client.model.wire_format import wire_format

# Names of transports: in the benchmarks' arguments, and in `session.transport`.
TRANSPORTS = {"auto": "auto", "shm": "shared_memory", "sockets": "sockets", "grpc": "grpc", "local": "local"}
WIRES = ("float32", "bfloat16", "float16")
SECURITIES = ("tokens", "open", "tls", "mtls")
POLICIES: dict[str, Callable[[], PolicySpec]] = {"sync": sync_policy, "async": async_policy}


class WrongTransport(Exception):
    """The sessions used another transport than the requested one; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`transport` "local": one process for all roles; `is_unix`: Unix sockets instead of TCP; `wire`: the encoding, if data is sent.

    `durability`: with checkpoints in a temporary directory; empty: no checkpoints. `checkpoint_steps`: steps between two checkpoints.
    `security`: "tokens" as under `lockstep up`, "open": none, "tls": TLS too, "mtls": callers show certificates as well.
    """

    transport: str = "auto"
    is_unix: bool = False
    wire: str = "float32"
    policy: str = "sync"
    chief_in_ps: bool = False
    durability: str = ""
    checkpoint_steps: int | None = None
    security: str = "tokens"

    def __post_init__(self) -> None:
        try:
            wire_format(self.wire)
        except InvalidSpec as error:
            raise WrongArguments(error.message) from None
        for name, known in (("transport", TRANSPORTS), ("policy", POLICIES), ("security", SECURITIES)):
            if getattr(self, name) not in known:
                raise WrongArguments(f"{name}: got {getattr(self, name)!r}, want one of {', '.join(known)}")
        if self.durability not in ("", *DURABILITIES):
            raise WrongArguments(f"durability: got {self.durability!r}, want one of {', '.join(DURABILITIES)}")
        if self.is_local and self.durability:
            raise WrongArguments("transport local: there are no checkpoints; give no durability")
        if self.is_local and (self.wire != "float32" or self.chief_in_ps or self.is_unix):
            raise WrongArguments("transport local: there is one process and nothing travels; give no sockets, wire or place of the chief")

    @property
    def is_local(self) -> bool:
        """Whether all roles are in this process."""
        return self.transport == "local"

    @property
    def policy_spec(self) -> PolicySpec:
        """The cluster's policy."""
        return POLICIES[self.policy]()

    @property
    def environment(self) -> dict[str, str | None]:
        """Variables for the SDK in a worker's environment; None removes the shell's value."""
        wire = None if self.wire == "float32" else self.wire
        return {"LOCKSTEP_TRANSPORT": TRANSPORTS[self.transport], "LOCKSTEP_WIRE": wire}

    @property
    def title(self) -> str:
        """The setting as text, for example "shm", "grpc unix", "grpc tcp bfloat16", "shm chief in ps"."""
        sockets = ("unix" if self.is_unix else "tcp") if self.transport in ("grpc", "sockets") else ""
        wire = "" if self.wire == "float32" else self.wire
        kept = f"durability {self.durability}" if self.durability else ""
        return " ".join(word for word in (self.transport, sockets, wire, "chief in ps" if self.chief_in_ps else "", kept) if word)

    def check(self, used: Sequence[str]) -> None:
        """Raises WrongTransport unless every worker used the setting's transport to every shard.

        `used`: the sessions' transports, in any order.
        """
        wanted = TRANSPORTS[self.transport]
        if not used or (wanted != "auto" and set(used) != {wanted}):
            seen = ", ".join(sorted(set(used))) or "nothing"
            raise WrongTransport(f"asked for the transport {wanted}, but the sessions used {seen}; its figures are not shown")

    def record(self) -> dict[str, object]:
        """The setting's fields for a report in JSON."""
        sockets = {} if self.is_local else {"sockets": "unix" if self.is_unix else "tcp"}
        kept = {"durability": self.durability, "checkpoint_steps": self.checkpoint_steps} if self.durability else {}
        words = {**kept, "transport": self.transport, **sockets, "wire": self.wire, "policy": self.policy}
        return {**words, "chief_in_ps": self.chief_in_ps, "security": self.security}


SIZES = ("4KiB/4", "1MiB/8", "4MB/1000", "16MiB/16", "64MiB/16", "256MiB/16")


def workload_of(size: str, *, num_steps: int, num_ps: int = 1, num_workers: int = 2) -> Workload:
    """Returns the workload of a size such as "4KiB/4": bytes and variables. Raises WrongArguments for an invalid size."""
    total_bytes, num_variables = parse_size(size)
    return Workload(total_bytes=total_bytes, num_variables=num_variables, num_workers=num_workers, num_ps=num_ps, num_steps=num_steps)


def parse_size(size: str) -> tuple[int, int]:
    """Returns bytes and variables. Raises WrongArguments."""
    amount, separator, num_variables = size.rpartition("/")
    try:
        if separator and num_variables.isdecimal():
            return parse_bytes(amount), int(num_variables)
    except argparse.ArgumentTypeError:
        pass
    raise WrongArguments(f"--sizes {size}: want bytes/variables, such as 4KiB/4 or 1048576/8")


def size_title(workload: Workload) -> str:
    """Returns the size as text, for example "64 MiB / 16"."""
    return f"{human_bytes(workload.total_bytes)} / {workload.num_variables}"


def steps_for(total_bytes: int, counts: tuple[tuple[int, int], ...], *, fewest: int) -> int:
    """Returns the steps of the first entry (most bytes, steps) that covers the size, else `fewest`."""
    return next((steps for limit, steps in counts if total_bytes <= limit), fewest)
