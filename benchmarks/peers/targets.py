"""Targets: the most time that a step of Lockstep may take, as a fraction of a peer's. Knows numbers; measures nothing."""

from dataclasses import dataclass

# Names of Lockstep's contenders in the comparison.
SHM, GRPC, BFLOAT16 = "lockstep shm", "lockstep grpc", "lockstep grpc bfloat16"
SOCKETS, SOCKETS_BFLOAT16 = "lockstep sockets", "lockstep sockets bfloat16"
EVERY_SIZE = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`own` should take at most `at_most` times the time of `peer` at `size`, synchronously, with 1 server."""

    size: str
    own: str
    peer: str
    at_most: float

    def verdict(self, ratio: float) -> str:
        """Returns the result as text, for example "≤ 0.2 of tensorflow: met", or "MISSED" in capitals."""
        return f"≤ {self.at_most:g} of {self.peer}: {'met' if self.is_met(ratio) else 'MISSED'}"

    def is_met(self, ratio: float) -> bool:
        """Whether a ratio is low enough."""
        return ratio <= self.at_most


def _of_tensorflow() -> tuple[Target, ...]:
    bars = {"4KiB/4": (0.2, 0.5), "1MiB/8": (0.15, 0.7), "4MB/1000": (0.02, 0.05), "64MiB/16": (0.2, 0.85), "256MiB/16": (0.2, 0.85)}
    return tuple(
        Target(size=size, own=own, peer="tensorflow", at_most=at_most)
        for size, both in bars.items()
        for own, at_most in zip((SHM, GRPC), both, strict=True)
    )


TARGETS = (
    *_of_tensorflow(),
    Target(size="64MiB/16", own=BFLOAT16, peer="tensorflow", at_most=0.6),
    Target(size="16MiB/16", own=SOCKETS, peer="tensorflow", at_most=0.45),
    Target(size="64MiB/16", own=SOCKETS, peer="tensorflow", at_most=0.45),
    Target(size="256MiB/16", own=SOCKETS, peer="tensorflow", at_most=0.6),
    Target(size="64MiB/16", own=SOCKETS_BFLOAT16, peer="tensorflow", at_most=0.35),
    # All-reduce moves half the bytes.
    *(Target(size=size, own=SOCKETS, peer="gloo-flat", at_most=1.25) for size in ("16MiB/16", "64MiB/16", "256MiB/16")),
    Target(size="64MiB/16", own=SHM, peer="gloo", at_most=0.4),
    Target(size="256MiB/16", own=SHM, peer="gloo", at_most=0.4),
    Target(size=EVERY_SIZE, own=SHM, peer="mxnet", at_most=1.0),
    Target(size=EVERY_SIZE, own=GRPC, peer="mxnet", at_most=1.0),
)


def targets_of(size: str, own: str) -> list[Target]:
    """Returns the targets of a Lockstep contender at a size such as "64MiB/16"."""
    return [target for target in TARGETS if target.own == own and target.size in (size, EVERY_SIZE)]
