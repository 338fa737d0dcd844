"""Those who have the weights: followers, and for comparison readers of all of it, by an observer, from a file over HTTP, by gloo."""

import threading
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import numpy as np

import worker_client
from benchmarks.harness.worker import Station
from benchmarks.harness.workload import own_cpu_s

WIRE = "bfloat16"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderWork:
    """`count` followers of the chief until a step; or so many readings of all of it, `kind` "observer", "http" or "gloo".

    `routes`: by the address of a role, where it is reached from here. `place`: of the file, or where those meet who broadcast.
    """

    kind: str
    count: int
    chief: str = ""
    last_step: int = 0
    counts_changes: bool = False
    routes: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    nbytes: int = 0
    rank: int = 0


def work(orders: dict[str, Any], station: Station) -> None:
    """Reads as one process."""
    reader = ReaderWork(**orders)
    direct = grpc.insecure_channel
    # The chief names the servers' own addresses; from here they lie behind a link.
    grpc.insecure_channel = lambda target, **more: direct(reader.routes.get(target, target), **more)
    if reader.kind == "followers":
        _follow(reader, station)
    else:
        read = {"observer": _observe, "http": _download, "gloo": _broadcast}[reader.kind](reader)
        took = []
        for _ in range(reader.count):
            begin = time.monotonic()
            read()
            took.append(time.monotonic() - begin)
        station.say("done", took=took)


def _follow(reader: ReaderWork, station: Station) -> None:
    everyone_is_there = threading.Barrier(reader.count, action=lambda: station.say("following"))

    def follow(_: int) -> dict[str, Any]:
        with worker_client.follow(reader.chief, wire=WIRE, timeout_s=_TIMEOUT_S) as weights:
            seen, shares = [(weights.wait(timeout_s=_TIMEOUT_S), time.monotonic(), weights.received_bytes)], []
            before = _bits(weights.arrays) if reader.counts_changes else None
            everyone_is_there.wait()
            while seen[-1][0] < reader.last_step:
                step = weights.wait(step=seen[-1][0] + 1, timeout_s=_TIMEOUT_S)
                seen.append((step, time.monotonic(), weights.received_bytes))
                if before is not None:
                    before, last = _bits(weights.arrays), before
                    shares.append(float(np.mean(before != last)))
            counts = {"patches": weights.num_patches, "wholes": weights.num_wholes, "mended": weights.num_mended}
            return {"seen": seen, "shares": shares, **counts}

    with ThreadPoolExecutor(reader.count) as threads:
        station.say("followed", followers=[*threads.map(follow, range(reader.count))], cpu_s=own_cpu_s())
    station.await_release()


def _bits(arrays: Mapping[str, Any]) -> Any:
    return np.concatenate([array.reshape(-1).view(np.uint32) for array in arrays.values()])


def _observe(reader: ReaderWork) -> Any:
    # Each reads once: what an observer has, it does not fetch again.
    observers = [worker_client.observe(reader.chief, wire=WIRE, timeout_s=_TIMEOUT_S) for _ in range(reader.count)]
    for observer in observers:
        observer.model()

    def observe() -> None:
        with observers.pop() as observer:
            observer.views()

    return observe


def _download(reader: ReaderWork) -> Any:
    from safetensors.numpy import load

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def download() -> None:
        with opener.open(reader.place, timeout=_TIMEOUT_S) as answer:
            load(answer.read())

    return download


def _broadcast(reader: ReaderWork) -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{reader.place}", rank=reader.rank, world_size=2, timeout=timedelta(seconds=300))
    weights = torch.zeros(reader.nbytes // 2, dtype=torch.bfloat16)

    def broadcast() -> None:
        dist.broadcast(weights, src=0)
        dist.barrier()

    return broadcast
