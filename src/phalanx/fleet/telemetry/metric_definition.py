"""What a metric is called and means, and its values in prometheus-client's form."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Metric


@dataclass(frozen=True)
class MetricDefinition:
    """A gauge, or a counter where the name ends in `_total`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        """Whether it only grows, but for restarts at zero."""
        return self.name.endswith("_total")

    def build(self, rows: Iterable[tuple[Sequence[str], float | None]]) -> Iterator["Metric"]:
        """The metric with a row of values of labels, and a value, each; None is left out. Nothing without a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        make: Any = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        metric: Metric = make(self.name, self.help, labels=self.labels)
        for texts, value in rows:
            if value is not None:
                metric.add_metric([_encodable(text) for text in texts], float(value))  # type: ignore[attr-defined]
        if metric.samples:
            yield metric


def _encodable(text: str) -> str:
    """The text; of a path or a name that is no UTF-8, with the bytes that are none written as escapes."""
    return text.encode(errors="backslashreplace").decode()
