"""The peers' Python environments: each is made once, under .venv-peers, with the peer's requirements. Knows pip; measures nothing."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".venv-peers"
_INSTALL_TIMEOUT_S = 3600.0


class NotInstallable(Exception):
    """A peer cannot be installed on this machine; the text is the last error of pip or of the peer."""


def prepare(name: str, requirements: tuple[str, ...], *, module: str, cache: Path = CACHE, note: Callable[[str], None]) -> Path:
    """Returns the Python of an environment in which `module` can be imported; installs it on first use, which takes minutes.

    Raises NotInstallable. Idempotent; an environment with other requirements is updated.
    """
    home, stamp, wanted = cache / name, cache / name / ".installed", "\n".join(requirements)
    python = home / "bin" / "python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    note(f"installing {' '.join(requirements)} into {home}")
    try:
        home.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
    except OSError as error:
        raise NotInstallable(f"{home}: {error.strerror}") from None
    _run([sys.executable, "-m", "venv", str(home)])
    _run([str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *requirements])
    _run([str(python), "-c", f"import {module}"])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstallable(f"not installed within {_INSTALL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise NotInstallable(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise NotInstallable(last_word(done.stderr or done.stdout) or f"exit code {done.returncode}")


def last_word(output: str) -> str:
    """Returns the line of the error: pip's last ERROR, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or [""])[-1].removeprefix("ERROR: ")
