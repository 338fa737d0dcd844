"""`lockstep checkpoint`: has a cluster save one; lists, verifies, exports and imports them. Knows chief and storages."""

import argparse
import dataclasses
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from lockstep.checkpoint_changes import write_changes
from lockstep.checkpoint_export import export
from lockstep.checkpoint_fold import folded
from lockstep.checkpoint_import import import_checkpoint
from lockstep.cli.access import add_arguments, chief_of
from lockstep.cli.formatting import bytes_text, table
from lockstep.cli.progress import shown
from lockstep.cli.results import CommandResult
from ps_protocol.checkpoint.catalog import Found, Skipped, find_checkpoint, list_checkpoints, open_storage, verify_checkpoint
from ps_protocol.checkpoint.storage import CheckpointStorage, LocalStorage
from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec, PsError
from ps_protocol.process.ending import exit_at_sigterm
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import CALLED_CLUSTER, CHECKPOINT_DIR, RESTORE, Given
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.checkpoint import check_tag
from ps_protocol.roles.shard import CheckpointFile
from worker_client.session.changes import await_checkpoint


def add_checkpoint_save_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint save`."""
    add_arguments(parser)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds to wait until it is saved (default 600)")


def add_checkpoint_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint ls`."""
    parser.add_argument("place", nargs="?", default="", metavar="PLACE", help="the same as --checkpoint-dir PLACE")
    _add_place(parser)


def add_checkpoint_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint verify`."""
    parser.add_argument("tag", nargs="?", default="", metavar="TAG", help="which checkpoint (default: all)")
    _add_place(parser)


def add_checkpoint_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint export`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="file to write, its name ending in .npz, .safetensors or .parquet")
    parser.add_argument("--tag", default="", metavar="TAG", help="which checkpoint (default: the newest)")
    parser.add_argument("--variable", default="", metavar="NAME", help="only this variable; a .parquet file has one table")
    parser.add_argument("--slots", action="store_true", help="also the optimizers' slots and the moving averages")
    _add_place(parser)


def add_checkpoint_changes_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint changes`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory for the files, which readers may remove")
    parser.add_argument("--follow", action="store_true", help="go on with each new checkpoint, until Ctrl-C")
    _add_place(parser)


