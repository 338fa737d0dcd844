"""A light dataclass behaves as a dataclass; and which classes of the packages are light."""

import copy
import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

import worker_client
from ps_protocol.model.light_dataclass import light_dataclass
from worker_client import strategy, sync_replicas


def declared(decorate: Any) -> Any:
    """The same class, by either decorator."""

    @decorate(frozen=True, slots=True, kw_only=True)
    class Point:
        """A point."""

        dimensions: ClassVar[int] = 2
        x: float
        y: float = 1.0
        tags: list[str] = field(default_factory=list, hash=False)
        note: str = field(default="", compare=False, repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("x is less than 0")

    return Point


@pytest.fixture
def both() -> tuple[Any, Any]:
    return declared(light_dataclass), declared(dataclass)


def test_values_are_described_compared_and_hashed_as_by_a_dataclass(both: tuple[Any, Any]) -> None:
    for cls in both:
        one, same, other = cls(x=1.0, tags=["a"], note="mine"), cls(x=1.0, tags=["a"]), cls(x=1.0)
        assert one == same != other and one != (1.0, 1.0, ["a"])
        assert hash(one) == hash(same) == hash((1.0, 1.0))
        assert repr(one).endswith("Point(x=1.0, y=1.0, tags=['a'])")
    assert len({repr(cls(x=2.0)) for cls in both}) == 1


def test_the_functions_of_the_dataclasses_module_work_on_a_light_dataclass(both: tuple[Any, Any]) -> None:
    light, usual = both
    assert [one.name for one in dataclasses.fields(light)] == [one.name for one in dataclasses.fields(usual)]
    assert dataclasses.asdict(light(x=3.0)) == dataclasses.asdict(usual(x=3.0))
    assert dataclasses.replace(light(x=3.0), y=2.0) == light(x=3.0, y=2.0)
    assert copy.deepcopy(light(x=3.0, tags=["a"])) == copy.copy(light(x=3.0, tags=["a"]))
    assert inspect.signature(light) == inspect.signature(usual) and light.__slots__ == usual.__slots__


def test_a_light_dataclass_checks_its_fields_and_requires_those_without_a_default(both: tuple[Any, Any]) -> None:
    for cls in both:
        with pytest.raises(ValueError, match="less than 0"):
            cls(x=-1.0)
        with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required keyword-only argument: 'x'"):
            cls()


@pytest.mark.parametrize("decorate", [light_dataclass, dataclass])
def test_few_fields_or_none_are_compared_too(decorate: Any) -> None:
    @decorate(frozen=True, slots=True)
    class Nothing:
        """No field."""

    @decorate(frozen=True, slots=True)
    class One:
        """One field."""

        value: float

    one: Any = One  # mypy does not know what the parameter makes of it
    assert Nothing() == Nothing() != one(1.0) == one(1.0)
    assert hash(Nothing()) == hash(()) and hash(one(1.0)) == hash((1.0,))
    # A tuple holds an object for equal to itself; so does a dataclass.
    assert one(nan := float("nan")) == one(nan)


@pytest.mark.parametrize("decorate", [light_dataclass, dataclass])
def test_a_light_dataclass_keeps_its_own_methods_and_a_mutable_one_has_no_hash(decorate: Any) -> None:
    @decorate(slots=True)
    class Counter:
        """It changes."""

        number: int = 0

        def __repr__(self) -> str:
            return "own"

    @decorate(frozen=True, slots=True, eq=False)
    class Handle:
        """It is equal to itself alone."""

        number: int = 0

    @decorate(frozen=True, slots=True)
    class Odd:
        """Its own equality and hash."""

        number: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Odd) and self.number % 2 == other.number % 2

        def __hash__(self) -> int:
            return self.number % 2

    assert repr(Counter()) == "own" and Counter() == Counter() and Counter.__hash__ is None
    assert Handle() != Handle() and len({Handle(), Handle()}) == 2
    assert Odd(1) == Odd(3) and len({Odd(1), Odd(3), Odd(2)}) == 2


@pytest.mark.parametrize("package", [worker_client, strategy, sync_replicas])
def test_exported_classes_refuse_to_be_changed_when_the_program_runs(package: Any) -> None:
    exported = [one for name in package.__all__ if isinstance(one := getattr(package, name), type)]
    values: list[Any] = [one for one in exported if dataclasses.is_dataclass(one)]
    assert len(values) >= 4
    assert [one.__name__ for one in values if not one.__dataclass_params__.frozen] == []
