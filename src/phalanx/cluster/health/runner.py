"""Run the chosen checks on this machine, in this order, each with its timeout. docs/reference/health-checks.md says
what each is for.

Benchmarks run in a separate process each, the other checks share one. A check that hangs, dies or raises yields a
finding with the verdict ERROR.
"""

import contextlib
import difflib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from phalanx.cluster.calibration.location_speed import describe_speed, measure_location, remove_probe
from phalanx.cluster.device_links import import_nvml
from phalanx.cluster.health.checks import gpus, host, kernel_log, matmul, network
from phalanx.cluster.health.finding import CheckContext, HealthFinding, HealthVerdict, parse_finding, worst_verdict
from phalanx.errors import PhalanxError, SubprocessError, UsageError, describe_os_error
from phalanx.formatting import format_exit_status
from phalanx.run.call_process import CallProcess, value_of
from phalanx.run.messages import Message
from phalanx.run.process_messages import CallRaised, CallReturned

REPORT_FORMAT = 1
START_TIMEOUT_S = 60.0
"""Seconds for the process to start; a loaded machine may start Python slowly, and is not unfit because of that."""
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class HealthCheck:
    """One check. `timeout_s`: the check is aborted after this time. `is_benchmark`: it takes seconds, runs in a
    separate process, and is skipped by `--quick`."""

    name: str
    run_check: Callable[[CheckContext], list[HealthFinding]]
    timeout_s: float = 10.0
    is_benchmark: bool = False


def check_storage(context: CheckContext) -> list[HealthFinding]:
    """Measure each location of the context. One that cannot be used fails."""
    findings = []
    for place in context.locations:
        verdict, figures = HealthVerdict.FAIL, dict[str, Any]()
        try:
            speed = measure_location(place, context.probe_name)
        except (PhalanxError, OSError) as error:
            reason = describe_os_error(error) if isinstance(error, OSError) else str(error)
            reason = reason.replace(f"/{context.probe_name}", "")
        else:
            verdict = HealthVerdict.PASS if speed.latencies_s else HealthVerdict.UNKNOWN
            reason, figures = f"{place.location}: {describe_speed(speed)}", speed.model_dump()
            for name, (median_s, p99_s) in figures.pop("latencies_s").items():
                figures |= {f"{name}_median_s": median_s, f"{name}_p99_s": p99_s}
        findings.append(HealthFinding(f"storage/{place.key}", verdict, reason, figures))
    return findings


def remove_probes(payload: dict[str, Any]) -> None:
    """Remove what a measurement that was killed has written."""
    context = CheckContext.from_json(payload)
    for place in context.locations:
        remove_probe(place, context.probe_name)


HEALTH_CHECKS = (
    HealthCheck("versions", lambda context: host.evaluate_versions(host.measure_versions(context))),
    HealthCheck("gpus", lambda context: gpus.check_gpus(context, import_nvml()), timeout_s=20.0),
    HealthCheck("kernel-log", kernel_log.check_kernel_log),
    HealthCheck("cpu", lambda context: host.evaluate_cpu(host.measure_cpu(context))),
    HealthCheck("memory", lambda context: host.evaluate_memory(host.measure_memory(context))),
    HealthCheck("ulimits", lambda context: host.evaluate_ulimits(host.measure_ulimits(context))),
    HealthCheck("network", network.check_network),
    HealthCheck("disk", host.check_disk_space),
    HealthCheck("leaked-resources", host.check_leaked_resources),
    HealthCheck("matmul", matmul.check_matmul, timeout_s=120.0, is_benchmark=True),
    HealthCheck(
        "all-reduce",
        network.check_all_reduce,
        timeout_s=network.ALL_REDUCE_TIMEOUT_S + 30.0,
        is_benchmark=True,
    ),
    HealthCheck("storage", check_storage, timeout_s=60.0, is_benchmark=True),
)


def choose_checks(only: Sequence[str], skip: Sequence[str], quick: bool) -> list[HealthCheck]:
    """Choose the checks to run. Raises UsageError for an unknown name, and when no check is left."""
    names = [check.name for check in HEALTH_CHECKS]
    for name in (*only, *skip):
        if name not in names:
            suggestion = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {suggestion[0]!r}?" if suggestion else "."
            raise UsageError(f"there is no check {name!r}{hint} There are: {', '.join(names)}")
    found = [check for check in HEALTH_CHECKS if (not only or check.name in only) and check.name not in skip]
    found = [check for check in found if not (quick and check.is_benchmark)]
    if not found:
        raise UsageError("no check is left to do" + (": --quick leaves out those that measure" if quick else ""))
    return found


