"""Numbers of hundreds of digits in messages: they are cut, wherever a user can give one."""

from collections.abc import Callable

import pytest

import worker_client
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.data import DataSpec
from ps_protocol.model.shown import format_bytes, shown
from worker_client.model.optimizers import step_hyperparameters


@pytest.mark.parametrize("number", [10**400, 10**5000], ids=["400 digits", "5000 digits"])
@pytest.mark.parametrize(
    "give",
    [
        lambda number: worker_client.sgd(number),
        lambda number: worker_client.adam(0.1, epsilon=number),
        lambda number: worker_client.ssp_policy(number),
        lambda number: worker_client.sync_policy(replicas_to_aggregate=number),
        lambda number: worker_client.fixed_size_partitioner(2, axis=-number),
        lambda number: worker_client.moving_average(number),
        lambda number: worker_client.connect("local", worker_index=number),
        lambda number: worker_client.connect("127.0.0.1:1", timeout_s=-number),
        lambda number: step_hyperparameters({"learning_rate": number}),
        lambda number: DataSpec(name="d", num_samples=number, range_size=1),
    ],
    ids=["rate", "epsilon", "staleness", "replicas", "axis", "decay", "index", "timeout", "step", "samples"],
)
def test_a_number_of_hundreds_of_digits_is_refused_in_a_short_message(give: Callable[[int], object], number: int) -> None:
    with pytest.raises(InvalidSpec) as caught:
        give(number)
    assert "want" in caught.value.message and len(caught.value.message) < 200


def test_short_values_are_shown_whole() -> None:
    assert [shown(value) for value in (5, -1.5, "x", None)] == ["5", "-1.5", "'x'", "None"]


def test_sizes_are_formatted_with_units() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 1536, 1 << 20, 9 << 29, 3 << 40)] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1.0 MiB", "4.5 GiB", "3.0 TiB"),
    ]
