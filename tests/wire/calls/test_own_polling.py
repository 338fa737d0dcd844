"""The switches of grpcio's polling: set only while grpcio is loaded, only those that it knows, and not against the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ps_protocol.process import polling
from ps_protocol.process.polling import SWITCH, knows_switches, settings

OFF = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq,-event_engine_for_all_other_endpoints"
SAYS = {
    "GRPC_EXPERIMENTS": OFF,
    "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "100",
    "GRPC_POLL_STRATEGY": "poll",
    "GRPC_VERBOSITY": "ERROR",
}
# Notes what the library sees of the environment while it is loaded.
WATCH = """
import os, sys
seen = []
def note(event, arguments):
    if event == "import" and arguments[0] == "grpc._cython.cygrpc":
        seen.append("event_engine" in os.environ.get("GRPC_EXPERIMENTS", ""))
sys.addaudithook(note)
"""
# Prints whether it was loaded as wanted, and what of that children would inherit.
REPORT = """
print(seen[0], [name for name in os.environ if name.startswith("GRPC_")])
"""


def report(program: str, **environment: str) -> tuple[str, str]:
    """Runs a program, and returns what it prints and what is said to its user."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "LOCKSTEP_"))}
    done = subprocess.run(
        [sys.executable, "-c", WATCH + program + REPORT], env=plain | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip(), done.stderr.strip()


def test_all_environment_variables_of_grpcs_polling_are_set() -> None:
    assert settings({}) == SAYS


def test_server_with_many_connections_does_not_look_at_each_of_them() -> None:
    assert settings({}, has_many_connections=True) == {name: value for name, value in SAYS.items() if name != "GRPC_POLL_STRATEGY"}


@pytest.mark.parametrize(("number", "are_many"), [(None, False), (32, False), (33, True)])
def test_server_of_many_workers_has_many_connections(number: int | None, are_many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_has_many_connections", False)
    polling.expect_workers(number)
    assert polling._has_many_connections is are_many


def test_servers_read_their_flags_before_grpc_is_loaded_so_that_they_can_choose() -> None:
    program = "import sys, chief.__main__, ps_server.__main__, lockstep.combined.__main__; sys.exit('grpc' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("environment", [{SWITCH: "0"}, {"GRPC_EXPERIMENTS": "event_engine_client"}, {"GRPC_EXPERIMENTS": OFF}])
def test_settings_of_the_users_environment_stay(environment: dict[str, str]) -> None:
    assert settings(environment) == {}


def test_other_settings_of_the_environment_stay_too() -> None:
    said = {"GRPC_EXPERIMENTS": "tcp_rcv_lowat", "GRPC_POLL_STRATEGY": "epoll1", "GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS": "7"}
    assert settings(said | {"GRPC_VERBOSITY": "DEBUG"}) == {"GRPC_EXPERIMENTS": f"tcp_rcv_lowat,{OFF}"}


def test_a_library_that_does_not_know_the_switches_gets_none(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF event_engine_client event_engine_listener event_engine_callback_cq")
    assert not knows_switches(library)
    library.write_bytes(OFF.encode())
    assert knows_switches(library)


# All that imports grpc imports `ps_protocol.rpc` first; a test of the repository holds that.
@pytest.mark.parametrize("first", ["worker_client", "lockstep\nlockstep.connect"])
def test_the_package_imported_first_switches_polling_and_leaves_no_variable_behind(first: str) -> None:
    assert report(f"import {first}") == ("True []", "")


def test_user_who_has_imported_grpc_before_keeps_it_as_it_is() -> None:
    assert report("import grpc\nimport worker_client") == ("False []", "")


def test_the_user_may_turn_own_polling_off() -> None:
    assert report("import worker_client", **{SWITCH: "0"}) == ("False []", "")


def test_a_variable_that_the_user_has_set_is_still_set_afterwards() -> None:
    assert report("import worker_client", GRPC_POLL_STRATEGY="epoll1") == ("True ['GRPC_POLL_STRATEGY']", "")
