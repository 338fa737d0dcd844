"""Bearer tokens: their files, read again when they change, and the role of each. Knows files and the clock; no gRPC and no method."""

import hashlib
import logging
import math
import os
import secrets
import stat
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ps_protocol.errors import InvalidSpec, Unauthenticated
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.options import check_token

log = logging.getLogger("lockstep.rpc")

_MAX_FILE_BYTES = 1 << 20
# How soon a changed file counts.
LOOK_INTERVAL_S = 1.0
# A file of this name beside a Unix socket has the tokens for it: what a launcher leaves there for everything on this machine.
BESIDE_SOCKET = "tokens"
_KEY, _SCHEME = "authorization", "Bearer "
# Observers and operators may use another role's token, as far as that role may.
_STAND_INS = {
    CallerRole.OBSERVER: (CallerRole.WORKER, CallerRole.ADMIN),
    CallerRole.ADMIN: (CallerRole.WORKER, CallerRole.OBSERVER),
}


def new_token() -> str:
    """Returns a random token of 256 bits."""
    return secrets.token_hex(32)


def new_token_lines() -> str:
    """Returns the text of a token file with a new token for each role."""
    return "".join(f"{role.value} {new_token()}\n" for role in CallerRole)


def write_secret(path: Path, text: str | bytes) -> None:
    """Writes a file that only its owner can read; an existing one is replaced whole. Raises OSError."""
    # Not only the process number: in a container it is the same after each start, and one that was killed may have left its file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    temporary.replace(path)


@light_dataclass(frozen=True, slots=True)
class Grant:
    """What a token stands for: a role, None for that of the caller; and the time of the epoch, in seconds, at which it ends."""

    role: CallerRole | None
    ends_s: float = math.inf


def parse_tokens(text: str, *, name: str) -> dict[str, Grant]:
    """Returns the tokens of a file in its order. Raises InvalidSpec, which quotes no token.

    A line is a token, or a role and a token, or these and the time at which the token ends: 2026-12-31, or 2026-12-31T18:00Z. UTC, unless
    the time says otherwise.
    """
    tokens: dict[str, Grant] = {}
    roles = {role.value: role for role in CallerRole}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 3 or (len(words) > 1 and words[0] not in roles):
            raise InvalidSpec(
                f"{name} line {number}: want a role, a token, and the time at which it ends if it does; the roles are {', '.join(roles)}"
            )
        role, token = (roles[words[0]], words[1]) if len(words) > 1 else (None, words[0])
        check_token(token, f"{name} line {number}")
        grant = Grant(role, _time_of(words[2], f"{name} line {number}") if len(words) > 2 else math.inf)
        if tokens.setdefault(token, grant) != grant:
            raise InvalidSpec(f"{name} line {number}: one token for two roles or with two ends; give each line a token of its own")
    if not tokens:
        raise InvalidSpec(f"{name}: there is no token in it; want lines like: worker {'0123456789abcdef' * 2}")
    return tokens


