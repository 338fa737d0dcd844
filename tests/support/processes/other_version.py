"""Runs a module as if its protocol had another version: `-m tests.support.processes.other_version 5.0 chief --address …`."""

import runpy
import sys

from ps_protocol.roles import identity


def main(version: str, module: str, *words: str) -> None:
    major, minor = map(int, version.split("."))
    # Before anything else has taken it from there.
    identity.PROTOCOL_VERSION = identity.ProtocolVersion(major=major, minor=minor)
    sys.argv = [module, *words]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
