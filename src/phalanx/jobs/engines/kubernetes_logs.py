"""What a job's pods print, as it comes: one stream a pod, in which each byte is sent once. A stream that breaks off
goes on where it was; a pod that a restart brings gets a stream of its own.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.engines.kubernetes_errors import NotThere
from phalanx.jobs.engines.kubernetes_status import index_of

Pod = Mapping[str, Any]
Open = Callable[[Pod, int | None], Iterator[tuple[str, str]]]
"""The lines of a pod, each with the moment at which it was printed, until it ends or the stream breaks off; with a
number only those of so many seconds until now."""
AGAIN = 1.0
"""Seconds after which a stream that broke off is opened again."""
OVERLAP = 5
"""Seconds by which it then reaches back further than needed."""
ENDING = 15.0
"""Seconds that the streams of a job that is over may take to come to their ends."""
OVER = ("Succeeded", "Failed")


class Streams:
    """`read` gives the lines that have come since it was called before, in the order of time as far as it is known."""

    def __init__(self, pods: Callable[[], Sequence[Pod]], open: Open):
        self._pods, self._open = pods, open
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._over: set[str] = set()
        self._last = threading.Event()

    def read(self, last: bool) -> list[str]:
        """`last`: the job is over, so that all that is left comes."""
        pods = self._pods()
        there = {pod["metadata"]["name"]: pod.get("status", {}).get("phase") for pod in pods}
        self._over |= {name for name in (*self._threads, *there) if there.get(name) in (*OVER, None)}
        for pod in pods:
            name = pod["metadata"]["name"]
            if name not in self._threads and pod.get("status", {}).get("phase") != "Pending":
                prefix = f"[node {index_of(pod)}] " if len(pods) > 1 else ""
                thread = threading.Thread(target=self._follow, args=(pod, prefix), name=f"log of {name}", daemon=True)
                self._threads[name] = thread
                thread.start()
        if last:
            self._last.set()
            until = time.monotonic() + ENDING
            for thread in self._threads.values():
                thread.join(max(0.0, until - time.monotonic()))
        found = [self._lines.get() for _ in range(self._lines.qsize())]
        return [line for _, line in sorted(found, key=lambda one: one[0])]

    def _follow(self, pod: Pod, prefix: str) -> None:
        """All streams of one pod. One that was opened when the pod was over already has all that is left."""
        newest, count, heard = "", 0, None
        name = pod["metadata"]["name"]
        while True:
            final = name in self._over or self._last.is_set()
            since = None if heard is None else int(time.monotonic() - heard) + OVERLAP
            heard, again, reaching_back = time.monotonic(), 0, since is not None
            try:
                for moment, line in self._open(pod, since):
                    heard = time.monotonic()
                    again += moment == newest
                    if reaching_back and (moment < newest or (moment == newest and again <= count)):
                        continue  # it came before the stream broke off
                    reaching_back = False
                    newest, count = moment, count + 1 if moment == newest else 1
                    self._lines.put((moment, prefix + line))
            except NotThere:
                return
            except UsageError:  # it broke off; who polls the job learns whether the cluster answers
                final = final and self._last.is_set()
            if final:
                return
            self._last.wait(AGAIN)
