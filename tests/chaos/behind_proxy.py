"""`python -m tests.chaos.behind_proxy ADDRESS chief …`: a chief that announces the address of a proxy. Knows its announcement."""

import runpy
import sys

import chief.serving.server


def main() -> None:
    """Runs the chief; whom it tells where it is, it tells ADDRESS, or workers would soon go around the proxy."""
    told = sys.argv[1]

    def reachable(address: str) -> str:
        return told if address else address

    chief.serving.server.reachable = reachable
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
