"""`lockstep store`: follows a cluster, and keeps its weights in a place that others follow. Knows arguments; the work is the SDK's."""

import argparse
import os
from contextlib import closing

import worker_client
from lockstep.cli.access import add_arguments, chief_of
from ps_protocol.checkpoint.catalog import storage_of_role
from ps_protocol.process import options
from ps_protocol.process.ending import exit_at_sigterm
from ps_protocol.process.failpoints import enable_worker_failpoints
from ps_protocol.process.options import Given
from worker_client.following.keeper import ANCHOR_STEPS, KEEP_S, KEEP_STEPS, StoreKeeper


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `store`."""
    parser.add_argument("--to", required=True, metavar="PLACE", help="a directory of its own, or a URL such as s3://bucket/weights")
    parser.add_argument("--wire", metavar="FORMAT", help="how float32 variables are kept: float32 (default), bfloat16 or float16")
    parser.add_argument("--tables", action="store_true", help="keep all rows of tables, too")
    add_arguments(parser)
    parser.add_argument(
        "--keep-steps", type=int, default=KEEP_STEPS, metavar="N", help=f"a reader N steps behind finds patches (default {KEEP_STEPS})"
    )
    parser.add_argument(
        "--keep-s", type=float, default=KEEP_S, metavar="S", help=f"seconds that files stay when the index drops them (default {KEEP_S:g})"
    )
    parser.add_argument(
        "--anchor-steps", type=int, default=ANCHOR_STEPS, metavar="N", help=f"steps between two whole copies (default {ANCHOR_STEPS})"
    )


def run_store(arguments: argparse.Namespace) -> int:
    """Writes until training ends and returns the exit code."""
    enable_worker_failpoints(os.environ)
    with chief_of(arguments) as chief:
        address, security = chief.address, chief.access.security  # reports an absent chief at once; a follower would wait for it
    cluster = Given(vars(arguments), os.environ)[options.CALLED_CLUSTER]
    storage = storage_of_role(arguments.to)
    keeper = StoreKeeper(storage, keep_steps=arguments.keep_steps, keep_s=arguments.keep_s, anchor_steps=arguments.anchor_steps)
    exit_at_sigterm()
    follower = worker_client.follow(address, wire=arguments.wire, tables=arguments.tables, cluster=cluster, security=security)
    with follower, closing(keeper):
        keeper.claim()
        # As readers in other directories can write it.
        place = arguments.to if "://" in arguments.to else os.path.abspath(arguments.to)
        print(f"keeping the weights in {storage.place} until training ends; to follow them: lockstep.follow({place!r})", flush=True)
        keeper.keep(follower)
    return 0
