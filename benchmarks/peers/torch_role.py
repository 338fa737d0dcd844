"""Trains one PyTorch model: with DistributedDataParallel, lockstep.torch, a plain session, or alone. Runs in torch's environment.

After the warm-up, the first worker records each step's time, and the CPU time of all processes of the training.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

WIDTHS = {"mlp-4.5MiB": (784, 1024, 360, 10), "mlp-64MiB": (2048, 4096, 2048)}
MODELS = (*WIDTHS, "cnn-0.6MiB", "transformer-5M", "table-1M")
KINDS = ("alone", "ddp", "lockstep", "by-hand")
BATCH = 32
ROWS, ROW_LENGTH, NUM_IDS = 1_000_000, 16, 64


def network(kind: str, name: str) -> tuple[Any, Any, Any]:
    """Returns a model, a batch, and the batch's targets."""
    if name == "table-1M":
        is_here = kind in ("alone", "ddp")
        bag: Any = nn.EmbeddingBag(ROWS, ROW_LENGTH, mode="sum", sparse=True) if is_here else _bag_on_servers()
        return nn.Sequential(bag, nn.Linear(ROW_LENGTH, 1)), torch.randint(ROWS, (BATCH, NUM_IDS)), torch.randn(BATCH, 1)
    if name in WIDTHS:
        widths = WIDTHS[name]
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(BATCH, widths[0]), torch.randn(BATCH, widths[-1])
    if name == "cnn-0.6MiB":
        convolutions = (nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU())
        head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3136, 44), nn.ReLU(), nn.Linear(44, 10))
        return nn.Sequential(*convolutions, *head), torch.randn(BATCH, 1, 28, 28), torch.randn(BATCH, 10)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(1000, 256), encoder), torch.randint(1000, (8, 32)), torch.randn(8, 32, 256)


def main() -> None:
    """Trains for some steps and writes their times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.torch_role")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, given, wanted = (one.to(options.device) for one in network(options.kind, options.model))
    step, is_first = _TRAININGS[options.kind](model, given, wanted)
    times: list[float] = []
    num_warm = max(3, options.steps // 5)
    cpu_before = 0.0
    for number in range(num_warm + options.steps):
        if number == num_warm and is_first:
            cpu_before = _cpu_s()
        start = time.perf_counter()
        step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        if number >= num_warm:
            times.append(time.perf_counter() - start)
    if is_first:
        cpu_s = (_cpu_s() - cpu_before) / options.steps
        num_rows = given.numel() if options.model.startswith("table") else 0
        found = {"step_ms": statistics.median(times) * 1e3, "cpu_ms": cpu_s * 1e3, "rows": num_rows}
        options.out.write_text(json.dumps(found))


def _cpu_s() -> float:
    """Returns the CPU time so far of all processes of the training, the children of this process's parent."""
    total = 0.0
    for process in psutil.Process(os.getppid()).children(recursive=True):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _bag_on_servers() -> Any:
    import lockstep.torch as lt

    return lt.EmbeddingBag(ROWS, ROW_LENGTH, mode="sum")


def _ddp(model: Any, given: Any, wanted: Any) -> tuple[Callable[[], None], bool]:
    torch.distributed.init_process_group("gloo")
    parallel = nn.parallel.DistributedDataParallel(model)
    return _plain(parallel, _optimizers(model), given, wanted), torch.distributed.get_rank() == 0


def _alone(model: Any, given: Any, wanted: Any) -> tuple[Callable[[], None], bool]:
    return _plain(model, _optimizers(model), given, wanted), True


def _optimizers(model: Any) -> list[Any]:
    tables = [one.weight for one in model if isinstance(one, nn.EmbeddingBag)] if isinstance(model, nn.Sequential) else []
    dense = [one for one in model.parameters() if all(one is not table for table in tables)]
    return [torch.optim.AdamW(dense, lr=1e-4), *(torch.optim.SparseAdam([table], lr=1e-4) for table in tables)]


def _lockstep(model: Any, given: Any, wanted: Any) -> tuple[Callable[[], None], bool]:
    import lockstep.torch as lt

    optimizer = lt.Optimizer(None, model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    return _plain(model, [optimizer], given, wanted), optimizer.worker_index == 0


def _plain(model: Any, optimizers: list[Any], given: Any, wanted: Any) -> Callable[[], None]:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(model(given), wanted).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def _by_hand(model: Any, given: Any, wanted: Any) -> tuple[Callable[[], None], bool]:
    """Trains without the adapter, with a session and NumPy arrays, as in the README."""
    import lockstep

    session = lockstep.connect()
    parameters = dict(model.named_parameters())
    session.create_or_join({name: one.detach().cpu().numpy().copy() for name, one in parameters.items()}, optimizer=lockstep.adamw(1e-4))

    def step() -> None:
        with torch.no_grad():
            for name, value in session.read().items():
                parameters[name].copy_(torch.from_numpy(value))
        model.zero_grad()
        nn.functional.mse_loss(model(given), wanted).backward()
        session.step({name: one.grad.cpu().numpy() for name, one in parameters.items()})

    return step, session.worker_index == 0


_TRAININGS: dict[str, Callable[[Any, Any, Any], tuple[Callable[[], None], bool]]] = {
    "alone": _alone,
    "ddp": _ddp,
    "lockstep": _lockstep,
    "by-hand": _by_hand,
}

if __name__ == "__main__":
    main()
