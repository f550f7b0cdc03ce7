"""The connection to a cluster: the official client as a kubeconfig or a pod's service account gives it, its errors as
UsageErrors, `kill` in a container, and followed logs.

Logs have one stream per pod, in which each byte is sent once. A broken stream resumes where it stopped; a new pod after
a restart gets a new stream.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.backends.kubernetes.status import pod_index

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_TIMEOUT_S = 10.0
"""Time limit of `kill` in a container."""
INSTALL_HINT = "jobs on Kubernetes need its client: pip install 'phalanx[kubernetes]'"

MISSING_RESOURCE_TEXT = "the server could not find the requested resource"
"""The API server's answer for an unknown kind of object. Trainer and JobSet must be installed separately."""

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


@dataclass(frozen=True)
class KubernetesClient:
    """The parts of the API that are used."""

    core: Any
    batch: Any
    custom: Any
    api: Any


def connect(config: Path | None, environ: Mapping[str, str]) -> tuple[KubernetesClient, str]:
    """Return a client and the default namespace. Raises UsageError when no configuration is found."""
    try:
        from kubernetes import client
        from kubernetes import config as configuration
    except ImportError:
        raise UsageError(INSTALL_HINT) from None

    settings = type.__call__(client.Configuration)
    try:
        if config is None and "KUBERNETES_SERVICE_HOST" in environ and "KUBECONFIG" not in environ:
            configuration.load_incluster_config(client_configuration=settings)
            namespace = (SERVICE_ACCOUNT_DIR / "namespace").read_text().strip()
        else:
            file = None if config is None else str(config)
            configuration.load_kube_config(file, client_configuration=settings)
            _, current = configuration.list_kube_config_contexts(file)
            namespace = current["context"].get("namespace", "default")
    except (configuration.ConfigException, OSError) as error:
        raise UsageError(
            f"no cluster is configured: {error}; `kubectl get pods` has to work first (KUBECONFIG names its file)"
        ) from error
    settings.retries = 1
    api = client.ApiClient(settings)
    return KubernetesClient(client.CoreV1Api(api), client.BatchV1Api(api), client.CustomObjectsApi(api), api), namespace


def send_signal_to_pod(client: KubernetesClient, pod: Mapping[str, Any], container: str, number: int) -> None:
    """Send a signal to the first process of a pod's container."""
    from kubernetes.client import CoreV1Api
    from kubernetes.stream import stream
    from kubernetes.stream.ws_client import ERROR_CHANNEL

    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    with translate_api_errors(f"sending signal {number} to pod {name}"):
        stream_client = stream(
            CoreV1Api(client.api).connect_get_namespaced_pod_exec,
            name,
            namespace,
            container=container,
            command=["/bin/sh", "-c", f"kill -{number:d} 1"],
            stdout=True,
            stderr=True,
            stdin=False,
            tty=False,
            _preload_content=False,
        )
        try:
            stream_client.run_forever(timeout=EXEC_TIMEOUT_S)
            result = json.loads(stream_client.read_channel(ERROR_CHANNEL) or "{}")
            message = stream_client.read_all().strip()
        finally:
            stream_client.sock.shutdown()  # its own close() leaves the socket open when the server closed first
    if result.get("status") != "Success":
        message = message or result.get("message") or f"it did not tell in {EXEC_TIMEOUT_S:g} s what became of it"
        raise UsageError(f"pod {name} could not be sent signal {number}: {message}")


class ObjectNotFoundError(UsageError):
    """The server knows no such object, or no such kind."""


@contextmanager
def translate_api_errors(what: str) -> Iterator[None]:
    """Raise UsageError, with `what` in front, for every way in which a request can fail."""
    import urllib3
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        kind = ObjectNotFoundError if error.status == 404 else UsageError
        reason = describe_api_error(error.status, error.body) if error.status else error.reason
        raise kind(f"{what}: {reason}") from error
    except urllib3.exceptions.HTTPError as error:
        cause = getattr(error, "reason", None) or error  # behind the retries
        raise UsageError(f"{what}: the cluster does not answer: {cause}") from error


def describe_api_error(status: int | None, body: str | bytes | None) -> str:
    """Describe an error answer. `body` is a Status object, or the text of a proxy in between."""
    answer = _parse_body(body)
    message = answer.get("message") or f"it answered with HTTP status {status}"
    details = answer.get("details") or {}
    kind = ".".join(filter(None, (str(details.get("kind") or ""), str(details.get("group") or ""))))
    if status == 401:
        return "the cluster does not know you; log in again, as `kubectl get pods` would ask you to"
    if status == 403:
        return f"you may not do this: {message}"
    if status == 404:
        missing = MISSING_RESOURCE_TEXT in message or not answer
        return f"{message}; is this kind of object installed there?" if missing else message
    if status == 409:
        return f"there is one of that name already ({message}); stop it first, or take another name"
    if status in (400, 422):
        causes = [f"{one.get('field')}: {one.get('message')}" for one in details.get("causes") or ()]
        return f"the cluster refuses it as wrong: {'; '.join(causes) or message}" + (f" ({kind})" if kind else "")
    return f"the cluster could not do it (HTTP status {status}): {message}"


def _parse_body(body: str | bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(body or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


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
                thread = threading.Thread(None, self._stream_pod, f"log of {name}", (pod, prefix), daemon=True)
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
