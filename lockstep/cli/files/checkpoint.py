"""`lockstep checkpoint`: has a cluster save one; lists, verifies, exports and imports them. Knows terminal, chief and storages."""

import argparse
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.checkpoint_export import export
from lockstep.checkpoint_import import import_checkpoint
from lockstep.cli.access import CommandFailed, add_arguments, chief_of
from lockstep.cli.formatting import bytes_text, table
from lockstep.cli.progress import shown
from ps_protocol.checkpoint.catalog import Found, Skipped, find_checkpoint, list_checkpoints, open_storage, verify_checkpoint
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.errors import CheckpointNotFound, DataLoss, DeadlineExceeded, InvalidSpec
from ps_protocol.process.options import CALLED_CLUSTER, CHECKPOINT_DIR, RESTORE, Given
from ps_protocol.roles.checkpoint import check_tag
from ps_protocol.roles.chief import Chief


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint`."""
    add_arguments(parser)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds to wait until it is saved (default 600)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(action=_save)
    actions = parser.add_subparsers(title="without a cluster", metavar="ACTION")
    listing = actions.add_parser("ls", help="list the checkpoints of a directory, the newest last", description="List checkpoints.")
    listing.add_argument("place", nargs="?", default="", metavar="PLACE", help="the same as --checkpoint-dir PLACE")
    listing.set_defaults(action=_list)
    verify = actions.add_parser(
        "verify", help="read every byte of checkpoints and compare their checksums", description="Verify checkpoints."
    )
    verify.add_argument("tag", nargs="?", default="", metavar="TAG", help="which checkpoint (default: all)")
    verify.set_defaults(action=_verify)
    exporting = actions.add_parser("export", help="write whole variables to one file", description="Export a checkpoint's variables.")
    exporting.add_argument("file", type=Path, metavar="FILE", help="file to write, its name ending in .npz or .safetensors")
    exporting.add_argument("--tag", default="", metavar="TAG", help="which checkpoint (default: the newest)")
    exporting.add_argument("--slots", action="store_true", help="also the optimizers' slots and the moving averages")
    exporting.set_defaults(action=_export)
    importing = actions.add_parser(
        "import",
        help="create a checkpoint from a file that was exported with --slots",
        description="Make a checkpoint of a file: the way back of `export --slots`.",
    )
    importing.add_argument("file", type=Path, metavar="FILE", help="file to read, its name ending in .safetensors")
    importing.add_argument("--into", default="", metavar="TAG", help='take what FILE lacks from this checkpoint ("latest": the newest)')
    importing.add_argument("--tag", default="", metavar="NAME", help='name of the new one (default: as before, or with "-imported")')
    importing.set_defaults(action=_import)
    for action in (listing, verify, exporting, importing):
        _add_place(action)
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Runs the action and returns the exit code: 0, 1 for a failure or damaged checkpoints, 2 for wrong arguments."""
    action: Callable[[argparse.Namespace], int] = arguments.action
    try:
        return action(arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandFailed(str(error)) from error


def _add_place(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS: a subparser's default would overwrite a value given before the action.
    parser.add_argument(CHECKPOINT_DIR.flag, default=argparse.SUPPRESS, metavar="PLACE", help=CHECKPOINT_DIR.help_text(has_variable=True))
    parser.add_argument(
        CALLED_CLUSTER.flag, default=argparse.SUPPRESS, metavar="NAME", help="only checkpoints of this cluster [LOCKSTEP_CLUSTER]"
    )


def _cluster_of(arguments: argparse.Namespace) -> str:
    return Given(vars(arguments), os.environ)[CALLED_CLUSTER]


def _save(arguments: argparse.Namespace) -> int:
    if not arguments.timeout > 0:
        raise InvalidSpec(f"--timeout: got {arguments.timeout}, want more than 0 seconds")
    with chief_of(arguments) as chief:
        tag, step = _await_save(chief, timeout_s=arguments.timeout)
    print(json.dumps({"tag": tag, "step": step}) if arguments.json else f"saved {tag}, step {step}")
    return 0


def _await_save(chief: Chief, *, timeout_s: float) -> tuple[str, int]:
    """Requests the checkpoint, with one request id, until it is complete, and shows the progress. Raises DeadlineExceeded."""
    request_id, deadline, shown_reason = secrets.randbits(63), time.monotonic() + timeout_s, ""
    while True:
        saved = chief.save_checkpoint(request_id=request_id, max_wait_s=max(0.0, min(1.0, deadline - time.monotonic())))
        if saved.tag:
            return saved.tag, saved.step
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"not within {timeout_s:g} s: {saved.waiting_for}; it will be saved all the same")
        if saved.waiting_for != shown_reason:
            shown_reason = saved.waiting_for
            print(shown_reason, file=sys.stderr, flush=True)


def _list(arguments: argparse.Namespace) -> int:
    storage = _storage_of(arguments)
    whole, others = list_checkpoints(storage, cluster=_cluster_of(arguments))
    if arguments.json:
        print(
            json.dumps(
                {"place": storage.place, "whole": [_fields(one) for one in whole], "others": [dataclasses.asdict(one) for one in others]}
            )
        )
        return 0
    if whole:
        print(table([("checkpoint", "step", "epoch", "ps", "size", "saved at", "cluster"), *map(_row, whole)], left=(0, 5, 6)))
    else:
        print(f"no complete checkpoint in {storage.place}")
    for one in others:
        print(f"{one.tag}: {one.reason}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    storage, found = _storage_of(arguments), list[dict[str, object]]()

    def note(tag: str, words: str, *, is_whole: bool, is_damaged: bool) -> None:
        found.append({"tag": tag, "is_whole": is_whole, "is_damaged": is_damaged, "words": words})
        if not arguments.json:
            print(f"{tag}: {'DAMAGED: ' if is_damaged else ''}{words}", flush=True)

    whole, others = _chosen(storage, arguments)
    for one in whole:
        try:
            total = one.checkpoint.num_bytes
            with shown(f"verifying {one.checkpoint.tag}", is_bytes=True) as progress:
                verify_checkpoint(storage, one.checkpoint, on_read=partial(progress.advance, total=total))
        except (DataLoss, CheckpointNotFound) as error:
            note(one.checkpoint.tag, error.message, is_whole=False, is_damaged=True)
        else:
            words = f"whole, {bytes_text(one.checkpoint.num_bytes)}, step {one.checkpoint.step}"
            note(one.checkpoint.tag, words, is_whole=True, is_damaged=False)
    for skipped in others:
        note(skipped.tag, skipped.reason, is_whole=False, is_damaged=not skipped.is_incomplete)
    if arguments.json:
        print(json.dumps({"place": storage.place, "checkpoints": found}, indent=2))
    elif not found:
        print(f"no complete checkpoint in {storage.place}")
    return 1 if any(one["is_damaged"] for one in found) or not whole else 0


def _chosen(storage: CheckpointStorage, arguments: argparse.Namespace) -> tuple[tuple[Found, ...], tuple[Skipped, ...]]:
    if arguments.tag:
        return (find_checkpoint(storage, cluster=_cluster_of(arguments), tag=check_tag(arguments.tag)),), ()
    whole, others = list_checkpoints(storage, cluster=_cluster_of(arguments))
    return whole, tuple(one for one in others if not one.is_foreign)


def _export(arguments: argparse.Namespace) -> int:
    storage = _storage_of(arguments)
    tag = check_tag(arguments.tag) if arguments.tag else None
    found = find_checkpoint(storage, cluster=_cluster_of(arguments), tag=tag)
    for skipped in found.skipped:
        if not skipped.is_foreign:
            print(f"skipped {skipped.tag}: {skipped.reason}", file=sys.stderr)
    if not os.access(arguments.file.parent, os.W_OK | os.X_OK):
        raise InvalidSpec(f"{arguments.file}: its directory is not there, or cannot be written to; choose another FILE")
    with shown(f"exporting {found.checkpoint.tag}", is_bytes=True) as progress:
        on_read = partial(progress.advance, total=found.checkpoint.num_bytes)
        names = export(storage, found.checkpoint, arguments.file, has_slots=arguments.slots, on_read=on_read)
    fields = {"file": str(arguments.file), "tag": found.checkpoint.tag, "step": found.checkpoint.step, "tensors": [*names]}
    words = f"{arguments.file}: {len(names)} tensors of {found.checkpoint.tag}, step {found.checkpoint.step}"
    print(json.dumps(fields) if arguments.json else words)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    storage, cluster, path = _storage_of(arguments), _cluster_of(arguments), arguments.file
    if path.suffix != ".safetensors":
        raise InvalidSpec(f"{path}: want a .safetensors that `lockstep checkpoint export --slots` has written")
    into = None
    if arguments.into:
        wanted = None if arguments.into == RESTORE.default else check_tag(arguments.into)
        into = find_checkpoint(storage, cluster=cluster, tag=wanted).checkpoint
    with shown(f"importing {path}", is_bytes=True) as progress:
        on_written = partial(progress.advance, total=path.stat().st_size)
        tag = check_tag(arguments.tag) if arguments.tag else ""
        found = import_checkpoint(path, storage, into=into, tag=tag, cluster=cluster, on_written=on_written)
    tag, step = found.checkpoint.tag, found.checkpoint.step
    newest = find_checkpoint(storage, cluster=found.checkpoint.cluster).checkpoint.tag
    if arguments.json:
        fields = {"file": str(path), "tag": tag, "step": step, "tensors": [*found.names], "unused": [*found.unused], "newest": newest}
        print(json.dumps(fields))
        return 0
    print(f"{tag}: step {step}, {len(found.names)} tensors of {path}")
    if found.unused:
        print(f"not used, since the checkpoint has no such tensor: {', '.join(map(repr, found.unused))}", file=sys.stderr)
    if newest != tag:
        print(f"{newest} is newer: start the cluster with --restore {tag}", file=sys.stderr)
    return 0


def _storage_of(arguments: argparse.Namespace) -> CheckpointStorage:
    place = getattr(arguments, "place", "") or Given(vars(arguments), os.environ)[CHECKPOINT_DIR]
    if not place:
        raise InvalidSpec("which checkpoints? give --checkpoint-dir PLACE or set LOCKSTEP_CHECKPOINT_DIR")
    return open_storage(place)


def _row(one: Found) -> tuple[str, ...]:
    checkpoint = one.checkpoint
    numbers = (checkpoint.step, checkpoint.fence.epoch, checkpoint.num_shards)
    return (checkpoint.tag, *map(str, numbers), bytes_text(checkpoint.num_bytes), one.saved_at, checkpoint.cluster)


def _fields(one: Found) -> dict[str, object]:
    checkpoint = one.checkpoint
    names = ("tag", "cluster", "step", "num_shards", "num_bytes")
    fields: dict[str, object] = {name: getattr(checkpoint, name) for name in names}
    return {**fields, "epoch": checkpoint.fence.epoch, "saved_at": one.saved_at, "manifest_sha256": one.manifest_sha256}
