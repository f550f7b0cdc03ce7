"""Start the server, and end it on Ctrl-C."""

import errno
import resource
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from phalanx.errors import UsageError
from phalanx.jobs.backends.base import open_backend
from phalanx.serve.access import make_access
from phalanx.serve.app import Server
from phalanx.serve.job_pages import JobReader
from phalanx.serve.page_context import AddedPages
from phalanx.serve.run_index import RunIndex

ServerThread = RunIndex | JobReader | AddedPages
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
    token: str | None = None
    demands_token: bool = True
    """Whether pages are shown to browsers with the token only."""
    proxy_names: Sequence[str] = ()
    """Names of proxies before the server."""


def serve(options: ServeOptions, added: Sequence[AddedPages], report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, with added pages; `report` gets the address. UsageError where the address cannot
    be used, or a directory is none."""
    for root in options.roots:
        if root.exists() and not root.is_dir():
            raise UsageError(f"{root}: is a file; expected a directory with runs, such as runs")
    open_backend(options.backend)  # a name that is none, or a package that is missing
    access = make_access(options.host, options.allow_actions, options.token, options.demands_token, options.proxy_names)
    _raise_file_limit()
    with _listen(options.host, options.port) as listener:
        index = RunIndex(options.roots)
        server = Server(index, JobReader(options.backend, open_backend), access, added, options.backend)
        index.start()
        readers: list[ServerThread] = [server.jobs, *added]
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
