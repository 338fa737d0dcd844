"""Failpoints: no effect unless they are enabled and set; then the configured effect, at the configured time."""

import errno
from collections.abc import Iterator

import pytest

from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.process import failpoints
from ps_protocol.process.failpoints import enable_failpoints, enable_worker_failpoints, failpoint
from tests.support.processes.processes import run


@pytest.fixture(autouse=True)
def _none_stays_active() -> Iterator[None]:
    yield
    enable_failpoints({}, is_enabled=False)


def _enable(text: str) -> None:
    enable_failpoints({failpoints.VARIABLE: text}, is_enabled=True)


def test_failpoint_has_no_effect_by_default() -> None:
    failpoint("ps.apply.before_ack")


def test_the_failpoints_variable_without_the_enabling_flag_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="--enable-failpoints"):
        enable_failpoints({failpoints.VARIABLE: "ps.apply.before=error"}, is_enabled=False)
    failpoint("ps.apply.before")


def test_a_workers_failpoints_need_both_environment_variables() -> None:
    both = {failpoints.VARIABLE: "worker.token.after=error", failpoints.ENABLING_VARIABLE: "1"}
    enable_worker_failpoints(both)
    with pytest.raises(Unavailable, match=r"worker\.token\.after"):
        failpoint("worker.token.after")


def test_a_failpoint_with_a_number_fails_at_that_pass_only() -> None:
    _enable("ps.apply.mid=error@3; chief.apply.before=error")
    failpoint("ps.apply.mid")
    failpoint("ps.apply.mid")
    with pytest.raises(Unavailable):
        failpoint("ps.apply.mid")
    failpoint("ps.apply.mid")


def test_a_failpoint_without_a_number_fails_at_every_pass() -> None:
    _enable("chief.apply.before=error")
    for _ in range(3):
        with pytest.raises(Unavailable):
            failpoint("chief.apply.before")
    failpoint("chief.apply.after")


def test_disk_errors_are_those_of_the_system() -> None:
    _enable("ps.save.mid_file=error:enospc;ps.save.before_fsync=error:eio")
    with pytest.raises(OSError) as full:
        failpoint("ps.save.mid_file")
    with pytest.raises(OSError) as broken:
        failpoint("ps.save.before_fsync")
    assert (full.value.errno, broken.value.errno) == (errno.ENOSPC, errno.EIO)


@pytest.mark.parametrize(
    "text",
    [
        *("ps.aply.before=kill", "ps.apply.before", "ps.apply.before=explode", "ps.apply.before=kill@0", "ps.apply.before=kill@x"),
        *("ps.apply.before=delay:nan", "ps.apply.before=delay:-1", "ps.apply.before=error:other", "ps.apply.before=kill:now"),
    ],
)
def test_a_malformed_failpoint_is_refused_and_leaves_the_enabled_ones(text: str) -> None:
    _enable("ps.apply.before=error")
    with pytest.raises(InvalidSpec, match=failpoints.VARIABLE):
        _enable(text)
    with pytest.raises(Unavailable):
        failpoint("ps.apply.before")


def test_kill_ends_the_process_at_once() -> None:
    script = (
        "from ps_protocol.process.failpoints import enable_failpoints, failpoint\n"
        "enable_failpoints({'LOCKSTEP_FAILPOINTS': 'chief.apply.after=kill@2'}, is_enabled=True)\n"
        "for number in range(5):\n"
        "    print(number, flush=True)\n"
        "    failpoint('chief.apply.after')\n"
    )
    ended = run("-c", script)
    assert (ended.returncode, ended.stdout.split()) == (-9, ["0", "1"])
