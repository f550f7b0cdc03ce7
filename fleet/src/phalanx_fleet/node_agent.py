"""Answer with the readings of this node on PHALANX_METRICS_PORT where no run does."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from phalanx.errors import UsageError
from phalanx.run.node_env import find_node_name
from phalanx.telemetry.agent_endpoint import AgentEndpoint
from phalanx.telemetry.record import PORT_VARIABLE, NodeSampler, open_local_sources, read_metrics_port
from phalanx.telemetry.sample import SAMPLE_INTERVAL_S, NodeSample, TelemetrySource

logger = logging.getLogger(__name__)
RETRY_INTERVAL_S = 10.0
"""From one attempt to open the port to the next, while a run's agent has it."""


class SharedPort:
    """Shows samples on the port while no other agent of this node has it. Raises UsageError for a port that is none."""

    def __init__(self, node: str, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic):
        self._node, self._clock, self._port = node, clock, read_metrics_port(environment)
        if not self._port:
            raise UsageError(
                f"`phalanx nodes agent` answers on a port: set {PORT_VARIABLE}, such as {PORT_VARIABLE}=9440"
            )
        self._endpoint: AgentEndpoint | None = None
        self._next_attempt, self._is_warned = clock(), False

    @property
    def is_open(self) -> bool:
        """Whether samples are shown."""
        return self._endpoint is not None

    def publish(self, sample: NodeSample) -> None:
        """Show a sample. A port that is in use is tried again every RETRY_INTERVAL_S."""
        if self._endpoint is None and self._clock() >= self._next_attempt:
            self._next_attempt = self._clock() + RETRY_INTERVAL_S
            try:
                self._endpoint = AgentEndpoint(self._node, self._port)
            except OSError as error:
                if not self._is_warned:
                    logger.warning("port %d: %s; trying again every %g s", self._port, error.strerror, RETRY_INTERVAL_S)
                self._is_warned = True
        if self._endpoint is not None:
            self._endpoint.publish(sample)

    def close(self) -> None:
        """Let another agent have it."""
        if self._endpoint is not None:
            self._endpoint.close()


def record_node(
    environment: Mapping[str, str] = os.environ,
    open_sources: Callable[[], tuple[Sequence[TelemetrySource], Sequence[str]]] = open_local_sources,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Sample this node once a second until KeyboardInterrupt. Raises UsageError without a port, or for one that is
    none."""
    node = find_node_name()
    with contextlib.closing(SharedPort(node, environment)) as port:
        sources, problems = open_sources()
        for problem in problems:
            logger.warning(problem)
        with contextlib.closing(NodeSampler(sources, node, on_sample=port.publish)) as sampler:
            while True:
                due = time.monotonic() + SAMPLE_INTERVAL_S
                sampler.read()
                sleep(max(0.0, due - time.monotonic()) if port.is_open else RETRY_INTERVAL_S)
