"""Checkpoints of every `Shard`: training from a restored one continues bit for bit, on any number of shards."""

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.checkpoint.tensor_file import open_file
from ps_protocol.errors import (
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointStorageMissing,
    DataLoss,
    EpochMismatch,
    NotInitialized,
    StepAhead,
    Superseded,
)
from ps_protocol.model.keys import KeyKind, KeySpec
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, constant
from ps_protocol.model.spec import AverageSpec, ModelSpec, PlacementPolicy
from ps_protocol.model.variables import ANY, DataType, Initializer, InitializerKind, Partition, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import (
    Adoption,
    AdoptRequest,
    ReadMetricsRequest,
    SaveRequest,
    SaveState,
    Shard,
    ShardStatusRequest,
)
from ps_protocol.shared_memory.segment import NAME_PREFIX, can_share
from tests.support.chief.eras import fence
from tests.support.parameter_servers.sharded_training import CHIEF, ShardedTraining, metrics_of
from tests.support.parameter_servers.shards import WITHOUT_SOCKETS, SharingWorkers, Trainer, keeping, open_shard
from tests.support.waiting import wait_until

Open = Callable[..., ShardedTraining]
DECAY = Schedule(name="exponential_decay", arguments={"initial": 0.1, "decay_rate": 0.9, "decay_steps": 7.0})
OPTIMIZERS = {
    "sgd": OptimizerSpec(name="sgd", learning_rate=DECAY),
    "momentum": OptimizerSpec(name="momentum", learning_rate=constant(0.1), hyperparameters={"use_nesterov": 1.0}),
    "adam": OptimizerSpec(name="adam", learning_rate=constant(0.01)),
    "adagrad": OptimizerSpec(name="adagrad", learning_rate=constant(0.1)),
    "adamw": OptimizerSpec(name="adamw", learning_rate=DECAY, hyperparameters={"amsgrad": 1.0, "l2": 0.1}),
    "nadam": OptimizerSpec(name="nadam", learning_rate=constant(0.01)),
    "delayed_nesterov": OptimizerSpec(name="delayed_nesterov", learning_rate=DECAY, hyperparameters={"delay": 3.0}),
    "lion": OptimizerSpec(name="lion", learning_rate=DECAY, hyperparameters={"weight_decay": 0.1}),
    # With a power of the step, and a first value of a slot.
    "custom": OptimizerSpec(
        name="custom",
        learning_rate=DECAY,
        formula="m = b * m + (1 - b) * g; n = n + m * m; v = v - lr * m / (1 - b ** t) / sqrt(n)",
        hyperparameters={"b": 0.9},
        slot_values={"m": 0.0, "n": 0.5},
    ),
}
NORMED = OptimizerSpec(name="lamb", learning_rate=constant(0.1))
LAZY_ADAM = OptimizerSpec(name="adam", learning_rate=constant(0.02), hyperparameters={"lazy": 1.0})
VARIABLES = (
    VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(13, 7)),
    VariableSpec(name="wide", data_type=DataType.FLOAT64, shape=(3, 11), partition=Partition(axis=1, num_slices=4)),
    VariableSpec(name="b", data_type=DataType.FLOAT32, shape=()),
    VariableSpec(name="half", data_type=DataType.FLOAT16, shape=(9,)),
    VariableSpec(name="own", data_type=DataType.FLOAT32, shape=(6,), optimizer=OPTIMIZERS["momentum"]),
    VariableSpec(name="normed", data_type=DataType.FLOAT32, shape=(50, 2), optimizer=NORMED),
    VariableSpec(name="none", data_type=DataType.FLOAT32, shape=(0, 4)),
    VariableSpec(
        name="words",
        data_type=DataType.FLOAT32,
        shape=(40, 3),
        is_sparse=True,
        partition=Partition(axis=0, num_slices=3),
        initializer=Initializer(kind=InitializerKind.UNIFORM, low=-1.0, high=1.0, seed=5),
    ),
    VariableSpec(
        name="clicks",
        data_type=DataType.FLOAT32,
        shape=(ANY, 3),
        is_sparse=True,
        initializer=Initializer(kind=InitializerKind.NORMAL, low=0.5, high=2.0, seed=9),
        keys=KeySpec(kind=KeyKind.UINT64),
    ),
    VariableSpec(name="users", data_type=DataType.FLOAT64, shape=(17, 2), is_sparse=True, optimizer=LAZY_ADAM),
)


