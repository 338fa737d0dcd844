"""`lockstep audit`: it passes a history that keeps the promises, and reports each other one."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.__main__ import main
from lockstep.audit.books import Books, check_books
from lockstep.audit.facts import facts_of
from lockstep.audit.values import recompute
from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.model.layout import Segments
from ps_protocol.model.spec import AverageSpec, ModelSpec
from ps_protocol.process.history import HistoryWriter, read_history
from ps_protocol.roles import history as events
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.history import Answered, Applied, Counted, StateKept
from ps_protocol.roles.shard import AdoptRequest, ApplyRequest, PushHeader, PushReply, ReplicaState
from ps_server.serving.local import InProcessShard
from tests.contract.shard.test_checkpoints import evicting_model, model_of
from tests.support.parameter_servers.commanded_shard import ForwardingShard
from tests.support.parameter_servers.sharded_training import NUM_WORKERS, ShardedTraining
from tests.support.parameter_servers.shards import telling

# Of the records of each process.
_BOUND = 60_000


class _Noted(ForwardingShard):
    """A shard whose workers write down what they send."""

    def __init__(self, directory: Path, *, index: int, max_bytes: int = 1 << 30, table_dir: Path | None = None) -> None:
        storage = open_storage(str(directory / "checkpoints"))
        history = HistoryWriter(directory / "history", role=f"ps-{index}", max_bytes=max_bytes)
        self.server = InProcessShard(index=index, storage=storage, history=history, table_dir=table_dir)
        super().__init__(self.server)
        self._index = index
        self._of_workers = HistoryWriter(directory / "history", role="worker", max_bytes=max_bytes)

    def push_gradients(self, header: PushHeader, gradients: Segments, *, timeout_s: float | None = None) -> PushReply:
        self._of_workers.write(events.contributed(header, shard=self._index), gradients.pieces)
        return self._forward.push_gradients(header, gradients, timeout_s=timeout_s)


def _training(
    directory: Path, num_shards: int, *, max_bytes: int = 1 << 30, model: ModelSpec | None = None, table_dir: Path | None = None
) -> ShardedTraining:
    averages = AverageSpec(decay=0.9, use_num_updates=True, zero_debias=True)
    shards = [_Noted(directory, index=index, max_bytes=max_bytes, table_dir=table_dir) for index in range(num_shards)]
    return ShardedTraining(shards=shards, model=model or model_of("adam", averages=averages), checkpoint_dir=str(directory / "checkpoints"))


def _trained(directory: Path, model: ModelSpec | None = None, table_dir: Path | None = None) -> Path:
    """Trains on two shards, and goes back to a checkpoint on three."""
    first = _training(directory, 2, model=model, table_dir=table_dir)
    first.create()
    first.train(4)
    first.save("after-4")
    first.train(3)
    second = _training(directory, 3, model=model, table_dir=table_dir)
    second.restore("after-4", step=4, epoch=5)
    second.train(3)
    return directory / "history"


def _changed(history: Path, kind: type, change: Callable[[Any], Any], *, role: str = "ps-0") -> None:
    """Changes the last event of a kind in the first history of a role, which is written again."""
    chronicle = next(one for one in read_history(history) if one.role == role)
    index = max(index for index, record in enumerate(chronicle.records) if isinstance(record.event, kind))
    writer = HistoryWriter(history, role=role)
    for place, record in enumerate(chronicle.records[1:], start=1):
        event = change(record.event) if place == index else record.event
        writer.write(event, [record.content])
    writer.close()
    for path in history.glob(f"{chronicle.name}.*"):
        path.unlink()


@pytest.fixture(scope="module")
def cut_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a training that is longer than the history reaches back, and goes back to a checkpoint near its end."""
    directory, num_steps = tmp_path_factory.mktemp("cut"), 110
    training = _training(directory, 2, max_bytes=_BOUND)
    chief = HistoryWriter(directory / "history", role="chief")

    def train(count: int) -> None:
        for _ in range(count):
            contributors = tuple(PushId(worker=worker, incarnation=1, sequence=training.step + 1) for worker in range(NUM_WORKERS))
            training.train(1)
            chief.write(Counted(epoch=training.epoch, step=training.step - 1, contributors=contributors))

    training.create()
    train(num_steps)
    training.save("saved")
    train(3)
    training.restore("saved", step=num_steps, epoch=5)
    train(3)
    return directory / "history"


