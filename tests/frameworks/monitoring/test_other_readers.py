"""Lockstep's exports in others' readers: Prometheus' client, TensorBoard's own reader, OpenTelemetry's SDK."""

import sys
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import lockstep
from lockstep import checkpoint_export
from lockstep.__main__ import main
from lockstep.in_process import InProcessCluster
from lockstep.tensorboard import TensorBoardWriter
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.metrics.exposition import exposition, gauge, labels, process_families
from ps_protocol.metrics.families import cluster_families, shard_families
from ps_protocol.roles.chief import StepTotals
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.shard import MetricCell, ShardReport, ShardStatus
from ps_server.serving.local import InProcessShard
from tests.contract.shard.test_checkpoints import model_of
from tests.support.chief.cluster_status import cluster_status, server_status, worker_status
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.parameter_servers.sharded_training import ShardedTraining


@pytest.fixture
def cluster(socket_dir: Path) -> Iterator[ServedCluster]:
    with ExitStack() as stack:
        yield ServedCluster(Shape(), stack, directory=socket_dir)


def test_the_client_of_prometheus_reads_what_roles_export() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus-client is not installed")
    status = cluster_status(worker_status(0, num_late=3), shards=(server_status(0, report=ShardReport(allocated_bytes=7)),))
    shard = ShardStatus(shard=0, process_incarnation=1, fence=NOBODY, step=3, report=ShardReport(num_pushes=5))
    name = 'loss "of"\n\\all'
    cells = [MetricCell(name=name, worker=0, total=1.5, weight=1.0, count=1, last=1.5)]
    families = [
        *process_families(role="chief", version="1"),
        *cluster_families(status, StepTotals(num_steps=4, duration_s=2.0, apply_s=1.0)),
        *shard_families(shard, num_applied=3, apply_s=0.5, cells=cells),
        gauge("numbers", "Numbers that are none", (labels(is_="nan"), float("nan")), (labels(is_="inf"), float("-inf"))),
    ]
    read = {family.name: family for family in parser.text_string_to_metric_families(exposition(families).decode())}
    assert len(read) == len([family for family in families if family.samples])
    assert read["lockstep_worker_contributions"].type == "counter"
    (late,) = [one.value for one in read["lockstep_worker_contributions"].samples if one.labels["outcome"] == "late"]
    assert late == 3
    assert {one.name: one.value for one in read["lockstep_cluster_step_duration_seconds"].samples} == {
        "lockstep_cluster_step_duration_seconds_count": 4,
        "lockstep_cluster_step_duration_seconds_sum": 2,
    }
    assert read["lockstep_reported_weighted_value"].samples[0].labels == {"metric": name}


def test_tensorboard_reads_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorBoard then does not import TensorFlow. A process that loads it and the Triton of a PyTorch with CUDA aborts.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))
    module = "tensorboard.backend.event_processing.event_accumulator"
    accumulators = pytest.importorskip(module, reason="tensorboard is not installed")
    writer = TensorBoardWriter(tmp_path)
    with lockstep.local(InProcessCluster()) as session:
        session.create_or_join({"w": np.zeros(2)}, optimizer=lockstep.sgd(0.1))
        for round_ in range(4):
            writer.record(session)
            for _ in range(5):
                session.step({"w": np.ones(2)}, metrics={"loss": 1.0 - round_ / 4})
        writer.record(session)
    events = accumulators.EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"metrics/loss", "training/steps_per_second", "training/max_staleness"} <= {*events.Tags()["scalars"]}
    assert [(point.step, point.value) for point in events.Scalars("metrics/loss")] == [(5, 1.0), (10, 0.75), (15, 0.5), (20, 0.25)]


def test_the_sdk_of_opentelemetry_exports_spans_of_steps(cluster: ServedCluster) -> None:
    pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with lockstep.connect(cluster.chief_address, timeout_s=20, otel=True) as session:
        session.create_or_join({"w": np.zeros(3)}, optimizer=lockstep.sgd(1.0), timeout_s=20)
        with trace.get_tracer("program").start_as_current_span("epoch"):
            for _ in range(3):
                session.step({"w": np.ones(3)}, timeout_s=20)
    spans = exporter.get_finished_spans()
    (epoch,) = [span for span in spans if span.name == "epoch"]
    steps = [span for span in spans if span.name == "lockstep.step"]
    assert len(steps) == 4 and steps[1].parent.span_id == epoch.context.span_id
    parts = [span for span in spans if span.parent is not None and span.parent.span_id == steps[1].context.span_id]
    assert {"lockstep.read", "lockstep.compute", "lockstep.push", "lockstep.await_token"} <= {span.name for span in parts}
    assert all(steps[1].start_time <= span.start_time <= span.end_time <= steps[1].end_time for span in parts)


@pytest.mark.parametrize("name", ["clicks", "words"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_pyarrow_reads_a_table_of_a_chain_of_deltas_as_numpy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int, name: str
) -> None:
    """Keys, or numbers of rows, and rows; in several groups."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    monkeypatch.setattr(checkpoint_export, "_GROUP_BYTES", 100)
    place = LocalStorage(tmp_path / "checkpoints")
    shards = [InProcessShard(index=index, storage=place) for index in range(num_shards)]
    training = ShardedTraining(shards=shards, model=model_of("adagrad"), checkpoint_dir=place.place)
    training.create()
    base = None
    for tag in ("full", "delta", "newest"):
        training.train(2)
        base = training.save(tag, base=base, has_deltas=True)
    for file, words in (("t.parquet", ["--variable", name]), ("all.npz", [])):
        assert main(["checkpoint", "export", str(tmp_path / file), *words, "--tag", "newest", "--checkpoint-dir", place.place]) == 0
    with zipfile.ZipFile(tmp_path / "all.npz") as archive:
        rows, *keys = [
            np.lib.format.read_array(archive.open(member), allow_pickle=False)
            for member in (f"{name}.npy", f"{name}@row keys.npy")
            if member in archive.namelist()
        ]
    read = parquet.read_table(tmp_path / "t.parquet")
    assert parquet.ParquetFile(tmp_path / "t.parquet").num_row_groups > 1
    np.testing.assert_array_equal(read["key"].to_numpy(), keys[0] if keys else np.arange(len(rows)))
    np.testing.assert_array_equal(np.array(read["row"].to_pylist(), np.float32), rows)
