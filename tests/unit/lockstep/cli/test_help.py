"""What `lockstep` says of itself: its commands on one screen, the usual flags of each, and that nothing happens without a command."""

import re

import pytest

from lockstep.__main__ import ROLES, parser_of
from lockstep.cli.commands import COMMANDS, actions_of
from tests.support.processes.commands import lockstep_here

SINGLE = [name for name in COMMANDS if name not in ROLES and not actions_of(name)]


@pytest.mark.parametrize("words", [(), ("--help",), ("help",), ("-h",)])
def test_all_commands_fit_one_screen_and_only_a_missing_command_is_a_wrong_call(words: tuple[str, ...]) -> None:
    ended = lockstep_here(*words)
    lines = ended.stdout.splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80, "the prompt takes a line, too"
    assert [name for name in COMMANDS if " " not in name and not re.search(rf"^.{{8}}(\w+, )?{name}[, ]", ended.stdout, re.MULTILINE)] == []
    assert (ended.returncode, ended.stderr) == (0 if words else 2, "")


@pytest.mark.parametrize("name", ["checkpoint", "certs"])
def test_a_command_without_its_action_shows_its_actions_and_does_nothing(name: str) -> None:
    ended = lockstep_here(name, LOCKSTEP_CHIEF="127.0.0.1:1")
    assert (ended.returncode, ended.stderr) == (2, "")
    assert all(f"  {action.partition(' ')[2]} " in ended.stdout for action in actions_of(name))
    assert lockstep_here(name, "--help").stdout == lockstep_here("help", name).stdout == ended.stdout


@pytest.mark.parametrize("name", SINGLE)
def test_help_of_a_command_has_examples_and_is_the_same_both_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = lockstep_here("help", *name.split())
    assert ended.returncode == 0
    assert ended.stdout == lockstep_here(*name.split(), "--help").stdout
    _, examples = ended.stdout.split("\nexamples:\n")
    assert examples.startswith(f"  lockstep {name}")


@pytest.mark.parametrize("name", [name for name in SINGLE if "--tls-ca" in parser_of(name)._option_string_actions])
def test_flags_of_tls_take_no_line_of_the_short_help(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = lockstep_here("help", *name.split()).stdout
    assert not re.search(r"^  --tls-\w+ [A-Z]", shown, re.MULTILINE)
    assert re.search(r"^--help-all also explains: .*--tls-ca --tls-cert", shown, re.MULTILINE)
    assert re.search(r"^  --tls-ca FILE", lockstep_here(*name.split(), "--help-all").stdout, re.MULTILINE)


def test_the_help_of_a_command_runs_nothing_whatever_follows_its_name() -> None:
    shown = lockstep_here("help", "up", "true")
    assert (shown.returncode, shown.stdout) == (0, lockstep_here("up", "--help").stdout)
    assert lockstep_here("help", "help").stdout == lockstep_here("help").stdout


def test_the_help_of_the_demo_has_its_own_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = lockstep_here("help", "demo").stdout
    assert re.search(r"--ps N .*\(default: 2\)", shown) and re.search(r"--workers M .*\(default: 3\)", shown)


def test_a_version_is_asked_for_in_two_ways() -> None:
    assert lockstep_here("version").stdout == lockstep_here("--version").stdout
    assert re.fullmatch(r"lockstep-ps \d+\.\d+\.\d+\n", lockstep_here("version").stdout)


def test_list_means_ls() -> None:
    assert lockstep_here("list").stdout == lockstep_here("ls").stdout
    assert lockstep_here("checkpoint", "list", "--help").stdout == lockstep_here("checkpoint", "ls", "--help").stdout


def test_a_flag_is_not_shortened() -> None:
    ended = lockstep_here("status", "--led", "3")
    assert ended.returncode == 2 and "no such argument: --led 3; did you mean '--ledger'?" in ended.stderr