def _flip(history: Path, role: str, kind: type) -> None:
    """Changes a bit in the exponent of a number in the last content of a kind."""
    chronicle = next(one for one in read_history(history) if one.role == role)
    content = [record.content.tobytes() for record in chronicle.records if isinstance(record.event, kind)][-1]
    for path in history.glob(f"{chronicle.name}.*"):
        before, found, after = path.read_bytes().rpartition(content)
        if found:
            path.write_bytes(before + found[:7] + bytes([found[7] ^ 64]) + found[8:] + after)


def _files(history: Path, role: str) -> list[list[Path]]:
    """The segments of each history of a role, in order."""
    paths = sorted(history.glob(f"{role}-*"))
    return [[*group] for _, group in itertools.groupby(paths, lambda path: path.name.split(".")[0])]


def _books(history: Path) -> Books:
    return check_books(facts_of(read_history(history)))


def test_history_of_training_and_of_going_back_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = _trained(tmp_path)
    assert main(["audit", str(history)]) == 0
    said = capsys.readouterr().out
    assert "2 epochs" in said and "clean" in said and "WRONG" not in said
    assert f"{2 * 7 + 3 * 3} steps of servers computed again" in said
    assert _books(history).counts == {"applied": 14, "rolled back": 6}


@pytest.mark.parametrize(("max_rows", "in_files"), [(None, False), (33, False), (33, True)])
@pytest.mark.parametrize("options", [{}, {"max_age_steps": 2, "admit_probability": 0.5}, {"admit_after": 2}])
def test_history_of_rows_that_made_room_for_others_or_grew_old_is_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_rows: int | None, in_files: bool, options: dict[str, Any]
) -> None:
    history = _trained(tmp_path, evicting_model(max_rows, **options), table_dir=tmp_path if in_files else None)
    assert main(["audit", str(history)]) == 0
    assert f"{2 * 7 + 3 * 3} steps of servers computed again" in capsys.readouterr().out


@pytest.mark.parametrize("num_given", [0, 1])
def test_a_step_without_contributions_that_servers_never_received_passes_the_audit(tmp_path: Path, num_given: int) -> None:
    training, forged = _training(tmp_path, 2), PushId(worker=9, incarnation=1, sequence=1)
    training.create()
    training.train(1)
    honest = PushId(worker=0, incarnation=1, sequence=2)
    for index, shard in enumerate(training.shards):
        training.push(index, honest)
        if index < num_given:
            training.push(index, forged)
        without = () if index < num_given else (forged,)
        fence = training.settings.fence
        shard.call(ApplyRequest(fence=fence, step=1, contributors=(honest, forged), without=without))
    training.step += 1
    training.train(1)
    facts = facts_of(read_history(tmp_path / "history"))
    assert not recompute(facts).problems
    assert not check_books(facts).problems


def test_one_changed_bit_of_a_contribution_shows_in_the_values(tmp_path: Path) -> None:
    history = _trained(tmp_path)
    _flip(history, "worker", events.Contributed)
    problems = recompute(facts_of(read_history(history))).problems
    assert problems and "other values than" in problems[0]


def test_wrong_digest_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = _trained(tmp_path)
    _changed(history, Applied, lambda event: replace(event, sha256="0" * 64))
    assert main(["audit", str(history)]) == 1
    assert "other values than" in capsys.readouterr().out


def test_restoration_to_other_values_is_found(tmp_path: Path) -> None:
    history = _trained(tmp_path)
    _flip(history, "ps-2", StateKept)
    assert any("restored to other values" in problem for problem in recompute(facts_of(read_history(history))).problems)


def test_an_unfinished_history_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = _trained(tmp_path)
    path = min(history.glob("ps-0-*.history"))
    path.write_bytes(path.read_bytes()[:-9])
    # Whether the others' records agree without what is missing differs.
    main(["audit", str(history)])
    assert f"unfinished: {path.name.split('.')[0]} ends within a record" in capsys.readouterr().out
    main(["audit", str(history), "--json"])
    assert json.loads(capsys.readouterr().out)["unfinished"] == [path.name.split(".")[0]]


