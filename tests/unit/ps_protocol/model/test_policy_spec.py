"""A policy as a value: valid combinations, and their meaning for servers and workers."""

from typing import Any

import pytest

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.merging import merge_of
from ps_protocol.model.policy import MAX_REPLICAS, PolicyName, PolicySpec, TokenMode, TooStale

SYNC, SSP, ASYNC = PolicyName.SYNC, PolicyName.SSP, PolicyName.ASYNC


@pytest.mark.parametrize(
    ("policy", "text", "reads_latest", "accepts_stale", "applies_on_arrival"),
    [
        (PolicySpec(), "sync", False, False, False),
        (PolicySpec(tokens=TokenMode.FIFO), "sync, fifo tokens", True, False, False),
        (PolicySpec(merge=merge_of("trimmed_mean:0.25")), "sync, trimmed_mean:0.25", False, False, False),
        (PolicySpec(name=SSP, staleness=2), "ssp(2)", True, True, False),
        (PolicySpec(name=ASYNC), "async", True, True, False),
        (PolicySpec(name=ASYNC, max_staleness=4), "async, drops beyond staleness 4", True, True, False),
        (PolicySpec(name=SSP, max_staleness=4, too_stale=TooStale.SCALE), "ssp(0), scales beyond staleness 4", True, True, False),
        (PolicySpec(name=ASYNC, use_locking=False), "async, unlocked", True, True, True),
    ],
)
def test_each_policy_has_a_description_and_its_rules(
    policy: PolicySpec, text: str, reads_latest: bool, accepts_stale: bool, applies_on_arrival: bool
) -> None:
    assert policy.text == text
    assert (policy.reads_latest, policy.accepts_stale, policy.applies_on_arrival) == (reads_latest, accepts_stale, applies_on_arrival)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"replicas_to_aggregate": 0}, "replicas_to_aggregate: got 0, want 1 to"),
        ({"total_num_replicas": MAX_REPLICAS + 1}, f"total_num_replicas: got {MAX_REPLICAS + 1}"),
        ({"name": SSP, "staleness": -1}, "staleness: got -1, want 0"),
        ({"name": SSP, "max_staleness": -1}, "max_staleness: got -1, want 0"),
        ({"num_tokens": -2}, "num_tokens: got -2, want -1"),
        ({"num_tokens": 1 << 31, "tokens": TokenMode.FIFO}, "num_tokens: got 2147483648, want -1 .* to 1001000"),
        ({"name": ASYNC, "tokens": TokenMode.FIFO}, "tokens: it is for the policy sync, not async"),
        ({"name": SSP, "use_locking": False}, "use_locking: it is for the policy async, not ssp"),
        ({"max_staleness": 1}, "max_staleness: it is for the policy async, outer and ssp, not sync"),
        (
            {"name": ASYNC, "use_locking": False, "max_staleness": 1},
            "max_staleness: async without locking applies before anybody",
        ),
        ({"name": SSP, "merge": merge_of("trimmed_mean:0.25")}, "merge: it is for the policy outer and sync, not ssp"),
        ({"name": SSP, "staleness": 1.5}, "staleness: got 1.5, want a whole number"),
        ({"name": SSP, "staleness": True}, "staleness: got True, want a whole number"),
        ({"name": SSP, "staleness": None}, "staleness: got None, want a whole number"),
        ({"name": SSP, "max_staleness": 1.5}, "max_staleness: got 1.5, want a whole number"),
        ({"num_tokens": 1.5, "tokens": TokenMode.FIFO}, "num_tokens: got 1.5, want a whole number"),
        ({"replicas_to_aggregate": 2.0}, "replicas_to_aggregate: got 2.0, want a whole number"),
        ({"total_num_replicas": "3"}, "total_num_replicas: got '3', want a whole number"),
    ],
)
def test_policy_fields_that_contradict_each_other_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidSpec, match=text):
        PolicySpec(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("median", "got 'median', want one of mean, trimmed_mean, bounded_mean, radial_mean"),
        ("trimmed_mean:many", "got 'trimmed_mean:many', want one of"),
        (0.25, "got 0.25, want one of"),
        ("trimmed_mean", "trimmed_mean with 0.0, want the share to leave out at each end"),
        ("trimmed_mean:0.5", "trimmed_mean with 0.5, want the share"),
        ("trimmed_mean:nan", "trimmed_mean with nan, want the share"),
        ("bounded_mean:0", "bounded_mean with 0.0, want how often the others' median norm"),
        ("bounded_mean:inf", "bounded_mean with inf, want how often"),
        ("radial_mean:2", "radial_mean with 2.0, want no number"),
        ("mean:1", "mean with 1.0, want no number"),
    ],
)
def test_a_way_to_merge_that_means_nothing_is_refused(text: Any, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        merge_of(text)
