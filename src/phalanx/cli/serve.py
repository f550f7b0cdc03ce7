"""`phalanx serve`: the live page."""

import os
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.errors import UsageError

if TYPE_CHECKING:
    from phalanx.serve.page_context import AddedPages, PageMaker


def serve_pages(
    added: "Sequence[AddedPages]",
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR|URL ...]",
            help="Directories with runs, at any depth up to 4, and URLs of runs; runs by default.",
        ),
    ] = None,
    on: Annotated[str, typer.Option(help="Show the jobs of this backend: local, slurm, kubernetes or ray.")] = "local",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8420,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions", help="Let a browser with the token chat with models, cancel jobs and act on added pages."
        ),
    ] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Show the pages to every user of this machine, without the token.")
    ] = False,
    proxy_name: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name of a proxy before the server (repeatable).")
    ] = None,
) -> None:
    """Serve a live page of runs and jobs until Ctrl-C. Installed packages may add pages, such as phalanx-fleet.

    The page is read-only, and for browsers on this machine that have opened the printed address, unless you say
    otherwise. PHALANX_SERVE_TOKEN gives the token; without it one is made.
    """
    from phalanx.serve.app import ServeOptions
    from phalanx.serve.app import serve as run_server

    roots = [_open_root(each) for each in runs or ["runs"]]
    token = os.environ.get("PHALANX_SERVE_TOKEN") or None
    options = ServeOptions(roots, on, host, port, allow_actions, token, not no_token, proxy_name or ())
    run_server(options, added, lambda address: print(f"serving {address} (Ctrl-C ends)", flush=True))


def _open_root(location: str) -> Path:
    from phalanx.storage.run_objects import follow_run, mirror_run

    mirror_run(location)  # UsageError where a URL has no run
    return follow_run(location)


def make_serve_command(makers: "Sequence[PageMaker]") -> Callable[..., None]:
    """Return `phalanx serve` with the options of the pages that `makers` add."""
    own = list(signature(serve_pages).parameters.values())[1:]
    options = {maker: list(signature(maker).parameters.values()) for maker in makers}

    def serve(**values: Any) -> None:
        check_packages()
        added = [maker(**{one.name: values.pop(one.name) for one in taken}) for maker, taken in options.items()]
        serve_pages(added, **values)

    parameters = [*own, *(one for taken in options.values() for one in taken)]
    serve.__doc__ = serve_pages.__doc__
    serve.__annotations__ = {one.name: one.annotation for one in parameters}
    keywords = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters]
    serve.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
    return serve


def check_packages() -> None:
    """Raise UsageError where a package of the extra `serve` is missing."""
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise UsageError(f"{package.replace('_', '-')} is not installed; pip install 'phalanx[serve]'")


serve = make_serve_command([entry_point.load() for entry_point in entry_points(group="phalanx.pages")])
