"""The coordinator as its parts see it, a Protocol: whether training continues, which callers are valid, what to do next. Holds nothing."""

from typing import Protocol

from chief.core.cluster.members import Member
from ps_protocol.errors import PsError
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import End, Participant


class Host(Protocol):
    """The coordinator."""

    # -- where the cluster is

    @property
    def step(self) -> int:
        """The open step."""

    @property
    def is_failed(self) -> bool:
        """Whether the cluster cannot continue."""

    @property
    def is_finished(self) -> bool:
        """Whether training is finished."""

    @property
    def end(self) -> End:
        """Whether training is finished, and how it has ended."""

    @property
    def is_over(self) -> bool:
        """Whether training is finished, or has failed."""

    @property
    def is_finishing(self) -> bool:
        """Whether training is finished as soon as the step is applied that is being applied."""

    @property
    def is_recovering(self) -> bool:
        """Whether the shards are being brought to one step."""

    @property
    def reason(self) -> str:
        """Why training is over."""

    def explain(self, now: float, *, asking: int | None = None) -> str:
        """Returns words for the cluster's wait; `asking` is a worker that waits for a token although it does not block."""

    def explain_to_many(self, now: float) -> str:
        """As `explain`, up to a quarter of a second old."""

    def record(self) -> ChiefRecord:
        """Returns the record for a successor of this chief, without the state that changes with every step."""

    # -- callers

    def worker(self, participant: Participant, what: str, now: float) -> Member:
        """Returns the live worker that calls. Raises TrainingFailed, and the errors of Membership."""

    def refuse_if_failed(self) -> None:
        """Raises TrainingFailed once the cluster cannot continue."""

    def refuse_if_recovering(self, now: float) -> None:
        """Raises Unavailable while nothing can be counted, so that the caller tries again."""

    def check_settings_may_change(self) -> None:
        """Raises TrainingFailed once training is over."""

    def refuse_participants(self, error: PsError) -> None:
        """All calls that wait as participants get this error."""

    def welcome(self) -> None:
        """Participants that came before the chief knew its predecessors are admitted, or refused, once the event has been handled."""

    # -- next steps

    def proceed(self, now: float) -> None:
        """Begins the next task of the shards."""

    def model_initialised(self, now: float) -> None:
        """The shards hold the model's first values: training begins as soon as they work as they shall."""

    def model_ready(self, now: float) -> None:
        """Answers all that wait for the model: the shards hold its first values and their settings."""

    def answer_about_model(self) -> None:
        """The shards, or the model, have changed: answers the calls that wait for that."""

    def finish(self, reason: str, now: float) -> None:
        """Finishes training: answers all that wait."""

    def finish_as_asked(self, now: float) -> None:
        """Ends training as requested: with the step that has been applied, or without the step that is being applied."""

    def fail(self, reason: str) -> None:
        """Fails the cluster, which cannot continue: all that wait get the reason."""