def add_checkpoint_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint import`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="file to read, its name ending in .safetensors")
    parser.add_argument("--into", default="", metavar="TAG", help='take what FILE lacks from this checkpoint ("latest": the newest)')
    parser.add_argument("--tag", default="", metavar="NAME", help='name of the new one (default: as before, or with "-imported")')
    _add_place(parser)


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(CHECKPOINT_DIR.flag, metavar="PLACE", help="where they are: a directory or a URL [LOCKSTEP_CHECKPOINT_DIR]")
    parser.add_argument(CALLED_CLUSTER.flag, metavar="NAME", help="only checkpoints of this cluster [LOCKSTEP_CLUSTER]")


def _cluster_of(arguments: argparse.Namespace) -> str:
    return Given(vars(arguments), os.environ)[CALLED_CLUSTER]


def run_checkpoint_save(arguments: argparse.Namespace) -> CommandResult:
    """Has the cluster save one, and returns its tag and step."""
    if not arguments.timeout > 0:
        raise InvalidSpec(f"--timeout: got {arguments.timeout}, want more than 0 seconds")
    with chief_of(arguments) as chief:
        saved = await_checkpoint(lambda asked, timeout_s: chief.call(asked), Wait("the checkpoint", timeout_s=arguments.timeout))
    return CommandResult(words=f"saved {saved.tag}, step {saved.step}", fields={"tag": saved.tag, "step": saved.step})


def run_checkpoint_ls(arguments: argparse.Namespace) -> CommandResult:
    """Returns a table of whole checkpoints, and what is wrong with the others."""
    storage = _storage_of(arguments)
    whole, others = list_checkpoints(storage, cluster=_cluster_of(arguments))
    rows = [("checkpoint", "step", "epoch", "ps", "size", "rests on", "saved at", "cluster"), *map(_row, whole)]
    said = [table(rows, left=(0, 5, 6, 7)) if whole else f"no complete checkpoint in {storage.place}"]
    return CommandResult(
        words="\n".join([*said, *(f"{one.tag}: {one.reason}" for one in others)]),
        fields={"place": storage.place, "whole": [_fields(one) for one in whole], "others": [dataclasses.asdict(one) for one in others]},
    )


def run_checkpoint_verify(arguments: argparse.Namespace) -> CommandResult:
    """Returns what is whole and what is damaged; exit code 1 if one is, or there is none."""
    storage, found, known = _storage_of(arguments), list[dict[str, object]](), dict[CheckpointFile, PsError | None]()

    def note(tag: str, words: str, *, is_whole: bool, is_damaged: bool) -> None:
        found.append({"tag": tag, "is_whole": is_whole, "is_damaged": is_damaged, "words": words})

    whole, others = _chosen(storage, arguments)
    for one in whole:
        try:
            total = one.checkpoint.num_bytes_to_read
            with shown(f"verifying {one.checkpoint.tag}", is_bytes=True) as progress:
                verify_checkpoint(storage, one.checkpoint, known=known, on_read=partial(progress.advance, total=total))
        except (DataLoss, CheckpointNotFound) as error:
            note(one.checkpoint.tag, error.message, is_whole=False, is_damaged=True)
        else:
            rests = f", rests on {', '.join(one.checkpoint.base_tags)}" if one.checkpoint.bases else ""
            words = f"whole, {bytes_text(one.checkpoint.num_bytes)}, step {one.checkpoint.step}{rests}"
            note(one.checkpoint.tag, words, is_whole=True, is_damaged=False)
    for skipped in others:
        note(skipped.tag, skipped.reason, is_whole=False, is_damaged=not skipped.is_incomplete)
    said = [f"{one['tag']}: {'DAMAGED: ' if one['is_damaged'] else ''}{one['words']}" for one in found]
    return CommandResult(
        words="\n".join(said) or f"no complete checkpoint in {storage.place}",
        fields={"place": storage.place, "checkpoints": found},
        exit_code=ExitCode.FAILED if any(one["is_damaged"] for one in found) or not whole else ExitCode.DONE,
    )


def _chosen(storage: CheckpointStorage, arguments: argparse.Namespace) -> tuple[tuple[Found, ...], tuple[Skipped, ...]]:
    if arguments.tag:
        return (find_checkpoint(storage, cluster=_cluster_of(arguments), tag=check_tag(arguments.tag)),), ()
    whole, others = list_checkpoints(storage, cluster=_cluster_of(arguments))
    return whole, tuple(one for one in others if not one.is_foreign)


def run_checkpoint_export(arguments: argparse.Namespace) -> CommandResult:
    """Writes the file and returns what is in it."""
    storage = _storage_of(arguments)
    tag = check_tag(arguments.tag) if arguments.tag else None
    found = find_checkpoint(storage, cluster=_cluster_of(arguments), tag=tag)
    for skipped in found.skipped:
        if not skipped.is_foreign:
            print(f"skipped {skipped.tag}: {skipped.reason}", file=sys.stderr)
    if not os.access(arguments.file.parent, os.W_OK | os.X_OK):
        raise InvalidSpec(f"{arguments.file}: its directory is not there, or cannot be written to; choose another FILE")
    with shown(f"exporting {found.checkpoint.tag}", is_bytes=True) as progress:
        on_read = partial(progress.advance, total=found.checkpoint.num_bytes_to_read)
        names = export(storage, found.checkpoint, arguments.file, has_slots=arguments.slots, variable=arguments.variable, on_read=on_read)
    fields = {"file": str(arguments.file), "tag": found.checkpoint.tag, "step": found.checkpoint.step, "tensors": [*names]}
    words = f"{arguments.file}: {len(names)} tensors of {found.checkpoint.tag}, step {found.checkpoint.step}"
    return CommandResult(words=words, fields=fields)


def run_checkpoint_changes(arguments: argparse.Namespace) -> CommandResult:
    """Writes a file for each checkpoint since the last call, and returns their names; with `--follow` says each and goes on."""
    directory, written, storage = arguments.directory, list[dict[str, object]](), _storage_of(arguments)
    if isinstance(storage, LocalStorage) and Path(storage.place).resolve() in (directory.resolve(), *directory.resolve().parents):
        raise InvalidSpec(f"{directory}: it lies in {storage.place}, where what is no whole checkpoint is removed; choose a DIR outside")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSpec(f"{directory}: {error.strerror}; choose another DIR") from None
    if arguments.follow:
        exit_at_sigterm()
    found = write_changes(
        storage,
        directory,
        cluster=_cluster_of(arguments),
        follows=arguments.follow,
        on_skipped=lambda words: print(f"skipped {words}", file=sys.stderr),
    )
    for path, one in found:
        written.append({"file": str(path), "tag": one.tag, "step": one.step, "since": one.since})
        if arguments.follow:
            print(_words_of_changes(written.pop()), flush=True)
    return CommandResult(
        words="\n".join(map(_words_of_changes, written)) or f"nothing is new in {storage.place}", fields={"files": written}
    )


def _words_of_changes(one: dict[str, object]) -> str:
    return f"{one['file']}: step {one['step']}, {'what changed since ' + str(one['since']) if one['since'] else 'all rows'}"


def run_checkpoint_import(arguments: argparse.Namespace) -> CommandResult:
    """Makes the checkpoint and returns its tag, and what it took."""
    storage, cluster, path = _storage_of(arguments), _cluster_of(arguments), arguments.file
    if path.suffix != ".safetensors":
        raise InvalidSpec(f"{path}: want a .safetensors that `lockstep checkpoint export --slots` has written")
    into = None
    if arguments.into:
        wanted = None if arguments.into == RESTORE.default else check_tag(arguments.into)
        into = find_checkpoint(storage, cluster=cluster, tag=wanted).checkpoint
    with shown(f"importing {path}", is_bytes=True) as progress, ExitStack() as stack:
        source, into = stack.enter_context(folded(storage, into, directory=None)) if into is not None else (storage, None)
        on_written = partial(progress.advance, total=path.stat().st_size)
        tag = check_tag(arguments.tag) if arguments.tag else ""
        found = import_checkpoint(path, storage, source=source, into=into, tag=tag, cluster=cluster, on_written=on_written)
    tag, step = found.checkpoint.tag, found.checkpoint.step
    newest = find_checkpoint(storage, cluster=found.checkpoint.cluster).checkpoint.tag
    if found.unused:
        print(f"not used, since the checkpoint has no such tensor: {', '.join(map(repr, found.unused))}", file=sys.stderr)
    if newest != tag:
        print(f"{newest} is newer: start the cluster with --restore {tag}", file=sys.stderr)
    return CommandResult(
        words=f"{tag}: step {step}, {len(found.names)} tensors of {path}",
        fields={"file": str(path), "tag": tag, "step": step, "tensors": [*found.names], "unused": [*found.unused], "newest": newest},
    )


def _storage_of(arguments: argparse.Namespace) -> CheckpointStorage:
    place = getattr(arguments, "place", "") or Given(vars(arguments), os.environ)[CHECKPOINT_DIR]
    if not place:
        raise InvalidSpec("which checkpoints? give --checkpoint-dir PLACE or set LOCKSTEP_CHECKPOINT_DIR")
    return open_storage(place)


def _row(one: Found) -> tuple[str, ...]:
    checkpoint = one.checkpoint
    numbers = (checkpoint.step, checkpoint.fence.epoch, checkpoint.num_shards)
    rests_on = checkpoint.base_tags[-1] if checkpoint.bases else "-"
    return (checkpoint.tag, *map(str, numbers), bytes_text(checkpoint.num_bytes), rests_on, one.saved_at, checkpoint.cluster)


def _fields(one: Found) -> dict[str, object]:
    checkpoint = one.checkpoint
    names = ("tag", "cluster", "step", "num_shards", "num_bytes", "base_tags")
    fields: dict[str, object] = {name: getattr(checkpoint, name) for name in names}
    return {**fields, "epoch": checkpoint.fence.epoch, "saved_at": one.saved_at, "manifest_sha256": one.manifest_sha256}