def token_of(path: Path, role: CallerRole) -> str:
    """Returns the first token of a role in a file. Raises InvalidSpec if there is none, or the file cannot be read."""
    try:
        tokens = parse_tokens(path.read_text(encoding="utf-8"), name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    for token, grant in tokens.items():
        if grant.role is role:
            return token
    raise InvalidSpec(f"{path}: there is no token for the role {role.value} in it")


class WatchedFile:
    """A small text file whose newest whole content counts. Thread-safe; checks the file once a second at most.

    With `settles`, a file that was written to in place counts when two looks have found it the same: it may be half written. One that was
    replaced counts at once.
    """

    def __init__(self, path: Path, *, settles: bool = False) -> None:
        self.path, self._settles = path, settles
        self._lock = threading.Lock()
        self._next_look = 0.0
        self._seen: tuple[int, ...] = ()
        self._unsettled: tuple[int, ...] = ()
        self._failure = ""  # why it could not be read again, as was said

    def changed(self) -> str | None:
        """Returns the text if it is not the one that was returned last; None also when there is nothing new to see or it is not to be read.

        Raises InvalidSpec if it has never been read.
        """
        if time.monotonic() < self._next_look or not self._lock.acquire(blocking=False):
            return None
        try:
            self._next_look = time.monotonic() + LOOK_INTERVAL_S
            text, self._failure = self._read(), ""
            return text
        except (OSError, UnicodeDecodeError) as error:
            words = getattr(error, "strerror", None) or "it is no text"
            if not self._seen:
                raise InvalidSpec(f"cannot read {self.path}: {words}") from None
            if words != self._failure:
                log.warning("cannot read a token file again, the tokens read before stay good path=%s cause=%s", self.path, words)
            self._failure = words
            return None
        finally:
            self._lock.release()

    def _read(self) -> str | None:
        about = os.stat(self.path)
        # The inode too: a file that is replaced within one tick of the clock, with one of the same size.
        seen = (about.st_ino, about.st_mtime_ns, about.st_size, about.st_ctime_ns)
        if seen == self._seen:
            return None
        if self._settles and self._seen and seen[0] == self._seen[0] and seen != self._unsettled:
            self._unsettled = seen
            return None
        if about.st_size > _MAX_FILE_BYTES:
            raise OSError(0, f"it has over {_MAX_FILE_BYTES} bytes")
        text = self.path.read_text(encoding="utf-8")
        if not self._seen and about.st_mode & (stat.S_IROTH | stat.S_IWOTH):
            log.warning("others can read or write this file of tokens; chmod 600 it path=%s", self.path)
        self._seen = seen
        return text


class TokenTable:
    """The roles of tokens, by a file that may change. Thread-safe; `role_of` never waits. Raises InvalidSpec for a bad file."""

    def __init__(self, path: Path) -> None:
        self._file = WatchedFile(path, settles=True)
        self._grants: dict[bytes, Grant] = {}
        self._next_end_s = math.inf
        # Rises whenever other tokens are good than before.
        self.version = 0
        self._load(self._file.changed() or "")

    def role_of(self, authorization: str | bytes | None) -> CallerRole:
        """Returns the role of the holder of the token in a header "Bearer …". Raises Unauthenticated."""
        self.renew()
        if not authorization:
            raise Unauthenticated("missing token. Set LOCKSTEP_TOKEN_FILE or pass token=")
        given = authorization.decode("utf-8", "replace") if isinstance(authorization, bytes) else authorization
        # By digest: how long the search takes says nothing about a token.
        grant = self._grants.get(_digest(given.removeprefix(_SCHEME))) if given.startswith(_SCHEME) else None
        if grant is None or grant.role is None:
            raise Unauthenticated("invalid token")
        if time.time() >= grant.ends_s:
            ended = datetime.fromtimestamp(grant.ends_s, UTC).isoformat(timespec="minutes")
            raise Unauthenticated(f"the token ended at {ended}. Ask for a new one")
        return grant.role

    def is_token_of(self, role: CallerRole, authorization: str | bytes | None) -> bool:
        """Whether a header "Bearer …" has a good token of the role."""
        try:
            return self.role_of(authorization) is role
        except Unauthenticated:
            return False

    def renew(self) -> None:
        """Looks whether the file has changed, once a second at most. Never raises: what cannot be used changes nothing."""
        if time.time() >= self._next_end_s:
            self._count_ends()
        text = self._file.changed()
        if text is None:
            return
        try:
            self._load(text)
            log.info("read the tokens again path=%s num=%d", self._file.path, len(self._grants))
        except InvalidSpec as error:
            log.warning("the changed token file is not right, the tokens read before stay good cause=%s", error.message)

    def _load(self, text: str) -> None:
        tokens = parse_tokens(text, name=str(self._file.path))
        if any(grant.role is None for grant in tokens.values()):
            raise InvalidSpec(f"{self._file.path}: a token without a role; a server needs lines: role token")
        self._grants = {_digest(token): grant for token, grant in tokens.items()}
        self._count_ends()

    def _count_ends(self) -> None:
        now_s = time.time()
        self._next_end_s = min((one.ends_s for one in self._grants.values() if one.ends_s > now_s), default=math.inf)
        # Last: a reader of the new number finds the new tokens.
        self.version += 1


class TokenSource:
    """The token that a caller of one role sends, from a file that may change. Thread-safe. Raises InvalidSpec for a bad file."""

    def __init__(self, path: Path, *, role: CallerRole) -> None:
        self._file, self._role = WatchedFile(path), role
        self._header: tuple[tuple[str, str], ...] = ()
        self._load(self._file.changed() or "")

    def header(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call."""
        text = self._file.changed()
        if text is not None:
            self._load(text)
        return self._header

    def _load(self, text: str) -> None:
        try:
            tokens = parse_tokens(text, name=str(self._file.path))
            by_role = {grant.role: token for token, grant in reversed(tokens.items())}
            own = next((by_role[role] for role in (None, self._role, *_STAND_INS.get(self._role, ())) if role in by_role), None)
            if own is None:
                raise InvalidSpec(f"{self._file.path}: there is no token for the role {self._role.value} in it")
            self._header = bearer(own)
        except InvalidSpec:
            if not self._header:
                raise
            log.warning("the changed token file has no good token for us, the one read before stays path=%s", self._file.path)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that carries a token. Raises InvalidSpec if it is none."""
    check_token(token, "token")
    return ((_KEY, f"{_SCHEME}{token}"),)


def authorization_in(metadata: Any) -> str | bytes | None:
    """Returns the credentials in a call's metadata."""
    return next((value for key, value in metadata or () if key == _KEY), None)


def tokens_beside(socket_path: str) -> Path | None:
    """Returns the file of tokens beside a Unix socket, if there is one that is ours alone."""
    path = Path(socket_path).parent / BESIDE_SOCKET
    try:
        about = os.lstat(path)
    except OSError:
        return None
    is_ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return path if is_ours else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _time_of(word: str, where: str) -> float:
    try:
        at = datetime.fromisoformat(word)
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidSpec(f"{where}: the third word is no time; want the time at which the token ends, such as 2026-12-31") from None