def model_of(optimizer: str, *, averages: AverageSpec | None = None) -> ModelSpec:
    """A model of all kinds of variables; `w` is cut into slices of some rows."""
    return ModelSpec(variables=VARIABLES, optimizer=OPTIMIZERS[optimizer], placement=PlacementPolicy(split_bytes=100), averages=averages)


@pytest.fixture
def open_training(tmp_path: Path, socket_dir: Path) -> Iterator[Open]:
    """Opens shards of one transport, which end with the test; the checkpoints are all in one directory."""
    with contextlib.ExitStack() as stack:

        def opened(
            num_shards: int,
            *,
            model: ModelSpec | None = None,
            transport: str = "in_process",
            table_dir: Path | None = None,
            **options: object,
        ) -> ShardedTraining:
            directory, sockets = str(tmp_path / "checkpoints"), socket_dir / str(len(list(socket_dir.iterdir())))
            sockets.mkdir()
            shards: list[Shard] = [
                stack.enter_context(open_shard(transport, socket_dir=sockets, index=index, checkpoint_dir=directory, table_dir=table_dir))
                for index in range(num_shards)
            ]
            return ShardedTraining(shards=shards, model=model or model_of("sgd"), checkpoint_dir=directory, **options)  # type: ignore[arg-type]

        yield opened


@pytest.mark.parametrize(
    ("optimizer", "num_shards"), [(name, number) for place, name in enumerate(OPTIMIZERS) for number in ((1, 3), (2, 5))[place % 2]]
)
def test_restored_on_any_number_of_shards_the_next_steps_are_the_same_bits(open_training: Open, optimizer: str, num_shards: int) -> None:
    averages = AverageSpec(decay=0.9, use_num_updates=True, zero_debias=True)
    model = model_of(optimizer, averages=averages)
    saved = open_training(2, model=model)
    saved.create()
    saved.train(7)
    saved.save("after-7")
    restored = open_training(num_shards, model=model)
    restored.restore("after-7", step=7, epoch=9)
    assert restored.state() == saved.state()
    assert metrics_of(restored) == metrics_of(saved)
    for training in (saved, restored):
        training.train(6)
    assert restored.state() == saved.state()
    assert metrics_of(restored) == metrics_of(saved)


@pytest.mark.parametrize("transport", ["in_process", "grpc_tcp"])
def test_rows_in_files_are_saved_and_restored_as_those_in_memory_are(open_training: Open, tmp_path: Path, transport: str) -> None:
    (tables := tmp_path / "tables").mkdir()
    model = evicting_model(max_age_steps=4, admit_after=2)
    in_memory = open_training(2, model=model)
    in_files = open_training(2, model=model, table_dir=tables, transport=transport)
    for training, tag in ((in_memory, "memory"), (in_files, "files")):
        training.create()
        training.train(6)
        full = training.save(f"{tag}-full", has_deltas=True)
        training.train(1)
        assert training.save(tag, base=full, has_deltas=True).base_tags, "a delta"
    assert in_files.state() == in_memory.state()
    restored = open_training(3, model=model, table_dir=tables)
    restored.restore("memory", step=7, epoch=9)
    again = open_training(1, model=model)
    again.restore("files", step=7, epoch=9)
    for training in (in_memory, in_files, restored, again):
        training.train(5)
        assert training.state() == in_memory.state()
    assert not [*tables.iterdir()], "files without names"


def evicting_model(max_rows: int | None = 33, **options: Any) -> ModelSpec:
    """A model with a table in which each step's rows make others leave."""
    clicks = next(variable for variable in VARIABLES if variable.keys is not None)
    recent = replace(clicks, name="recent", keys=KeySpec(kind=KeyKind.UINT64, max_rows=max_rows, **options))
    return ModelSpec(variables=(VARIABLES[0], recent, VARIABLES[-1]), optimizer=OPTIMIZERS["momentum"], placement=PlacementPolicy())


