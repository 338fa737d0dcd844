"""What the processes of a cluster on this machine are told, or not told, by their environments. Knows names; starts nothing."""

import os
from pathlib import Path

from ps_protocol.process.options import cluster_variables

# What the shell may say about some other cluster must not reach the roles of this one.
FOREIGN = {**dict.fromkeys(cluster_variables()), "TF_CONFIG": None}


def with_checkout() -> dict[str, str]:
    """Lets child processes find the packages when they are run from a source tree that isn't installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    earlier = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join([*earlier, str(root)])}
