"""What the chaos tests claim about a run that is over, from the diaries, logs, histories and checkpoints that it left. Starts no fault."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.checkpoint_export import export
from ps_protocol.checkpoint.catalog import list_checkpoints, verify_checkpoint
from ps_protocol.checkpoint.storage import LocalStorage
from tests.chaos import script
from tests.support.repository import ROOT

Event = Mapping[str, Any]


def rollbacks(events: Sequence[Event]) -> int:
    """How often a worker was told that a contribution was rolled back, and how often the cluster's epoch has risen."""
    told = sum(event.get("outcome") == "ROLLED_BACK" for event in events)
    epochs = {event["epoch"] for event in events if "epoch" in event}
    return int(told + max(epochs, default=1) - min(epochs, default=1))


def assert_each_step_once(events: Sequence[Event]) -> None:
    """No worker, whatever its lives, was told of one step twice in one epoch that its contribution counts; and steps only rise.

    Only a step that was open when training was ended by order is never made.
    """
    ended_at = {event["step"] for event in events if event["event"] == "finished"}
    counted = [event for event in events if event["event"] == "step" and event["outcome"] == "ACCEPTED"]
    times = Counter((event["worker"], event["epoch"], event["step"]) for event in counted)
    twice = [key for key, count in times.items() if count > 1]
    assert not twice, f"(worker, epoch, step) accepted more than once: {twice}"
    assert all(event["after"] > event["step"] or event["step"] in ended_at for event in counted)


def standstill_s(events: Sequence[Event], since: float) -> float:
    """The longest time after `since` in which no worker got a step done."""
    ends = [event["at"] for event in events if event["event"] == "step" and event["outcome"] != "ROLLED_BACK"]
    times = [since, *(at for at in ends if at > since)]
    return max((later - earlier for earlier, later in pairwise(times)), default=float("inf"))


def contributing_s(events: Sequence[Event]) -> float:
    """How long the newest process of one worker took from the beginning of its program to its first step."""
    begun = max(event["at"] for event in events if event["event"] == "begun")
    steps = [event["at"] for event in events if event["event"] == "step" and event["at"] > begun]
    return float(min(steps, default=float("inf")) - begun)


def assert_history_is_clean(history: Path) -> str:
    """`lockstep audit` finds nothing wrong; returns what it says."""
    command = [sys.executable, "-m", "lockstep", "audit", str(history)]
    verdict = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert re.search(r"\b[1-9]\d* steps of servers computed again", verdict.stdout), verdict.stdout
    return verdict.stdout


def assert_checkpoints_are_of_one_step_each(directory: Path, *, num_workers: int, scratch: Path) -> list[int]:
    """Every whole checkpoint has, bit for bit, the values after its step of a run without faults; returns the steps."""
    storage = LocalStorage(directory)
    whole, _ = list_checkpoints(storage, cluster="lockstep")
    for one in whole:
        verify_checkpoint(storage, one.checkpoint)
        path = scratch / f"{one.checkpoint.tag}.npz"
        export(storage, one.checkpoint, path)
        script.assert_same_bytes(script.load(path), script.reference(num_steps=one.checkpoint.step, num_workers=num_workers))
    return [one.checkpoint.step for one in whole]
