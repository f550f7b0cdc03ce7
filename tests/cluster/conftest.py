"""The Slurm of the session, and waiting for servers. Where there can be no Slurm, the tests are skipped, and the reason
is told."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.jobs.backends.slurm.backend import QUEUE_MAX_AGE_S, SlurmBackend
from slurm_cluster import SlurmCluster, find_obstacle


@pytest.fixture(scope="session")
def rig() -> Iterator[SlurmCluster]:
    why = find_obstacle()
    if why is not None:
        pytest.skip(f"NOTHING IS TESTED ON A REAL SLURM: {why}")
    with SlurmCluster() as rig:
        yield rig


@pytest.fixture(scope="session")
def secret() -> str:
    """The value of the variable SECRET of who submits."""
    return "swordfish '\"$(id)\\"


@pytest.fixture(scope="session")
def slurm(rig: SlurmCluster, secret: str, tmp_path_factory: pytest.TempPathFactory) -> SlurmBackend:
    """The engine, with a folder whose name needs quoting."""
    folder: Path = tmp_path_factory.mktemp("shared") / "it's $(here) 100%d"
    clock = itertools.count(step=QUEUE_MAX_AGE_S).__next__  # Slurm is asked whenever a test polls
    return SlurmBackend(rig.run, folder, {"SECRET": secret}, clock)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition that a server and a thread have to bring about."""

    def wait(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, "it did not come about within 60 s"
            time.sleep(0.05)

    return wait
