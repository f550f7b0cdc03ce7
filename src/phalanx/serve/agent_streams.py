"""Samples of all nodes once a second, from the agents that answer on a port (PHALANX_METRICS_PORT): one connection a
node, kept open. Addresses come from the backend or the nodes file, never from a run directory."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping

from phalanx.fleet.telemetry.agent_endpoint import SAMPLES_PATH
from phalanx.fleet.telemetry.sample import NodeSample
from phalanx.fleet.telemetry.sample_json import from_json

logger = logging.getLogger(__name__)

SYNC_INTERVAL_S = 5.0
"""Between two looks at which nodes there are."""
CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0


class AgentStreams:
    """The newest sample of each node. `addresses` returns host and port by the name of the node."""

    def __init__(self, addresses: Callable[[], Mapping[str, tuple[str, int]]]):
        self._addresses = addresses
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._samples: dict[str, NodeSample] = {}

    @property
    def samples(self) -> Mapping[str, NodeSample]:
        """The newest sample of each node that has sent one; its time says how old it is."""
        return self._samples

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
            self._samples.pop(name, None)
        for name, (host, port) in addresses.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._follow(name, host, port))

    async def _follow(self, name: str, host: str, port: int) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            before = self._samples.get(name)
            try:
                await self._read_stream(name, host, port)
            except (OSError, TimeoutError, ValueError, TypeError, KeyError) as error:
                logger.debug("agent of %s at %s:%d: %s", name, host, port, error)
            retry_s = FIRST_RETRY_S if self._samples.get(name) is not before else min(2 * retry_s, LAST_RETRY_S)
            await asyncio.sleep(retry_s)

    async def _read_stream(self, name: str, host: str, port: int) -> None:
        """Read samples until the agent ends. Errors of the connection, and of what is no sample, pass."""
        connecting = asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        try:
            writer.write(f"GET {SAMPLES_PATH} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            status = await asyncio.wait_for(reader.readline(), SILENCE_TIMEOUT_S)
            if status.split()[1:2] != [b"200"]:
                raise ValueError(f"answers {status!r}")
            while (await asyncio.wait_for(reader.readline(), SILENCE_TIMEOUT_S)).strip():
                pass  # headers
            while line := await asyncio.wait_for(reader.readline(), SILENCE_TIMEOUT_S):
                self._samples[name] = from_json(json.loads(line))
        finally:
            writer.close()
