"""What an agent answers over HTTP: `/metrics` for Prometheus, and `/samples`, a line of JSON a second for
`phalanx serve`. It shows readings and takes none; off unless PHALANX_METRICS_PORT is set."""

import http.server
import json
import logging
import threading

from phalanx.run.fields import to_json
from phalanx.telemetry.exposition import build_node_metrics, render_families
from phalanx.telemetry.sample import NodeSample

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SAMPLES_PATH = "/samples"
MAX_STREAMS = 8
SEND_TIMEOUT_S = 10.0
"""A reader that takes nothing for so long is dropped."""


class AgentEndpoint:
    """Answers on a port of every interface. OSError where the port is in use."""

    def __init__(self, node: str, port: int):
        self._node = node
        self._sample: NodeSample | None = None
        self._changed = threading.Condition()
        self._is_open = True
        self.streams = threading.BoundedSemaphore(MAX_STREAMS)
        endpoint = self

        class Handler(_RequestHandler):
            agent = endpoint

        self._server = http.server.ThreadingHTTPServer(("", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def publish(self, sample: NodeSample) -> None:
        with self._changed:
            self._sample = sample
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def render(self) -> bytes:
        """The page of metrics."""
        return render_families(build_node_metrics({} if self._sample is None else {self._node: self._sample}))

    def wait_for_sample(self, before: NodeSample | None) -> NodeSample | None:
        """The next sample after `before`; None when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_open or self._sample is not before)
            return self._sample if self._is_open else None

    def to_line(self, sample: NodeSample) -> bytes:
        return json.dumps({"node": self._node, **to_json(sample)}, separators=(",", ":")).encode() + b"\n"


class _RequestHandler(http.server.BaseHTTPRequestHandler):
    agent: AgentEndpoint
    timeout = SEND_TIMEOUT_S

    def do_GET(self) -> None:
        try:
            if self.path == "/metrics":
                self._send(200, METRICS_TYPE, self.agent.render())
            elif self.path == SAMPLES_PATH:
                self._stream()
            else:
                self._send(404, "text/plain", b"/metrics and /samples are here\n")
        except OSError:  # the reader is gone, or takes nothing
            logger.debug("telemetry: a reader of %s is gone", self.path)
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep requests out of the output of a run."""
        logger.debug(format, *args)

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self) -> None:
        if not self.agent.streams.acquire(blocking=False):
            self._send(503, "text/plain", f"more than {MAX_STREAMS} readers\n".encode())
            return
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-ndjson")
            self.send_header("Connection", "close")
            self.end_headers()
            sample = None
            while (sample := self.agent.wait_for_sample(sample)) is not None:
                self.wfile.write(self.agent.to_line(sample))
        finally:
            self.close_connection = True
            self.agent.streams.release()
