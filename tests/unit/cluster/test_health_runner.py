"""Checks in processes that can be ended: one that hangs, dies or raises is told and is no pass."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from phalanx.cluster.health import CheckContext, HealthVerdict
from phalanx.cluster.health.finding import HealthFinding
from phalanx.cluster.health.runner import (
    HEALTH_CHECKS,
    CheckAborted,
    CheckProcess,
    HealthCheck,
    NodeHealthReport,
    choose_checks,
    parse_report,
    run_check,
    run_checks,
)
from train_harness import wait_until


def process_of(helper: CheckProcess) -> psutil.Process:
    return psutil.Process(helper.call("builtins:eval", "__import__('os').getpid()", 20.0))


def test_a_process_answers_one_request_after_another_and_ends_when_the_checks_are_done() -> None:
    with CheckProcess() as helper:
        child = process_of(helper)
        assert [helper.call("math:sqrt", value, 20.0) for value in (4, 9)] == [2, 3]
    assert not child.is_running()


def test_a_check_that_hangs_is_killed_at_its_deadline_and_the_next_one_runs() -> None:
    with CheckProcess() as helper:
        child = process_of(helper)
        begun = time.monotonic()
        with pytest.raises(CheckAborted, match=r"did not finish within 0\.2 s"):
            helper.call("time:sleep", 1000, 0.2)
        assert time.monotonic() - begun < 5
        assert not child.is_running()
        assert helper.call("math:sqrt", 16, 20.0) == 4


def test_a_check_that_raises_is_told() -> None:
    with CheckProcess() as helper:
        with pytest.raises(CheckAborted, match="ValueError: "):
            helper.call("math:sqrt", -1, 20.0)
        assert helper.call("math:sqrt", 16, 20.0) == 4


def test_a_check_whose_process_dies_is_told() -> None:
    with CheckProcess() as helper, pytest.raises(CheckAborted, match=r"its process died \(exit code 3\)"):
        helper.call("os:_exit", 3, 20.0)


def test_what_a_check_prints_is_not_taken_for_its_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with CheckProcess() as helper:
        assert helper.call("builtins:print", "nonsense", 20.0) is None
    assert capfd.readouterr().err == "nonsense\n"


def test_what_a_check_started_is_ended_with_it(tmp_path: Path) -> None:
    with CheckProcess() as helper, pytest.raises(CheckAborted):
        helper.call("os:system", f"sleep 1000 & echo $! > {tmp_path}/pid; wait", 1.0)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_an_unfinished_check_is_a_finding_with_its_limit(tmp_path: Path) -> None:
    def call(function: str, payload: Any, seconds: float) -> Any:
        raise CheckAborted("it hung")

    process: Any = SimpleNamespace(call=call)
    (found,) = run_check(HealthCheck("disk", lambda site: [], timeout_s=3.0), CheckContext(tmp_path), process)
    assert found == HealthFinding("disk", HealthVerdict.ERROR, "it hung", {"limit": 3.0})


def test_real_checks_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    asked: list[str] = []
    here = CheckContext(tmp_path, tmp_path, tmp_path)
    whole = run_checks(here, choose_checks(["disk", "ulimits"], [], quick=True), asked.append, now=lambda: 5.0)
    assert asked == ["ulimits", "disk"]
    assert [each.check for each in whole.findings] == ["ulimits", "disk/run", "disk/cache", "disk/temp"]
    assert whole.written_at == 5.0


def test_a_report_survives_json() -> None:
    before = NodeHealthReport("n1", 12.5, 1.25, (HealthFinding("cpu", HealthVerdict.FAIL, "why", {"busy": 1.5}),))
    assert parse_report(before.as_json()) == before
    assert not before.is_fit


def test_a_report_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 2"):
        parse_report({**NodeHealthReport("n1", 0.0, 0.0, ()).as_json(), "format": 2})


def test_names_choose_checks() -> None:
    assert [each.name for each in choose_checks(["memory"], [], False)] == ["memory"]
    assert "memory" not in [each.name for each in choose_checks([], ["memory"], False)]


def test_quick_leaves_out_what_measures() -> None:
    left = {each.name for each in HEALTH_CHECKS} - {each.name for each in choose_checks([], [], True)}
    assert left == {"matmul", "all-reduce", "storage"}
