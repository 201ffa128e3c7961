"""Start a service: one process, or several behind one port."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG
from uvicorn.supervisors import Multiprocess

from thalweg.errors import ConfigError
from thalweg.learning.trainer import resolve_device
from thalweg.serve.app import create_app
from thalweg.serve.guard import is_loopback
from thalweg.serve.library import Library
from thalweg.serve.metrics import FOLDER
from thalweg.serve.settings import Settings

_GRACE = 60  # seconds that requests have to be answered in after SIGTERM
_BACKLOG = 2048  # connections that may wait to be accepted


def app_of_environment() -> FastAPI:
    """The app with the settings that the first process published; each worker calls this."""
    return create_app(Settings.published())


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; all workers accept from it.

    >>> with bound("127.0.0.1", 0) as listener:
    ...     listener.getsockname()[1] > 0
    True
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)  # from here on the port is taken: callers wait until the models are loaded
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from None
    listener.set_inheritable(True)
    return listener


class _Workers(Multiprocess):
    """Processes that load their models anew on SIGHUP instead of being replaced: no connection is lost."""

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()  # who comes now is refused at once, rather than left waiting until all others are answered
        super().terminate_all()

    def handle_hup(self) -> None:
        for process in self.processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGHUP)


def start(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until a signal ends it.

    Args:
        host: one that is not of this machine alone needs a token.
        port: 0 takes any that is free.
        ready: told the address once it is bound, before models are loaded.
    """
    if not is_loopback(host) and not settings.token:
        raise ConfigError(
            f"{host} can be reached from elsewhere, which needs a token; add `--token $(openssl rand -hex 16)`, "
            "or leave out --host"
        )
    with bound(host, port) as listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        own = {"thalweg.serve": {"handlers": ["default"], "level": "INFO", "propagate": False}}
        options = {
            "log_config": {**LOGGING_CONFIG, "loggers": {**LOGGING_CONFIG["loggers"], **own}},
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "timeout_graceful_shutdown": _GRACE,
            "timeout_worker_healthcheck": 60,
            "backlog": _BACKLOG,
        }
        if settings.workers == 1:
            app = create_app(settings)
            app.state.service.library.open()  # what cannot be loaded is one line before anything is served
            ready(address)
            uvicorn.Server(uvicorn.Config(app, **options)).run(sockets=[listener])
            return
        resolve_device(settings.device)
        Library(settings.runs, device="cpu").open()  # as above, rather than a traceback from every worker
        with tempfile.TemporaryDirectory(prefix="thalweg-serve-") as folder:
            os.environ[FOLDER] = folder
            settings.publish()
            place = f"{__name__}:{app_of_environment.__name__}"
            config = uvicorn.Config(place, factory=True, workers=settings.workers, **options)
            ready(address)
            _Workers(config, sockets=[listener]).run()
