"""What can be looked at in a cluster's model: rows, slots, averages, metrics. Knows the model and its shards; no tokens and no pushes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ps_protocol.averages import AVERAGE_SLOT
from ps_protocol.errors import InvalidSpec, SlotNotFound, StepGone, StepNotReady
from ps_protocol.layout import Layout
from ps_protocol.model import ModelSpec
from ps_protocol.tensors import Array, VariableSpec
from worker_client.gradients import unknown_variable
from worker_client.model_memory import ModelMemory
from worker_client.optimizers import slot_names
from worker_client.outcomes import MetricReport, metric_reports
from worker_client.patience import Patience
from worker_client.row_gradients import checked_indices
from worker_client.row_reading import Rows, read_rows
from worker_client.shard_group import ShardGroup

# After so many attempts to read a slot at one step of all shards, a cluster that steps faster than it is read gives what there is.
MAX_SLOT_ATTEMPTS = 10
# After the first attempt to read rows at one step of all shards, and then each time after so many, the policy is asked for.
ATTEMPTS_PER_POLICY = 8


class ModelReader:
    """Reads what does not belong to every step. For one thread; `who` names the reader in what is said of waits.

    `applies_on_arrival` asks whether shards do so now: then none of them has steps that could be the same as another's.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        layouts: tuple[Layout, ...],
        shards: ShardGroup,
        who: str,
        timeout_s: float,
        applies_on_arrival: Callable[[], bool],
    ) -> None:
        self.model = model
        self._layouts = layouts
        self._shards = shards
        self._who = who
        self._timeout_s = timeout_s
        self._applies_on_arrival = applies_on_arrival
        self._variables: Mapping[str, VariableSpec] = {spec.name: spec for spec in model.variables}

    def rows(self, name: str, indices: Any, *, step: int | None, is_aligned: bool = True) -> Rows:
        """Returns rows of one table (`indices` None: all), of one step, in the order asked for, repetitions included.

        `step` None: the newest that can be had from all shards, in as many attempts as it takes within the reader's `timeout_s`; without
        `is_aligned`, and where shards apply on arrival, each part is the newest. Raises VariableNotFound, InvalidSpec, DtypeMismatch,
        IndexOutOfRange; StepGone, StepNotReady for a step that was named; DeadlineExceeded.
        """
        spec = self._spec(name)
        if not spec.is_sparse:
            raise InvalidSpec(f"variable {name!r} is dense: read() gives it; only a Table is read by rows")
        wanted = None if indices is None else checked_indices(f"rows of {name!r}", indices, num_rows=spec.num_rows)
        if step is not None:
            return read_rows(self._shards, self._layouts, spec, wanted, step=step)
        return self._newest_rows(spec, wanted, is_aligned=is_aligned)

    def slot(self, name: str, slot: str) -> Array:
        """Returns a copy of one variable's slot, of the newest step. Raises VariableNotFound, SlotNotFound.

        Where steps come too fast for some attempts to find all shards at one step, each shard's newest. A slot that changes while it is
        copied is read again, within the reader's `timeout_s`: else DeadlineExceeded.
        """
        spec = self._spec(name)
        known = slot_names(spec.optimizer or self.model.optimizer)
        if slot not in known:
            raise SlotNotFound(f"variable {name!r} has no slot {slot!r}; its optimizer has {', '.join(known) or 'none'}")
        if spec.is_sparse:
            return self._newest_rows(spec, None, slot=slot).values
        return self._dense_slot(slot, [name])[name].copy()

    def slot_names(self) -> list[str]:
        """Returns the names of all optimizers' slots, sorted."""
        return self._shards.slot_names()

    def averages(self, names: Iterable[str] | None) -> dict[str, Array]:
        """Returns the moving averages of the newest step, of all variables that have one or of those named.

        Raises SlotNotFound, VariableNotFound.
        """
        kept = self._averaged()
        wanted = kept if names is None else [self._spec(name).name for name in ([names] if isinstance(names, str) else names)]
        for name in wanted:
            if name not in kept:
                raise SlotNotFound(f"variable {name!r} has no moving average; name it in create_or_join(…, averages=moving_average(…))")
        if not wanted:
            return {}
        arrays = self._dense_slot(AVERAGE_SLOT, wanted)
        return {name: arrays[name] for name in wanted}

    def metrics(self) -> dict[str, MetricReport]:
        """Returns what workers have reported in contributions that count, by name."""
        return metric_reports(self._shards.metrics())

    def _averaged(self) -> list[str]:
        averages = self.model.averages
        if averages is None:
            raise SlotNotFound("the model keeps no moving averages; create it with create_or_join(…, averages=moving_average(0.99))")
        trained = [spec.name for spec in self.model.variables if not (spec.is_sparse or spec.is_state)]
        return [name for name in trained if name in averages.variables] if averages.variables else trained

    def _newest_rows(self, spec: VariableSpec, indices: Array | None, *, slot: str = "", is_aligned: bool = True) -> Rows:
        what = f"slot {slot!r}" if slot else "rows"
        patience = Patience(f"{self._who} reads {what} of {spec.name!r}", timeout_s=self._timeout_s)
        num_failures = 0
        while True:
            try:
                # Many small calls do not keep up with fast steps, so from the second time on shards are told first.
                is_held = not slot and num_failures > 0
                return read_rows(self._shards, self._layouts, spec, indices, step=None, slot=slot, is_aligned=is_aligned, is_held=is_held)
            except (StepGone, StepNotReady) as error:
                patience.explain(f"steps pass faster than these {what} can be read at one step of all shards: {error.message}")
            num_failures += 1
            if slot and num_failures >= MAX_SLOT_ATTEMPTS:
                is_aligned = False
            elif num_failures % ATTEMPTS_PER_POLICY == 1:
                is_aligned = not self._applies_on_arrival()

    def _dense_slot(self, slot: str, names: list[str]) -> dict[str, Array]:
        memory = ModelMemory(self.model, layouts=self._layouts, is_writable=True)
        patience = Patience(f"{self._who} reads slot {slot!r}", timeout_s=self._timeout_s)
        num_attempts = 0
        while True:
            num_attempts += 1
            try:
                steps = self._shards.read_slot(slot, memory, names=frozenset(names))
                if len(steps) <= 1 or num_attempts >= MAX_SLOT_ATTEMPTS:
                    return memory.arrays
            except StepGone as error:
                patience.explain(error.message)

    def _spec(self, name: str) -> VariableSpec:
        if not isinstance(name, str) or name not in self._variables:
            raise unknown_variable(name, self._variables)
        return self._variables[name]
