"""`python -m tests.chaos.lossy`: a training over TCP in the network namespace of this process, and the values it must end with."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.cluster import Cluster
from tests.chaos.plan import Plan


def main() -> None:
    """Trains, and fails if anything ends otherwise than on a good network."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ls-")))
        plan = Plan(port=5000, transport="grpc", max_steps=30, lease_s=20.0, pace_s=0.0)
        cluster = Cluster(plan, stack, directory=directory / "run", sockets=directory).start()
        cluster.await_end(timeout_s=110)
        cluster.assert_as_without_faults()


if __name__ == "__main__":
    main()
