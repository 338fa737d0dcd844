"""`lockstep up --hosts` over real ssh bears a link that is cut for a while."""

import re
import threading
import time

import pytest

from tests.engines.ssh import Ssh
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
@pytest.mark.parametrize("engine", ["ssh"], indirect=True)
def test_a_link_that_is_cut_for_twenty_seconds_costs_no_step_and_is_named_within_three(engine: Ssh, rate: str) -> None:
    engine.net.limit("h2", rate)
    run = engine.run("--max-steps", "300", "--lease", "60", "--backup-workers", "0", names=("h1", "h2"))
    run.await_step(60)
    engine.net.cut("h2")
    cut_at, step, before = time.monotonic(), run.step, run.out
    wait_until(lambda: re.search("(?i)waiting|no answer", run.out.removeprefix(before)), what="it is named", timeout_s=3)
    print(f"named after {time.monotonic() - cut_at:.1f} s")
    threading.Event().wait(max(0.0, cut_at + 20 - time.monotonic()))
    engine.net.join("h2")
    wait_until(lambda: run.step > step + 20, what=f"it goes on\n{run.out}", timeout_s=40)
    print(f"went on {time.monotonic() - cut_at - 20:.1f} s after the link was there again")
    run.assert_trained()
    assert "rolled back" not in run.out and "is started again" not in run.out, run.out
