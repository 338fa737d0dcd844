"""The contributions that a worker reports to another chief: counted, or perhaps counted, and in no applied step."""

from dataclasses import replace

from ps_protocol.roles.chief import CommitResult, Participant, ParticipantKind, PushCommit, PushOutcome
from ps_protocol.roles.contribution import PushId
from tests.support.chief.eras import era
from worker_client.core.state import OpenCommits

OWNER = Participant(era=era(1), kind=ParticipantKind.WORKER, index=0, incarnation=1)


def commit(sequence: int, *, step: int = 5) -> PushCommit:
    return PushCommit(push_id=PushId(worker=0, incarnation=1, sequence=sequence), step=step, staged=True)


def accepted(step: int = 5, **fields: object) -> CommitResult:
    return CommitResult(outcome=PushOutcome.ACCEPTED, global_step=5, applied_step=step, **fields)  # type: ignore[arg-type]


def test_commit_is_open_from_its_sending_until_its_step_is_applied() -> None:
    commits, first = OpenCommits(OWNER), commit(1)
    commits.sent(first)
    assert (commits.all(), commits.accepted(first)) == ((first,), None)
    commits.answered(first, accepted(), global_step=5)
    assert (commits.all(), commits.accepted(first)) == ((first,), accepted())
    commits.advance(5)
    assert commits.all() == (first,)
    commits.advance(6)
    assert (commits.all(), commits.accepted(first)) == ((), accepted()), "what was said of it stays true"
    commits.sent(commit(2))
    assert commits.accepted(commit(2)) is None


def test_refused_commits_are_not_open() -> None:
    commits = OpenCommits(OWNER)
    for sequence, outcome in enumerate((PushOutcome.STALE, PushOutcome.LATE, PushOutcome.DUPLICATE), start=1):
        commits.sent(commit(sequence))
        commits.answered(commit(sequence), CommitResult(outcome=outcome, global_step=5), global_step=5)
    assert commits.all() == ()


def test_a_repeated_commit_has_its_first_outcome() -> None:
    commits = OpenCommits(OWNER)
    commits.sent(commit(1))
    again = CommitResult(outcome=PushOutcome.DUPLICATE, global_step=5, first_outcome=PushOutcome.ACCEPTED, applied_step=5)
    commits.answered(commit(1), again, global_step=5)
    assert commits.accepted(commit(1)) == again


def test_open_commits_are_listed_in_order_and_forgotten_together() -> None:
    commits = OpenCommits(OWNER)
    for sequence in (1, 2, 3):
        commits.sent(commit(sequence))
        commits.answered(commit(sequence), accepted(step=4 + sequence), global_step=5)
    commits.advance(6)
    assert [each.push_id.sequence for each in commits.all()] == [2, 3]
    successor = replace(OWNER, era=era(2))
    commits.begin(successor)
    assert (commits.all(), commits.owner, commits.accepted(commit(3))) == ((), successor, None)
