"""A stand-in for a Kubernetes API server: it answers the official client over HTTP, refuses what the real one refuses
(unknown fields, values against the schema, names that are taken), and keeps objects. It has no controllers: a test
writes the status and the pods that they would.

The schemas of JobSet and Trainer come from ../shared/schemas, those of core kinds from kubernetes-validate.
"""

import base64
import functools
import hashlib
import json
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
from ruamel.yaml import YAML

SCHEMAS = Path(__file__).parents[3] / "shared" / "schemas"
FILES = {"JobSet": "jobset.x-k8s.io_jobsets.yaml", "TrainJob": "trainer.kubeflow.org_trainjobs.yaml"}
CUSTOM_KINDS = {"jobsets", "trainjobs"}
CORE = "1.35"
METADATA = {"name", "namespace", "labels", "annotations", "ownerReferences", "uid", "creationTimestamp"}


def strict(schema: Any) -> Any:
    """A schema under which fields that are not listed are errors, as for a server that was asked to be strict."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """The strict schema of a custom kind, in the version that we render."""
    document = YAML(typ="safe").load((SCHEMAS / FILES[kind]).read_text())
    (version,) = (one for one in document["spec"]["versions"] if one["storage"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"properties": {key: {} for key in METADATA}, "additionalProperties": False}
    return jsonschema.Draft202012Validator(schema)


def faults(thing: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Fields of an object that are wrong, and why."""
    if thing["kind"] in FILES:
        found = [
            (".".join(map(str, one.absolute_path)), one.message) for one in validator(thing["kind"]).iter_errors(thing)
        ]
        if thing["kind"] == "JobSet":
            found += core_faults(job_of(thing))
        return found
    return core_faults(thing)


