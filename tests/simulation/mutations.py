"""Deliberately broken copies, one for each promise at least, that the simulation must catch. Knows where to break the cores."""

from collections.abc import Callable
from typing import Any

import pytest

from chief.checkpointing import Checkpointing
from chief.push_outcomes import PushOutcomes
from chief.shard_sequence import ShardSequence
from ps_protocol.checkpoint_files import TensorFileReader
from ps_server import fused_apply, means, model_state, shard_restores
from ps_server.fences import Fences
from ps_server.shard_model import ShardModel
from tests.simulation.chief_node import ChiefNode

Break = Callable[[pytest.MonkeyPatch], None]


def _counts_repeated_commits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PushOutcomes, "is_repeated", lambda self, push_id, *, step: False)


def _applies_repeated_steps(patch: pytest.MonkeyPatch) -> None:
    """A step that comes again is applied again, from whatever is staged then."""

    def is_repeated(self: ShardModel, request: Any) -> bool:
        return False

    patch.setattr(ShardModel, "is_repeated", is_repeated)


def _counts_a_step_before_all_have_it(patch: pytest.MonkeyPatch) -> None:
    whole = ChiefNode._at_all

    def at_all(self: ChiefNode, method: str, arguments: list[tuple[Any, ...]]) -> Any:
        if method == "apply" and len(arguments) > 1:
            answer = yield from self._at(0, method, *arguments[0])
            self._spawn(self._at(1, method, *arguments[1]))
            return [answer]
        return (yield from whole(self, method, arguments))

    patch.setattr(ChiefNode, "_at_all", at_all)


def _serves_any_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "check_caller", lambda self, epoch: None)
    patch.setattr(Fences, "check_epoch", lambda self, epoch: None)


def _obeys_any_chief(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "check_chief", lambda self, chief_incarnation: None)


def _tells_before_it_is_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Checkpointing, "holds_steps", property(lambda self: False))


def _believes_rotten_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TensorFileReader, "_check", lambda self: None)


def _forgets_the_slots(patch: pytest.MonkeyPatch) -> None:
    real = model_state.tensors_of
    patch.setattr(shard_restores, "tensors_of", lambda *given: (tensor for tensor in real(*given) if not tensor.part))


def _adds_up_in_another_order(patch: pytest.MonkeyPatch) -> None:
    real = means.mean_of

    def mean_of(blocks: Any, **named: Any) -> Any:
        return real(blocks[:-1] if len(blocks) > 2 else blocks, **named)

    patch.setattr(fused_apply, "mean_of", mean_of)


def _leaves_callers_waiting(patch: pytest.MonkeyPatch) -> None:
    """When a step is applied, nothing follows from it."""
    real = ShardSequence.applied
    patch.setattr(ShardSequence, "applied", lambda self, event, now: [] if event.step == 3 else real(self, event, now))


# The promises that may be seen to break (the first letter of what is said), where to break them, and the fault that it takes.
MUTATIONS: dict[str, tuple[str, Break, str]] = {
    "a repeated commit counts again": ("13", _counts_repeated_commits, ""),
    "a step that comes again is applied again": ("126", _applies_repeated_steps, ""),
    "a step counts when the first server has it": ("2", _counts_a_step_before_all_have_it, ""),
    "servers serve callers of any epoch": ("236", _serves_any_epoch, "kill"),
    "servers obey any chief": ("236", _obeys_any_chief, "new chief"),
    "a step is told before it is saved": ("4", _tells_before_it_is_saved, ""),
    "a rotten file is believed": ("25", _believes_rotten_files, "rot"),
    "a restored server has lost its slots": ("5", _forgets_the_slots, "kill"),
    "a mean leaves one contribution out": ("5", _adds_up_in_another_order, ""),
    "an applied step opens no other": ("6", _leaves_callers_waiting, ""),
}
