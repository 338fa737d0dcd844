"""Numbers in Prometheus' text format: names, escapes, NaN and infinities, and the families of every process."""

import math
import time

from ps_protocol.metrics.exposition import counter, exposition, gauge, labels, process_families, summary
from tests.support.formats.prometheus import parsed, value


def test_each_kind_of_metric_is_written_with_its_help_type_and_sample_lines() -> None:
    families = [
        counter("a_total", "Things", (labels(outcome="late"), 3), (labels(outcome="stale"), 0)),
        gauge("b_seconds", "An age", ("", 0.25)),
        summary("c_seconds", "Durations", total=1.5, count=4),
    ]
    assert exposition(families).decode() == (
        '# HELP a_total Things.\n# TYPE a_total counter\na_total{outcome="late"} 3\na_total{outcome="stale"} 0\n'
        "# HELP b_seconds An age.\n# TYPE b_seconds gauge\nb_seconds 0.25\n"
        "# HELP c_seconds Durations.\n# TYPE c_seconds summary\nc_seconds_count 4\nc_seconds_sum 1.5\n"
    )


def test_a_family_without_samples_is_left_out() -> None:
    assert exposition([gauge("a", "Nothing"), gauge("b", "Something", ("", 1))]) == b"# HELP b Something.\n# TYPE b gauge\nb 1\n"


def test_labels_cannot_break_out_of_their_quotes() -> None:
    names = ['"} 1\nforged 7', "back\\slash", "line\nbreak", '<script>alert("x")</script>', "日本", "\\n"]
    text = exposition([gauge("a", "Words", *((labels(metric=name), number) for number, name in enumerate(names)))]).decode()
    families = parsed(text)
    assert list(families) == ["a"] and len(families["a"].samples["a"]) == len(names)


def test_nan_infinity_and_very_large_numbers_are_written_as_prometheus_reads_them() -> None:
    values = [math.nan, math.inf, -math.inf, 10**20, 1e-9, 0.1]
    text = exposition([gauge("a", "Numbers", *((labels(row=str(row)), one) for row, one in enumerate(values)))]).decode()
    assert [line.split()[1] for line in text.splitlines()[2:]] == ["NaN", "+Inf", "-Inf", "100000000000000000000", "1e-09", "0.1"]


def test_every_process_exports_its_version_processor_time_memory_and_descriptors() -> None:
    families = parsed(exposition(process_families(role="chief", version="1.2")).decode())
    assert value(families, "lockstep_build_info", role="chief", version="1.2") == 1
    assert value(families, "process_cpu_seconds_total") > 0
    assert 3 <= value(families, "process_open_fds") <= value(families, "process_max_fds")
    assert 1 << 20 < value(families, "process_resident_memory_bytes") <= value(families, "process_virtual_memory_bytes")
    assert 0 < time.time() - value(families, "process_start_time_seconds") < 86_400
