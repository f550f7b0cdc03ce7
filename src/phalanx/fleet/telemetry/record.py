"""Record this node's telemetry while an agent trains a run: samples of the last day on the node, minutes in the run."""

import contextlib
import fcntl
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import UsageError
from phalanx.fleet.telemetry.local_sources import open_local_sources, ring_path
from phalanx.fleet.telemetry.ring_file import RingBusyError, RingLayout, RingWriter
from phalanx.fleet.telemetry.rollup import add_minute_energy
from phalanx.fleet.telemetry.sample import DeviceSample, NodeSample
from phalanx.fleet.telemetry.sampler import NodeSampler, SamplingThread
from phalanx.run import Run
from phalanx.run.node_env import find_node_name
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, read_newest_energy

if TYPE_CHECKING:
    from phalanx.fleet.telemetry.agent_endpoint import AgentEndpoint

logger = logging.getLogger(__name__)

PORT_VARIABLE = "PHALANX_METRICS_PORT"


class MinuteFile:
    """Appends minutes to RUN/telemetry/NODE.jsonl. One process writes it: a second agent on the same node leaves it to
    the first. Nothing that fails here stops a run.

    Args:
        host: Name for the file where another agent has that of the node: pods on one node have their own accelerators.

    Attributes:
        device_ids: accelerators of the run; only their energy is counted. Empty: they are not known.
    """

    def __init__(self, run: Run, node: str, host: str | None = None):
        self.device_ids: Sequence[str] = ()
        self._run, self._path, self._fd = run, run.telemetry / f"{node}.jsonl", -1
        self._other_path = None if host in (None, node) else run.telemetry / f"{host}.jsonl"
        self._is_off = False
        self._energy = NodeEnergy()

    def write(self, minute: NodeMinute) -> None:
        """Append a minute; none while the run has no directory yet."""
        if self._is_off or not self._run.path.is_dir():
            return
        try:
            if self._fd < 0:
                self._fd = self._open()
                self._energy = _read_last_energy(self._path)
            self._energy = add_minute_energy(self._energy, minute, self.device_ids)
            os.write(self._fd, replace(minute, run_energy=self._energy).to_line())
        except BlockingIOError:
            logger.info("telemetry: another agent records this node in %s", self._path)
            self._is_off = True
        except OSError as error:
            logger.warning("telemetry: %s is not written: %s", self._path, error)
            self._is_off = True

    def _open(self) -> int:
        try:
            return _open_alone(self._path)
        except BlockingIOError:
            if self._other_path is None:
                raise
            self._path, self._other_path = self._other_path, None
            return _open_alone(self._path)

    def close(self) -> None:
        """Let another process write it."""
        if self._fd >= 0:
            os.close(self._fd)


@contextlib.contextmanager
def record_telemetry(run: Run, find_devices: Callable[[], Sequence[str]] = lambda: ()) -> Iterator[None]:
    """Sample this node once a second, write each minute into the run, and answer on PHALANX_METRICS_PORT. UsageError
    for a port that is none. `find_devices` returns the ids of the run's accelerators here; none: not known."""
    node = find_node_name()
    endpoint = _open_endpoint(node)
    minutes = MinuteFile(run, node, os.uname().nodename)

    def make_sampler() -> NodeSampler:
        minutes.device_ids = find_devices()
        sources, problems = open_local_sources()
        for problem in problems:
            logger.info("telemetry: %s", problem)
        devices = [device for source in sources for device in source.read().devices]
        publish = endpoint.publish if endpoint is not None else _ignore_sample
        return NodeSampler(sources, node, _open_ring(node, devices), minutes.write, publish)

    thread = SamplingThread(make_sampler)
    try:
        yield
    finally:
        thread.stop()
        minutes.close()
        if endpoint is not None:
            endpoint.close()


def read_metrics_port(environment: Mapping[str, str]) -> int:
    """The port that the environment asks for; 0 for none. UsageError for what is no port."""
    given = environment.get(PORT_VARIABLE) or "0"
    if not given.isdecimal() or int(given) > 65535:
        raise UsageError(f"{PORT_VARIABLE}={given}: expected a port from 1 to 65535, or 0 for no metrics")
    return int(given)


def _open_endpoint(node: str) -> "AgentEndpoint | None":
    """The endpoint that the environment asks for; None where it asks for none, or another agent of this node has the
    port."""
    if not (port := read_metrics_port(os.environ)):
        return None
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(f"{PORT_VARIABLE} needs the `prometheus-client` package: pip install 'phalanx[fleet]'")
    from phalanx.fleet.telemetry.agent_endpoint import AgentEndpoint  # which takes 75 ms to import

    try:
        return AgentEndpoint(node, port)
    except OSError as error:
        logger.warning("telemetry: no metrics on port %d: %s", port, error.strerror)
        return None


def _ignore_sample(sample: NodeSample) -> None:
    """For agents without an endpoint."""


def _read_last_energy(path: Path) -> NodeEnergy:
    """What earlier attempts have used on this node."""
    newest = read_newest_energy(path)
    return NodeEnergy() if newest is None or newest.run_energy is None else newest.run_energy


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
