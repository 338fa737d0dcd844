"""The index of a store of weights: of which training they are, which anchors and patches there are. Knows JSON; opens no file."""

import json
from collections.abc import Set
from dataclasses import replace
from functools import lru_cache
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from ps_protocol.checkpoint.manifest import decode_json, manifest_end
from ps_protocol.errors import DataLoss, PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import AgreedModel
from ps_protocol.roles.fence import Era
from ps_protocol.roles.shard import CheckpointFile
from ps_protocol.roles.weights import KeptWeights
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from worker_client.following.sources import Followed
from worker_client.model.memory import arranged

INDEX = "index.json"
FORMAT = "lockstep-weights"
FORMAT_VERSION = 1
_MAX_SHARDS = 1 << 16


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file for each shard under one tag: all weights of a step (an anchor, `before` None), or what leads there from an earlier one."""

    tag: str
    before: int | None
    step: int
    files: tuple[CheckpointFile, ...]

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(file.num_bytes for file in self.files)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What a store holds. `entries`: in the order of their writing, the patch to a step before its anchor.

    `writer`: who writes it; empty: nobody does any more. It is written anew at least each `beat_s`, with one more `beat`. `newest_step`:
    of the cluster, as far as the writer knew. `is_over`: training has ended with the last entry.
    """

    followed: Followed
    writer: str
    beat_s: float
    entries: tuple[Entry, ...] = ()
    beat: int = 0
    newest_step: int = 0
    is_over: bool = False

    @property
    def kept(self) -> KeptWeights:
        """What there is of the variables."""
        assert self.followed.kept is not None
        return self.followed.kept

    @property
    def step(self) -> int | None:
        """The newest step that can be had; None: there is none yet."""
        return self.entries[-1].step if self.entries else None

    @property
    def anchor(self) -> int:
        """The place of the newest anchor among the entries."""
        return max(place for place, entry in enumerate(self.entries) if entry.before is None)

    def continues(self, followed: Followed) -> bool:
        """Whether these are steps of the same training, in the same epoch and encoding."""
        hashes = [[layout.hash for layout in one.layouts] for one in (self.followed, followed)]
        kinds = [(one.era, one.kept) for one in (self.followed, followed)]
        return kinds[0] == kinds[1] and hashes[0] == hashes[1]

    def next_entry(self, held_step: int | None, *, without: Set[str]) -> Entry | None:
        """Returns what comes first on the shortest way to the newest step: a patch of the step that is held, or an anchor; None: no way.

        `without`: tags that cannot be read.
        """
        entries = [entry for entry in self.entries if entry.tag not in without]
        following = {entry.before: entry for entry in entries if entry.before is not None}
        starts = [following[held_step]] if held_step in following else []
        starts += [entry for entry in entries if entry.before is None and entry.step > (-1 if held_step is None else held_step)]
        found = []
        for start in starts:
            way = [start]
            while (link := following.get(way[-1].step)) is not None:
                way.append(link)
            if way[-1].step == self.step:
                found.append(way)
        return min(found, key=lambda way: sum(entry.num_bytes for entry in way))[0] if found else None

    def pruned(self, keep_steps: int) -> "Index":
        """Returns the index with its newest anchor and all after it, and of the last `keep_steps` before it as much as two anchors have."""
        first, least_step = self.anchor, self.entries[-1].step - keep_steps
        left_bytes = 2 * self.entries[first].num_bytes
        for entry in reversed(self.entries[:first]):
            left_bytes -= entry.num_bytes
            if left_bytes < 0 or (entry.step if entry.before is None else entry.before) < least_step:
                break
            first -= 1
        return replace(self, entries=self.entries[first:])


def encode_index(index: Index) -> bytes:
    """Returns the index as a JSON object that ends with its own SHA-256."""
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "life": index.followed.era.life,
        "epoch": index.followed.era.epoch,
        "step": index.step,
        **{name: getattr(index, name) for name in ("newest_step", "is_over", "writer", "beat", "beat_s")},
        "num_shards": len(index.followed.layouts),
        "anchors": [_fields_of(entry) for entry in index.entries if entry.before is None],
        "patches": [_fields_of(entry) for entry in index.entries if entry.before is not None],
    }
    content = json.dumps(fields, indent=1).removesuffix("\n}") + f',\n "agreed": {_agreed_text(index.followed)}'
    return content.encode() + manifest_end(content.encode())


def decode_index(content: bytes, *, where: str, known: Followed | None = None) -> Index:
    """Checks and returns an index; with `known` as what is followed, if that is the same. Raises DataLoss, saying what is wrong."""
    fields = decode_json(content, where=where, kind=FORMAT, kind_version=FORMAT_VERSION)
    try:
        era = Era(life=int(fields["life"]), epoch=int(fields["epoch"]))
        if known is None or known.era != era or json.loads(_agreed_text(known)) != fields["agreed"]:
            agreed = codec.decode(AgreedModel, ParseDict(fields["agreed"], pb.GetModelResponse()))
            if agreed.model is None or agreed.kept is None:
                raise ValueError("it does not say which model it is of, or what it has of that")
            layouts = arranged(agreed.model, agreed.placement, num_shards=min(int(fields["num_shards"]), _MAX_SHARDS))
            known = Followed(model=agreed.model, layouts=layouts, era=era, policy=agreed.policy, kept=agreed.kept)
        entries = [_entry_of(one, len(known.layouts)) for one in (*fields["anchors"], *fields["patches"])]
        entries.sort(key=lambda entry: (entry.step, entry.before is None))
        return Index(
            followed=known,
            writer=str(fields["writer"]),
            beat_s=float(fields["beat_s"]),
            entries=tuple(entries),
            beat=int(fields["beat"]),
            newest_step=int(fields["newest_step"]),
            is_over=fields["is_over"] is True,
        )
    except PsError as error:
        raise DataLoss(f"{where}: not a valid manifest: {error.message}") from None
    except (ParseError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{where}: not a valid manifest: {type(error).__name__}: {str(error)[:200]}") from None


@lru_cache(maxsize=4)  # by identity: to encode a model takes longer than the rest
def _agreed_text(followed: Followed) -> str:
    agreed = followed.agreed(step=0)
    return json.dumps(MessageToDict(codec.encode(agreed), preserving_proto_field_name=True), separators=(",", ":"))


def _fields_of(entry: Entry) -> dict[str, Any]:
    files = [{"name": file.name, "num_bytes": file.num_bytes, "sha256": file.sha256} for file in entry.files]
    return {"tag": entry.tag, "before": entry.before, "step": entry.step, "files": files}


def _entry_of(fields: dict[str, Any], num_shards: int) -> Entry:
    entry = Entry(**{**fields, "files": tuple(CheckpointFile(shard=shard, **file) for shard, file in enumerate(fields["files"]))})
    if len(entry.files) != num_shards or not (-1 if entry.before is None else entry.before) < entry.step:
        raise ValueError(f"{entry.tag} has {len(entry.files)} files and leads from step {entry.before} to {entry.step}")
    return entry
