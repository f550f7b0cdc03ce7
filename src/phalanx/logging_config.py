"""Which log records of Phalanx are shown, and where: `--log-level` and PHALANX_LOG.

Modules log to `logging.getLogger(__name__)`. Only a process that Phalanx starts configures the logger `phalanx`; a
program that imports Phalanx keeps its own configuration. Events are for programs, log records are for people.
"""

import logging
import os
import sys
from collections.abc import MutableMapping

from phalanx.errors import UsageError
from phalanx.std_streams import SafeStream, escape_control_chars

LOG_LEVEL_VARIABLE = "PHALANX_LOG"
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_LOG_LEVEL = "warning"
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"


class _StderrHandler(logging.Handler):
    """Writes to what `sys.stderr` is at that time: a worker's log, or a terminal with a progress display."""

    def emit(self, record: logging.LogRecord) -> None:
        print(escape_control_chars(self.format(record)), file=SafeStream(sys.stderr), flush=True)


def configure_logging(level: str | None = None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Write the log records of Phalanx to standard error.

    Args:
        level: Lowest level that is shown (LOG_LEVELS), as `--log-level` gives it; it is passed on to processes that
            this one starts through PHALANX_LOG. Without it PHALANX_LOG decides, else DEFAULT_LOG_LEVEL.
        environment: The variables of this process.

    Raises:
        UsageError: The level is none of LOG_LEVELS.
    """
    given = level or environment.get(LOG_LEVEL_VARIABLE) or DEFAULT_LOG_LEVEL
    if given.lower() not in LOG_LEVELS:
        source = f"--log-level {given}" if level else f"{LOG_LEVEL_VARIABLE}={given}"
        raise UsageError(f"{source}: expected one of {', '.join(LOG_LEVELS)}")
    if level:
        environment[LOG_LEVEL_VARIABLE] = level
    logger = logging.getLogger("phalanx")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logger.handlers = [handler]
    logger.setLevel(given.upper())
    logger.propagate = False  # the user's code may configure the root logger, which would show each record twice
