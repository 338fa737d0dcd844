"""`python -m tests.chaos.wrong_clock OFFSET MODULE …`: a module in a process whose time of day is wrong, and jumps. Knows no role."""

import runpy
import sys
import time

_JUMP_S = 3600.0
_PERIOD_S = 1.0


def main() -> None:
    """Runs the module; the time of day is off by OFFSET seconds, and by an hour more in every other second."""
    offset_s, right, begin = float(sys.argv[1]), time.time, time.monotonic()

    def wrong() -> float:
        # gRPC hands Python's time of day to a core that has its own clock; where a clock is really wrong, both are.
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("grpc"):
            return right()
        return right() + offset_s + _JUMP_S * (int((time.monotonic() - begin) / _PERIOD_S) % 2)

    time.time = wrong
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
