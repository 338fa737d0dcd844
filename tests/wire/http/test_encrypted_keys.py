"""Keys with a password, which no process can be given: they are refused, and no process waits for input."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tests.support.network.certificates import make

SERVE = """
from pathlib import Path
from ps_protocol.errors import InvalidSpec
from ps_protocol.http.server import HttpServer
from ps_protocol.security.options import Security
try:
    HttpServer([], address="127.0.0.1:0", cluster="job", security=Security(tls_cert=Path("ps.pem"), tls_key=Path("ps.key")))
except InvalidSpec as error:
    print("refused:", error)
"""
DOCTOR = """
from pathlib import Path
from lockstep.doctor.files import _fits
print("refused:", _fits(Path("ps.pem"), Path("ps.key")))
"""


@pytest.mark.parametrize("program", [SERVE, DOCTOR], ids=["http server", "doctor"])
def test_key_with_a_password_is_refused_without_asking_for_it(program: str, tmp_path: Path) -> None:
    files = make(tmp_path / "certs").directory
    key = serialization.load_pem_private_key((files / "ps.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    (files / "ps.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, locked))
    # Its input stays open and says nothing, as a terminal at which nobody sits.
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=files, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        try:
            process.wait(20)
            assert process.stdout.read().startswith("refused:")
        finally:
            process.kill()