@pytest.mark.parametrize(
    ("num_shards", "options"),
    [(1, {}), (3, {}), (2, {"max_age_steps": 4, "admit_probability": 0.5}), (3, {"max_age_steps": 4, "admit_after": 2})],
)
def test_the_rows_of_a_restored_table_make_room_as_they_would_have(open_training: Open, num_shards: int, options: Any) -> None:
    trainings = [open_training(count, model=evicting_model(**options)) for count in (2, num_shards)]
    saved, restored = trainings
    saved.create()
    saved.train(7)
    saved.save("after-7")
    restored.restore("after-7", step=7, epoch=9)
    assert restored.state() == saved.state()
    for training in trainings:
        training.train(6)
    assert restored.state() == saved.state()
    endless = open_training(2, model=evicting_model(None))
    endless.create()
    endless.train(13)
    assert endless.state()["recent"] != saved.state()["recent"], "some rows have begun anew"


def save_chain(training: ShardedTraining) -> list[Checkpoint]:
    """Trains and saves a full checkpoint and three deltas on it, the last of which has changed nothing."""
    training.train(2)
    chain = [training.save("full", has_deltas=True)]
    for number, num_steps in enumerate((1, 2, 0)):
        training.train(num_steps)
        chain.append(training.save(f"delta-{number}", base=chain[-1]))
    return chain


@pytest.mark.parametrize(("optimizer", "num_shards"), [("sgd", 1), ("adagrad", 2), ("momentum", 3), ("custom", 5)])
def test_deltas_restore_on_any_number_of_shards_what_a_full_checkpoint_would(open_training: Open, optimizer: str, num_shards: int) -> None:
    model = model_of(optimizer, averages=AverageSpec(decay=0.9, use_num_updates=True, zero_debias=True))
    saved = open_training(2, model=model)
    saved.create()
    chain = save_chain(saved)
    assert chain[-1].base_tags == ("full", "delta-0", "delta-1")
    restored = open_training(num_shards, model=model)
    restored.restore(chain[-1].tag, step=5, epoch=9)
    assert restored.state() == saved.state()
    for training in (saved, restored):
        training.train(6)
    assert restored.state() == saved.state()


@pytest.mark.parametrize(
    ("num_shards", "options"),
    [
        (1, {}),
        (3, {}),
        (3, {"max_age_steps": 2}),
        (1, {"max_rows": None, "max_age_steps": 1, "admit_probability": 0.5}),
        (2, {"admit_after": 3}),
    ],
)
def test_rows_whose_keys_changed_in_a_delta_are_those_of_the_new_keys(open_training: Open, num_shards: int, options: Any) -> None:
    saved, restored = (open_training(count, model=evicting_model(**options)) for count in (2, num_shards))
    saved.create()
    chain = save_chain(saved)
    assert chain[-1].bases
    restored.restore(chain[-1].tag, step=5, epoch=9)
    assert restored.state() == saved.state()
    for training in (saved, restored):
        training.train(6)
    assert restored.state() == saved.state(), "the same rows make room next, too"


def test_a_delta_has_the_rows_that_changed_and_no_others(open_training: Open, tmp_path: Path) -> None:
    training = open_training(1)
    training.create()
    chain = save_chain(training)
    names = []
    for checkpoint in chain:
        with open_file(LocalStorage(training.checkpoint_dir), checkpoint.tag, checkpoint.files[0]) as reader:
            names.append({entry.name: entry.shape[0] for entry in reader.tensors if entry.name.startswith("clicks")})
    full, first, second, none = names
    assert set(full) | {"clicks@row numbers"} == set(first) == set(second) == set(none)
    assert not any(none.values())
    assert 0 < first["clicks"] == first["clicks@row keys"] == first["clicks@row numbers"] < second["clicks"] < 40


def test_a_damaged_delta_is_named_and_those_before_it_are_restored(open_training: Open, tmp_path: Path) -> None:
    training = open_training(2)
    training.create()
    chain = save_chain(training)
    before = open_training(2)
    path = tmp_path / "checkpoints" / chain[2].tag / chain[2].files[1].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=f"^{chain[2].tag}/{chain[2].files[1].name}: sha256 mismatch"):
        before.restore(chain[3].tag, step=5, epoch=9)
    before.restore(chain[1].tag, step=3, epoch=10)
    again = open_training(2)
    again.create()
    again.train(3)
    assert before.state() == again.state()


def test_a_shard_that_does_not_know_what_changed_writes_all_of_it(open_training: Open) -> None:
    training = open_training(2)
    training.create()
    full, first, *_ = save_chain(training)
    assert [file.is_delta for file in (*full.files, *first.files)] == [False, False, True, True]
    other = open_training(2)
    other.restore(first.tag, step=3, epoch=9)
    whole = other.save("other", base=first)
    assert whole.bases == ()
    other.train(1)
    assert other.save("more", base=whole).base_tags == ("other",)


