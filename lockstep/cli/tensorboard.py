"""`lockstep tensorboard`: observes a cluster and writes event files until training ends. Knows its arguments and time; no file format."""

import argparse
import os
import time
from pathlib import Path

import worker_client
from lockstep.cli.access import CommandFailed, add_arguments, chief_and_access_of
from lockstep.tensorboard import TensorBoardWriter
from ps_protocol.process import options
from ps_protocol.process.options import Given
from ps_protocol.roles.chief import ClusterState

_PERIOD_S = 1.0
_TIMEOUT_S = 60.0
_BEFORE = (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)
_OVER = (ClusterState.FINISHED, ClusterState.FAILED)


def add_tensorboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tensorboard`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory for the event file; made if need be")
    add_arguments(parser)


def run_tensorboard(arguments: argparse.Namespace) -> int:
    """Writes until training ends and returns the exit code."""
    with chief_and_access_of(arguments) as (chief, access):
        address, security = chief.address, access.security  # a chief that is not there is reported at once, an observer waits for it
    cluster = Given(vars(arguments), os.environ)[options.CALLED_CLUSTER]
    try:
        writer = TensorBoardWriter(arguments.directory)
    except OSError as error:
        raise CommandFailed(f"cannot write to {arguments.directory}: {error.strerror}; choose another directory", exit_code=2) from error
    print(f"writing {writer.path} until training ends; look at it with: tensorboard --logdir {arguments.directory}", flush=True)
    with worker_client.observe(address, cluster=cluster, security=security, timeout_s=_TIMEOUT_S) as observer:
        _watch(observer, writer)
    return 0


def _watch(observer: worker_client.Observer, writer: TensorBoardWriter) -> None:
    """Has the writer record about every second, and once more when training has ended."""
    while (state := observer.status().state) in _BEFORE:
        time.sleep(_PERIOD_S)
    while state is not ClusterState.FAILED:
        state = writer.record(observer).state
        if state in _OVER:
            return
        time.sleep(_PERIOD_S)
