"""What the processes of a cluster on this machine are told, or not told, by their environments. Knows names; starts nothing."""

import os
from pathlib import Path

_NAMES = (
    *("ADDRESS", "ALLOW_INSECURE_NETWORK", "CHIEF", "CLUSTER", "LEASE_S", "MAX_STEPS", "NUM_WORKERS", "PS", "PS_INDEX", "STANDBYS"),
    *("REPLICAS_TO_AGGREGATE", "TOTAL_NUM_REPLICAS", "WORKER_INDEX", "REJECT_NONFINITE", "ADVERTISE"),
    *("CHECKPOINT_DIR", "DURABILITY", "CHECKPOINT_INTERVAL", "CHECKPOINT_STEPS", "KEEP_CHECKPOINTS", "RESTORE", "MIN_REPLICAS", "HISTORY"),
    *("POLICY", "TOKENS", "NUM_TOKENS", "STALENESS", "NO_LOCKING", "MAX_STALENESS", "TOO_STALE"),
)
# What the shell may say about some other cluster must not reach the roles of this one.
FOREIGN = {f"LOCKSTEP_{name}": None for name in _NAMES} | {"TF_CONFIG": None}


def with_checkout() -> dict[str, str]:
    """Lets child processes find the packages when they are run from a source tree that isn't installed."""
    root = Path(__file__).resolve().parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    earlier = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join([*earlier, str(root)])}