@pytest.mark.parametrize("transport", WITHOUT_SOCKETS)
def test_survivors_and_restarted_shards_go_back_together(open_training: Open, transport: str) -> None:
    training = open_training(2, model=model_of("adam"), transport=transport)
    training.create()
    training.train(3)
    training.save("after-3")
    training.train(4)
    after_7 = training.state()
    # One shard is another process from now on; the other one has lost nothing.
    fresh = open_training(2, model=training.model, transport=transport)
    training.shards = [training.shards[0], fresh.shards[1]]
    training.restore("after-3", step=3, epoch=4)
    training.train(4)
    assert training.state() == after_7


@pytest.mark.parametrize("transport", WITHOUT_SOCKETS)
def test_caller_of_the_epoch_before_is_refused_after_a_restoration(open_training: Open, transport: str) -> None:
    training = open_training(1, transport=transport)
    training.create()
    training.save("first")
    training.train(1)
    old = dataclasses.replace(training)
    training.restore("first", step=0, epoch=4)
    with pytest.raises(EpochMismatch):
        old.train(1)
    training.train(2)


@pytest.fixture
def no_look_for_cycles() -> Iterator[None]:
    """A server that makes few objects seldom looks for cycles: what they keep stays for hours."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not can_share(), reason="memory cannot be shared on this system, so there is none to give back")
@pytest.mark.parametrize("transport", ["grpc_unix", "shared_memory"])
def test_memory_of_models_that_were_replaced_is_given_back(open_training: Open, transport: str, no_look_for_cycles: None) -> None:
    """Each restoration makes new memory for the variables; an open descriptor alone would keep the old."""
    training = open_training(1, transport=transport)
    training.create()
    training.save("first")

    def num_segments() -> int:
        found = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{NAME_PREFIX}")
        return found

    def replace(epoch: int) -> None:
        training.restore("first", step=0, epoch=epoch)
        training.train(2)
        training.step += 97
        with pytest.raises(StepAhead):
            training.push(0, PushId(worker=0, incarnation=1, sequence=100))

    replace(4)
    before = num_segments()
    assert before
    for epoch in range(5, 10):
        replace(epoch)
    wait_until(lambda: num_segments() <= before, what="what was replaced is gone")


def test_memory_is_not_shared_any_more_after_a_restoration(open_training: Open) -> None:
    training = open_training(1, transport="shared_memory")
    training.create()
    training.train(1)
    training.save("t")
    (workers,) = training.shards
    assert isinstance(workers, SharingWorkers)
    before = list(workers.memories.values())
    assert before and all(memory.is_open for memory in before)
    training.restore("t", step=1, epoch=4)
    wait_until(lambda: not any(memory.is_open for memory in before), what="the workers have noticed")
    training.train(2)
    assert all(memory.is_open for memory in workers.memories.values())


def test_settings_in_force_are_those_of_the_request(open_training: Open) -> None:
    faster = dataclasses.replace(OPTIMIZERS["momentum"], learning_rate=constant(0.5))
    changes = ((OPTIMIZERS["momentum"], faster),)
    saved = open_training(2, model=model_of("momentum"), optimizers=changes)
    saved.create()
    saved.train(3)
    saved.save("t")
    restored = open_training(3, model=saved.model, optimizers=changes)
    restored.restore("t", step=3, epoch=4)
    for training in (saved, restored):
        training.train(3)
    assert restored.state() == saved.state()


@pytest.mark.parametrize("transport", WITHOUT_SOCKETS)
def test_a_shard_without_a_place_for_checkpoints_refuses_to_save(socket_dir: Path, transport: str) -> None:
    with open_shard(transport, socket_dir=socket_dir) as shard:
        trainer = Trainer(shard)
        trainer.create()
        with pytest.raises(CheckpointStorageMissing, match="without --checkpoint-dir"):
            shard.call(SaveRequest(fence=fence(3, CHIEF), step=0, tag="t"))


def test_a_failed_save_is_reported_and_can_be_repeated(open_training: Open, tmp_path: Path) -> None:
    training = open_training(1)
    training.create()
    # A file where the directory should be.
    blocking = tmp_path / "checkpoints"
    blocking.write_text("")
    request = SaveRequest(fence=fence(3, CHIEF), step=0, tag="t")
    training.shards[0].call(request)
    progress = training.shards[0].call(replace(request, max_wait_s=10.0))
    assert progress.state is SaveState.FAILED and progress.failure is not None and "t.incomplete" in progress.failure.message
    blocking.unlink()
    assert training.save("t").files[0].num_bytes > 0
    held = training.shards[0].call(ShardStatusRequest()).report.allocated_bytes
    assert training.save("u").files[0].num_bytes > 0
    assert training.shards[0].call(ShardStatusRequest()).report.allocated_bytes == held


def test_a_changed_file_is_not_restored(open_training: Open, tmp_path: Path) -> None:
    training = open_training(2)
    training.create()
    checkpoint = training.save("t")
    path = tmp_path / "checkpoints" / "t" / checkpoint.files[1].name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataLoss, match="sha256 mismatch"):
        training.restore("t", step=0, epoch=4)
    # The shard holds nothing then: half a checkpoint is none.
    with pytest.raises(NotInitialized):
        training.shards[1].call(ReadMetricsRequest(epoch=4))


@pytest.mark.parametrize("transport", WITHOUT_SOCKETS)
def test_a_failed_restoration_leaves_the_present_values(open_training: Open, transport: str) -> None:
    training = open_training(1, transport=transport)
    training.create()
    training.save("t")
    other = dataclasses.replace(VARIABLES[0], shape=(13, 8))
    stranger = dataclasses.replace(training.model, variables=(other, *VARIABLES[1:]))
    wrong = dataclasses.replace(training, model=stranger, epoch=4)
    training.shards[0].call(AdoptRequest(fence=fence(4, CHIEF)))
    request = wrong.restore_request(0, "t")
    with pytest.raises(CheckpointMismatch, match=r"variable 'w' has shape \(13, 7\)"):
        training.shards[0].call(replace(request, max_wait_s=10.0))
    with pytest.raises(DataLoss, match="sha256 mismatch"):
        training.shards[0].call(replace(dataclasses.replace(request, manifest_sha256="0" * 64), max_wait_s=10.0))
    with pytest.raises(CheckpointNotFound):
        training.shards[0].call(replace(dataclasses.replace(request, tag="never-saved"), max_wait_s=10.0))
    training.epoch = 4
    training.train(1)


@pytest.mark.parametrize("transport", WITHOUT_SOCKETS)
def test_an_adoption_returns_the_pushes_and_settings_that_a_new_chief_needs(open_training: Open, transport: str) -> None:
    training = open_training(1, transport=transport)
    shard = training.shards[0]
    assert shard.call(AdoptRequest(fence=fence(3, 1), chief_address="host:1")) == Adoption(step=None, layout_hash="")
    training.create()
    training.train(20)
    for version, record in ((2, b"two"), (1, b"one"), (3, b"three")):
        shard.call(keeping(version, record, epoch=3))
    adoption = shard.call(AdoptRequest(fence=fence(3, CHIEF + 1), chief_address="host:2"))
    assert (adoption.step, adoption.record, adoption.record_version) == (20, b"three", 3)
    assert adoption.last_apply is not None and adoption.last_apply.step == 19
    assert adoption.last_apply.contributors == tuple(PushId(worker=worker, incarnation=1, sequence=20) for worker in (0, 1))
    assert [(pushes.worker, [push.step for push in pushes.applied]) for pushes in adoption.pushes] == [
        (worker, list(range(4, 20))) for worker in (0, 1)
    ]
    status = shard.call(ShardStatusRequest())
    assert status.chief_address == "host:2" and status.chief_heard_ago_s is not None
    with pytest.raises(Superseded):
        shard.call(keeping(9, epoch=3))


def test_applied_pushes_come_back_with_the_checkpoint(open_training: Open) -> None:
    training = open_training(1)
    training.create()
    training.train(2)
    training.save("t")
    training.train(3)
    training.restore("t", step=2, epoch=4)
    adoption = training.shards[0].call(AdoptRequest(fence=fence(4, CHIEF)))
    assert [[push.step for push in pushes.applied] for pushes in adoption.pushes] == [[0, 1], [0, 1]]
    assert adoption.last_apply is None
