"""`phalanx serve`: the live page."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import UsageError


def serve(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR ...]", help="Directories with runs, at any depth up to 4; runs by default."),
    ] = None,
    on: Annotated[
        str, typer.Option("--on", help="Show the jobs of this backend: local, slurm, kubernetes or ray.")
    ] = "local",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8420,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", metavar="FILE", help="Show the nodes of this file, not of the backend.")
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option("--fleet", metavar="FILE", help="Show the power tree and cooling of this fleet file."),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", metavar="FILE", help="Load targets of the fleet; as for `phalanx power guard`."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME|FILE", help="Cluster with prices, for cost; as for `phalanx plan`."),
    ] = None,
    agent_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="PHALANX_METRICS_PORT of the agents, to show nodes every second; 0: off."),
    ] = 0,
    allow_actions: Annotated[
        bool,
        typer.Option(
            "--allow-actions",
            help="Let a browser with the token cancel jobs and drain nodes; make nodes with evidence suspect.",
        ),
    ] = False,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Show the pages to every user of this machine, without the token.")
    ] = False,
    proxy_name: Annotated[
        list[str] | None,
        typer.Option(
            "--proxy-name",
            metavar="NAME",
            help="Name of a proxy before the server (repeatable).",
        ),
    ] = None,
) -> None:
    """Serve a live page of runs, jobs and nodes until Ctrl-C.

    The page is read-only, and for browsers on this machine that have opened the printed address, unless you say
    otherwise. PHALANX_SERVE_TOKEN gives the token; without it one is made.
    """
    for package in ("starlette", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise UsageError(f"{package.replace('_', '-')} is not installed; pip install 'phalanx[serve]'")
    from phalanx.serve.server import ServeOptions
    from phalanx.serve.server import serve as run_server

    if targets is not None and fleet is None:
        raise UsageError("--targets needs --fleet FILE, the levels that the targets are for")
    options = ServeOptions(
        runs or [Path("runs")],
        on,
        host,
        port,
        allow_actions,
        nodes,
        cluster,
        agent_port,
        os.environ.get("PHALANX_SERVE_TOKEN") or None,
        fleet,
        targets,
        not no_token,
        proxy_name or (),
    )
    run_server(options, lambda address: print(f"serving {address} (Ctrl-C ends)", flush=True))
