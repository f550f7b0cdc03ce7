"""The Kubernetes backend: JobSets or TrainJobs, optionally with Kueue. It uses the official client; `manifest.py`
renders the objects, and `status.py` reads them.

The id of a job is NAMESPACE/KIND/NAME. Log lines are merged by time, with the node in front if there are several. A job
that ends with 77 (unfit node) is restarted, but Kubernetes chooses the machine: this backend cannot exclude nodes.
"""

import heapq
import io
import json
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import (
    Backend,
    BackendNode,
    LogReader,
    NoSuchJobError,
    SubmitRequest,
    add_inherited_variables,
    group_running_jobs,
    read_secrets,
)
from phalanx.jobs.backends.kubernetes import manifest
from phalanx.jobs.backends.kubernetes.client import (
    KubernetesClient,
    ObjectNotFoundError,
    PodLogStreams,
    connect,
    send_signal_to_pod,
    translate_api_errors,
)
from phalanx.jobs.backends.kubernetes.manifest import LABEL_PATTERN, WORKLOAD_KINDS, parse_options
from phalanx.jobs.backends.kubernetes.status import make_cordon, parse_node, parse_status, pod_index, select_latest_pods
from phalanx.jobs.spec import Job, JobState, JobStatus, select_array_members
from phalanx.recipe.yaml_loader import parse_yaml, to_yaml

logger = logging.getLogger(__name__)

