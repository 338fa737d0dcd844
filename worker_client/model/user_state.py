"""The program's own state that travels with its contributions: a mapping of plain values, sent as JSON. Knows no step and no call.

Each value is encoded when it is set. So the line that sets a wrong value raises the error, and a step spends no time on unchanged values.
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage
from ps_protocol.roles.contribution import MAX_USER_STATE_BYTES

_MAX_DEPTH = 32
_MAX_KEY = 256
# A value that JSON has no type for becomes an object of one entry with such a name.
_BYTES, _ARRAY = "$bytes", "$array"
_ARRAY_KINDS = "biuf"


class UserState(MutableMapping[str, Any]):
    """The state that a worker's program keeps with the training: names to values of JSON, bytes and arrays, at most 64 KiB as JSON.

    Setting a value copies it, and reading one makes a new copy: to change a list or dict, set it again. Tuples come back as lists. Raises
    InvalidSpec or LimitExceeded with the name of the wrong value; nothing has changed then.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        # The length of the JSON text: the opening brace, and each entry with the comma or brace after it.
        self._num_bytes = 1
        # The state that the chief has, as far as is known; and whether this one may differ.
        self._known = "{}"
        self._has_changed = False

    def __getitem__(self, name: str) -> Any:
        return _decode(self._texts[name])

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_KEY:
            raise InvalidSpec(f"user_state: got the name {str(name)[:40]!r}, want a str of 1 to {_MAX_KEY} characters")
        text = _encode(value, where=f"user_state[{name!r}]")
        num_bytes = self._num_bytes + len(_entry(name, text)) - self._size_of(name)
        if num_bytes > MAX_USER_STATE_BYTES:
            raise LimitExceeded(
                f"user_state[{name!r}]: with its {len(text)} bytes the state has {num_bytes} bytes as JSON, {MAX_USER_STATE_BYTES} at most;"
                " keep what is larger in variables or in files"
            )
        self._texts[name], self._num_bytes, self._has_changed = text, num_bytes, True

    def __delitem__(self, name: str) -> None:
        self._num_bytes -= self._size_of(name)
        del self._texts[name]
        self._has_changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._texts))

    def __len__(self) -> int:
        return len(self._texts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"

    def to_send(self) -> str:
        """Returns the state as JSON, to travel with a contribution; empty if the chief has it already."""
        if not self._has_changed:
            return ""
        text = self._json()
        if text == self._known:
            self._has_changed = False
            return ""
        return text

    def counted(self, text: str) -> None:
        """Notes that a contribution with this state counts, so that the chief has it."""
        self._known, self._has_changed = text, text != self._json()

    def restore(self, text: str) -> None:
        """Replaces all values by the state that the cluster has for this worker (empty: none).

        Raises MalformedMessage if it cannot be read.
        """
        try:
            values = json.loads(text or "{}")
            texts = {name: _text(value) for name, value in values.items()}
            for one in texts.values():
                _decode(one)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise MalformedMessage(f"the state of this worker's program is not one: {str(error)[:80]}") from None
        self._texts = texts
        self._num_bytes = 1 + sum(map(self._size_of, texts))
        self._known, self._has_changed = self._json(), False

    def clear_unreadable(self, text: str) -> None:
        """Removes all values, after `restore` refused the cluster's state; the next contribution that counts replaces that state."""
        self._texts, self._num_bytes = {}, 1
        self._known, self._has_changed = text, True

    def _json(self) -> str:
        return "{" + "".join(_entry(name, text) for name, text in self._texts.items())[:-1] + "}" if self._texts else "{}"

    def _size_of(self, name: str) -> int:
        return len(_entry(name, self._texts[name])) if name in self._texts else 0


def _entry(name: str, text: str) -> str:
    return f"{json.dumps(name)}:{text},"


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _encode(value: Any, *, where: str) -> str:
    plain = _plain(value, where, 0)
    try:
        return _text(plain)
    except ValueError as error:  # Python refuses to write an integer of thousands of digits
        raise InvalidSpec(f"{where}: {error}") from None


def _plain(value: Any, where: str, depth: int) -> Any:
    """Returns a value in types that JSON has. Raises InvalidSpec with the place of a part that cannot be encoded."""
    if depth > _MAX_DEPTH:
        raise InvalidSpec(f"{where}: more than {_MAX_DEPTH} lists and dicts within each other")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidSpec(f"{where}: got {value}, which JSON has no number for; leave it out, or set None, until there is a finite one")
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or name in (_BYTES, _ARRAY):
                raise InvalidSpec(f"{where}: got the key {name!r}, want a str other than {_BYTES!r} and {_ARRAY!r}")
        return {name: _plain(one, f"{where}[{name!r}]", depth + 1) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, f"{where}[{index}]", depth + 1) for index, one in enumerate(value)]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        little = value.astype(value.dtype.newbyteorder("<"), order="C", copy=False)
        return {_ARRAY: [little.dtype.str, list(value.shape), base64.b64encode(little.tobytes()).decode()]}
    if getattr(value, "ndim", None) == 0 and callable(item := getattr(value, "item", None)):
        return _plain(item(), where, depth + 1)  # a number of another library, such as a loss
    raise InvalidSpec(
        f"{where}: got a {type(value).__name__}, want None, a bool, number, str, bytes, NumPy array of numbers,"
        " or a list or dict of these; give a tensor's .numpy()"
    )


def _decode(text: str) -> Any:
    return json.loads(text, object_hook=_special)


def _special(value: dict[str, Any]) -> Any:
    if _BYTES in value:
        return base64.b64decode(value[_BYTES], validate=True)
    if _ARRAY in value:
        code, shape, content = value[_ARRAY]
        dtype = np.dtype(code)
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"an array of {code!r}")
        return np.frombuffer(base64.b64decode(content, validate=True), dtype).reshape(shape).copy()
    return value
