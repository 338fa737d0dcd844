"""A cluster of processes whose workers contribute by the script and keep diaries, behind relays if its plan says so."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.relay import Conditions, Relay
from ps_protocol.roles.chief import FinishTrainingRequest
from tests.chaos import claims, script
from tests.chaos.plan import Plan
from tests.support.cluster.processes import ProcessCluster

Event = Mapping[str, Any]


class Cluster(ProcessCluster):
    """Diaries lie in `directory`, too."""

    plan: Plan

    def __init__(self, plan: Plan, stack: ExitStack, *, directory: Path, sockets: Path) -> None:
        super().__init__(plan, stack, directory=directory, sockets=sockets)
        self.chief_conditions, self.worker_conditions = Conditions(), Conditions()
        self.worker_to_chief, self.lonely_conditions = Conditions(), Conditions()
        self.own_conditions = Conditions()  # of the test itself
        self.proxies: list[Relay] = []
        if plan.has_proxies:
            ways = [partial(self._conditions_of, index) for index in range(plan.num_ps)]
            relays = (Relay(f"unix:{sockets}/ps{index}", conditions_of=way) for index, way in enumerate(ways))
            self.proxies = [stack.enter_context(relay) for relay in relays]
            self.chief_proxy = stack.enter_context(Relay(f"unix:{sockets}/chief", conditions_of=lambda pid: self.worker_to_chief))

    def rollbacks(self) -> int:
        """How often workers were told of one, and how often the epoch has risen."""
        return claims.rollbacks(self.events())

    def events(self, index: int | None = None) -> list[Event]:
        """What workers have written down (`index`: one of them), by time."""
        paths = self.directory.glob("worker-*.jsonl" if index is None else f"worker-{index}.jsonl")
        lines = [(path.stem.partition("-")[2], line) for path in paths for line in path.read_bytes().splitlines()]
        return sorted(({"worker": int(worker), **json.loads(line)} for worker, line in lines), key=lambda event: event["at"])

    def reached(self) -> int:
        """The newest step that a worker has."""
        return max((event.get("after", event.get("step", 0)) for event in self.events()), default=0)

    def await_step(self, step: int, *, timeout_s: float = 40.0) -> None:
        """Waits until a worker has this step."""
        self.await_(lambda: self.reached() >= step, what=f"step {step} is reached", timeout_s=timeout_s)

    def await_standstill(self, *, silence_s: float = 3.0, timeout_s: float = 20.0) -> float:
        """Waits until no step has been made for longer than any patience within a call would make of it; returns when."""

        def stands() -> bool:
            latest = max(event["at"] for event in self.events() if event["event"] == "step")
            return bool(time.monotonic() > latest + silence_s)

        self.await_(stands, what="the cluster stands still", timeout_s=timeout_s)
        return time.monotonic()

    def waiting_for(self) -> str:
        """What the chief says that it waits for; "" if it says nothing."""
        status = self.status()
        return status.waiting_for if status is not None else ""

    def finish(self) -> int:
        """Ends the training by order, waits until all have ended, and returns the last step."""
        self.client().call(FinishTrainingRequest(reason="the test has seen enough"))
        self.await_end()
        (last,) = {event["step"] for event in self.events() if event["event"] == "finished"}
        return int(last)

    def assert_as_without_faults(self, *, num_steps: int | None = None) -> None:
        """Every worker has, bit for bit, the values of a run in which nothing happened, and was told of each of its steps once."""
        claims.assert_each_step_once(self.events())
        self.assert_values(script.reference(num_steps=num_steps or self.plan.max_steps, num_workers=self.plan.num_workers))

    def assert_values(self, expected: script.Values) -> None:
        """Every worker has, bit for bit, these values in the end."""
        for index in range(self.plan.num_workers):
            script.assert_same_bytes(script.load(self._values(index)), expected)

    def standstill_s(self, since: float) -> float:
        """The longest time after `since` in which no worker got a step done."""
        return claims.standstill_s(self.events(), since)

    def contributing_s(self, index: int) -> float:
        """How long the newest process of a worker took from the beginning of its program to its first step."""
        return claims.contributing_s(self.events(index))

    def _values(self, index: int) -> Path:
        return self.directory / f"worker-{index}.npz"

    @property
    def _server_addresses(self) -> list[str]:
        return [proxy.address for proxy in self.proxies] or super()._server_addresses

    @property
    def _before_chief(self) -> Sequence[str]:
        return ["tests.chaos.behind_proxy", self.chief_proxy.address] if self.plan.has_proxies else []

    def _worker_flags(self, index: int) -> Sequence[str]:
        address = self.chief_proxy.address if self.plan.has_proxies else self.chief_address
        flags = ["--chief", address, "--index", str(index), "--pace", str(self.plan.pace_s)]
        flags += ["--diary", str(self.directory / f"worker-{index}.jsonl"), "--values", str(self._values(index))]
        return [*flags, *(self.plan.worker_flags or {}).get(index, ())]

    def _conditions_of(self, server: int, pid: int) -> Conditions:
        if pid == os.getpid():
            return self.own_conditions
        name = self.name_of(pid)
        if (name, server) == self.plan.lonely:
            return self.lonely_conditions
        return self.worker_conditions if name.startswith("worker") else self.chief_conditions
