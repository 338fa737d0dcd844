"""`python -m tests.chaos.limited LIMIT VALUE MODULE …`: runs a module in a process with a lower limit of a resource. Knows no role.

LIMIT is that of `resource` without "RLIMIT_"; or "LOG", whose VALUE is the file that takes the place of its output; or "GROUP", whose
VALUE is the directory of the control group that the process joins.
"""

import os
import resource
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Sets the limit for good and runs the module."""
    limit, value = sys.argv[1:3]
    if limit == "LOG":
        file = os.open(value, os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
    elif limit == "GROUP":
        Path(value, "cgroup.procs").write_text(str(os.getpid()))
    else:
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (int(value), int(value)))
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