def run_check_in_process(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one check in a subprocess. `payload`: the name of the check and the context."""
    check = next(each for each in HEALTH_CHECKS if each.name == payload["check"])
    return [found.as_json() for found in check.run_check(CheckContext.from_json(payload["site"]))]


class CheckProcess:
    """A process that runs checks, one at a time, so that one that hangs can be killed with its children. The next call
    starts a new process. A context manager that ends it on exit."""

    def __init__(self) -> None:
        self._process: CallProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def call(self, function: str, payload: Any, timeout_s: float) -> Any:
        """Run `module:function(payload)` in the process. Raises CheckAborted when it takes longer than `timeout_s`,
        raises an exception, or dies."""
        try:
            process = self._ensure_started()
            process.send_call(function, payload)
            reply = self._receive(process, timeout_s, f"it did not finish within {timeout_s:g} s")
        except KeyboardInterrupt:
            self._kill()  # otherwise its answer would be taken for that of the next request
            raise
        assert isinstance(reply, CallReturned | CallRaised)
        try:
            return value_of(reply)
        except (PhalanxError, SubprocessError) as error:
            raise CheckAborted(str(error)[:MAX_ERROR_CHARS]) from None

    def _ensure_started(self) -> CallProcess:
        if self._process is None:
            self._process = CallProcess()
            self._receive(self._process, START_TIMEOUT_S, f"its process did not start within {START_TIMEOUT_S:g} s")
        return self._process

    def _receive(self, process: CallProcess, timeout_s: float, timeout_text: str) -> Message:
        try:
            messages = process.receive(timeout_s)
        except TimeoutError:
            raise CheckAborted(self._kill_and_explain(timeout_text)) from None
        if messages is None:
            raise CheckAborted(self._kill_and_explain("its process died"))
        return messages[0]

    def _kill_and_explain(self, reason: str) -> str:
        """Kill the process. Returns `reason`, with its exit status or the fact that it could not be killed."""
        assert self._process is not None
        process = self._process.process
        killed = process.poll() is None and not reason.endswith("died")
        if not self._kill():
            return f"{reason}, and its process {process.pid} cannot be killed: it waits within the kernel"
        return reason if killed else f"{reason} ({format_exit_status(process.returncode)})"

    def _kill(self) -> bool:
        """Kill the process and its process group. Returns whether it has ended."""
        process, self._process = self._process, None
        return process is None or process.kill()


@dataclass(frozen=True)
class NodeHealthReport:
    """Findings of one node. `written_at`: Unix seconds by the node's own clock."""

    node: str
    written_at: float
    duration_s: float
    findings: tuple[HealthFinding, ...]

    @property
    def verdict(self) -> HealthVerdict:
        return worst_verdict(each.verdict for each in self.findings)

    @property
    def is_fit(self) -> bool:
        """Whether this node may train."""
        return not any(each.verdict.is_unfit for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": REPORT_FORMAT,
            "node": self.node,
            "written_at": self.written_at,
            "duration_s": round(self.duration_s, 3),
            "verdict": str(self.verdict),
            "fit": self.is_fit,
            "findings": [each.as_json() for each in self.findings],
        }


def parse_report(value: Mapping[str, Any]) -> NodeHealthReport:
    """Parse a report from plain values. Raises KeyError, TypeError or ValueError for invalid ones."""
    if value["format"] != REPORT_FORMAT:
        raise ValueError(f"format {value['format']}: expected {REPORT_FORMAT}")
    findings = tuple(parse_finding(each) for each in value["findings"])
    return NodeHealthReport(str(value["node"]), float(value["written_at"]), float(value["duration_s"]), findings)


def run_checks(
    context: CheckContext,
    checks: Sequence[HealthCheck],
    progress: Callable[[str], None] = lambda name: None,
    now: Callable[[], float] = time.time,
) -> NodeHealthReport:
    """Run the checks. Ctrl-C leaves no process behind."""
    started, found = time.monotonic(), list[HealthFinding]()
    with CheckProcess() as shared_process:
        for check in checks:
            progress(check.name)
            if check.name == "storage":
                for place in context.locations:
                    found += run_storage_check(check, replace(context, locations=(place,)))
            elif check.is_benchmark:
                with CheckProcess() as own_process:
                    found += run_check(check, context, own_process)
            else:
                found += run_check(check, context, shared_process)
    return NodeHealthReport(platform.node(), now(), time.monotonic() - started, tuple(found))


def run_check(check: HealthCheck, context: CheckContext, runner: CheckProcess) -> list[HealthFinding]:
    """Return the findings of one check, or one that says why it did not finish."""
    payload = {"check": check.name, "site": context.as_json()}
    try:
        return [
            parse_finding(each) for each in runner.call(f"{__name__}:run_check_in_process", payload, check.timeout_s)
        ]
    except CheckAborted as error:
        return [HealthFinding(check.name, HealthVerdict.ERROR, str(error), {"limit": check.timeout_s})]


def run_storage_check(check: HealthCheck, context: CheckContext) -> list[HealthFinding]:
    """Measure a location in its own process: a network disk may hang. What a killed process has written is removed."""
    is_done = False
    try:
        with CheckProcess() as process:
            (finding,) = run_check(check, context, process)
        is_done = finding.verdict is not HealthVerdict.ERROR
        return [finding if is_done else replace(finding, reason=f"{context.locations[0].location}: {finding.reason}")]
    finally:
        if not is_done:
            with CheckProcess() as process, contextlib.suppress(CheckAborted):
                process.call(f"{__name__}:remove_probes", context.as_json(), START_TIMEOUT_S)


class CheckAborted(Exception):
    """A request did not finish; the text says why."""
