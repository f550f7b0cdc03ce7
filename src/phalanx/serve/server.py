"""Start the server, and end it on Ctrl-C."""

import errno
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import open_backend
from phalanx.jobs.backends.nodes import open_node_backend
from phalanx.jobs.spec import JobStatus
from phalanx.run.cache import cache_root
from phalanx.serve.access import make_access
from phalanx.serve.agent_streams import AgentStreams
from phalanx.serve.app import Server
from phalanx.serve.job_pages import JobReader
from phalanx.serve.node_actions import NodeActions
from phalanx.serve.node_reader import NodeReader, ReadFleet
from phalanx.serve.run_accounts import AccountReader
from phalanx.serve.run_index import RunIndex, run_id

if TYPE_CHECKING:
    from phalanx.cluster.spec import Prices
    from phalanx.fleet.fleet_node import FleetNode
    from phalanx.fleet.node_states import NodeChange
    from phalanx.fleet.telemetry.sample import RackSample
    from phalanx.serve.fleet_routes import ServedFleet

ServerThread = RunIndex | JobReader | NodeReader | AccountReader
SHUTDOWN_TIMEOUT_S = 2
"""For streams to end: they look once a second."""


@dataclass(frozen=True)
class ServeOptions:
    """What is served, and where. Port 0 is any free one."""

    roots: Sequence[Path]
    backend: str = "local"
    host: str = "127.0.0.1"
    port: int = 8420
    allow_actions: bool = False
    nodes_file: Path | None = None
    """Names the nodes instead of the backend."""
    cluster: str | None = None
    """Name or file of the cluster with the prices."""
    agent_port: int = 0
    """PHALANX_METRICS_PORT of the agents; 0: none are asked."""
    token: str | None = None
    fleet: Path | None = None
    """Fleet file with budgets and a plant."""
    targets: Path | None = None
    """Load targets of that fleet."""
    demands_token: bool = True
    """Whether pages are shown to browsers with the token only."""
    proxy_names: Sequence[str] = ()
    """Names of proxies before the server."""


def serve(options: ServeOptions, report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `report` gets the address. UsageError where the address cannot be used, or a
    directory is none."""
    for root in options.roots:
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root}: is a file; expected a directory with runs, such as runs")
    if options.nodes_file is not None:
        from phalanx.fleet.nodes_file import load_nodes_file

        load_nodes_file(options.nodes_file)  # what is wrong with it is said before anything is served
    fleet = None if options.fleet is None else _load_fleet(options.fleet, options.targets)
    prices = None if options.cluster is None else _load_prices(options.cluster)
    open_backend(options.backend)  # a name that is none, or a package that is missing
    access = make_access(options.host, options.allow_actions, options.token, options.demands_token, options.proxy_names)
    _raise_file_limit()
    with _listen(options.host, options.port) as listener:
        index = RunIndex(options.roots)
        nodes = NodeReader(lambda: open_fleet(options, index))
        streams = AgentStreams(lambda: _find_agents(nodes.nodes.nodes, options.agent_port))
        server = Server(
            index,
            JobReader(options.backend, open_backend, lambda job, now: _predict_end(index, job, now)),
            nodes,
            access,
            AccountReader(index, cache_root() / "serve" / "accounts.json"),
            prices,
            streams,
            _read_history,
            NodeActions(options.backend),
            fleet,
        )
        index.start()
        readers: list[ServerThread] = [server.jobs, server.nodes, server.accounts]
        threads: list[ServerThread] = [index]

        def start_readers() -> None:
            for reader in readers:
                reader.start()
                threads.append(reader)

        host = f"[{options.host}]" if ":" in options.host else options.host
        secret = f"/?token={access.token}" if access.token else "/"
        report(f"http://{host}:{listener.getsockname()[1]}{secret}")
        config = uvicorn.Config(
            server.make_app(start_readers),
            log_level="warning",
            access_log=False,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        try:
            _EndingServer(config, server).run(sockets=[listener])
        except KeyboardInterrupt:  # how uvicorn passes on the Ctrl-C that has ended it
            pass
        finally:
            server.stopping.set()
            for thread in threads:
                thread.stop()


def _load_fleet(path: Path, targets: Path | None) -> "ServedFleet":
    from phalanx.serve.fleet_routes import load_served_fleet

    return load_served_fleet(path, targets)


def _load_prices(cluster: str) -> "Prices":
    from phalanx.cluster.load import load_cluster

    return load_cluster(cluster).prices


def _predict_end(index: RunIndex, job: JobStatus, now: float) -> float | None:
    """When the run of a job will be done, at the pace of its last steps; None for another kind of job."""
    row = None if job.run_dir is None else index.find(run_id(Path(job.run_dir)))
    if row is None or row.total_steps is None or row.step_s is None:
        return None
    return now + max(0, row.total_steps - row.step) * row.step_s


def open_fleet(options: ServeOptions, index: RunIndex) -> ReadFleet:
    """Reads the nodes of the backend, or of the nodes file, with what running runs have recorded."""
    from phalanx.app.fleet_nodes import FleetReader, FleetSources, open_node_states

    def list_running() -> list[Path]:
        now = time.time()
        return [row.path for row in index.rows.values() if row.status(now) == "running"]

    backend = None if options.nodes_file is not None else open_node_backend(options.backend)
    sources = FleetSources(backend, options.nodes_file)
    reader = FleetReader(sources, open_node_states(), list_more_runs=list_running, finds_evidence=options.allow_actions)

    def read() -> "tuple[Sequence[FleetNode], Sequence[str], Sequence[RackSample]]":
        view = reader.read()
        return view.nodes, view.problems, view.racks

    return read


def _find_agents(nodes: "Sequence[FleetNode]", port: int) -> dict[str, tuple[str, int]]:
    """Addresses of the agents of nodes; none for port 0."""
    return {node.name: (node.name, port) for node in nodes} if port else {}


def _read_history(name: str) -> "list[NodeChange]":
    from phalanx.app.fleet_nodes import open_node_states

    with open_node_states() as states:
        return states.history(name)


class _EndingServer(uvicorn.Server):
    """Ends the streams of pages with the first signal, which would last as long as a browser shows the page."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._pages = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        self._pages.stopping.set()
        super().handle_exit(sig, frame)


def _raise_file_limit() -> None:
    """Each agent and each page has a connection; the limit of a shell is often 1,024 open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. UsageError where the address cannot be used."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use, perhaps by another `phalanx serve`; choose another with --port, or --port 0 "
                "for any free one"
            ) from None
        raise UsageError(f"--host {host} --port {port}: {error.strerror}") from None
    return listener
