"""Objects of Kubernetes as YAML for people to read. Knows dicts, lists and scalars; no Kubernetes.

A key that begins with # is a comment in front of the next key, and its value counts for nothing. A `Verbatim` is written as it is.
"""

import json
import re
from collections.abc import Sequence

# What cannot be taken for anything but a string. Versions of YAML differ about words such as `off`, so they are quoted.
_PLAIN = re.compile(r"-{0,2}[A-Za-z/$][\w./$()*=@-]*(:[\w./-]+)*")
_WORDS = re.compile(r"true|false|yes|no|on|off|null|y|n", re.IGNORECASE)
_MAX_LINE = 100


class Verbatim(str):
    """A scalar that is YAML only once somebody has filled it in: an expression of a template."""

    __slots__ = ()


def yaml_of(documents: Sequence[object]) -> str:
    """Returns the documents as one text."""
    return "---\n".join("\n".join([*_block(document), ""]) for document in documents)


def _block(node: object) -> list[str]:
    lines: list[str] = []
    if isinstance(node, dict):
        for key, value in node.items():
            if key.startswith("#"):
                lines.append(key)
            elif _fits(value):
                lines.append(f"{_flow(key)}: {_flow(value)}")
            else:
                lines += [f"{_flow(key)}:", *(f"  {line}" for line in _block(value))]
    elif isinstance(node, list):
        for value in node:
            inner = [_flow(value)] if _fits(value) else _block(value)
            lines += [f"{'  ' if number else '- '}{line}" for number, line in enumerate(inner)]
    return lines


def _fits(node: object) -> bool:
    return not isinstance(node, dict | list) or (len(line := _flow(node)) <= _MAX_LINE and "#" not in line)


def _flow(node: object) -> str:
    """Returns a node on one line."""
    if isinstance(node, dict):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(value)}' for key, value in node.items())}}}"
    if isinstance(node, list):
        return f"[{', '.join(map(_flow, node))}]"
    if isinstance(node, Verbatim):
        return str(node)
    if isinstance(node, str) and _PLAIN.fullmatch(node) and not _WORDS.fullmatch(node):
        return node
    # What JSON has is YAML, but for characters outside of ASCII.
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(node, ensure_ascii=False))
