"""Jobs on Kubernetes: JobSets or TrainJobs, with Kueue where it is asked for. It talks to the API server through the
official client; what is sent is made in kubernetes_manifest, what is answered is read in kubernetes_status.

A job's id is NAMESPACE/KIND/NAME. Its lines come merged by time, with the node before each where there are several.
Who ends with 77 is started again, but Kubernetes, not we, decides where: nothing here keeps it off a machine.
"""

import heapq
import io
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.errors import UsageError
from phalanx.jobs.engine import Reader, Request, no_such_job
from phalanx.jobs.engines import kubernetes_manifest as manifest
from phalanx.jobs.engines.kubernetes_client import Client, connect, send
from phalanx.jobs.engines.kubernetes_errors import NotThere, explained
from phalanx.jobs.engines.kubernetes_logs import Streams
from phalanx.jobs.engines.kubernetes_options import KINDS, LABEL, options_of
from phalanx.jobs.engines.kubernetes_status import index_of, latest, status_of
from phalanx.jobs.spec import Job, State, Status
from phalanx.recipe.text import parse, to_yaml

GROUPS = {
    "jobset": {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"},
    "trainjob": {"group": "trainer.kubeflow.org", "version": "v1alpha1", "plural": "trainjobs"},
}
PAGE = 500
"""Objects that one answer of a list may have, as kubectl asks for."""
BELONGS = "jobset.sigs.k8s.io/jobset-name"
"""The label of the Jobs and pods of a JobSet; a TrainJob's JobSet has its name."""
MANAGED = ",".join(f"{key}={value}" for key, value in manifest.MANAGED_BY.items())
PATIENCE = (10.0, 60.0)
"""Seconds to connect, and to be answered."""


class Kubernetes:
    """The engine. `config` is a kubeconfig file, `context` one of its contexts; by default what `kubectl` would use, or
    in a pod its service account."""

    name = "kubernetes"

    def __init__(
        self,
        config: Path | None = None,
        context: str | None = None,
        environ: Mapping[str, str] = os.environ,
        token: Callable[[], str] = lambda: secrets.token_hex(32),
    ):
        self._config, self._context = config, context
        self._environ, self._token = environ, token
        self._connected: tuple[Client, str] | None = None
        self._last: dict[str, Status] = {}
        """What was last known of each job that was polled here: of one that is deleted, the cluster keeps nothing."""

    def render(self, job: Job) -> Request:
        """The manifests. Values of secrets are not in them."""
        if job.code is not None:
            raise UsageError(
                f"job {job.name}: on Kubernetes code comes with the image (-o image=...) or lies on a volume "
                "(-o pvc=CLAIM:/PATH); --snapshot is for local, slurm and ray"
            )
        if job.at_most is not None:
            raise UsageError(
                f"job {job.name}: Kubernetes does not count the members of an array; a queue of Kueue's with a quota "
                "(-o queue=NAME) lets only some run at once"
            )
        options = options_of(job)
        objects = {"secret": manifest.secret(job, options), options.kind: manifest.workload(job, options)}
        texts = {f"{name}.yaml": to_yaml(one, flow=False) for name, one in objects.items()}
        return Request(self.name, job, texts)

    def submit(self, request: Request) -> str:
        """Create what runs the job, then its Secret, which belongs to it and goes with it; until the Secret is there,
        pods wait."""
        objects = {name.removesuffix(".yaml"): parse(text, name)[0] for name, text in request.files.items()}
        secret = objects.pop("secret")
        ((kind, workload),) = objects.items()
        secret["stringData"] = self._values(request.job)
        client, default = self._connect()
        name, namespace = workload["metadata"]["name"], workload["metadata"].get("namespace", default)
        what = f"submitting job {request.job.name} as {kind} {name} to namespace {namespace}"
        custom, at = client.custom, {**GROUPS[kind], "namespace": namespace}
        strict: dict[str, Any] = {"field_validation": "Strict", "_request_timeout": PATIENCE}
        with explained(what):
            made = custom.create_namespaced_custom_object(**at, body=workload, **strict)
        owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": name}
        secret["metadata"]["ownerReferences"] = [owner | {"uid": made["metadata"]["uid"]}]
        try:
            with explained(f"{what}: making its Secret"):
                client.core.create_namespaced_secret(namespace, secret, **strict)
        except BaseException:
            with explained(f"{what}: it could not be made whole, nor removed; `phalanx jobs cancel` ends it"):
                custom.delete_namespaced_custom_object(**at, name=name, _request_timeout=PATIENCE)
            raise
        return f"{namespace}/{kind}/{name}"

    def poll(self, job: str) -> Status:
        """What is known of a job. One that was there when it was last polled here, and is not any more, was cancelled,
        by whomever; or it was over, and its time to be kept has passed."""
        namespace, _, name = _parts(job)
        workload = self._found(job)
        if workload is None:
            last = self._last.get(job)
            if last is None:
                raise no_such_job(self.name, job)
            return last if last.state.over else replace(last, state=State.CANCELLED, reason="it was deleted")
        found = status_of(job, workload, self._jobs(namespace, name), self._pods(namespace, name))
        self._last[job] = found
        return found

    def jobs(self) -> list[Status]:
        """Those that Phalanx submitted to the namespace of the context, of everybody who may use it. What belongs to
        them is asked for once, however many they are."""
        client, namespace = self._connect()
        workloads: list[tuple[str, Mapping[str, Any]]] = []
        missing = 0
        for kind, group in GROUPS.items():
            try:
                with explained(f"listing the {kind}s of namespace {namespace}"):
                    listed = _pages(
                        partial(client.custom.list_namespaced_custom_object, **group, namespace=namespace), MANAGED
                    )
            except NotThere as error:  # one of the two kinds is enough
                missing += 1
                if missing == len(GROUPS):
                    raise UsageError(
                        f"neither JobSet nor Kubeflow Trainer is installed on this cluster: {error}"
                    ) from error
                continue
            workloads += [(kind, workload) for workload in listed]
        if not workloads:
            return []
        jobs = _by_job(_listed(client.batch.list_namespaced_job, namespace))
        pods = _by_job(_listed(client.core.list_namespaced_pod, namespace))
        found = []
        for kind, workload in workloads:
            name = workload["metadata"]["name"]
            its = jobs.get(name, []), latest(pods.get(name, []))
            found.append(status_of(f"{namespace}/{kind}/{name}", workload, *its))
        return sorted(found, key=lambda status: (status.submitted or 0.0, status.id))

    def signal(self, job: str, number: int) -> None:
        """Kubernetes has no signals but those of its own end: `kill` is run in each container, on its first process,
        which the kernel shields from signals that it does not handle."""
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise UsageError(
                f"{job}: the first process of a container cannot be sent {signal.Signals(number).name} from within; "
                f"`phalanx jobs cancel {job} --on kubernetes` ends the job"
            )
        namespace, _, name = _parts(job)
        self._workload(job)
        running = [pod for pod in self._pods(namespace, name) if pod.get("status", {}).get("phase") == "Running"]
        if not running:
            raise UsageError(f"{job}: it does not run, so that nothing can be signalled")
        client, _ = self._connect()
        for pod in running:
            send(client, pod, manifest.CONTAINER, number)

    def logs(self, job: str) -> Iterator[str]:
        namespace, _, name = _parts(job)
        self._workload(job)
        pods = [pod for pod in self._pods(namespace, name) if pod.get("status", {}).get("phase") != "Pending"]
        several = any(index_of(pod) for pod in pods)
        lines = (self._lines(namespace, pod, f"[node {index_of(pod)}] " if several else "") for pod in pods)
        for _, line in heapq.merge(*lines, key=lambda one: one[0]):
            yield line

    def follow_logs(self, job: str) -> Reader:
        """What its pods print, also those that a restart brings."""
        namespace, _, name = _parts(job)
        self._workload(job)
        return Streams(
            lambda: self._pods(namespace, name), lambda pod, since: self._lines(namespace, pod, "", True, since)
        ).read

    def cancel(self, job: str) -> None:
        """Delete it; its pods may save for as long as the job's warning is, and its Secret goes with it."""
        namespace, kind, name = _parts(job)
        if self.poll(job).state.over:
            return
        client, _ = self._connect()
        with explained(f"stopping {job}"), suppress(NotThere):  # it went away meanwhile
            client.custom.delete_namespaced_custom_object(
                **GROUPS[kind],
                namespace=namespace,
                name=name,
                propagation_policy="Foreground",
                _request_timeout=PATIENCE,
            )

    def _values(self, job: Job) -> dict[str, str]:
        missing = [name for name in job.secrets if name not in self._environ]
        if missing:
            raise UsageError(f"job {job.name}: its secret {missing[0]} is not in your environment; export it first")
        return {manifest.TOKEN: self._token()} | {name: self._environ[name] for name in job.secrets}

    def _workload(self, job: str) -> dict[str, Any]:
        found = self._found(job)
        if found is None:
            raise no_such_job(self.name, job)
        return found

    def _found(self, job: str) -> dict[str, Any] | None:
        """The JobSet or TrainJob, if it is there."""
        namespace, kind, name = _parts(job)
        client, _ = self._connect()
        try:
            with explained(f"asking for {job}"):
                found: dict[str, Any] = client.custom.get_namespaced_custom_object(
                    **GROUPS[kind], namespace=namespace, name=name, _request_timeout=PATIENCE
                )
        except NotThere:
            return None
        return found

    def _jobs(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        client, _ = self._connect()
        return _listed(client.batch.list_namespaced_job, namespace, name)

    def _pods(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """Those of the last attempt, by node."""
        client, _ = self._connect()
        return latest(_listed(client.core.list_namespaced_pod, namespace, name))

    def _lines(
        self, namespace: str, pod: Mapping[str, Any], prefix: str, follow: bool = False, since: int | None = None
    ) -> Iterator[tuple[str, str]]:
        """A pod's lines so far, each with the moment at which it was printed; with `follow` all until it ends, of which
        `since` leaves those of so many seconds."""
        more: dict[str, Any] = {} if since is None else {"since_seconds": since}
        client, _ = self._connect()
        name = pod["metadata"]["name"]
        with explained(f"reading the log of pod {name}"):
            answer = client.core.read_namespaced_pod_log(
                name,
                namespace,
                container=manifest.CONTAINER,
                timestamps=True,
                follow=follow,
                _preload_content=False,
                _request_timeout=PATIENCE,
                **more,
            )
            answer.auto_close = False  # the wrapper closes it
            for raw in io.TextIOWrapper(answer, encoding="utf-8", errors="replace", newline="\n"):
                moment, _, line = raw.rstrip("\n").partition(" ")
                yield moment, prefix + line

    def _connect(self) -> tuple[Client, str]:
        """The client, and the namespace that the configuration names."""
        if self._connected is None:
            self._connected = connect(self._config, self._context, self._environ)
        return self._connected


def _listed(call: Callable[..., Any], namespace: str, name: str | None = None) -> list[Mapping[str, Any]]:
    """The objects that belong to a job, or to any, as they are on the wire."""
    with explained(f"asking for what belongs to {namespace}/{name or 'its jobs'}"):
        return _pages(partial(call, namespace), BELONGS if name is None else f"{BELONGS}={name}")


def _pages(call: Callable[..., Any], selector: str) -> list[Mapping[str, Any]]:
    """All that a list call gives, in pages, so that no answer is too long."""
    found: list[Mapping[str, Any]] = []
    more: dict[str, Any] = {}
    while True:
        answer = call(label_selector=selector, limit=PAGE, _preload_content=False, _request_timeout=PATIENCE, **more)
        page = json.loads(answer.data)
        found += page["items"]
        if not (onwards := page.get("metadata", {}).get("continue")):
            return found
        more = {"_continue": onwards}


def _by_job(things: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Objects by the name of the job that they belong to."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for thing in things:
        found.setdefault(thing["metadata"]["labels"][BELONGS], []).append(thing)
    return found


def _parts(job: str) -> tuple[str, str, str]:
    """Namespace, kind and name; what is no id belongs to no job."""
    parts = job.split("/")
    if len(parts) != 3 or parts[1] not in KINDS or not LABEL.fullmatch(parts[0]) or not LABEL.fullmatch(parts[2]):
        raise no_such_job("kubernetes", job)
    return parts[0], parts[1], parts[2]