def test_contribution_in_two_steps_is_found(tmp_path: Path) -> None:
    history = _trained(tmp_path)

    again = PushId(worker=1, incarnation=1, sequence=2)
    for role in ("ps-0", "ps-1"):
        _changed(history, Applied, lambda event: replace(event, request=replace(event.request, contributors=(again,))), role=role)
    assert any("push 1/1/2 is in step 1 and in step 6" in problem for problem in _books(history).problems)


def test_servers_that_disagree_on_a_step_are_found(tmp_path: Path) -> None:
    history = _trained(tmp_path)
    _changed(
        history,
        Applied,
        lambda event: replace(event, request=replace(event.request, contributors=event.request.contributors[:-1])),
        role="ps-1",
    )
    assert any("another server" in problem for problem in _books(history).problems)


def test_servers_that_weighted_the_contributions_of_a_step_differently_are_found(tmp_path: Path) -> None:
    history = _trained(tmp_path)
    _changed(history, Applied, lambda event: replace(event, request=replace(event.request, weights=(1.0, 2.0))), role="ps-1")
    assert any(" weighted it (1.0, 2.0), another ()" in problem for problem in _books(history).problems)


@pytest.mark.parametrize(
    ("outcome", "applied_step", "words"),
    [("ACCEPTED", 3, "accepted for step 3, and is in step 2"), ("STALE", None, "reported as STALE, and is in step 2")],
)
def test_the_audit_finds_a_reported_outcome_that_the_history_contradicts(
    tmp_path: Path, outcome: str, applied_step: int | None, words: str
) -> None:
    history = _trained(tmp_path)
    writer = HistoryWriter(history, role="worker")
    push_id = PushId(worker=0, incarnation=1, sequence=3)
    writer.write(Answered(push_id=push_id, epoch=3, outcome=outcome, applied_step=applied_step))
    assert any(words in problem for problem in _books(history).problems)


def test_step_counted_before_all_servers_had_it_is_found(tmp_path: Path) -> None:
    history = _trained(tmp_path)
    writer = HistoryWriter(history, role="chief")
    writer.write(Counted(epoch=5, step=7, contributors=(PushId(worker=0, incarnation=1, sequence=8),)))
    assert any("ps 2 has not applied it" in problem for problem in _books(history).problems)


def test_contributions_staged_before_a_server_left_and_returned_in_one_epoch_count(tmp_path: Path) -> None:
    """A server and its standby, each of which is lost once and brought back from what the other one has saved."""
    pair = [_training(tmp_path, 1) for _ in range(2)]
    chief = HistoryWriter(tmp_path / "history", role="chief")
    for one in pair:
        one.create()
        one.train(1)
    for number, (lost, other) in enumerate([pair, pair[::-1]], start=1):
        other.train(1)
        other.save(f"step-{other.step}")
        shard, lost.step = lost.shards[0], other.step
        assert isinstance(shard, _Noted)
        shard.server.call(AdoptRequest(fence=lost.settings.fence, replica=ReplicaState(version=number, forgets=True)))
        request = replace(lost.restore_request(0, f"step-{other.step}"), replica_version=number)
        assert shard.call(replace(request, max_wait_s=10.0)).is_done or shard.call(replace(request, max_wait_s=10.0)).is_done
        for one in pair:
            one.train(1)
    for step in range(pair[0].step):
        contributors = tuple(PushId(worker=worker, incarnation=1, sequence=step + 1) for worker in range(2))
        chief.write(Counted(epoch=pair[0].epoch, step=step, contributors=contributors))
    facts = facts_of(read_history(tmp_path / "history"))
    values = recompute(facts)
    assert (check_books(facts).problems, values.problems, values.skipped, values.num_steps) == ((), [], [], 5 + 3)


