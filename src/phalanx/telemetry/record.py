"""Record this node's telemetry while an agent trains a run: sample it once a second in a thread, roll the samples up
into minutes in the run, and serve metrics on a port.
"""

import contextlib
import fcntl
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cluster.device_links import import_nvml
from phalanx.errors import UsageError
from phalanx.run import Run
from phalanx.run.node_env import find_node_name
from phalanx.run.telemetry_minutes import NodeEnergy, NodeMinute, read_newest_energy
from phalanx.telemetry.gpu_sources import AmdsmiSource, NvmlSource
from phalanx.telemetry.host import HostSource
from phalanx.telemetry.rollup import DeviceChecker, MinuteBuilder, add_minute_energy, merge_hosts
from phalanx.telemetry.sample import (
    SAMPLE_INTERVAL_S,
    DeviceSample,
    NodeSample,
    SourceUnavailableError,
    TelemetrySource,
)

if TYPE_CHECKING:
    from phalanx.telemetry.agent_endpoint import AgentEndpoint

STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the last reading: a driver may never answer."""
logger = logging.getLogger(__name__)

PORT_VARIABLE = "PHALANX_METRICS_PORT"


class NodeSampler:
    """Takes samples of this node. `on_minute` gets each minute that is over, and at the end the part of one."""

    def __init__(
        self,
        sources: Sequence[TelemetrySource],
        node: str,
        on_minute: Callable[[NodeMinute], None] = lambda minute: None,
        on_sample: Callable[[NodeSample], None] = lambda sample: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self._sources = sources
        self._on_minute, self._on_sample = on_minute, on_sample
        self._clock, self._wall_clock = clock, wall_clock
        self._checker, self._minutes = DeviceChecker(), MinuteBuilder(node)

    def read(self) -> NodeSample:
        """Take one sample now."""
        readings = [source.read() for source in self._sources]
        now = self._clock()
        devices: dict[str, DeviceSample] = {}
        for reading in readings:
            for device in reading.devices:
                if device.id not in devices:  # the first source that has it gives it, and alone is checked
                    devices[device.id] = self._checker.check(device, now)
        host = merge_hosts(reading.host for reading in readings if reading.host is not None)
        sample = NodeSample(self._wall_clock(), host, tuple(devices.values()))
        self._on_sample(sample)
        if (minute := self._minutes.add(sample)) is not None:
            self._on_minute(minute)
        return sample

    def close(self) -> None:
        """Pass on the part of the last minute, and close the sources."""
        if (minute := self._minutes.take()) is not None:
            self._on_minute(minute)
        for source in self._sources:
            source.close()


class SamplingThread:
    """Takes a sample a second in a thread of its own until `stop`. The thread also opens the sources, by
    `make_sampler`, and closes them: a driver or storage that hangs never blocks the caller."""

    def __init__(self, make_sampler: Callable[[], NodeSampler]):
        self._make_sampler = make_sampler
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling. A source that does not answer in time is left behind."""
        self._stop_requested.set()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("telemetry: a driver or storage did not answer for %g s", STOP_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.closing(self._make_sampler()) as sampler:
            due = time.monotonic()
            while True:
                sampler.read()
                due = max(due + SAMPLE_INTERVAL_S, time.monotonic())  # what a slow source missed is not made up for
                if self._stop_requested.wait(due - time.monotonic()):
                    return


def open_local_sources() -> tuple[list[TelemetrySource], list[str]]:
    """The sources of this machine, and what they cannot read, in words."""
    sources: list[TelemetrySource] = [HostSource()]
    problems: list[str] = []
    for library, make_source in ((import_nvml(), NvmlSource), (import_amdsmi(), AmdsmiSource)):
        if library is not None:
            try:
                sources.append(make_source(library))
            except SourceUnavailableError as error:
                problems.append(str(error))
    return sources, [*(problem for source in sources for problem in source.problems), *problems]


def import_amdsmi() -> Any:
    """AMD's library, where ROCm and its Python package are installed; else None."""
    try:
        return importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError):  # KeyError: the package is there, and ROCm's library is not
        return None


class MinuteFile:
    """Appends minutes to RUN/telemetry/NODE.jsonl. One process writes it: a second agent on the same node leaves it to
    the first, and writes that of `host`, since pods on one node have their own accelerators. Nothing that fails here
    stops a run. `device_ids`: accelerators of the run; only their energy is counted. Empty: they are not known."""

    def __init__(self, run: Run, node: str, host: str | None = None):
        self.device_ids: Sequence[str] = ()
        self._run, self._path, self._fd = run, run.telemetry / f"{node}.jsonl", -1
        self._other_path = None if host in (None, node) else run.telemetry / f"{host}.jsonl"
        self._is_off = False
        self._energy = NodeEnergy()

    def write(self, minute: NodeMinute) -> None:
        """Append a minute; none while the run has no directory yet."""
        if self._is_off or not os.path.isdir(self._run.path):  # False while the storage fails
            return
        try:
            if self._fd < 0:
                self._fd = self._open()
                newest = read_newest_energy(self._path)  # of earlier attempts
                self._energy = (newest and newest.run_energy) or NodeEnergy()
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
        publish = endpoint.publish if endpoint is not None else lambda sample: None
        return NodeSampler(sources, node, minutes.write, publish)

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
    """The endpoint that the environment asks for; None without, or where another agent of this node has the port."""
    if not (port := read_metrics_port(os.environ)):
        return None
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(f"{PORT_VARIABLE} needs the `prometheus-client` package: pip install 'phalanx[serve]'")
    from phalanx.telemetry.agent_endpoint import AgentEndpoint  # which takes 75 ms to import

    try:
        return AgentEndpoint(node, port)
    except OSError as error:
        logger.warning("telemetry: no metrics on port %d: %s", port, error.strerror)
        return None


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
