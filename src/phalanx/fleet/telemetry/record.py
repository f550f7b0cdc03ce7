"""Record this node's telemetry while an agent trains a run: samples of the last day on the node, minutes in the run."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.fleet.telemetry.local_sources import open_local_sources, ring_path
from phalanx.fleet.telemetry.ring_file import RingBusyError, RingLayout, RingWriter
from phalanx.fleet.telemetry.sample import DeviceSample
from phalanx.fleet.telemetry.sampler import NodeSampler, SamplingThread
from phalanx.run import Run
from phalanx.run.telemetry_minutes import NodeMinute

logger = logging.getLogger(__name__)


class MinuteFile:
    """Appends minutes to RUN/telemetry/NODE.jsonl. One process writes it: a second agent on the same node leaves it to
    the first. Nothing that fails here stops a run."""

    def __init__(self, run: Run, node: str):
        self._run, self._path, self._fd = run, run.telemetry / f"{node}.jsonl", -1
        self._is_off = False

    def write(self, minute: NodeMinute) -> None:
        """Append a minute; none while the run has no directory yet."""
        if self._is_off or not self._run.path.is_dir():
            return
        try:
            if self._fd < 0:
                self._fd = _open_alone(self._path)
            os.write(self._fd, minute.to_line())
        except BlockingIOError:
            logger.info("telemetry: another agent records this node in %s", self._path)
            self._is_off = True
        except OSError as error:
            logger.warning("telemetry: %s is not written: %s", self._path, error)
            self._is_off = True

    def close(self) -> None:
        """Let another process write it."""
        if self._fd >= 0:
            os.close(self._fd)


@contextlib.contextmanager
def record_telemetry(run: Run) -> Iterator[None]:
    """Sample this node once a second, and write each minute into the run."""
    node = os.uname().nodename
    minutes = MinuteFile(run, node)

    def make_sampler() -> NodeSampler:
        sources, problems = open_local_sources()
        for problem in problems:
            logger.info("telemetry: %s", problem)
        devices = [device for source in sources for device in source.read().devices]
        return NodeSampler(sources, node, _open_ring(node, devices), minutes.write)

    thread = SamplingThread(make_sampler)
    try:
        yield
    finally:
        thread.stop()
        minutes.close()


def _open_alone(path: Path) -> int:
    """Open a file to append to it, and lock it. BlockingIOError where another process has it."""
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_ring(node: str, devices: Sequence[DeviceSample]) -> RingWriter | None:
    """The ring file of this node; None where another agent writes it, or it cannot be written."""
    path = ring_path(node)
    try:
        return RingWriter(path, RingLayout(tuple((device.id, device.name) for device in devices)))
    except RingBusyError as error:
        logger.info("telemetry: %s", error)
    except OSError as error:  # as in a container with a read-only file system: nothing is wrong with the run
        logger.info("telemetry: %s is not written: %s", path, error)
    return None
