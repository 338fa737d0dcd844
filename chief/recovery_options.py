"""The chief's flags and LOCKSTEP_* for checkpoints and recovery. Knows arguments; opens no place."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from chief.coordination import DEFAULT_CHECKPOINT_INTERVAL_S, DEFAULT_CHECKPOINTS_KEPT, RESTORE_LATEST, CheckpointConfig
from chief.option_values import choice, integer, number
from ps_protocol.checkpoint import Durability
from ps_protocol.errors import InvalidSpec


def add_recovery_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="where checkpoints lie, a directory or a URL, the same for all roles [LOCKSTEP_CHECKPOINT_DIR] (none: no checkpoints)",
    )
    parser.add_argument(
        "--durability",
        metavar="none|interval|step",
        help="what the loss of a parameter server may cost: everything, the steps since the last checkpoint, or nothing"
        " [LOCKSTEP_DURABILITY] (interval)",
    )
    parser.add_argument(
        "--checkpoint-interval",
        metavar="SECONDS",
        help=f"time between checkpoints [LOCKSTEP_CHECKPOINT_INTERVAL] ({DEFAULT_CHECKPOINT_INTERVAL_S:g})",
    )
    parser.add_argument("--checkpoint-steps", metavar="N", help="steps between checkpoints [LOCKSTEP_CHECKPOINT_STEPS] (by time alone)")
    parser.add_argument(
        "--keep-checkpoints", metavar="K", help=f"how many are kept [LOCKSTEP_KEEP_CHECKPOINTS] ({DEFAULT_CHECKPOINTS_KEPT})"
    )
    parser.add_argument(
        "--restore", metavar="latest|none|TAG", help="which checkpoint to begin with, if there is one [LOCKSTEP_RESTORE] (latest)"
    )
    parser.add_argument(
        "--min-replicas",
        metavar="M",
        help="sync: when workers are gone, a step needs as many as are left, M at least [LOCKSTEP_MIN_REPLICAS] (as many as ever)",
    )
    parser.add_argument(
        "--takeover", action="store_true", help="take the parameter servers from their present chief, even if it seems to be alive"
    )
    parser.add_argument(
        "--history", metavar="DIR", type=Path, help="directory for a record that `lockstep verify` checks [LOCKSTEP_HISTORY] (none)"
    )
    parser.add_argument("--enable-failpoints", action="store_true", help="for tests: do what LOCKSTEP_FAILPOINTS says")


def place_of(flags: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """Returns where checkpoints lie; empty: nowhere."""
    given: str | None = flags.checkpoint_dir
    return (given if given is not None else environment.get("LOCKSTEP_CHECKPOINT_DIR", "")).strip()


def checkpoints_of(flags: argparse.Namespace, environment: Mapping[str, str]) -> CheckpointConfig | None:
    """Returns when checkpoints are made; None if there is no place for them. Raises InvalidSpec if a flag asks for what cannot be."""
    durability = choice(Durability, "--durability", flags.durability, "LOCKSTEP_DURABILITY", environment)
    interval_s = number("--checkpoint-interval", flags.checkpoint_interval, "LOCKSTEP_CHECKPOINT_INTERVAL", environment)
    every_steps = integer("--checkpoint-steps", flags.checkpoint_steps, "LOCKSTEP_CHECKPOINT_STEPS", environment)
    keep = integer("--keep-checkpoints", flags.keep_checkpoints, "LOCKSTEP_KEEP_CHECKPOINTS", environment)
    if not place_of(flags, environment):
        asked = {"--durability": flags.durability, "--checkpoint-interval": flags.checkpoint_interval, "--restore": flags.restore}
        asked |= {"--checkpoint-steps": flags.checkpoint_steps, "--keep-checkpoints": flags.keep_checkpoints}
        for flag, given in asked.items():
            if given is not None and given != "none":
                raise InvalidSpec(f"{flag}: where do checkpoints lie? give --checkpoint-dir too, to all roles")
        return None
    return CheckpointConfig(
        durability=durability or Durability.INTERVAL,
        interval_s=DEFAULT_CHECKPOINT_INTERVAL_S if interval_s is None else interval_s,
        every_steps=every_steps,
        keep=keep or DEFAULT_CHECKPOINTS_KEPT,
        restore=flags.restore if flags.restore is not None else environment.get("LOCKSTEP_RESTORE", "").strip() or RESTORE_LATEST,
    )
