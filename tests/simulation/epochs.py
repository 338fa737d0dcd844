"""The record of each epoch of a simulated cluster, kept by the oracle. Knows no promise."""

from dataclasses import dataclass, field

from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import Participant
from ps_protocol.roles.contribution import PushId

Contributors = tuple[PushId, ...]
# Life of the cluster, and epoch.
Era = tuple[int, int]


def era_of(participant: Participant) -> Era:
    """Returns the era that somebody is registered in."""
    return participant.era.life, participant.era.epoch


@dataclass(slots=True)
class State:
    """One shard's values at one step, and their slot; and the phase of training, which begins with an empty slot.

    The values are those of its variable, and then of the rows of `keys`; `used`: the step after the last that changed each row.
    `occurred`: in how many steps each key was not admitted.
    """

    value: Array
    momentum: Array
    keys: Array
    used: Array
    occurred: Array
    phase: int = 0


@dataclass(slots=True)
class Epoch:
    """One epoch: where it began, and what each of its steps was made of.

    `rates`: the learning rate that servers were told to use for each of its steps, for want of another.
    `made` and `used`: the step that each contribution, and each range of the training data, is in, of all that its values are made of.
    `brought`: of these contributions, those that brought a state of their worker's program, and it.
    """

    era: Era
    first_step: int
    parent: Era | None
    steps: dict[int, Contributors] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    made: dict[PushId, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    brought: dict[PushId, str] = field(default_factory=dict)
    # The shards that lack a contribution of a step.
    lacking: dict[tuple[int, PushId], set[int]] = field(default_factory=dict)
    # By server, the step that it has, that which it was brought back to last, and its states.
    at: dict[str, int] = field(default_factory=dict)
    since: dict[str, int] = field(default_factory=dict)
    states: dict[tuple[str, int], State] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number of the epoch, for words."""
        return self.era[1]

    def child(self, era: Era, *, first_step: int) -> "Epoch":
        """Returns the epoch that goes on from this one at an earlier step, or where it is."""
        return Epoch(
            era=era,
            first_step=first_step,
            parent=self.era,
            made={push_id: step for push_id, step in self.made.items() if step < first_step},
            used={identity: step for identity, step in self.used.items() if step < first_step},
            brought={push_id: state for push_id, state in self.brought.items() if self.made[push_id] < first_step},
        )
