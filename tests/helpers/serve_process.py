"""A `phalanx serve` of its own, and what tests ask a browser about its pages."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from typing import Any

from chromium import Page

TIMEOUT_S = 60.0


def wait_until(check: Callable[[], Any]) -> Any:
    """What `check` returns once that is true."""
    until = time.monotonic() + TIMEOUT_S
    while not (found := check()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.02)
    return found


class ServeProcess:
    """A `phalanx serve` of its own."""

    def __init__(self, *arguments: str, **environment: str):
        access = [] if "PHALANX_SERVE_TOKEN" in environment else ["--no-token"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx", "serve", "--port", "0", *arguments, *access],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("serving "), line + self.process.stdout.read()
        self.address = line.split()[1]
        self.base = self.address.partition("/?")[0].rstrip("/")

    def end(self) -> tuple[int, str]:
        """Press Ctrl-C; exit code and what it printed since."""
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output


def find_violations(page: Page) -> list[str]:
    """Serious findings of axe on the page."""
    page.evaluate(resources.files("axe_core_python").joinpath("axe.min.js").read_text())
    page.send("Runtime.evaluate", expression="axe.run().then((found) => { window.found = found; })", awaitPromise=True)
    found: list[str] = page.evaluate(
        "found.violations.filter((each) => ['serious', 'critical'].includes(each.impact))"
        ".map((each) => `${each.id}: ${each.nodes[0].html}`)"
    )
    return found
