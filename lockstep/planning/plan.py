"""Recommends a number of backup workers: simulates several numbers and compares them. Knows no file, terminal or network."""

import dataclasses
import math

from lockstep.planning.latencies import Latency
from lockstep.planning.simulation import MAX_WORKERS, Costs, SimulationResult, simulate
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import DEFAULT_POLICY

# More backup workers must gain more than this share, and more than the error of the simulation.
_LEAST_GAIN = 0.005
_CONTRIBUTIONS = 20_000  # roughly how many are simulated for each number of backups


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question to plan for: either the number of workers (T) or the contributions that a step needs (R) is given; b is T - R."""

    latency: Latency
    costs: Costs = dataclasses.field(default_factory=Costs)
    num_workers: int | None = None
    num_required: int | None = None
    backups: tuple[int, ...] = ()
    compared: tuple[PolicySpec, ...] = ()
    num_rounds: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.num_workers is None) == (self.num_required is None):
            raise InvalidSpec("want either the number of workers there are, or the contributions that a step needs")
        size = self.num_workers or self.num_required or 0
        if not 1 <= size <= MAX_WORKERS:
            raise InvalidSpec(f"{'workers' if self.num_workers else 'contributions a step needs'}: got {size}, want 1 to {MAX_WORKERS}")
        most = size - 1 if self.num_workers else MAX_WORKERS - size
        for backups in self.backups:
            if not 0 <= backups <= most:
                raise InvalidSpec(f"backups: got {backups}, want 0 to {most} with {self.size_text}")

    @property
    def size(self) -> int:
        """The given number, T or R."""
        return self.num_workers or self.num_required or 0

    @property
    def size_text(self) -> str:
        """A description of the given number."""
        return f"{self.num_workers} workers" if self.num_workers else f"{self.num_required} contributions a step"

    @property
    def candidates(self) -> list[int]:
        """The numbers of backup workers to compare, always with 0: those given, or some up to a fifth of the workers."""
        if self.backups:
            return sorted({0, *self.backups})
        few = range(9) if self.size < 1000 else (0, 1, 2, 4, 8)
        shares = {math.ceil(self.size * share / 100) for share in (2, 4, 6, 8, 10, 15, 20)}
        most = min(max(1, self.size // 2), self.size - 1 if self.num_workers else MAX_WORKERS - self.size)
        return sorted(backups for backups in {*few, *shares} if backups <= most)

    @property
    def rounds(self) -> int:
        """Steps to simulate for each candidate."""
        return self.num_rounds or max(10, min(400, _CONTRIBUTIONS // self.size))


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of a plan. `rows`: one for each number of backups, from 0 on; `compared`: other policies with the same workers."""

    question: Question
    rows: tuple[SimulationResult, ...]
    compared: tuple[SimulationResult, ...] = ()

    @property
    def best(self) -> SimulationResult:
        """The recommended row: the fewest backups whose efficiency equals the best one within the simulation's error."""
        most = max(self.rows, key=lambda row: row.efficiency)
        tolerance = max(_LEAST_GAIN, most.step_error_s / most.step_s)
        return next(row for row in self.rows if row.efficiency >= most.efficiency * (1 - tolerance))

    @property
    def shortest(self) -> SimulationResult:
        """The row with the shortest mean step, within the simulation's error."""
        least = min(self.rows, key=lambda row: row.step_s)
        tolerance = max(_LEAST_GAIN, least.step_error_s / least.step_s)
        return next(row for row in self.rows if row.step_s <= least.step_s * (1 + tolerance))

    def speed(self, row: SimulationResult) -> float:
        """Returns contributions per second and worker, relative to no backups: t(0) / t(b) · R / (R + b) where R is given."""
        return row.efficiency / self.rows[0].efficiency

    def as_fields(self) -> dict[str, object]:
        """Returns all figures by name, for JSON; times in seconds."""
        rows = [{"num_backups": row.num_backups, "speed_per_worker": self.speed(row), **dataclasses.asdict(row)} for row in self.rows]
        compared = [{"speed_per_worker": self.speed(row), **dataclasses.asdict(row)} for row in self.compared]
        return {
            "latency": self.question.latency.text,
            "costs": dataclasses.asdict(self.question.costs),
            "seed": self.question.seed,
            "rows": rows,
            "compared": compared,
            "recommended_backups": self.best.num_backups,
            "shortest_step_backups": self.shortest.num_backups,
        }


def make_plan(question: Question) -> Plan:
    """Simulates all candidates and returns the results; takes some seconds."""
    rows = tuple(_simulate(question, DEFAULT_POLICY, backups) for backups in question.candidates)
    return Plan(question=question, rows=rows, compared=tuple(_simulate(question, policy, 0) for policy in question.compared))


def _simulate(question: Question, policy: PolicySpec, backups: int) -> SimulationResult:
    num_workers = question.num_workers or question.size + backups
    return simulate(
        policy=policy,
        num_workers=num_workers,
        num_required=policy.replicas_to_aggregate or num_workers - backups,
        latency=question.latency,
        costs=question.costs,
        num_rounds=question.rounds,
        num_warm_up=max(2, question.rounds // 10),
        seed=question.seed,
    )
