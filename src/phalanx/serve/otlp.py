"""The metrics of `phalanx serve`, sent to a collector over OTLP/HTTP by OpenTelemetry's own exporter, which reads the
standard OTEL_EXPORTER_OTLP_* variables. Without one of ENDPOINT_VARIABLES nothing is sent, and nothing is imported."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from prometheus_client import Metric

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP_PROTOCOL = "http/protobuf"
INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"
DEFAULT_INTERVAL_MS = "60000"
MAX_POINTS_PER_REQUEST = 10_000
"""Some collectors refuse requests of more than 4 MiB."""
STOP_TIMEOUT_S = 5.0

ReadMetrics = Callable[[], Iterable["Metric"]]


def open_otlp_export(environment: Mapping[str, str], read: ReadMetrics) -> "OtlpExport | None":
    """The export that the environment asks for; None where it asks for none. UsageError where the package is missing,
    or a variable has a value that does not work."""
    named = next((name for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    if named is None or environment.get("OTEL_METRICS_EXPORTER") == "none" or _is_disabled(environment):
        return None
    if not environment[named].startswith(("http://", "https://")):
        raise UsageError(f"{named}: is {environment[named]}, expected an address such as http://127.0.0.1:4318")
    for name in PROTOCOL_VARIABLES:
        if environment.get(name, OTLP_PROTOCOL) != OTLP_PROTOCOL:
            raise UsageError(f"{name}: is {environment[name]}; `phalanx serve` sends {OTLP_PROTOCOL} only")
    interval_s = _read_interval(environment.get(INTERVAL_VARIABLE) or DEFAULT_INTERVAL_MS)
    try:
        return OtlpExport(read, interval_s)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{named} is set, but {error.name} is not installed; pip install 'phalanx[otlp]', or unset the variable"
        ) from None


def _is_disabled(environment: Mapping[str, str]) -> bool:
    return environment.get("OTEL_SDK_DISABLED", "").lower() == "true"


def _read_interval(text: str) -> float:
    """Seconds."""
    try:
        interval_ms = float(text)
    except ValueError:
        interval_ms = math.nan
    if not 1 <= interval_ms < math.inf:
        raise UsageError(f"{INTERVAL_VARIABLE}: is {text}, expected milliseconds, such as {DEFAULT_INTERVAL_MS}")
    return interval_ms / 1000


class OtlpExport:
    """Sends what `read` returns at every interval, from `start` to `stop`. The exporter logs what it cannot send."""

    def __init__(self, read: ReadMetrics, interval_s: float):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        self._read, self._interval_s = read, interval_s
        self._exporter = OTLPMetricExporter(max_export_batch_size=MAX_POINTS_PER_REQUEST)
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Send in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, also one that waits for a collector."""
        self._stop_requested.set()
        self._exporter.shutdown()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop_requested.wait(self._interval_s):
            self._exporter.export(build_otlp_metrics(self._read(), time.time()))


def build_otlp_metrics(metrics: Iterable["Metric"], now: float) -> "MetricsData":
    """The metrics with Phalanx's own names in OpenTelemetry's form. A counter has no `_total` in its name there:
    whatever makes Prometheus's form of it adds that."""
    from opentelemetry.sdk.metrics import export as sdk
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from phalanx.serve.metrics import list_metrics

    own_names = {definition.name.removesuffix("_total") for definition in list_metrics()}
    found = []
    for metric in metrics:
        if metric.name not in own_names:
            continue
        # counters began before this process did, at a time that is not known: 0
        points = [
            sdk.NumberDataPoint(sample.labels, 0, int(now * 1e9), sample.value)
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]
        data: sdk.Sum | sdk.Gauge = sdk.Gauge(points)
        if metric.type == "counter":
            data = sdk.Sum(points, sdk.AggregationTemporality.CUMULATIVE, is_monotonic=True)
        found.append(sdk.Metric(metric.name, metric.documentation, "", data))
    resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "phalanx"}))
    scope = sdk.ScopeMetrics(InstrumentationScope("phalanx"), found, "")
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])