def core_faults(thing: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The same for a core kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resources that it reads its schemas from
        import kubernetes_validate

        try:
            kubernetes_validate.validate(thing, CORE, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [(".".join(map(str, error.path)), error.message)]
    return []


def job_of(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """The Job that the JobSet controller would make of a JobSet."""
    (group,) = jobset["spec"]["replicatedJobs"]
    name = f"{jobset['metadata']['name']}-{group['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": group["template"]["spec"]}


class ApiRefusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, causes: list[tuple[str, str]] | None = None, kind: str = ""):
        details = {"kind": kind, "causes": [{"field": field, "message": why} for field, why in causes or []]}
        self.status = status
        self.body = {"kind": "Status", "status": "Failure", "code": status, "message": message, "details": details}


def has(labels: Mapping[str, str], key: str, sign: str, value: str) -> bool:
    """Whether labels meet one part of a selector: key=value, or key alone."""
    return labels.get(key) == value if sign else key in labels


class FakeApiServer:
    """The server. `objects` maps (plural, namespace, name) to what is kept; `refuse` maps (method, plural) to a status
    and a message with which such requests are answered."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.sent: dict[str, int] = {}
        self.breaks: list[int] = []
        self.stopping = threading.Event()
        self.refuse: dict[tuple[str, str], tuple[int, str]] = {}
        self.kinds = {*CUSTOM_KINDS, "secrets", "pods", "jobs", "nodes"}
        self.commands: list[tuple[str, list[str]]] = []
        self.kill_fails = False
        self.page = 500
        double = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                try:
                    if url.path.endswith("/log") and query.get("follow", [""])[0].lower() == "true":
                        self.stream(url.path.split("/")[-2])
                        return
                    if url.path.endswith("/exec"):
                        self.exec(url.path.split("/")[-2], query)
                        return
                    if "/apis/" in url.path and "strategic" in (self.headers["Content-Type"] or ""):
                        raise ApiRefusal(415, "the body of the request was in an unknown format")
                    found = double.handle(self.command, url.path, {key: one[0] for key, one in query.items()}, body)
                    status = 201 if self.command == "POST" else 200
                except ApiRefusal as refusal:
                    found, status = refusal.body, refusal.status
                text = found if isinstance(found, str) else json.dumps(found)
                data = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(found, str) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do_PATCH = answer

            def stream(self, pod: str) -> None:
                """A log as it grows, until its pod is over, or it is to break off: that is in `breaks`, by length."""
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                sent = 0
                while not double.stopping.is_set():
                    until = min((place for place in double.breaks if place > sent), default=None)
                    text = double.logs[pod][sent:until]
                    self.wfile.write(text.encode())
                    sent += len(text)
                    double.sent[pod] = double.sent.get(pod, 0) + len(text)
                    if sent == until:
                        double.breaks.remove(sent)
                        return
                    if double.phase(pod) in ("Succeeded", "Failed", None) and sent == len(double.logs[pod]):
                        return
                    double.stopping.wait(0.01)

            def exec(self, pod: str, query: dict[str, list[str]]) -> None:
                """A container's command over a web socket: its words are kept, and its end is told on channel 3."""
                double.commands.append((pod, query["command"]))
                magic = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
                self.send_response(101)
                self.send_header("Upgrade", "websocket")
                self.send_header("Connection", "Upgrade")
                self.send_header(
                    "Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(magic.encode()).digest()).decode()
                )
                self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
                self.end_headers()
                end: dict[str, Any] = {"status": "Success"}
                if double.kill_fails:
                    self.frame(b"\x02no such process")
                    end = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "1"}]}}
                self.frame(b"\x03" + json.dumps(end).encode())
                self.wfile.write(b"\x88\x02\x03\xe8")  # closed, 1000
                self.close_connection = True

            def frame(self, data: bytes) -> None:
                assert len(data) < 65536
                size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2, "big")
                self.wfile.write(b"\x82" + size + data)

            def log_message(self, format: str, *args: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address, while it answers."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{self._server.server_address[1]}"
        finally:
            self.stopping.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def phase(self, pod: str) -> str | None:
        """Of a pod that is there."""
        found = (thing for (kind, _, name), thing in self.objects.items() if (kind, name) == ("pods", pod))
        return next((thing["status"]["phase"] for thing in found), None)

    def handle(self, method: str, path: str, query: Mapping[str, str], body: Any) -> Any:
        path = path.replace("/api/v1/nodes", "/api/v1/namespaces//nodes")  # which belong to no namespace
        place = re.fullmatch(
            r"/(?:api|apis/[^/]+)/[^/]+/namespaces/([^/]*)/([^/]+)(?:/([^/]+)(/log|/eviction)?)?", path
        )
        if place is None or place[2] not in self.kinds:
            raise ApiRefusal(404, "the server could not find the requested resource")
        namespace, plural, name, part = place.groups()
        if (method, plural) in self.refuse:
            raise ApiRefusal(*self.refuse[method, plural])
        if part == "/eviction" and (plural, namespace, name) in self.objects:
            disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            self.objects[plural, namespace, name]["status"].setdefault("conditions", []).append(disrupted)
            return {"kind": "Status", "status": "Success"}
        if part == "/eviction":
            raise ApiRefusal(404, f'{plural} "{name}" not found')
        if namespace == "nowhere" and method == "POST":
            raise ApiRefusal(404, 'namespaces "nowhere" not found')
        if method == "POST":
            return self.create(namespace, plural, query, body)
        if name is None:
            wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
            items = [
                thing
                for (kind, place_, _), thing in self.objects.items()
                if (kind, place_) == (plural, namespace)
                and all(has(thing["metadata"].get("labels", {}), *one) for one in wanted)
            ]
            first = int(query.get("continue", "0"))
            last = first + min(self.page, int(query.get("limit", self.page)))
            more = {"continue": str(last)} if last < len(items) else {}
            return {"kind": "List", "metadata": more, "items": items[first:last]}
        if part:
            return self.logs[name]
        if (plural, namespace, name) not in self.objects:
            raise ApiRefusal(404, f'{plural} "{name}" not found')
        if method == "PATCH":
            merge(self.objects[plural, namespace, name], body)
            if wrong := faults(self.objects[plural, namespace, name]) if plural in CUSTOM_KINDS else []:
                raise ApiRefusal(422, f"{plural} {name} is invalid", wrong, plural)
        return self.delete(plural, namespace, name) if method == "DELETE" else self.objects[plural, namespace, name]

    def create(self, namespace: str, plural: str, query: Mapping[str, str], body: Any) -> Any:
        name = body["metadata"]["name"]
        if body["metadata"].setdefault("namespace", namespace) != namespace:
            raise ApiRefusal(400, "the namespace of the object does not match the namespace of the request")
        wrong = faults(body)
        unknown = [why for _, why in wrong if "Additional properties" in why]
        if unknown and query.get("fieldValidation") == "Strict":
            raise ApiRefusal(400, f"strict decoding error: {unknown[0]}")
        if wrong:
            raise ApiRefusal(422, f'{body["kind"]} "{name}" is invalid', wrong, plural)
        if (plural, namespace, name) in self.objects:
            raise ApiRefusal(409, f'{plural} "{name}" already exists')
        body["metadata"] |= {"uid": f"uid-{plural}-{name}", "creationTimestamp": "2026-11-22T07:00:00Z"}
        self.objects[plural, namespace, name] = body
        return body

    def delete(self, plural: str, namespace: str, name: str) -> Any:
        """With what belongs to it, as the garbage collector does."""
        gone = self.objects.pop((plural, namespace, name))
        for key, thing in list(self.objects.items()):
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in thing["metadata"].get("ownerReferences", ())):
                del self.objects[key]
        return {"kind": "Status", "status": "Success"}


def merge(thing: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Merge a change into an object: null removes a key."""
    for key, value in change.items():
        if value is None:
            thing.pop(key, None)
        elif isinstance(value, dict):
            merge(thing.setdefault(key, {}), value)
        else:
            thing[key] = value


def kubeconfig(folder: Path, address: str, namespace: str = "team-a") -> Path:
    """A kubeconfig file that leads to a double."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "double", "cluster": {"server": address}}],
        "users": [{"name": "somebody", "user": {"token": "not-a-secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "double", "user": "somebody", "namespace": namespace}}],
        "current-context": "here",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What Kubernetes makes of a word of a command: $(NAME) is put in, $$ is $."""

    def put(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, text)
