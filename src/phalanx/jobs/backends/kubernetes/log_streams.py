"""Follow the logs of a job's pods: one stream per pod, in which each byte is sent once. A broken stream resumes where
it stopped; a new pod after a restart gets a new stream.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.backends.kubernetes.errors import ObjectNotFoundError
from phalanx.jobs.backends.kubernetes.status import pod_index

Pod = Mapping[str, Any]
OpenLog = Callable[[Pod, int | None], Iterator[tuple[str, str]]]
"""Opens the log of a pod: lines with their timestamps, until the pod ends or the stream breaks. The number limits the
lines to those of the last seconds."""
REOPEN_INTERVAL_S = 1.0
"""Seconds after which a stream that broke off is opened again."""
OVERLAP_S = 5
"""Seconds by which it then reaches back further than needed."""
DRAIN_TIMEOUT_S = 15.0
"""Seconds for the streams of a finished job to end."""
FINAL_PHASES = ("Succeeded", "Failed")


class PodLogStreams:
    """`read` gives the lines that have come since it was called before, in the order of time as far as it is known."""

    def __init__(self, list_pods: Callable[[], Sequence[Pod]], open_log: OpenLog):
        self._list_pods, self._open_log = list_pods, open_log
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._threads: dict[str, threading.Thread] = {}
        self._ended_pods: set[str] = set()
        self._is_last = threading.Event()

    def read(self, is_last: bool) -> list[str]:
        """`is_last`: the job is over, so that all that is left comes."""
        pods = self._list_pods()
        phase_by_pod = {pod["metadata"]["name"]: pod.get("status", {}).get("phase") for pod in pods}
        self._ended_pods |= {
            name for name in (*self._threads, *phase_by_pod) if phase_by_pod.get(name) in (*FINAL_PHASES, None)
        }
        for pod in pods:
            name = pod["metadata"]["name"]
            if name not in self._threads and pod.get("status", {}).get("phase") != "Pending":
                prefix = f"[node {pod_index(pod)}] " if len(pods) > 1 else ""
                thread = threading.Thread(
                    target=self._stream_pod, args=(pod, prefix), name=f"log of {name}", daemon=True
                )
                self._threads[name] = thread
                thread.start()
        if is_last:
            self._is_last.set()
            deadline = time.monotonic() + DRAIN_TIMEOUT_S
            for thread in self._threads.values():
                thread.join(max(0.0, deadline - time.monotonic()))
        found = [self._lines.get() for _ in range(self._lines.qsize())]
        return [line for _, line in sorted(found, key=lambda one: one[0])]

    def _stream_pod(self, pod: Pod, prefix: str) -> None:
        """Read all streams of one pod. A stream that is opened after the pod has ended contains all that is left."""
        newest, count, last_line_at = "", 0, None
        name = pod["metadata"]["name"]
        while True:
            final = name in self._ended_pods or self._is_last.is_set()
            since = None if last_line_at is None else int(time.monotonic() - last_line_at) + OVERLAP_S
            last_line_at, num_same, reaching_back = time.monotonic(), 0, since is not None
            try:
                for timestamp, line in self._open_log(pod, since):
                    last_line_at = time.monotonic()
                    num_same += timestamp == newest
                    if reaching_back and (timestamp < newest or (timestamp == newest and num_same <= count)):
                        continue  # already received before the stream broke
                    reaching_back = False
                    newest, count = timestamp, count + 1 if timestamp == newest else 1
                    self._lines.put((timestamp, prefix + line))
            except ObjectNotFoundError:
                return
            except UsageError:  # the stream broke; polling the job shows whether the cluster responds
                final = final and self._is_last.is_set()
            if final:
                return
            self._is_last.wait(REOPEN_INTERVAL_S)
