"""A worker that learns handwritten digits; `lockstep demo` and docker-compose.yml run it. An ordinary user of worker_client."""

import argparse
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

import worker_client
from lockstep.demo.digits import (
    DEFAULT,
    NAMES,
    NETWORK,
    Examples,
    ExamplesMissing,
    evaluate,
    initial_values,
    load_digits,
    optimizer_of,
    split,
)
from ps_protocol.errors import PsError
from ps_protocol.model.optimizers import OptimizerSpec

SEED = 7
_BATCH_SIZE = 32
_REPORT_EVERY_S = 1.0


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
            print(f"learns from {len(part.labels)} of {len(examples.labels)} examples", flush=True)
            outcomes = _train(session, part, test, optimizer=optimizer, pace_s=arguments.pace)
            accuracy = evaluate(session.read(), test.images, test.labels).accuracy
            counted = ", ".join(f"{number} {outcome.name.lower()}" for outcome, number in outcomes.most_common())
            print(f"finished at step {session.local_step}: test accuracy {accuracy:.3f}; contributions: {counted}", flush=True)
    except (ExamplesMissing, PsError) as error:
        print(f"digits worker: {error}", file=sys.stderr)
        return 1
    if accuracy < arguments.least_accuracy:
        print(f"test accuracy {accuracy:.3f}, want {arguments.least_accuracy}: train longer (--max-steps)", file=sys.stderr)
        return 1
    return 0


def _train(
    session: worker_client.Session, part: Examples, test: Examples, *, optimizer: OptimizerSpec, pace_s: float
) -> Counter[worker_client.PushOutcome]:
    """Trains until training is finished; returns how many contributions had which outcome."""
    # Every worker starts from the same values; only the first one's are used.
    session.create_or_join(initial_values(seed=SEED), optimizer=optimizer)
    outcomes: Counter[worker_client.PushOutcome] = Counter()
    said_at = time.monotonic()
    while not session.is_finished:
        start = time.monotonic()
        step, variables, gradients = session.local_step, session.read(), session.gradient_buffers()
        batch = part.batch(_BATCH_SIZE, worker=session.worker_index, step=step)
        metrics = {"loss": NETWORK.loss_and_gradients(variables, batch.images, batch.labels, into=gradients)}
        if session.worker_index == 0 and start - said_at >= _REPORT_EVERY_S:
            said_at = start
            metrics["test_accuracy"] = evaluate(variables, test.images, test.labels).accuracy
            print(f"step {step}: loss {metrics['loss']:.4f}, test accuracy {metrics['test_accuracy']:.3f}", flush=True)
        threading.Event().wait(max(0.0, pace_s - (time.monotonic() - start)))
        outcomes[session.step(gradients, metrics=metrics).outcome] += 1
    return outcomes


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
    parser.add_argument("--least-accuracy", type=float, default=0.0, metavar="X", help="fail if the test accuracy is lower at the end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
