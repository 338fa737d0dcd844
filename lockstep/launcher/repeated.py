"""Shows a traceback that several workers print only once: a mistake in the program occurs in every worker. Knows lines; no process."""

from collections.abc import Iterable

_BEGIN = "Traceback (most recent call last):"
_MAX_KEPT = 16


class RepeatedTracebacks:
    """Decides line by line which output of the workers is shown."""

    def __init__(self) -> None:
        self._known: list[tuple[str, list[str]]] = []  # shown tracebacks, each with the name of its process
        self._own: dict[str, list[str]] = {}  # by process: the traceback that it is printing now and that is shown
        # By process: lines held back while they equal the beginning of a shown traceback, and that traceback.
        self._held: dict[str, tuple[list[str], tuple[str, list[str]]]] = {}

    def shown(self, name: str, line: str) -> Iterable[str]:
        """Returns the lines to show now that `name` has printed this one."""
        if name in self._held:
            return self._compared(name, line)
        if line == _BEGIN:
            known = next((one for one in self._known if one[0] != name), None)
            if known is not None:
                self._held[name] = [line], known
                return ()
            self._begin(name, [line])
        elif name in self._own:
            self._own[name].append(line)
            if _is_last(line):
                del self._own[name]
        return (line,)

    def _compared(self, name: str, line: str) -> Iterable[str]:
        lines, known = self._held[name]
        lines.append(line)
        while lines != known[1][: len(lines)]:
            following = self._next(known, name)
            if following is None:
                del self._held[name]
                self._begin(name, lines)
                return tuple(lines)
            known = following
        self._held[name] = lines, known
        if not _is_last(line):
            return ()
        del self._held[name]
        return (f"{line}   (the traceback is that of {known[0]})",)

    def _next(self, known: tuple[str, list[str]], name: str) -> "tuple[str, list[str]] | None":
        later = self._known[self._known.index(known) + 1 :]
        return next((one for one in later if one[0] != name), None)

    def _begin(self, name: str, lines: list[str]) -> None:
        if len(self._known) < _MAX_KEPT:
            self._known.append((name, lines))
            if not _is_last(lines[-1]):
                self._own[name] = lines


def _is_last(line: str) -> bool:
    """Whether a line of a traceback is its last one: the error, which is not indented."""
    return line != _BEGIN and not line.startswith(" ")


def without_traceback(lines: Iterable[str]) -> list[str]:
    """Returns lines with tracebacks reduced to their errors. The first lines may be the rest of a traceback."""
    kept, body, is_inside = [], list[str](), True
    for line in lines:
        if line == _BEGIN:
            kept += body if is_inside and not _has_frames(body) else []
            body, is_inside = [line], True
        elif is_inside and line.startswith(" "):
            body.append(line)
        else:
            kept += [] if _has_frames(body) else body
            body, is_inside = [], False
            kept.append(line)
    return kept + body


def _has_frames(lines: list[str]) -> bool:
    return any(line.startswith('  File "') for line in lines)
