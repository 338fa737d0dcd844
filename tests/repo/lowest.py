"""Prints, as constraints for pip, the oldest version that pyproject.toml promises of each dependency."""

import re
import tomllib

from tests.support.repository import ROOT

# What the tests take from there, too; tools of development have no floor that anybody is promised.
EXTRAS = ("demo", "certs", "estimator", "bfloat16", "remote")


def floors() -> dict[str, str]:
    """Returns the oldest version by name; of two floors the higher one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = {}
    for requirement in [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]:
        match = re.fullmatch(r"([\w-]+)>=([\d.]+).*", requirement)
        assert match, f"{requirement}: want NAME>=VERSION"
        name, version = match.groups()
        found[name] = max(found.get(name, version), version, key=lambda text: tuple(map(int, text.split("."))))
    return found


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in floors().items()))
