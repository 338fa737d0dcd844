"""The formula of an optimizer that is given as text, as the other formulas are: constants of a step, and operations on a block.

Knows no variable or step. What the text means: `ps_protocol/model/expressions.py`. How it becomes operations:
`ps_protocol/model/programs.py`.
"""

from collections.abc import Sequence

from ps_protocol.model.optimizers import LEARNING_RATE, STEP, OptimizerSpec
from ps_protocol.model.variables import Array
from ps_server.optimizers.formulas import NUM_SCRATCH, Formula, Number, Pass, Scalars


def text_formula(spec: OptimizerSpec) -> Formula:
    """Returns the formula of a checked specification that has a text.

    Numbers are computed as Python computes them, in double precision, and rounded where they meet an array of another type: in float32,
    1 - 0.999 is wrong in the fifth digit.
    """
    program, bases, given = spec.program, spec.parsed.bases, spec.numbers

    def constants(rate: float, powers: Sequence[float], step: int, of: Number) -> Scalars:
        raised = {f"{base} ** {STEP}": power for base, power in zip(bases, powers, strict=True)}
        return program.numbers({**given, **raised, LEARNING_RATE: rate, STEP: step + 1}, float)

    def apply(value: Array, out: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], constants: Scalars) -> None:
        program.run((value, gradient, *slots), (out,), scratch, constants)

    return Formula(
        constants,
        apply,
        decays=tuple(given[base] for base in bases),
        rounded=float,
        num_scratch=max(NUM_SCRATCH, program.num_scratch),
        passes=tuple(_pass(spec, index) for index in range(program.num_passes)),
    )


def _pass(spec: OptimizerSpec, index: int) -> Pass:
    program = spec.program

    def measure(
        value: Array, slots: Sequence[Array], gradient: Array, scratch: Sequence[Array], squares: Array, constants: Scalars
    ) -> list[float]:
        return program.measure(index, (value, gradient, *slots), scratch, squares, constants)

    def conclude(constants: Scalars, totals: Sequence[float], of: Number) -> Scalars:
        return program.conclude(index, totals, constants, float)

    return Pass(measure, conclude)
