"""Chrome's trace format, read strictly: events that a viewer would drop or draw wrongly raise AssertionError. Knows no cluster."""

from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def checked(trace: dict[str, Any]) -> list[Event]:
    """Returns the events that have a time, in order."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    timed, named = [], set()
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXiC" and isinstance(event["name"], str) and event["name"], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index") and event["args"], event
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0, event
        assert event["ph"] != "i" or event["s"] in "gpt", event
        assert event["ph"] != "C" or all(isinstance(value, int | float) for value in event["args"].values()), event
        timed.append(event)
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    _check_spans([event for event in timed if event["ph"] == "X"], named)
    return timed


def _check_spans(spans: list[Event], named: set[tuple[int, int]]) -> None:
    """Spans of one track lie beside each other or in each other."""
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for span in spans:
        assert span["dur"] > 0, span
        track = span["pid"], span["tid"]
        assert track in named, f"a track without a name: {span}"
        outer = open_until[track]
        while outer and outer[-1] <= span["ts"]:
            outer.pop()
        assert not outer or span["ts"] + span["dur"] <= outer[-1], f"overlaps the span around it: {span}"
        outer.append(span["ts"] + span["dur"])
