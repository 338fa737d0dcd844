"""Draws the live table of a demo with rich. Imported only if there is a terminal."""

from collections.abc import Sequence
from types import TracebackType
from typing import IO, Self, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.demo.observer import DemoStatus, WorkerCounts
from lockstep.launcher.supervisor import Process, describe_end
from ps_protocol.process.output import BoundedOutput


class LiveDisplay:
    """A table that is redrawn in place."""

    def __init__(self, output: BoundedOutput, *, num_steps: int) -> None:
        self._output = output
        self._num_steps = num_steps
        console = Console(file=cast(IO[str], output))  # rich writes whole frames to it, and asks whether it is a terminal
        # Drawn only in `show`, from the caller's thread.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Prints a message above the table."""
        self._live.console.print(Text(text))

    def show(self, status: DemoStatus | None, processes: Sequence[Process]) -> None:
        """Draws the table, unless the last frame is still unread: a frame that is dropped later would leave its lines on the screen."""
        if self._output.is_behind:
            return
        headline = self._headline(status) if status else Text("waiting for the first worker to give the model its first values …")
        self._live.update(Group(headline, Text(), _process_table(status, processes)), refresh=True)

    def _headline(self, status: DemoStatus) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for _ in range(7):
            table.add_column(justify="left")
        table.add_row("step", "", "loss", "test accuracy", "steps/s", "stale / late", "staleness up to", style="dim")
        table.add_row(
            f"{status.step} of {self._num_steps}",
            ProgressBar(total=self._num_steps, completed=status.step, width=24),
            f"{status.loss:.4f}",
            Text(f"{status.test_accuracy:.1%}", style="bold green" if status.test_accuracy >= 0.95 else "bold"),
            f"{status.steps_per_s:.1f}",
            f"{status.num_stale} / {status.num_late}",
            str(status.max_staleness),
        )
        return Group(table, Text(f"waiting: {status.waiting_for}", style="yellow")) if status.waiting_for else table


def _process_table(status: DemoStatus | None, processes: Sequence[Process]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading, justify in (("process", "left"), ("pid", "right"), ("state", "left"), ("contributions", "right"), ("dropped", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left", header_style="dim")
    workers = {f"worker {worker.index}": worker for worker in status.workers} if status else {}
    for process in processes:
        table.add_row(*_process_row(process, workers.get(process.name)))
    return table


def _process_row(process: Process, worker: WorkerCounts | None) -> list[RenderableType]:
    style = "green" if process.is_running else "dim" if process.returncode == 0 else "bold red"
    counts = [str(worker.num_accepted), str(worker.num_late + worker.num_stale)] if worker else ["", ""]
    return [process.name, str(process.pid), Text(_state_of(process), style=style), *counts]


def _state_of(process: Process) -> str:
    return "running" if process.returncode is None else "ended" if process.returncode == 0 else describe_end(process.returncode)
