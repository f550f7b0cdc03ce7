"""Which log records are shown, and that processes that Phalanx starts show the same."""

import logging
import re

import pytest

from fork_server_calls import WITHOUT_TORCH
from phalanx.errors import UsageError
from phalanx.jobs.agent.fork_server_client import ForkServerClient
from phalanx.logging_config import DEFAULT_LOG_LEVEL, LOG_LEVEL_VARIABLE, LOG_LEVELS, configure_logging


@pytest.fixture(autouse=True)
def no_level_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "")


def log_at_each_level() -> None:
    logger = logging.getLogger("phalanx.some.module")
    for level in LOG_LEVELS:
        logger.log(logging.getLevelNamesMapping()[level.upper()], "it is %s", level)


@pytest.mark.parametrize(
    ("option", "variable", "lowest"),
    [
        (None, "", DEFAULT_LOG_LEVEL),
        (None, "info", "info"),
        (None, "ERROR", "error"),
        ("debug", "", "debug"),
        ("Warning", "debug", "warning"),  # the option counts
    ],
)
def test_records_from_a_level_on_are_shown(
    option: str | None, variable: str, lowest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {LOG_LEVEL_VARIABLE: variable}
    configure_logging(option, variables)
    log_at_each_level()
    shown = [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == list(LOG_LEVELS[LOG_LEVELS.index(lowest) :])
    assert variables[LOG_LEVEL_VARIABLE] == (option or variable)  # for the processes that this one starts


def test_a_record_tells_when_how_important_and_of_what(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", {})
    configure_logging("info", {})  # once more changes nothing
    logging.getLogger("phalanx.some.module").info("two\x1b[2J lines\nof %d", 3)
    pattern = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO phalanx\.some\.module\[\d+\]: two\\x1b\[2J lines\nof 3\n"
    assert re.fullmatch(pattern, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "variable", "source"),
    [("loud", "", "--log-level loud"), (None, "2", f"{LOG_LEVEL_VARIABLE}=2")],
)
def test_a_level_that_is_none_is_refused(option: str | None, variable: str, source: str) -> None:
    with pytest.raises(UsageError, match=f"{source}: expected one of debug, info, warning, error"):
        configure_logging(option, {LOG_LEVEL_VARIABLE: variable})


def test_the_level_reaches_the_fork_server(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", WITHOUT_TORCH)
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "debug")
    with ForkServerClient() as fork_server:
        assert fork_server.call("fork_server_calls:double", 4) == 8
    assert "DEBUG phalanx.jobs.agent.fork_server[" in capfd.readouterr().err
