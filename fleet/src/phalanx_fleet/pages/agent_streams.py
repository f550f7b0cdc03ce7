"""Samples of all nodes once a second, from the agents that answer on a port (PHALANX_METRICS_PORT): one connection a
node, kept open. Addresses come from the backend or the nodes file, never from a run directory.

Lines are kept as bytes and parsed when a page or Prometheus asks: with 1,000 nodes, parsing takes 20 times as long as
receiving.
"""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from phalanx.telemetry.agent_endpoint import SAMPLES_PATH
from phalanx.telemetry.sample import NodeSample
from phalanx_fleet.telemetry.prometheus import MAX_DEVICES, read_sample

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 5.0
"""Between two looks at which nodes there are, and at which are silent."""
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0


class AgentStreams:
    """The newest sample of each node. `addresses` returns host and port by the name of the node."""

    def __init__(self, addresses: Callable[[], Mapping[str, tuple[str, int]]]):
        self._addresses = addresses
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lines: dict[str, tuple[bytes, float]] = {}
        """With when they arrived, by the monotonic clock."""
        self._parsed: dict[str, tuple[bytes, NodeSample]] = {}
        self._devices: dict[str, set[str]] = {}
        self._unreadable: set[str] = set()
        self._parsing = threading.Lock()

    def read_samples(self) -> dict[str, NodeSample]:
        """The newest sample of each node that has sent one. Its time is that of its arrival, by the clock of now: the
        clock of a node may be wrong."""
        with self._parsing:  # pages and the thread that records both ask
            self._parse_new()
        wall, now = time.time(), time.monotonic()
        arrivals = {name: wall - (now - at) for name, (_, at) in list(self._lines.items())}
        return {
            name: replace(sample, time=arrivals[name])
            for name, (_, sample) in list(self._parsed.items())
            if name in arrivals
        }

    def _parse_new(self) -> None:
        for name, (line, _) in list(self._lines.items()):
            parsed = self._parsed.get(name)
            if parsed is not None and parsed[0] is line:
                continue
            try:
                self._parsed[name] = line, self._drop_new_devices(name, read_sample(json.loads(line)))
                self._unreadable.discard(name)
            except Exception as error:  # noqa: BLE001 - anyone may listen on the port of a node
                logger.debug("agent of %s: no sample: %s", name, error)
                self._unreadable.add(name)
                self._lines.pop(name, None)
                self._parsed.pop(name, None)

    def list_problems(self) -> list[str]:
        """Return the nodes of which the newest line is no sample."""
        return [f"{name}: what its agent sends is unreadable" for name in sorted(self._unreadable)]

    def _drop_new_devices(self, name: str, sample: NodeSample) -> NodeSample:
        """Without devices after the first MAX_DEVICES that the node has had: Prometheus keeps a series of each."""
        known = self._devices.setdefault(name, set())
        for device in sample.devices:
            if len(known) < MAX_DEVICES:
                known.add(device.id)
        return replace(sample, devices=tuple(each for each in sample.devices if each.id in known))

    async def run(self) -> None:
        """Follow all nodes until this is cancelled."""
        try:
            while True:
                self._follow_new(self._addresses())
                await asyncio.sleep(SYNC_INTERVAL_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _follow_new(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        for name in self._tasks.keys() - addresses.keys():
            self._tasks.pop(name).cancel()
            self._lines.pop(name, None)
            self._parsed.pop(name, None)
            self._unreadable.discard(name)
        for name, (host, port) in addresses.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._follow(name, host, port))

    async def _follow(self, name: str, host: str, port: int) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            last_line = self._lines.get(name)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
                try:
                    writer.write(f"GET {SAMPLES_PATH} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
                    await self._receive(name, reader)
                finally:
                    writer.close()
            except (OSError, TimeoutError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                logger.debug("agent of %s at %s:%d: %s", name, host, port, error)
            has_lines = self._lines.get(name) is not last_line
            retry_s = FIRST_RETRY_S if has_lines else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _receive(self, name: str, reader: asyncio.StreamReader) -> None:
        """Take the lines of an answer, until the agent closes it or is silent for too long. A line that is not whole is
        not taken. Raises OSError, EOFError, ValueError or LimitOverrunError for what is no such answer."""
        async with asyncio.timeout(SILENCE_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
        if head.split(maxsplit=2)[1:2] != [b"200"]:
            return
        while True:
            # not asyncio.wait_for, which in Python 3.11 may lose a cancellation
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                line = await reader.readline()
            if not line.endswith(b"\n"):
                return
            self._take(name, line[:-1])

    def _take(self, name: str, line: bytes) -> None:
        self._lines[name] = line, time.monotonic()
