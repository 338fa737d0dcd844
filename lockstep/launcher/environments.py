"""Which variables the processes of a cluster on this machine get, and which they must not inherit. Knows names; starts nothing."""

import os
from pathlib import Path

from ps_protocol.process.options import cluster_variables

# The shell's variables may describe another cluster; the roles of this one must not inherit them.
FOREIGN = {**dict.fromkeys(cluster_variables()), "TF_CONFIG": None}


def with_checkout() -> dict[str, str]:
    """Returns the PYTHONPATH by which child processes find the packages of a source tree that is not installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    earlier = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join([*earlier, str(root)])}
