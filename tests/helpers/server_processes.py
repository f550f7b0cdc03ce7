"""Servers for tests on this machine: a free port, a certificate, and a process that is ended afterwards."""

import atexit
import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.run.authentication import reserve_port

START_TIMEOUT_S = 60.0


def find_program(name: str) -> str | None:
    """A program of this Python's environment, else of the system; Debian has servers in /usr/sbin."""
    folder = str(Path(sys.executable).parent)
    return shutil.which(name, path=folder) or shutil.which(name) or shutil.which(name, path="/usr/sbin")


_reserved_ports = contextlib.ExitStack()
atexit.register(_reserved_ports.close)


def find_free_port() -> int:
    """A port that the system gives to no other process while this one lives."""
    return int(_reserved_ports.enter_context(reserve_port()).getsockname()[1])


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*words, "-out", str(certificate), "-keyout", str(key)], check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def run_server(command: Sequence[str], port: int, log: Path, ready_path: str | None = None) -> Iterator[None]:
    """A server of which `port` is open, and that answers `ready_path` with status 200, if it has one; it is ended by
    SIGTERM, and if that is not enough by SIGKILL."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent)
    try:
        _wait_for_port(process, port, log, ready_path)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int, log: Path, ready_path: str | None) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')}"
        with contextlib.suppress(OSError):
            if ready_path is None:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            else:  # an answer with another status is an OSError, too
                urllib.request.urlopen(f"http://127.0.0.1:{port}{ready_path}", timeout=1).close()
            return
        time.sleep(0.05)
    raise AssertionError(f"the server does not listen after {START_TIMEOUT_S:g} s:\n{log.read_text(errors='replace')}")
