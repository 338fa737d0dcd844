"""What a program proves with who it is: arguments of `connect()` and `observe()`, else LOCKSTEP_*. Knows arguments; opens nothing."""

import os
from collections.abc import Mapping
from dataclasses import replace

from ps_protocol.access import Access
from ps_protocol.authorization import CallerRole
from ps_protocol.security_options import Security, security_of

PathLike = str | os.PathLike[str]


def access_of(
    environment: Mapping[str, str],
    *,
    role: CallerRole,
    token: str | None = None,
    token_file: PathLike | None = None,
    tls: bool | None = None,
    tls_ca: PathLike | None = None,
    tls_cert: PathLike | None = None,
    tls_key: PathLike | None = None,
) -> Access:
    """Returns how to reach servers: each part from its argument, else LOCKSTEP_*. Raises InvalidSpec."""
    if token is not None or token_file is not None:
        # What is given stands for both: the environment's must not contradict it.
        environment = {name: value for name, value in environment.items() if name not in ("LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE")}
    if tls is False:
        environment = {name: value for name, value in environment.items() if name != "LOCKSTEP_TLS_CA"}
    given = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    # All at once: the parts are checked together.
    overlaid = {**environment, **{f"LOCKSTEP_{name.upper()}": os.fspath(path) for name, path in given.items() if path is not None}}
    security: Security = security_of(None, overlaid)
    if token is not None:
        security = replace(security, token=token)
    if tls is not None:
        security = replace(security, tls=tls)
    return Access(security, role=role)
