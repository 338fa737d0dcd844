"""A worker that contributes by the script through all faults, and writes down the outcome of each contribution."""

import argparse
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ps_protocol.process.memory import importing_for_good

with importing_for_good():
    import numpy as np

    import worker_client
    from ps_protocol.model.variables import Array
    from tests.chaos import script
    from worker_client import Session


class Diary:
    """One JSON object a line, with the machine's monotonic time: whole lines, also if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **words: object) -> None:
        """Appends one line."""
        os.write(self._file, json.dumps({"event": event, "at": time.monotonic(), "pid": os.getpid(), **words}).encode() + b"\n")


def train(session: Session, diary: Diary, *, pace_s: float, fails_at: int | None, failure: str) -> None:
    """Contributes until training is finished; at step `fails_at` what `failure` says goes wrong, once; "model": at once."""
    model = {**script.initial_values(), **({"extra": np.zeros(3)} if failure == "model" else {})}
    session.create_or_join(model, optimizer=script.optimizer(), split_bytes=script.SPLIT_BYTES, timeout_s=60)
    diary.write("joined", step=session.local_step)
    while not session.is_finished:
        step = session.local_step
        threading.Event().wait(pace_s)
        gradients = script.gradients(step, session.worker_index)
        if step == fails_at and failure == "nan":
            gradients = script.without_a_number(step, session.worker_index)
        elif step == fails_at:
            fails_at = None
            go_wrong(session, diary, failure)
        found = session.step(gradients, timeout_s=90)
        diary.write("step", step=step, outcome=found.outcome.name, after=session.local_step, epoch=session.epoch)
    diary.write("finished", step=session.local_step)


def go_wrong(session: Session, diary: Diary, failure: str) -> None:
    """Does what a broken training program does."""
    if failure == "exception":
        raise RuntimeError("a worker's own mistake")
    bad = script.without_a_number(session.local_step, session.worker_index)
    if failure in ("shape", "refused nan"):
        try:
            session.step({**bad, "b": np.zeros(3)} if failure == "shape" else bad)
        except worker_client.PsError as error:
            diary.write("refused", reason=error.reason, words=error.message)


def main(train: Callable[..., None] = train, values: Callable[[Session], Mapping[str, Array]] = Session.read) -> None:
    """Joins, trains, and keeps the last values."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chief", required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--values", type=Path, required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--fails-at", type=int)
    parser.add_argument("--failure", default="exception")
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--never-collects", action="store_true")
    arguments = parser.parse_args()
    if arguments.never_collects:
        gc.disable()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    diary = Diary(arguments.diary)
    diary.write("begun")
    try:
        with worker_client.connect(arguments.chief, worker_index=arguments.index, timeout_s=60, takeover=arguments.takeover) as session:
            diary.write("connected", epoch=session.epoch)
            train(session, diary, pace_s=arguments.pace, fails_at=arguments.fails_at, failure=arguments.failure)
            script.save(arguments.values, values(session))
    except Exception as error:
        diary.write("failed", kind=type(error).__name__, words=str(error)[:500])
        raise


if __name__ == "__main__":
    main()
