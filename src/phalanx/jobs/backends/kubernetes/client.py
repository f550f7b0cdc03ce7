"""The connection to a cluster: the official client as a kubeconfig or a pod's service account gives it, and running
`kill` in a container. It knows nothing of jobs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.backends.kubernetes.errors import translate_api_errors

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
EXEC_TIMEOUT_S = 10.0
"""Time limit of `kill` in a container."""
INSTALL_HINT = "jobs on Kubernetes need its client: pip install 'phalanx[kubernetes]'"


@dataclass(frozen=True)
class KubernetesClient:
    """The parts of the API that are used."""

    core: Any
    batch: Any
    custom: Any
    api: Any


def connect(config: Path | None, context: str | None, environ: Mapping[str, str]) -> tuple[KubernetesClient, str]:
    """Return a client and the default namespace. Raises UsageError when no configuration is found."""
    try:
        from kubernetes import client
        from kubernetes import config as configuration
    except ImportError:
        raise UsageError(INSTALL_HINT) from None

    settings = type.__call__(client.Configuration)
    try:
        if config is None and context is None and "KUBERNETES_SERVICE_HOST" in environ and "KUBECONFIG" not in environ:
            configuration.load_incluster_config(client_configuration=settings)
            namespace = (SERVICE_ACCOUNT_DIR / "namespace").read_text().strip()
        else:
            file = None if config is None else str(config)
            configuration.load_kube_config(file, context, client_configuration=settings)
            known, current = configuration.list_kube_config_contexts(file)
            chosen = current if context is None else next(one for one in known if one["name"] == context)
            namespace = chosen["context"].get("namespace", "default")
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
