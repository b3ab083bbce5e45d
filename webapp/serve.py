"""The web server: uvicorn with every bound of `webapp.serving.limits`, in MESHBOARD_WEB_PROCESSES processes.

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

from webapp.environment import SettingError, WebSettings, read
from webapp.serving import limits
from webapp.serving.pool import share_connections
from webapp.serving.wire import BoundedHeads, BoundedSocket
from webapp.up.processes import die_with


class Divided(Multiprocess):
    """Each process listens for itself, and the kernel divides connections among those that do. Of one socket that all
    listen on, whoever wakes first takes all that wait: one process then had four fifths of the work."""

    def __init__(self, serving: uvicorn.Config) -> None:
        serving.bind_socket().close()  # or another server of this user on this port would be joined
        super().__init__(serving, [])

    @property
    def sockets(self) -> list[socket.socket]:
        """For one process more, which alone keeps it: this one lets go of it when that has begun."""
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((self.config.host, self.config.port))
        return [made]

    @sockets.setter
    def sockets(self, _none: list[socket.socket]) -> None:
        """uvicorn's own would be of all."""


def application() -> Any:
    """What each process that serves begins with."""
    if parent := multiprocessing.parent_process():
        assert parent.pid
        die_with(parent.pid)  # or it would keep the port from the next one
    from webapp.asgi import application  # sets Django up

    import_module(settings.ROOT_URLCONF)  # or the first request would wait for every view's import
    share_connections()
    gc.freeze()  # what was imported stays: looking through it again and again took a tenth of the web's time
    return application


def config(host: str, port: int, trusted_proxies: Sequence[str] = (), processes: int = 1) -> uvicorn.Config:
    """`trusted_proxies`: addresses and networks whose X-Forwarded-For is believed; nobody's by default,
    where uvicorn would believe everybody on loopback."""
    return uvicorn.Config(
        "webapp.serve:application",
        factory=True,
        workers=processes,
        timeout_worker_healthcheck=limits.SILENT_PROCESS_S,
        host=host,
        port=port,
        http=BoundedHeads,
        ws=BoundedSocket,
        access_log=False,
        log_config=None,  # Django's own, which tell of which request a line is
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        server_header=False,
        limit_concurrency=limits.MOST_CONNECTIONS,
        timeout_keep_alive=limits.KEEP_ALIVE_S,
        timeout_graceful_shutdown=3,
        ws_max_size=limits.SOCKET_FRAME_BYTES,
        ws_max_queue=1,
        ws_per_message_deflate=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    try:
        asked = read(WebSettings)
        import_module("webapp.asgi")  # uvicorn would show what refuses to start as a traceback
    except (SettingError, ImproperlyConfigured) as error:
        parser.error(str(error))
    serving = config(arguments.host, arguments.port, asked.trusted_proxies or (), asked.web_processes)
    if asked.web_processes == 1:
        uvicorn.Server(serving).run()
        return
    Divided(serving).run()


if __name__ == "__main__":
    main()
