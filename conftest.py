"""Fixtures that the tests of both packages share. Nothing here starts a process unless a test asks for it."""

import contextlib
import gc
import itertools
import logging
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from phalanx.autoconfig import trial_names
from process_worlds import ProcessWorlds
from train_harness import TrainHarness

if TYPE_CHECKING:
    from phalanx.jobs.backends.slurm.backend import SlurmBackend
    from slurm_cluster import SlurmCluster

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell's `&` leaves it. Programs that tests start would inherit it, and Ctrl-C could not be tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def use_one_thread() -> None:
    """Let torch compute on one thread in this process, if it is loaded. Tensors here are tiny: more threads would wait
    for each other in loops that keep the cores from the worlds of the tests, and from the other process of pytest."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, which takes a third of the CPU time for 10,000 tests, and exempt
    them from later collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        use_one_thread()


MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30
"""Where runs lie while tests look at them, if so many bytes are free."""


@contextlib.contextmanager
def in_memory(folder: Path) -> Iterator[Path]:
    """A folder in memory, so that how far a save has come does not depend on how busy the disk is; it becomes `folder`
    at the end, to see what failed."""
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield folder
        return
    place = Path(tempfile.mkdtemp(prefix="phalanx-lab-", dir=MEMORY))
    try:
        yield place
    finally:
        shutil.move(place, folder)


@pytest.fixture(scope="session", autouse=True)
def _trials_are_kept() -> Iterator[None]:
    """Runs of tests keep the times of their trials however busy the machine is: the other process of pytest is, and no
    test looks at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_names, "MAX_OTHER_LOAD", math.inf)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Also where a test was the first to load torch, or has left other threads behind."""
    use_one_thread()


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    """Leave the logger as it was: a command that ran in this process has configured it, and `caplog` of a later test
    would see nothing."""
    logger = logging.getLogger("phalanx")
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainHarness]:
    """One process with torch loaded, in which all runs of the session are trained."""
    folder = tmp_path_factory.mktemp("lab")
    with in_memory(folder / "runs") as runs, TrainHarness(folder, runs) as lab:
        yield lab


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessWorlds]:
    """This file's processes."""
    world = ProcessWorlds(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition that a server and a thread have to bring about."""

    def wait(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, "it did not come about within 60 s"
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="session")
def browser() -> str:
    """Path of a Chromium; the tests are skipped, and say so, where there is none."""
    from chromium import find

    path = find()
    if path is None:
        pytest.skip("no Chromium is installed (on Debian: apt-get install chromium), so pages are not looked at")
    return path


@pytest.fixture(scope="session")
def rig() -> "Iterator[SlurmCluster]":
    """The Slurm of the session. Where there can be none, the tests are skipped, and the reason is told."""
    from slurm_cluster import SlurmCluster, find_obstacle

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
def slurm(rig: "SlurmCluster", secret: str, tmp_path_factory: pytest.TempPathFactory) -> "SlurmBackend":
    """Its backend, with a directory whose name needs quoting."""
    from phalanx.jobs.backends.slurm.backend import QUEUE_MAX_AGE_S, SlurmBackend

    folder: Path = tmp_path_factory.mktemp("shared") / "it's $(here) 100%d"
    clock = itertools.count(step=QUEUE_MAX_AGE_S).__next__  # Slurm is asked whenever a test polls
    return SlurmBackend(rig.run, folder, {"SECRET": secret}, clock)
