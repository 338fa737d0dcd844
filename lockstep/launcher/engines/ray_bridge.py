"""Makes an actor of Ray for each process that a launcher has on a node, and passes on what that process reads and writes.

A driver of Ray: `lockstep.ray.up()` has a `Bridge` in the user's program, `lockstep up --engine ray` in a process of its own.
"""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.launcher.remote import WAITS

# Where a worker finds the function that it runs, and leaves its result: a directory.
FUNCTION_VARIABLE = "LOCKSTEP_RAY_FUNCTION"
FUNCTION, RESULT = "function", "result"
# In what a process yields: bytes of its outputs, by their descriptors, and the file that it has left.
_OUT, _ERROR, _LEFT = 1, 2, 3
_SAY_AFTER_S = 2.0
# How long Ray may take to place the workers: it may have to start nodes for them.
PLACED_WITHIN_S = 120.0


@ray.remote(concurrency_groups={"input": 1, "output": 1})
class Place:
    """Runs one command on the node of this actor. When the actor ends, so does the command's standard input, and then the command."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._has_begun = threading.Event()

    def is_ready(self) -> bool:
        """Whether the node has given the actor what it takes."""
        return True

    @ray.method(concurrency_group="output")  # type: ignore[untyped-decorator]  # Ray may not be installed where types are checked
    def run(self, command: str, first: bytes, function: bytes | None) -> Iterator[tuple[int, bytes]]:
        """Yields the output of the command, whose input begins with `first`. With a function it yields its result, too, if there is one."""
        with tempfile.TemporaryDirectory(prefix="lockstep-") as directory:
            environment = {**os.environ, FUNCTION_VARIABLE: directory}
            if function is not None:
                Path(directory, FUNCTION).write_bytes(function)
                environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            self._process = process = subprocess.Popen(["sh", "-c", command], env=environment, bufsize=0, start_new_session=True, **pipes)
            assert process.stdout is not None and process.stderr is not None
            self._feed(process, first)
            self._has_begun.set()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ, _OUT)
                selector.register(process.stderr, selectors.EVENT_READ, _ERROR)
                while selector.get_map():
                    for key, _ in selector.select():
                        if data := os.read(key.fd, 1 << 16):
                            yield key.data, data
                        else:
                            selector.unregister(key.fileobj)
            process.wait()
            if (left := Path(directory, RESULT)).exists():
                yield _LEFT, left.read_bytes()

    @ray.method(concurrency_group="input")  # type: ignore[untyped-decorator]
    def write(self, data: bytes) -> None:
        """Writes to the command's standard input, once it has begun; nothing: closes it."""
        self._has_begun.wait()
        assert self._process is not None
        self._feed(self._process, data)

    def _feed(self, process: "subprocess.Popen[bytes]", data: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[process.stdin.write(data) :]
                if not data:
                    return
            process.stdin.close()


class Bridge:
    """Serves a socket for `ray_reach.py`, while this process is a driver of Ray.

    `for_workers`: what Ray gives to each worker, as options of an actor such as `num_gpus`; other processes take nothing. `strategy` and
    `placed_within_s`: how a placement group chooses the workers' nodes, and how long that may take. `function`: what workers find at
    FUNCTION_VARIABLE. `results`: what they have left, by name such as "worker 0".
    """

    def __init__(
        self,
        *,
        for_workers: Mapping[str, Any],
        strategy: str = "SPREAD",
        placed_within_s: float = PLACED_WITHIN_S,
        function: bytes | None = None,
    ) -> None:
        self.results: dict[str, bytes] = {}
        self._for_workers = {"num_cpus": 1, **for_workers}
        self._takes = takes_of(self._for_workers)
        self._strategy, self._placed_within_s = strategy, placed_within_s
        self._function = None if function is None else ray.put(function)
        self._directory = tempfile.TemporaryDirectory(prefix="lockstep-")
        self.path = str(Path(self._directory.name, "bridge"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen()
        threading.Thread(target=self._accept, name="lockstep-bridge", daemon=True).start()

    def close(self) -> None:
        """Takes no more commands. Those that run end with their actors."""
        self._socket.close()
        self._directory.cleanup()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has been closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), name="lockstep-bridge", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            if not descriptors:
                with contextlib.suppress(OSError):  # who has asked need not wait for long
                    connection.sendall(json.dumps(self._answer(**json.loads(data))).encode())
                return
            order, (source, *sinks) = json.loads(data), descriptors
            try:
                self._run(order["node"], order["command"], source, dict(zip((_OUT, _ERROR), sinks, strict=True)))
                connection.sendall(b"\n")
            except (RayError, OSError) as error:
                with contextlib.suppress(OSError):
                    os.write(sinks[1], f"{(str(error).splitlines() or [type(error).__name__])[0]}\n".encode())
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _answer(self, workers: int = 0) -> dict[str, Any]:
        """Returns the nodes that a worker can run on, or, once Ray has placed so many workers, that of each; or why it has not."""
        if not workers:
            return {"nodes": self._nodes()}
        try:
            group = placement_group([self._takes] * workers, strategy=self._strategy)
        except (RayError, ValueError) as error:
            return {"failure": str(error).splitlines()[0]}
        try:
            if not group.wait(_SAY_AFTER_S):
                print(f"waiting up to {self._placed_within_s:g} s until Ray has placed the workers; {self._lack(workers)}", file=sys.stderr)
                if not group.wait(max(0.0, self._placed_within_s - _SAY_AFTER_S)):
                    return {"failure": f"Ray has not placed the workers within {self._placed_within_s:g} s; {self._lack(workers)}"}
            nodes, placed = self._nodes(), placement_group_table(group)["bundles_to_node_id"]
            return {"nodes": sorted((node for node in nodes for one in placed.values() if one == node["id"]), key=nodes.index)}
        finally:
            # Workers take its room one by one. In a group, those of a lost node could go nowhere: Ray keeps their room where it likes.
            remove_placement_group(group)

    def _lack(self, workers: int) -> str:
        """Returns what Ray lacks for so many workers."""
        free, whole = ray.available_resources(), ray.cluster_resources()
        lacking = [
            f"{workers} workers need {amount * workers:g} {name}, and {free.get(name, 0):g} of {whole.get(name, 0):g} are free"
            for name, amount in self._takes.items()
            if amount * workers > free.get(name, 0)
        ]
        where = {"STRICT_PACK": "on one node", "STRICT_SPREAD": f"on {workers} nodes"}.get(self._strategy, "on nodes with all for a worker")
        takes = " and ".join(f"{amount:g} {name}" for name, amount in self._takes.items())
        return "; ".join(lacking) or f"{workers} workers of {takes} each do not fit {where}"

    def _nodes(self) -> list[dict[str, Any]]:
        """Returns the nodes that a worker can run on, this one first."""
        here = ray.get_runtime_context().get_node_id()
        found = [
            {"id": node["NodeID"], "name": node["NodeManagerHostname"], "address": node["NodeManagerAddress"]}
            for node in sorted(ray.nodes(), key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
            if node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in self._takes.items())
        ]
        for node in found:  # several nodes may be on one machine
            if [other["name"] for other in found].count(node["name"]) > 1:
                node["name"] = f"{node['name']}-{node['id'][:6]}"
        return found

    def _run(self, node: str, command: str, source: int, sinks: Mapping[int, int]) -> None:
        first = b""
        while not first.endswith(b"\n") and (data := os.read(source, 1 << 16)):
            first += data
        name = json.loads(first)["name"]
        is_worker = name.startswith("worker")
        takes = self._for_workers if is_worker else {"num_cpus": 0}
        where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        place = Place.options(scheduling_strategy=where, **takes).remote()  # type: ignore[attr-defined]
        try:
            room = " and ".join(f"{amount:g} {what}" for what, amount in takes_of(takes).items()) or "an actor"
            self._await(place, f"waiting until Ray has {room} for {name} on node {node[:6]}\n", sinks)
            threading.Thread(target=_pass_on, args=(source, place), name="lockstep-bridge", daemon=True).start()
            output = place.run.options(num_returns="streaming").remote(command, first, self._function if is_worker else None)
            for kind, data in map(ray.get, output):
                if kind == _LEFT:
                    self.results[name] = data
                while kind != _LEFT and data:
                    data = data[os.write(sinks[kind], data) :]
        finally:
            ray.kill(place)

    def _await(self, place: Any, words: str, sinks: Mapping[int, int]) -> None:
        """Waits until the actor is there, and says so after a while. Raises BrokenPipeError soon after who waits for it has ended."""
        ready = place.is_ready.remote()
        while not ray.wait([ready], timeout=_SAY_AFTER_S)[0]:
            os.write(sinks[_ERROR], words.encode())
            os.write(sinks[_OUT], WAITS)
            words = ""
        ray.get(ready)


def takes_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Returns what an actor of such options takes, as resources of Ray."""
    kind = options.get("accelerator_type")
    amounts = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
    amounts |= {f"accelerator_type:{kind}": 0.001 if kind else 0, **(options.get("resources") or {})}
    return {name: amount for name, amount in amounts.items() if amount}


def _pass_on(source: int, place: Any) -> None:
    """Passes on a standard input, and its end."""
    source = os.dup(source)
    try:
        while data := os.read(source, 1 << 16):
            place.write.remote(data)
        place.write.remote(b"")
    finally:
        os.close(source)


def main() -> int:
    """Serves until standard input ends, and prints the socket's path first."""
    is_over = threading.Event()
    threading.Thread(target=_see_end, args=(is_over,), name="lockstep-end", daemon=True).start()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        print(f"no Ray answers: {why}; start one by `ray start --head`, or name it in RAY_ADDRESS", file=sys.stderr)
        return 2
    bridge = Bridge(for_workers={})
    print(bridge.path, flush=True)
    is_over.wait()
    bridge.close()
    ray.shutdown()
    return 0


def _see_end(is_over: threading.Event) -> None:
    sys.stdin.read()
    is_over.set()
    if not ray.is_initialized():  # which it may try for minutes, and who waited for it has gone
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
