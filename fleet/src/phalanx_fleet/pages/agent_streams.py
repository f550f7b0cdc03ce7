"""Samples of all nodes once a second, from the agents that answer on a port (PHALANX_METRICS_PORT): one connection a
node, kept open. Addresses come from the backend or the nodes file, never from a run directory.

Lines are kept as bytes and parsed when a page or Prometheus asks: with 1,000 nodes, parsing takes 20 times as long as
receiving.
"""

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

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

    def _take(self, name: str, line: bytes) -> None:
        self._lines[name] = line, time.monotonic()

    async def _follow(self, name: str, host: str, port: int) -> None:
        retry_s = FIRST_RETRY_S
        loop = asyncio.get_running_loop()
        while True:
            stream = _Stream(host, port, lambda line: self._take(name, line), loop.time)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    transport, _ = await loop.create_connection(lambda stream=stream: stream, host, port)  # type: ignore[misc]
                try:
                    await stream.wait_closed()
                finally:
                    transport.close()
            except (OSError, TimeoutError) as error:
                logger.debug("agent of %s at %s:%d: %s", name, host, port, error)
            retry_s = FIRST_RETRY_S if stream.has_lines else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s)


class _Stream(asyncio.Protocol):
    """Asks for samples, and passes on the last whole line of what arrives together."""

    def __init__(self, host: str, port: int, on_line: Callable[[bytes], None], clock: Callable[[], float]):
        self._request = f"GET {SAMPLES_PATH} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
        self._on_line, self._clock = on_line, clock
        self._buffer, self._is_head = b"", True
        self._closed = asyncio.Event()
        self._heard_at = clock()
        self._transport: asyncio.Transport | None = None
        self.has_lines = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Pass on the last line."""
        self._heard_at = self._clock()
        self._buffer += data
        if self._is_head:
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end and len(self._buffer) <= MAX_LINE_BYTES:
                return
            if not end or head.split(maxsplit=2)[1:2] != [b"200"]:
                self._close()
                return
            self._is_head, self._buffer = False, rest
        lines, newline, self._buffer = self._buffer.rpartition(b"\n")
        if newline:
            self.has_lines = True
            self._on_line(lines[lines.rfind(b"\n") + 1 :])
        elif len(self._buffer) > MAX_LINE_BYTES:
            self._close()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that it is closed."""
        self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until the agent closes it, or is silent for too long."""
        while not self._closed.is_set() and self._clock() - self._heard_at < SILENCE_TIMEOUT_S:
            # not asyncio.wait_for, which in Python 3.11 may lose a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SYNC_INTERVAL_S):
                    await self._closed.wait()

    def _close(self) -> None:
        assert self._transport is not None
        self._transport.close()
