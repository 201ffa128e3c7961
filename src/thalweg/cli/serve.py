"""``thalweg serve``: models over HTTP, with a page to try them on."""

from __future__ import annotations

from typing import Annotated

import typer

from thalweg.cli.output import note, say
from thalweg.errors import MissingDependencyError
from thalweg.limits import PROCESSES


def serve(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or a recipe's folder of them; one without a model yet is watched as it trains.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than this machine's needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    token: Annotated[
        str,
        typer.Option(
            envvar="THALWEG_TOKEN", help="What callers must show: `Authorization: Bearer TOKEN`.", show_default=False
        ),
    ] = "",
    workers: Annotated[int, typer.Option(min=1, max=PROCESSES, help="Processes behind the port.")] = 1,
    queue: Annotated[int, typer.Option(min=1, max=10**6, help="Inputs that may wait for each model; then 429.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, max=10**6, help="Inputs answered together at most.")] = 32,
    threads: Annotated[int, typer.Option(min=0, help="Of torch in each process; 0 shares out the cores.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.", metavar="NAME")] = "auto",
) -> None:
    """Serve models over HTTP, with a page to try them on: open the address that is printed.

    Requests of many callers are answered together. SIGHUP loads the runs anew without dropping a request; SIGTERM and
    Ctrl-C answer what was accepted and end. /openapi.json describes the API, /metrics is for Prometheus.

    \b
    Example:
      thalweg serve runs/demo
      curl -s localhost:8000/v1/predict --json '{"inputs": ["language"], "k": 3}'
      thalweg serve runs/demo runs/names --port 8080 --workers 4
      thalweg serve runs/demo --host 0.0.0.0 --token "$(openssl rand -hex 16)"
    """
    try:
        from thalweg.serve.settings import Settings
        from thalweg.serve.starting import start
    except ImportError as error:
        raise MissingDependencyError(
            f"serving needs packages that are not installed ({error.name}); run: pip install 'thalweg[serve]'"
        ) from None
    from thalweg.serve.guard import is_loopback

    settings = Settings(
        runs=tuple(runs),
        token=token,
        local=is_loopback(host),
        device=device,
        waiting=queue,
        batch=batch,
        threads=threads,
        workers=workers,
    )

    def ready(address: str) -> None:
        say(f"page    {address}/")
        note(f"serving {', '.join(runs)}; Ctrl-C ends")

    start(settings, host=host, port=port, ready=ready)
