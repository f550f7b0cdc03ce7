"""Bandwidth by the field's tools: fake tools that print what the real ones print."""

from pathlib import Path

import pytest

from phalanx.cluster.health import HealthVerdict
from phalanx.cluster.health.checks import network

ALL_REDUCE_OUTPUT = """\
# nThread 1 nGpus 8 minBytes 1073741824 maxBytes 1073741824 step: 1048576(bytes) warmup iters: 5 iters: 20
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  1073741824     268435456     float     sum      -1   4668.4  230.00  402.50      0   4663.8  230.23  402.90      0
# Out of bounds values : {wrong}
# Avg bus bandwidth    : 402.7
#
"""


def install(directory: Path, name: str, output: str, exit_code: int = 0) -> None:
    """Put a tool into a directory that prints its arguments and this output."""
    (directory / f"{name}.out").write_text(output)
    script = f'#!/bin/sh\necho "$@" > {directory}/{name}.arguments\n/bin/cat {directory}/{name}.out\nexit {exit_code}\n'
    (directory / name).write_text(script)
    (directory / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_the_bus_bandwidth_of_nccl_tests_is_reported(tools: Path) -> None:
    install(tools, "all_reduce_perf", ALL_REDUCE_OUTPUT.format(wrong="0 OK"))
    finding = network.measure_all_reduce(8)
    assert finding.verdict is HealthVerdict.PASS
    assert finding.values == {"bus_bytes_per_s": pytest.approx(402.7e9)}
    assert (tools / "all_reduce_perf.arguments").read_text() == "-b 1G -e 1G -g 8\n"


def test_wrong_sums_make_a_node_unfit(tools: Path) -> None:
    install(tools, "all_reduce_perf", ALL_REDUCE_OUTPUT.format(wrong="12 FAILED"))
    assert network.measure_all_reduce(8).verdict is HealthVerdict.FAIL


def test_a_failed_tool_is_an_error_with_its_last_line(tools: Path) -> None:
    install(tools, "all_reduce_perf", "first\nTest NCCL failure common.cu:1005 'unhandled cuda error'\n", exit_code=3)
    finding = network.measure_all_reduce(2)
    assert finding.verdict is HealthVerdict.ERROR
    assert finding.reason.endswith("common.cu:1005 'unhandled cuda error'")


@pytest.mark.usefixtures("tools")
def test_without_the_tools_nothing_is_measured_and_the_report_says_so() -> None:
    finding = network.measure_all_reduce(8)
    assert finding.verdict is HealthVerdict.UNKNOWN
    assert "not measured" in finding.reason
