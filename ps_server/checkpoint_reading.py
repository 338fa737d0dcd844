"""A shard's part of a checkpoint read into a model, however many shards saved it, and which had what."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ps_protocol.checkpoint import Checkpoint
from ps_protocol.checkpoint_files import TensorFileReader, open_file
from ps_protocol.checkpoint_format import tensor_name
from ps_protocol.checkpoint_search import max_tensors_of
from ps_protocol.checkpoint_storage import CheckpointStorage
from ps_protocol.errors import CheckpointMismatch, DataLoss
from ps_protocol.layout import VariableSlice
from ps_protocol.shard import CheckpointFile, ShardSpec
from ps_server.boxes import Target, fill, overlap
from ps_server.hidden_state import HiddenState, decode_hidden_state
from ps_server.model_state import StateTensor, rule_keys


class CheckpointPlan:
    """Which files of a checkpoint have what a shard needs. Raises CheckpointMismatch if it is not the checkpoint of such a model."""

    def __init__(self, checkpoint: Checkpoint, spec: ShardSpec) -> None:
        if checkpoint.step != spec.initial_step:
            raise CheckpointMismatch(f"checkpoint {checkpoint.tag} is of step {checkpoint.step}, not of step {spec.initial_step}")
        self._checkpoint = checkpoint
        self._spec = spec
        # The slices of each variable, with the shard that saved them.
        self._saved: dict[str, list[tuple[VariableSlice, int]]] = {}
        for placed in checkpoint.placement:
            self._saved.setdefault(placed.slice.variable.name, []).append((placed.slice, placed.shard))
        shards: set[int] = set()
        for piece in (*spec.layout.slices, *spec.layout.tables):
            shards |= self._sources(piece)
        # Its own file first, if it has what is needed: in doubt its numbers are this shard's.
        self._shards = sorted(shards, key=lambda shard: (shard != spec.shard, shard))

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """The files to read, in order. The metrics of a cluster are its first shard's."""
        shards = self._shards if self._spec.shard or 0 in self._shards else [*self._shards, 0]
        return tuple(self._checkpoint.files[shard] for shard in shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files to read."""
        return sum(file.num_bytes for file in self.files)

    def read(self, storage: CheckpointStorage, tensors: Iterable[StateTensor], *, on_progress: Callable[[int], None]) -> HiddenState:
        """Reads all files, fills the tensors, and returns the rest of the state. `on_progress` is told the bytes read so far, now and then.

        Raises DataLoss if a file is not what was written, CheckpointMismatch if it lacks something, what the storage raises, and what
        `on_progress` raises.
        """
        wanted: dict[tuple[str, str], list[Target]] = {}
        for tensor in tensors:
            wanted.setdefault((tensor.piece.variable.name, tensor.part), []).append(Target(tensor.piece, tensor.memory))
        states: dict[int, HiddenState] = {}
        num_before = 0
        for file in self.files:
            limit = max_tensors_of(self._checkpoint, file.shard)
            with open_file(storage, self._checkpoint.tag, file, max_tensors=limit) as reader:
                self._read_file(reader, file.shard, wanted, lambda num, before=num_before: on_progress(before + num))  # type: ignore[misc]
                states[file.shard] = decode_hidden_state(reader.metadata, where=f"{self._checkpoint.tag}/{file.name}")
            num_before += file.num_bytes
        self._check_steps(states)
        return self._joined([states[shard] for shard in self._shards], states)

    def _read_file(
        self,
        reader: TensorFileReader,
        shard: int,
        wanted: Mapping[tuple[str, str], Sequence[Target]],
        on_progress: Callable[[int], None],
    ) -> None:
        expected = {
            tensor_name(piece, part): (piece, targets)
            for (name, part), targets in wanted.items()
            for piece, owner in self._saved[name]
            if owner == shard and any(overlap(piece, target.piece) for target in targets)
        }
        for entry in reader:
            found = expected.pop(entry.name, None)
            if found is not None:
                piece, targets = found
                if entry.shape != piece.shape or entry.dtype != piece.variable.data_type.dtype:
                    raise DataLoss(
                        f"{self._where(shard)}: tensor {entry.name!r} is {entry.shape} {entry.dtype}, the manifest says otherwise"
                    )
                fill(piece, targets, reader.read_into)
            on_progress(reader.num_bytes_read)
        if expected:
            missing = ", ".join(repr(name) for name in list(expected)[:5])
            raise CheckpointMismatch(f"{self._where(shard)}: has no tensor {missing}; it is the checkpoint of another model")

    def _sources(self, piece: VariableSlice) -> set[int]:
        """The shards that saved parts of a slice; all of it must be somewhere."""
        name, num_found, shards = piece.variable.name, 0, set()
        for saved, shard in self._saved.get(name, ()):
            if (saved.variable.shape, saved.variable.data_type) != (piece.variable.shape, piece.variable.data_type):
                has = f"{saved.variable.shape} {saved.variable.data_type.value}"
                raise CheckpointMismatch(
                    f"checkpoint {self._checkpoint.tag}: variable {name!r} has shape {has}, the model's has {piece.variable.shape}"
                    f" {piece.variable.data_type.value}"
                )
            num_common = overlap(saved, piece)
            if num_common:
                num_found += num_common
                shards.add(shard)
        # The slices of a manifest are disjoint, so what is found is found once.
        if num_found != overlap(piece, piece) or name not in self._saved:
            raise CheckpointMismatch(f"checkpoint {self._checkpoint.tag}: has not all of variable {name!r}; it is of another model")
        return shards

    def _check_steps(self, states: Mapping[int, HiddenState]) -> None:
        for shard, state in states.items():
            if state.step != self._checkpoint.step:
                raise DataLoss(f"{self._where(shard)}: is of step {state.step}, the manifest says {self._checkpoint.step}")

    def _joined(self, sources: Sequence[HiddenState], states: Mapping[int, HiddenState]) -> HiddenState:
        """One state of several: what they all count is the same in each, but where contributions were applied as they arrived."""
        powers: dict[str, tuple[float, ...]] = {}
        for state in sources:
            for key, values in state.powers.items():
                powers.setdefault(key, values)
        missing = [key for key in rule_keys(self._spec.layout) if key not in powers]
        if missing:
            raise CheckpointMismatch(f"checkpoint {self._checkpoint.tag}: knows nothing of optimizer {missing[0] or 'of the model'!r}")
        first = sources[0] if sources else HiddenState(step=self._checkpoint.step)
        return replace(
            first,
            powers=powers,
            metrics=states[0].metrics if self._spec.shard == 0 and 0 in states else (),
            pushes=self._checkpoint.pushes or first.pushes,
        )

    def _where(self, shard: int) -> str:
        return f"{self._checkpoint.tag}/{self._checkpoint.files[shard].name}"
