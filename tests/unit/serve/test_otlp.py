"""Metrics over OTLP: a receiver decodes what the exporter sends."""

import http.server
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from prometheus_client import Metric

from made_samples import full_node
from phalanx.errors import UsageError
from phalanx.serve.metrics import MetricSnapshot, build_metrics, list_metrics
from phalanx.serve.otlp import ENDPOINT_VARIABLES, open_otlp_export
from phalanx.serve.run_row import RunRow

NOW = 1_790_000_000.0


class Receiver(http.server.ThreadingHTTPServer):
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ReceiverHandler)
        self.requests: queue.Queue[tuple[str, str | None, ExportMetricsServiceRequest]] = queue.Queue()
        self.address = f"http://127.0.0.1:{self.server_port}"


class _ReceiverHandler(http.server.BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = ExportMetricsServiceRequest.FromString(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.server.requests.put((self.path, self.headers.get("Authorization"), request))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def read_metrics() -> list[Metric]:
    run = RunRow(
        Path("runs/one"), 0, 0, None, NOW, step=7, total_steps=10, world_size=2, loss=2.5, validation_loss=2.0,
        units_per_s=4096.0, step_s=0.5, first_event_at=NOW - 60,
    )  # fmt: skip
    return list(build_metrics(MetricSnapshot(NOW, [run], True, ["queued"], ["healthy"], {"n1": full_node(NOW, 100.0)})))


@pytest.fixture
def sent(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str | None, ExportMetricsServiceRequest]:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address,
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20secret",
        "OTEL_METRIC_EXPORT_INTERVAL": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    export = open_otlp_export(environment, read_metrics)
    assert export is not None
    export.start()
    found = receiver.requests.get(timeout=30)
    export.stop()
    return found


def test_a_collector_gets_every_metric_with_its_labels_and_kind(
    sent: tuple[str, str | None, ExportMetricsServiceRequest],
) -> None:
    path, authorization, request = sent
    assert (path, authorization) == ("/v1/metrics", "Bearer secret")
    (resource,) = request.resource_metrics
    service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
    assert service == "phalanx"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics.keys() == {definition.name.removesuffix("_total") for definition in list_metrics()}
    (loss,) = metrics["phalanx_run_loss"].gauge.data_points
    assert (loss.attributes[0].key, loss.attributes[0].value.string_value, loss.as_double) == ("run", "runs/one", 2.5)
    energy = metrics["phalanx_device_energy_joules"].sum
    assert energy.is_monotonic
    assert [point.as_double for point in energy.data_points] == [65_000.0] * 8


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {ENDPOINT_VARIABLES[1]: ""},
        {ENDPOINT_VARIABLES[1]: "http://collector:4318", "OTEL_METRICS_EXPORTER": "none"},
        {ENDPOINT_VARIABLES[0]: "http://collector:4318/v1/metrics", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nothing_is_sent_without_an_endpoint_or_where_it_is_switched_off(environment: dict[str, str]) -> None:
    assert open_otlp_export(environment, list) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({ENDPOINT_VARIABLES[1]: "collector:4318"}, "is collector:4318, expected an address"),
        ({ENDPOINT_VARIABLES[1]: "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "sends http/protobuf only"),
        ({ENDPOINT_VARIABLES[1]: "http://c", "OTEL_METRIC_EXPORT_INTERVAL": "1m"}, "is 1m, expected milliseconds"),
        ({ENDPOINT_VARIABLES[1]: "http://c", "OTEL_METRIC_EXPORT_INTERVAL": "0"}, "is 0, expected milliseconds"),
    ],
)
def test_a_variable_that_does_not_work_is_said(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_otlp_export(environment, list)


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    with pytest.raises(UsageError, match=r"OTLP_ENDPOINT is set, but opentelemetry.* pip install 'phalanx\[otlp\]'"):
        open_otlp_export({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, list)


def test_a_collector_that_does_not_answer_is_said_and_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    has_read = threading.Event()

    def read() -> list[Metric]:
        has_read.set()
        return read_metrics()

    export = open_otlp_export({"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_METRIC_EXPORT_INTERVAL": "1"}, read)
    assert export is not None
    export.start()
    assert has_read.wait(30)
    export.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "otlp"]
    assert "metrics batch" in caplog.text or "already shutdown" in caplog.text
