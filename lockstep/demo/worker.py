"""A worker that learns handwritten digits; `lockstep demo` and docker-compose.yml run it. An ordinary user of worker_client."""

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

import worker_client
from lockstep.demo.digits import (
    DEFAULT,
    NAMES,
    Examples,
    ExamplesMissing,
    evaluate,
    initial_values,
    load_digits,
    loss_and_gradients,
    optimizer_of,
    split,
)
from ps_protocol.errors import PsError
from ps_protocol.model.optimizers import OptimizerSpec

SEED = 7
_BATCH_SIZE = 32
_REPORT_EVERY = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Trains until the cluster says that training is finished, and returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    arguments = _parser().parse_args(argv)
    try:
        examples, test = split(load_digits())
        optimizer = optimizer_of(arguments.optimizer, learning_rate=arguments.learning_rate)
        # An encoding needs gRPC: with shared memory, gradients are not sent.
        with worker_client.connect(transport="grpc" if arguments.wire else None, wire=arguments.wire) as session:
            part = examples.part(session.worker_index % arguments.parts, num_parts=arguments.parts)
            print(f"worker {session.worker_index} has {len(part.labels)} of {len(examples.labels)} examples", flush=True)
            num_accepted = _train(session, part, optimizer=optimizer, pace_s=arguments.pace)
            accuracy = evaluate(session.read(), test.images, test.labels).accuracy
            words = f"finished at step {session.local_step}, {num_accepted} contributions accepted, test accuracy {accuracy:.3f}"
            print(f"worker {session.worker_index}: {words}", flush=True)
    except (ExamplesMissing, PsError) as error:
        print(f"digits worker: {error}", file=sys.stderr)
        return 1
    return 0


def _train(session: worker_client.Session, part: Examples, *, optimizer: OptimizerSpec, pace_s: float) -> int:
    # Every worker starts from the same values; only the first one's are used.
    session.create_or_join(initial_values(seed=SEED), optimizer=optimizer)
    num_accepted = 0
    while not session.is_finished:
        start = time.monotonic()
        step, gradients = session.local_step, session.gradient_buffers()
        batch = part.batch(_BATCH_SIZE, worker=session.worker_index, step=step)
        loss = loss_and_gradients(session.read(), batch.images, batch.labels, into=gradients)
        threading.Event().wait(max(0.0, pace_s - (time.monotonic() - start)))
        result = session.step(gradients, metrics={"loss": loss})
        num_accepted += result.outcome is worker_client.PushOutcome.ACCEPTED
        if step % _REPORT_EVERY == 0:
            print(f"worker {session.worker_index}: step {step}, loss {loss:.4f}, {result.outcome.name.lower()}", flush=True)
    return num_accepted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.demo.worker", description="Learns handwritten digits as one worker of a cluster."
    )
    parts = os.environ.get("LOCKSTEP_NUM_WORKERS", "3")
    parser.add_argument("--parts", type=int, default=parts, metavar="N", help="number of parts of the examples (LOCKSTEP_NUM_WORKERS)")
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="S", help="seconds a batch takes at least, as with a larger model (default 0)"
    )
    parser.add_argument("--optimizer", choices=NAMES, default=DEFAULT, help=f"(default {DEFAULT})")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="learning rate (default: one that suits the optimizer)")
    parser.add_argument("--wire", metavar="FORMAT", help="train over gRPC with this encoding (default: no encoding)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
