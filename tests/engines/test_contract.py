"""What a user has of every engine: the digits are learnt over its hosts, which may be lost, and nothing is left behind."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import ABSENT, ENGINES
from tests.engines.demo import Engine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(400)


def losses(kind: str) -> list[Any]:
    return [(name, role) for name, made in ENGINES.items() for role in getattr(made, kind)]


def await_that_nothing_is_left(engine: Engine) -> None:
    wait_until(lambda: not engine.left(), what=f"nothing is left on the hosts: {engine.left()}", timeout_s=30)


@pytest.mark.parametrize("engine", [*ENGINES, *ABSENT], indirect=True)
def test_the_digits_are_learnt_on_several_hosts_and_nothing_is_left_there(engine: Engine) -> None:
    times = [time.monotonic()]
    engine.greet()
    times.append(time.monotonic())
    run = engine.run(pace=0.01)
    run.await_step(0)
    print(f"hello world after {times[1] - times[0]:.1f} s, first step after {time.monotonic() - times[1]:.1f} s")
    assert run.num_places() >= 2, run.out
    run.assert_trained()
    await_that_nothing_is_left(engine)


@pytest.mark.parametrize(("engine", "role"), losses("survives"), indirect=["engine"])
def test_a_run_goes_on_within_ten_seconds_of_the_notice_that_a_host_is_lost(engine: Engine, role: str) -> None:
    run = engine.run("--max-steps", "1000")
    run.await_step(60)
    lost_at, mark, words = time.monotonic(), len(run.out), f"{role} is started again"
    engine.lose(role)
    wait_until(lambda: engine.has_noticed(role, run), what="the engine notices it", timeout_s=60)
    noticed_at = time.monotonic()
    if role.startswith("worker") or not run.names_restarts:  # there is one in reserve; or training has stood since the loss
        mark, words = len(run.out), ""

    def goes_on() -> bool:  # worker 0 says its step once a second, unless it was there
        _, _, later = run.out[mark:].partition(words) if words else ("", "", run.out[mark:])
        return re.search(r"^(\[worker \d+\] )?step |state=TRAINING", later, re.MULTILINE) is not None

    assert wait_until(goes_on, timeout_s=11, required=False), run.out
    print(f"{role}: noticed after {noticed_at - lost_at:.1f} s, went on {time.monotonic() - noticed_at:.1f} s later")
    run.assert_trained()
    await_that_nothing_is_left(engine)


@pytest.mark.parametrize(("engine", "role"), losses("ends_with"), indirect=["engine"])
def test_a_run_that_ends_with_a_host_continues_from_its_newest_checkpoint(engine: Engine, role: str) -> None:
    run = engine.run()
    run.await_step(60)
    engine.lose(role)
    engine.run_again()
    run.assert_trained()
    assert re.search(r"ps 0 restored tag=step-0000000[5-9]", run.out), run.out
    await_that_nothing_is_left(engine)


@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_a_run_that_is_asked_to_end_saves_its_last_step(engine: Engine, tmp_path: Path) -> None:
    run = engine.run("--checkpoint-steps", "1000")
    run.await_step(30)
    engine.ask_to_end()
    run.await_end()
    await_that_nothing_is_left(engine)
    steps = [int(one.name.split("-")[1]) for one in (tmp_path / "kept").glob("step-*[0-9]")]
    assert max(steps) >= 30, (steps, run.out)
