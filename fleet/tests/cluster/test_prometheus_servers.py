"""Metrics of accelerators from real servers: prometheus-client's own, and a Prometheus that scrapes it."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from phalanx.telemetry.sample import DeviceSample, SourceUnavailableError
from phalanx_fleet.telemetry.prometheus import PrometheusSource
from server_processes import find_free_port, find_program, run_server

PROMETHEUS = find_program("prometheus")
LABELS = {"gpu": "0", "UUID": "GPU-a", "modelName": "NVIDIA H100", "Hostname": "node1"}
PAGE = b'DCGM_FI_DEV_POWER_USAGE{UUID="GPU-a"} 688.'


class Exporter:
    """prometheus-client's server, with the names of dcgm-exporter."""

    def __init__(self) -> None:
        self.port, self.registry = find_free_port(), CollectorRegistry()
        self.power = self._make_gauge("DCGM_FI_DEV_POWER_USAGE", 688.25)
        self.temperature = self._make_gauge("DCGM_FI_DEV_GPU_TEMP", 61)
        self.memory_temperature = self._make_gauge("DCGM_FI_DEV_MEMORY_TEMP", float("nan"))
        self.energy = Counter("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "mJ", list(LABELS), registry=self.registry)
        self.energy.labels(**LABELS).inc(6_233_211)
        self.server, self.thread = start_http_server(self.port, "127.0.0.1", self.registry)

    def set_power(self, watts: float) -> None:
        self.power.labels(**LABELS).set(watts)

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def _make_gauge(self, name: str, value: float) -> Gauge:
        gauge = Gauge(name, name, list(LABELS), registry=self.registry)
        gauge.labels(**LABELS).set(value)
        return gauge


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    if exporter.thread.is_alive():
        exporter.stop()


def served(watts: float = 688.25) -> DeviceSample:
    return DeviceSample(
        id="GPU-a", name="NVIDIA H100", power_mean_w=watts, core_temperature_c=61.0, energy_joules=6233.211
    )


def test_an_exporter_is_read_and_has_no_devices_when_it_is_gone(exporter: Exporter) -> None:
    source = PrometheusSource(f"http://127.0.0.1:{exporter.port}/metrics")
    assert source.read().devices == (served(),)
    exporter.set_power(9223372036854775794)
    assert source.read().devices[0].power_mean_w is None
    exporter.stop()
    assert source.read().devices == ()


def test_an_exporter_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(SourceUnavailableError, match="Connection refused; is the exporter running"):
        PrometheusSource(f"http://127.0.0.1:{find_free_port()}/metrics")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0" * 100,
        b"HTTP/1.0 200 OK\r\n\r\n" + PAGE,
        b"HTTP/1.0 200 OK\r\nContent-Length: 500\r\n\r\n" + PAGE + b"25\n",
    ],
)
def test_an_answer_that_is_cut_off_is_said(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(SourceUnavailableError, match=r"cut off|is no HTTP|closed"):
            PrometheusSource(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        thread.join()


@pytest.fixture
def prometheus(exporter: Exporter, tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes the exporter each second."""
    if PROMETHEUS is None:
        pytest.skip("NOTHING IS TESTED ON A REAL PROMETHEUS: there is no prometheus")
    port, config = find_free_port(), tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: dcgm, static_configs: [{{targets: ['127.0.0.1:{exporter.port}']}}]}}]\n"
    )
    words = [PROMETHEUS, f"--config.file={config}", f"--web.listen-address=127.0.0.1:{port}"]
    words += [f"--storage.tsdb.path={tmp_path / 'data'}", "--log.level=warn"]
    with run_server(words, port, tmp_path / "prometheus.log"):
        yield f"http://127.0.0.1:{port}"


def test_a_prometheus_server_gives_what_it_scraped_and_nothing_when_the_exporter_is_gone(
    prometheus: str, exporter: Exporter, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    url = f'{prometheus}/federate?match[]={{__name__=~"DCGM_FI_.*",Hostname="node1"}}'
    wait_until(lambda: "DCGM_FI_DEV_POWER_USAGE" in read_page(url))
    source = PrometheusSource(url, renewal_s=1.0)
    assert source.read().devices == (served(),)
    exporter.set_power(350.5)
    wait_until(lambda: source.read().devices == (served(350.5),))
    exporter.stop()
    wait_until(lambda: all(device.power_w is None for device in source.read().devices))


def read_page(url: str) -> str:
    """The page at `url`, once Prometheus is ready to answer."""
    try:
        with urllib.request.urlopen(url) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        error.close()
        return ""