API_GROUPS = {
    "jobset": {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"},
    "trainjob": {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs"},
}
LIST_PAGE_SIZE = 500
"""Objects per page of a list request, as in kubectl."""
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
"""The label of the Jobs and pods of a JobSet; a TrainJob's JobSet has its name."""
MANAGED_BY_SELECTOR = ",".join(f"{key}={value}" for key, value in manifest.MANAGED_BY_LABELS.items())
REQUEST_TIMEOUTS_S = (10.0, 60.0)
"""Timeouts of a connection and of an answer."""


class KubernetesBackend(Backend):
    """The Kubernetes backend. `config`: a kubeconfig file instead of `kubectl`'s, or a pod's service account."""

    name = "kubernetes"

    def __init__(
        self,
        config: Path | None = None,
        environ: Mapping[str, str] = os.environ,
        token: Callable[[], str] = lambda: secrets.token_hex(32),
    ):
        self._config, self._environ, self._token = config, environ, token
        self._connection: tuple[KubernetesClient, str] | None = None
        self._known_names: dict[str, str] = {}
        """Names of jobs that were submitted or cancelled here, since the cluster forgets deleted jobs."""

    def render(self, job: Job) -> SubmitRequest:
        """Return the manifests, without values of secrets."""
        if job.snapshot is not None:
            raise UsageError(
                f"job {job.name}: on Kubernetes code comes with the image (-o image=...) or lies on a volume "
                "(-o pvc=CLAIM:/PATH); --snapshot is for local, slurm and ray"
            )
        if job.max_parallel is not None:
            raise UsageError(
                f"job {job.name}: Kubernetes does not count the members of an array; a queue of Kueue's with a quota "
                "(-o queue=NAME) lets only some run at once"
            )
        options = parse_options(job)
        job = add_inherited_variables(job, self._environ, shares_files=False)
        make_workload = manifest.make_jobset if options.kind == "jobset" else manifest.make_trainjob
        objects = {"secret": manifest.make_secret(job, options), options.kind: make_workload(job, options)}
        texts = {f"{name}.yaml": to_yaml(one, flow=False) for name, one in objects.items()}
        return SubmitRequest(self.name, job, texts)

    def submit(self, request: SubmitRequest) -> str:
        """Create what runs the job, then its Secret, for which pods wait; it belongs to the job and goes with it."""
        objects = {name.removesuffix(".yaml"): parse_yaml(text, name)[0] for name, text in request.files.items()}
        secret = objects.pop("secret")
        ((kind, workload),) = objects.items()
        secret["stringData"] = {manifest.TOKEN_VARIABLE: self._token()} | read_secrets(request.job, self._environ)
        client, default = self._connect()
        name, namespace = workload["metadata"]["name"], workload["metadata"].get("namespace", default)
        what = f"submitting job {request.job.name} as {kind} {name} to namespace {namespace}"
        custom, job_id = client.custom, f"{namespace}/{kind}/{name}"
        strict: dict[str, Any] = {"field_validation": "Strict", "_request_timeout": REQUEST_TIMEOUTS_S}
        with translate_api_errors(what):
            created = custom.create_namespaced_custom_object(
                **API_GROUPS[kind], namespace=namespace, body=workload, **strict
            )
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": name}
        secret["metadata"]["ownerReferences"] = [owner | {"uid": created["metadata"]["uid"]}]
        try:
            with translate_api_errors(f"{what}: making its Secret"):
                client.core.create_namespaced_secret(namespace, secret, **strict)
        except BaseException:
            problem = "it could not be made whole, nor removed; `phalanx jobs cancel` ends it"
            with translate_api_errors(f"{what}: {problem}"):
                custom.delete_namespaced_custom_object(**_locate_workload(job_id))
            raise
        logger.info("created %s %s and its Secret in namespace %s", kind, name, namespace)
        self._known_names[job_id] = request.job.name
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        """Return the status of a job. One that was submitted or cancelled here and is gone now was cancelled."""
        namespace, _, name = _parse_job_id(job_id)
        workload = self._find_workload(job_id)
        if workload is None:
            if job_id not in self._known_names:
                raise NoSuchJobError(self.name, job_id)
            return JobStatus(job_id, self._known_names[job_id], JobState.CANCELLED, reason="it was deleted")
        jobs = _list_owned(self._client.batch.list_namespaced_job, namespace, name)
        return parse_status(job_id, workload, jobs, self._list_pods(namespace, name))

    def list_jobs(self, array: str | None = None) -> list[JobStatus]:
        """Return the jobs of all users that Phalanx submitted to the namespace of the context. The number of requests
        does not depend on the number of jobs."""
        client, namespace = self._connect()
        workloads: list[tuple[str, Mapping[str, Any]]] = []
        missing = 0
        for kind, group in API_GROUPS.items():
            try:
                with translate_api_errors(f"listing the {kind}s of namespace {namespace}"):
                    page = _list_all_pages(
                        partial(client.custom.list_namespaced_custom_object, **group, namespace=namespace),
                        MANAGED_BY_SELECTOR,
                    )
            except ObjectNotFoundError as error:  # one of the two kinds is enough
                missing += 1
                if missing == len(API_GROUPS):
                    problem = "neither JobSet nor Kubeflow Trainer is installed on this cluster"
                    raise UsageError(f"{problem}: {error}") from error
                continue
            workloads += [(kind, workload) for workload in page]
        if not workloads:
            return []
        jobs = _group_by_job(_list_owned(client.batch.list_namespaced_job, namespace))
        pods = _group_by_job(_list_owned(client.core.list_namespaced_pod, namespace))
        found = []
        for kind, workload in workloads:
            name = workload["metadata"]["name"]
            children = jobs.get(name, []), select_latest_pods(pods.get(name, []))
            found.append(parse_status(f"{namespace}/{kind}/{name}", workload, *children))
        if array is not None:
            found = select_array_members(found, array)
        return sorted(found, key=lambda status: (status.submitted_at or 0.0, status.id))

    def send_signal(self, job_id: str, number: int) -> None:
        """Send a signal with `kill` in each container, since Kubernetes can only send the signals that end a pod. The
        signal goes to the first process, which the kernel shields from signals that it does not handle."""
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise UsageError(
                f"{job_id}: the first process of a container cannot be sent {signal.Signals(number).name} from within; "
                f"`phalanx jobs cancel {job_id} --on kubernetes` ends the job"
            )
        namespace, _, name = _parse_job_id(job_id)
        self._get_workload(job_id)
        running = [pod for pod in self._list_pods(namespace, name) if pod.get("status", {}).get("phase") == "Running"]
        if not running:
            raise UsageError(f"{job_id}: it does not run, so that nothing can be signalled")
        for pod in running:
            send_signal_to_pod(self._client, pod, manifest.CONTAINER_NAME, number)

    def read_logs(self, job_id: str) -> Iterator[str]:
        namespace, _, name = _parse_job_id(job_id)
        self._get_workload(job_id)
        pods = [pod for pod in self._list_pods(namespace, name) if pod.get("status", {}).get("phase") != "Pending"]
        several = any(pod_index(pod) for pod in pods)
        lines = (self._read_pod_log(namespace, pod, f"[node {pod_index(pod)}] " if several else "") for pod in pods)
        for _, line in heapq.merge(*lines, key=lambda one: one[0]):
            yield line

    def follow_logs(self, job_id: str) -> LogReader:
        """Follow the logs of the job's pods, including those after a restart."""
        namespace, _, name = _parse_job_id(job_id)
        self._get_workload(job_id)
        return PodLogStreams(
            lambda: self._list_pods(namespace, name),
            lambda pod, since: self._read_pod_log(namespace, pod, "", True, since),
        ).read

    def cancel(self, job_id: str) -> None:
        """Delete the job and its Secret. Its pods get the job's warning time to save."""
        status = self.poll(job_id)
        if status.state.is_final:
            return
        self._known_names[job_id] = status.name
        with translate_api_errors(f"stopping {job_id}"), suppress(ObjectNotFoundError):  # deleted meanwhile
            self._client.custom.delete_namespaced_custom_object(
                **_locate_workload(job_id), propagation_policy="Foreground"
            )

    def pause(self, job_id: str, reason: str) -> None:
        """Suspend the job: Kubernetes ends its pods, which get the job's warning time to save."""
        status, workload = self.poll(job_id), self._get_workload(job_id)
        if status.state.is_final:
            raise UsageError(f"{job_id}: it is {status.state}: there is nothing to pause")
        if (queue := workload["metadata"].get("labels", {}).get(manifest.QUEUE_LABEL)) is not None:
            raise UsageError(
                f"{job_id}: Kueue decides when jobs of its queue {queue} run, and would start it again; set `active: "
                "false` in the spec of its Workload"
            )
        self._patch_workload(job_id, manifest.make_pause(reason))
        namespace, kind, name = _parse_job_id(job_id)
        if kind == "jobset":
            self._evict_pods(namespace, name)

    def resume(self, job_id: str) -> bool:
        """Let Kubernetes create the pods of a paused job again."""
        if manifest.PAUSE_ANNOTATION not in self._get_workload(job_id)["metadata"].get("annotations", {}):
            return False
        self._patch_workload(job_id, manifest.make_pause(None))
        return True

    def list_nodes(self) -> list[BackendNode]:
        """Return the nodes of the cluster, with the jobs that Phalanx runs in the namespace of the context."""
        client, namespace = self._connect()
        with translate_api_errors("listing nodes, which needs the verb list on nodes"):
            nodes = _list_all_pages(client.core.list_node, "")
        pods = _list_owned(client.core.list_namespaced_pod, namespace)
        jobs = group_running_jobs(self.list_jobs()) if pods else {}
        running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
        return [parse_node(node, running, jobs) for node in nodes]

    def drain_node(self, node: str, reason: str, actor: str) -> None:
        """Cordon a node: its pods continue. Reason and actor become annotations."""
        self._patch_node(node, make_cordon(reason, actor))

    def undrain_node(self, node: str) -> None:
        self._patch_node(node, make_cordon(None, None))

    def _evict_pods(self, namespace: str, name: str) -> None:
        """Mark the pods of a suspended JobSet as disrupted. Kubernetes does not count suspended pods as failures of
        their Job, but applies the failure policy to one that it still sees after its container has ended with 75."""
        for pod in self._list_pods(namespace, name):
            pod_name = pod["metadata"]["name"]
            metadata = {"name": pod_name, "namespace": namespace}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
            try:
                with translate_api_errors(f"evicting pod {pod_name}, which needs the verb create on pods/eviction"):
                    self._client.core.create_namespaced_pod_eviction(
                        pod_name, namespace, body, _preload_content=False, _request_timeout=REQUEST_TIMEOUTS_S
                    )
            except ObjectNotFoundError:  # gone already
                continue
            except UsageError as error:
                logger.warning("%s. Kubernetes may count the pause as a restart of %s", error, name)
                return

    def _patch_node(self, node: str, change: dict[str, Any]) -> None:
        with translate_api_errors(f"changing node {node}, which needs the verb patch on nodes"):
            self._client.core.patch_node(node, change, _request_timeout=REQUEST_TIMEOUTS_S)

    def _patch_workload(self, job_id: str, change: dict[str, Any]) -> None:
        location = _locate_workload(job_id)
        with translate_api_errors(f"changing {job_id}, which needs the verb patch on {location['plural']}"):
            self._client.custom.patch_namespaced_custom_object(**location, body=change)

    def _get_workload(self, job_id: str) -> dict[str, Any]:
        if (found := self._find_workload(job_id)) is None:
            raise NoSuchJobError(self.name, job_id)
        return found

    def _find_workload(self, job_id: str) -> dict[str, Any] | None:
        """The JobSet or TrainJob, if it is there."""
        location = _locate_workload(job_id)
        with suppress(ObjectNotFoundError), translate_api_errors(f"asking for {job_id}"):
            found: dict[str, Any] = self._client.custom.get_namespaced_custom_object(**location)
            return found
        return None

    def _list_pods(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """Return the pods of the last attempt, by node."""
        return select_latest_pods(_list_owned(self._client.core.list_namespaced_pod, namespace, name))

    def _read_pod_log(
        self, namespace: str, pod: Mapping[str, Any], prefix: str, follow: bool = False, since: int | None = None
    ) -> Iterator[tuple[str, str]]:
        """Yield the lines of a pod so far, each with its timestamp. With `follow`, yield until the pod ends. `since`:
        only lines of the last `since` seconds and later."""
        since_option: dict[str, Any] = {} if since is None else {"since_seconds": since}
        name = pod["metadata"]["name"]
        with translate_api_errors(f"reading the log of pod {name}"):
            answer = self._client.core.read_namespaced_pod_log(
                name,
                namespace,
                container=manifest.CONTAINER_NAME,
                timestamps=True,
                follow=follow,
                _preload_content=False,
                _request_timeout=REQUEST_TIMEOUTS_S,
                **since_option,
            )
            answer.auto_close = False  # the wrapper closes it
            for raw in io.TextIOWrapper(answer, encoding="utf-8", errors="replace", newline="\n"):
                timestamp, _, line = raw.rstrip("\n").partition(" ")
                yield timestamp, prefix + line

    @property
    def _client(self) -> KubernetesClient:
        return self._connect()[0]

    def _connect(self) -> tuple[KubernetesClient, str]:
        """The client, and the namespace that the configuration names."""
        if self._connection is None:
            self._connection = connect(self._config, self._environ)
            logger.debug("connected to Kubernetes, namespace %s", self._connection[1])
        return self._connection


def _list_owned(call: Callable[..., Any], namespace: str, name: str | None = None) -> list[Mapping[str, Any]]:
    """The objects that belong to a job, or to any, as they are on the wire."""
    with translate_api_errors(f"asking for what belongs to {namespace}/{name or 'its jobs'}"):
        selector = JOBSET_NAME_LABEL if name is None else f"{JOBSET_NAME_LABEL}={name}"
        return _list_all_pages(partial(call, namespace), selector)


def _list_all_pages(call: Callable[..., Any], selector: str) -> list[Mapping[str, Any]]:
    """Return all objects of a list request, in pages of limited size."""
    found: list[Mapping[str, Any]] = []
    more: dict[str, Any] = {}
    while True:
        answer = call(
            label_selector=selector,
            limit=LIST_PAGE_SIZE,
            _preload_content=False,
            _request_timeout=REQUEST_TIMEOUTS_S,
            **more,
        )
        page = json.loads(answer.data)
        found += page["items"]
        if not (continue_token := page.get("metadata", {}).get("continue")):
            return found
        more = {"_continue": continue_token}


def _group_by_job(objects: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Objects by the name of the job that they belong to."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each_object in objects:
        found.setdefault(each_object["metadata"]["labels"][JOBSET_NAME_LABEL], []).append(each_object)
    return found


def _locate_workload(job_id: str) -> dict[str, Any]:
    """Where a JobSet or TrainJob is, and the timeout of a request for it."""
    namespace, kind, name = _parse_job_id(job_id)
    return {**API_GROUPS[kind], "namespace": namespace, "name": name, "_request_timeout": REQUEST_TIMEOUTS_S}


def _parse_job_id(job_id: str) -> tuple[str, str, str]:
    """Namespace, kind and name; what is no id belongs to no job."""
    parts = job_id.split("/")
    if (
        len(parts) != 3
        or parts[1] not in WORKLOAD_KINDS
        or not LABEL_PATTERN.fullmatch(parts[0])
        or not LABEL_PATTERN.fullmatch(parts[2])
    ):
        raise NoSuchJobError("kubernetes", job_id)
    return parts[0], parts[1], parts[2]
