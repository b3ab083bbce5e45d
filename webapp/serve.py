"""Web server: uvicorn with the limits of `webapp.serving.limits`, in MESHBOARD_WEB_PROCESSES processes.

python -m webapp.serve --host H --port P
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import uvicorn
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from uvicorn.supervisors.multiprocess import Multiprocess

from jobs.core.child_processes import exit_with_parent
from webapp.environment import SettingError, WebSettings, read_settings
from webapp.serving import limits
from webapp.serving.limits import configure_connection_pool
from webapp.serving.protocols import BoundedHttpProtocol, BoundedWebSocketProtocol


class PortSharingServer(Multiprocess):
    """Server in which each process has its own socket, so that the kernel distributes connections.

    With a shared socket, one process got four fifths of the work.
    """

    def __init__(self, serving: uvicorn.Config) -> None:
        serving.bind_socket().close()  # fails if another server uses the port, which SO_REUSEPORT would share
        super().__init__(serving, [])

    @property
    def sockets(self) -> list[socket.socket]:
        """Return a new socket for the next process. This process closes it after the start."""
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((self.config.host, self.config.port))
        return [made]

    @sockets.setter
    def sockets(self, _none: list[socket.socket]) -> None:
        """Ignore the shared socket of uvicorn."""


def make_application() -> Any:
    """Return the ASGI application of a process."""
    if parent := multiprocessing.parent_process():
        assert parent.pid
        exit_with_parent(parent.pid)  # so that the port becomes free

    from webapp.asgi import application  # sets up Django

    import_module(settings.ROOT_URLCONF)  # else the first request imports all views
    configure_connection_pool()
    gc.freeze()  # garbage collection of imported modules took a tenth of the time
    return application


def build_config(host: str, port: int, trusted_proxies: Sequence[str] = (), processes: int = 1) -> uvicorn.Config:
    """Return the configuration of uvicorn.

    Args:
        trusted_proxies: Addresses and networks whose X-Forwarded-For is used. uvicorn would trust loopback by default.
    """
    return uvicorn.Config(
        "webapp.serve:make_application",
        factory=True,
        workers=processes,
        timeout_worker_healthcheck=limits.PROCESS_TIMEOUT_S,
        host=host,
        port=port,
        http=BoundedHttpProtocol,
        ws=BoundedWebSocketProtocol,
        access_log=False,
        lifespan="off",  # Django does not support it, and logs an error
        log_config=None,  # Django configures logs with request IDs
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        server_header=False,
        limit_concurrency=limits.MAX_CONNECTIONS,
        timeout_keep_alive=limits.KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=3,
        ws_max_size=limits.MAX_SOCKET_FRAME_BYTES,
        ws_max_queue=1,
        ws_per_message_deflate=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    try:
        web_settings = read_settings(WebSettings)
        import_module("webapp.asgi")  # uvicorn would print a traceback
    except (SettingError, ImproperlyConfigured) as error:
        parser.error(str(error))
    serving = build_config(
        arguments.host, arguments.port, web_settings.trusted_proxies or (), web_settings.web_processes
    )
    if web_settings.web_processes == 1:
        uvicorn.Server(serving).run()
        return
    PortSharingServer(serving).run()


if __name__ == "__main__":
    main()
