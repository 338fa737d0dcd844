"""What a run of the demo has written to a file: how far it is, and whether it has learnt the digits."""

import re
from pathlib import Path

from tests.support.waiting import wait_until


class Demo:
    """The output of the demo, or of its workers alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def out(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    @property
    def step(self) -> int:
        return max((int(text) for text in re.findall(r"^(?:\[worker \d+\] )?step (\d+):", self.out, re.MULTILINE)), default=-1)

    def await_step(self, step: int) -> None:
        wait_until(lambda: self.step >= step, what=f"step {step}", timeout_s=60)

    def assert_trained(self) -> None:
        assert "[lockstep] training finished" in self.out and "Traceback" not in self.out, self.out
        assert float(re.findall(r"accuracy (\d\.\d+)", self.out)[-1]) >= 0.95, self.out
