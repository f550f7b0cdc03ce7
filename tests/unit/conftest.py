"""What several rooms' tests begin with."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.run.messages import make_socket_pair


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = make_socket_pair()
    yield near, far
    near.close()
    far.close()
