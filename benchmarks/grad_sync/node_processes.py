"""The processes on all nodes, as one thing that can be asked for a turn, and ended when it hangs."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from links import Links
from rate_limited import ComputeTiming

BENCHMARK_DIR = Path(__file__).resolve().parent
START_TIMEOUT_S = 120.0
"""Seconds in which all nodes have to be there."""


class TurnFailed(Exception):
    """A turn that did not end well, or in time: what the first node that failed said."""


class NodeProcesses:
    """So many nodes with one paced model, as a context. After a TurnFailed there is nothing more to ask it for."""

    def __init__(self, nodes: int, shapes: Mapping[str, tuple[int, ...]], pace: ComputeTiming, log: Path) -> None:
        self.nodes = nodes
        self._given = {"shapes": shapes, "pace": pace.as_dict()}
        self._log = log
        self._stack = contextlib.ExitStack()
        self._processes: list[tuple[subprocess.Popen[str], threading.Thread]] = []
        self._replies: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._reap)
            self._links = stack.enter_context(Links(self.nodes))
            errors = stack.enter_context(open(self._log, "a"))
            for node in range(self.nodes):
                command = [sys.executable, str(BENCHMARK_DIR / "node.py"), str(node), str(self.nodes)]
                process = self._links.start(node, command, errors=errors)
                reader = threading.Thread(target=self._read, args=(node, process))
                reader.start()
                self._processes.append((process, reader))
            self._send(self._given)
            self._receive(START_TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _reap(self) -> None:
        """After the links, with which all processes end."""
        for process, reader in self._processes:
            process.wait()
            reader.join()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # of what was said to one that had ended
                process.stdin.close()
        self._processes.clear()

    def limit(self, rate: str | None) -> None:
        """Slow all links down to a rate as tc writes it; None for no limit."""
        self._links.limit(rate)

    def run_turn(self, request: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
        """All nodes' replies to what `node.py` is asked for. TurnFailed when it is not done within so many seconds."""
        self._send(request)
        return self._receive(seconds)

    def _send(self, what: Mapping[str, Any]) -> None:
        line = json.dumps(what) + "\n"
        for process, _ in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is noticed by whoever listens
                process.stdin.write(line)
                process.stdin.flush()

    def _receive(self, seconds: float) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        while len(replies) < self.nodes:
            try:
                node, line = self._replies.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise TurnFailed(f"not done after {seconds:.0f} s") from None
            if not line:
                said = self._log.read_text().strip().splitlines()
                raise TurnFailed(f"node {node} ended: {said[-1] if said else 'no word'}")
            reply = json.loads(line)
            if "failed" in reply:
                raise TurnFailed(f"node {node}: {reply['failed']}")
            replies[node] = reply
        return [replies[node] for node in range(self.nodes)]

    def _read(self, node: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._replies.put((node, line))
        self._replies.put((node, ""))
