"""How the step that was applied last had been asked for, so that the same may be asked again."""

from dataclasses import dataclass

from ps_protocol.errors import StepMismatch
from ps_protocol.shard import ApplyRequest


@dataclass(slots=True)
class LastStep:
    """`request` is None until a step has been applied."""

    request: ApplyRequest | None = None
    _prepared: tuple[ApplyRequest, list[float]] | None = None

    def check_repeated(self, request: ApplyRequest, *, at: int, has_applied: bool) -> None:
        """Raises StepMismatch unless this very request has been carried out; `at` is the step that the shard is at."""
        if request.step == at - 1 and self.request is not None and _are_same(self.request, request):
            return
        what = "was applied with other contributors" if request.step == at - 1 and has_applied else "is not the one to apply"
        raise StepMismatch(f"step {request.step} {what}: the shard is at step {at}; ask for its status", facts={"step": str(at)})

    def prepare(self, request: ApplyRequest, sums: list[float]) -> None:
        """Keeps what was prepared for the step that comes next."""
        self._prepared = request, sums

    def prepared(self, request: ApplyRequest, *, at: int) -> list[float]:
        """Returns what was prepared for a step that has been applied; raises StepMismatch if it was not prepared."""
        if self._prepared is not None and _are_same(self._prepared[0], request):
            return self._prepared[1]
        raise StepMismatch(f"step {request.step} was applied without being prepared; ask for the status", facts={"step": str(at)})


def _are_same(one: ApplyRequest, other: ApplyRequest) -> bool:
    return (one.step, one.contributors) == (other.step, other.contributors)
