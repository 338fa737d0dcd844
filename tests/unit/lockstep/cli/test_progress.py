"""Progress: nothing for quick work, a bar on a terminal, a line at intervals elsewhere."""

import io

from lockstep.cli.formatting import bytes_text
from lockstep.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Scene:
    """Something of a hundred parts, each of which takes a while."""

    def __init__(self, stream: io.StringIO, *, part_s: float, total: int = 100) -> None:
        self.now = 0.0
        progress = Progress("verifying it", words=bytes_text, stream=stream, clock=lambda: self.now)
        for _ in range(100):
            self.now += part_s
            progress.advance(1 << 20, total=total << 20)
        progress.close()


def test_quick_work_shows_no_progress() -> None:
    for stream in (io.StringIO(), Terminal()):
        Scene(stream, part_s=0.019)
        assert stream.getvalue() == ""


def test_a_file_gets_a_line_every_few_seconds() -> None:
    stream = io.StringIO()
    Scene(stream, part_s=0.25)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5, lines
    assert lines[0] == "verifying it: 8.0 MiB of 100.0 MiB (8 %), about 23.0 s left"
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_a_terminal_gets_a_bar_that_is_gone_in_the_end() -> None:
    stream = Terminal()
    Scene(stream, part_s=0.25)
    assert "[███████████████░░░░░░░░░░░░░░░] 50.0 MiB of 100.0 MiB (50 %), about 12.5 s left" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_long_part_has_its_progress_shown_again() -> None:
    stream, now = io.StringIO(), 0.0
    progress = Progress("measuring", stream=stream, clock=lambda: now)
    progress.advance(3, total=21)
    now = 30.0
    progress.advance(0, total=21)
    assert stream.getvalue() == "measuring: 3 of 21 (14 %), about 3 min left\n"


def test_progress_without_a_known_total_is_shown() -> None:
    stream = io.StringIO()
    Scene(stream, part_s=0.25, total=0)
    assert stream.getvalue().splitlines()[0] == "verifying it: 8.0 MiB in 2.0 s"
