"""Text for a stream without a reader: the caller never blocks, the oldest lines are dropped and counted, the last ones stay."""

import io
import os
import pty
import re
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from ps_protocol.process.output import BoundedOutput, write_last
from tests.support.processes.unread import full_pipe
from tests.support.waiting import wait_until

LINE = "x" * 99 + "\n"


@contextmanager
def pipe() -> Iterator[tuple[int, TextIO]]:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        try:
            yield reader, stream
        finally:
            os.close(reader)


def fill(output: BoundedOutput, num_lines: int) -> None:
    for number in range(num_lines):
        output.write(f"{number:>10}{LINE}")


def read_to_the_end(reader: int, output: BoundedOutput) -> str:
    """Reads until all that waits has come."""
    os.set_blocking(reader, False)
    parts = []

    def read() -> bool:
        try:
            while data := os.read(reader, 1 << 16):
                parts.append(data)
        except BlockingIOError:
            pass
        return not output.is_behind

    wait_until(read, what="all is read")
    read()
    return b"".join(parts).decode()


def test_writer_is_not_blocked_and_what_was_dropped_is_counted() -> None:
    with full_pipe() as unread, open(os.dup(unread.descriptor), "w", encoding="utf-8") as stream:
        output = BoundedOutput(stream, max_bytes=10_000, prefix="[lockstep] ")
        fill(output, 50_000)
        output.write("the reason\n")
        lines = read_to_the_end(unread.reader, output).lstrip(" ").splitlines()
        output.close()
    assert lines[-1] == "the reason"
    marks = [
        int(match[1]) for line in lines if (match := re.fullmatch(r"\[lockstep\] … (\d+) lines dropped: nobody read the output", line))
    ]
    numbers = [int(match[1]) for line in lines if (match := re.fullmatch(r"\s*(\d+)x{99}", line))]
    assert 1 <= len(marks) <= 2 and len(numbers) + len(marks) + 1 == len(lines)
    assert len(numbers) + sum(marks) == 50_000
    assert numbers == sorted(numbers) and numbers[-80:] == [*range(49_920, 50_000)]


def test_nothing_is_dropped_while_somebody_reads() -> None:
    with pipe() as (reader, stream), BoundedOutput(stream) as output:
        fill(output, 5_000)
        lines = read_to_the_end(reader, output).splitlines()
        assert [int(line[:10]) for line in lines] == [*range(5_000)]


def test_closing_an_output_waits_for_a_slow_reader_and_only_for_its_limit_without_one() -> None:
    with pipe() as (reader, stream):
        output = BoundedOutput(stream)
        fill(output, 5_000)
        parts: list[bytes] = []

        def read_slowly() -> None:
            while not parts or not parts[-1].endswith(b"the end\n"):
                parts.append(os.read(reader, 2_000))

        thread = threading.Thread(target=read_slowly)
        output.write("the end\n")
        thread.start()
        output.close()
        thread.join(10.0)
        assert len(b"".join(parts).splitlines()) == 5_001
    with pipe() as (_, stream):
        output = BoundedOutput(stream, timeout_s=0.1)
        fill(output, 5_000)
        begin = time.monotonic()
        output.close()
        assert time.monotonic() - begin < 2.0


def test_hurried_end_writes_the_last_lines_first() -> None:
    with pipe() as (reader, stream):
        output = BoundedOutput(stream)
        fill(output, 5_000)
        output.write("ended\n")
        output.hurry()
        begin = time.monotonic()
        output.close()
        assert time.monotonic() - begin < 2.0
        lines = read_to_the_end(reader, output).splitlines()
        assert lines[-1] == "ended" and len(lines) < 1_500


def test_stopped_terminal_blocks_nobody() -> None:
    controller, terminal = pty.openpty()
    with open(terminal, "w", encoding="utf-8") as stream:
        termios.tcflow(terminal, termios.TCOOFF)  # what Ctrl-S does
        output = BoundedOutput(stream, max_bytes=10_000)
        assert output.isatty()
        fill(output, 10_000)
        output.write("the reason\n")
        termios.tcflow(terminal, termios.TCOON)
        out = read_to_the_end(controller, output)
        output.close()
    os.close(controller)
    assert "lines dropped" in out and out.endswith("the reason\r\n")


def test_a_write_after_the_reader_is_gone_raises_broken_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stream, BoundedOutput(stream) as output:
        output.write("one\n")
        wait_until(lambda: not output.is_behind)
        with pytest.raises(BrokenPipeError):
            output.write("two\n")


def test_the_last_message_of_a_process_can_be_written_to_any_kind_of_stream() -> None:
    memory = io.StringIO()
    write_last(memory, "words ü\n")
    assert memory.getvalue() == "words ü\n"
    write_last(None, "nobody hears\n")
    assert sys.stderr is not None