@pytest.mark.parametrize(
    ("given", "outcome", "words"),
    [
        ({0, 1}, "ACCEPTED", ""),
        ({0}, "ACCEPTED", "ps 1 never applied it"),
        ({0}, "LATE", "ps 0 applied it"),
        (set(), "LATE", ""),
    ],
)
def test_contributions_applied_on_arrival_have_no_common_order_and_are_at_all_servers(
    tmp_path: Path, given: set[int], outcome: str, words: str
) -> None:
    training = _training(tmp_path, 2)
    training.create()
    first, second, third = (PushId(worker=worker, incarnation=1, sequence=1) for worker in range(3))
    for index, shard in enumerate(training.shards):
        shard.call(telling(replace(training.settings, version=1, accepts_stale=True, applies_on_arrival=True)))
        for push_id in (first, second) if index else (second, first):
            training.push(index, push_id)
        if index in given:
            training.push(index, third)
    workers = HistoryWriter(tmp_path / "history", role="worker")
    for step, push_id in enumerate((first, second)):
        workers.write(Answered(push_id=push_id, epoch=training.epoch, outcome="ACCEPTED", applied_step=step))
    workers.write(Answered(push_id=third, epoch=training.epoch, outcome=outcome, applied_step=2 if outcome == "ACCEPTED" else None))
    facts = facts_of(read_history(tmp_path / "history"))
    books = check_books(facts)
    assert [words in problem for problem in books.problems] == ([True] if words else [])
    assert books.epochs[training.epoch].num_steps == 2 + (0 in given)
    assert not recompute(facts).problems


def test_a_history_that_has_lost_its_oldest_records_is_clean_and_the_audit_says_since_when_it_has_checked(
    cut_history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = shutil.copytree(cut_history, tmp_path / "history")
    for role in ("ps-0", "ps-1", "worker"):
        assert sum(path.stat().st_size for path in min(_files(history, role))) <= _BOUND
    assert main(["audit", str(history)]) == 0
    said = capsys.readouterr().out
    assert "4 of the processes no longer have their oldest records (--history-max-bytes)" in said
    since = re.search(r"(\d+) steps of servers computed again, all from step (\d+) of epoch 3 on", said)
    assert since and 0 < int(since[2]) < 110 and int(since[1]) >= 2 * (113 - int(since[2]) + 3), said
    assert re.search(r"not computed again: ps 0 epoch 3 to step \d+: ", said)
    main(["audit", str(history), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["is_clean"] and found["all_computed_again_since"] == {"epoch": 3, "step": int(since[2])}
    assert len(found["without_oldest_records"]) == 4


@pytest.mark.parametrize(("kind", "role"), [(StateKept, "ps-0"), (events.Contributed, "worker")])
def test_a_wrong_value_is_found_after_the_oldest_records_are_gone(cut_history: Path, tmp_path: Path, kind: type, role: str) -> None:
    history = shutil.copytree(cut_history, tmp_path / "history")
    _flip(history, role, kind)
    values = recompute(facts_of(read_history(history)))
    assert values.problems and all("other values than" in problem for problem in values.problems)


def test_values_whose_contributions_are_gone_are_not_called_wrong(cut_history: Path, tmp_path: Path) -> None:
    """Servers keep much longer histories than workers, whose gradients fill theirs."""
    history = shutil.copytree(cut_history, tmp_path / "history")
    for paths in _files(history, "worker"):
        for path in paths[:-1]:
            path.unlink()
    facts = facts_of(read_history(history))
    values = recompute(facts)
    assert not values.problems and not check_books(facts).problems
    assert any("contributions are no longer there, such as" in words for words in values.skipped)


def test_contributions_that_nobody_sent_are_found_after_the_oldest_records_are_gone(cut_history: Path, tmp_path: Path) -> None:
    history = shutil.copytree(cut_history, tmp_path / "history")
    nobody = PushId(worker=0, incarnation=1, sequence=10_000)
    for role in ("ps-0", "ps-1"):
        _changed(history, Applied, lambda event: replace(event, request=replace(event.request, contributors=(nobody,))), role=role)
    assert any(f"no worker recorded that it sent push {nobody}" in problem for problem in _books(history).problems)


def test_the_audit_of_a_directory_without_history_reports_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "no history" in capsys.readouterr().err
