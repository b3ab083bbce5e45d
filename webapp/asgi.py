"""HTTP by Django, websockets by Channels, both behind `webapp.serving.doors`. A socket's Origin must be the board's
own, and its host an allowed one."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup()  # before anything imports models

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from channels.security.websocket import AllowedHostsOriginValidator  # noqa: E402
from channels.sessions import SessionMiddlewareStack  # noqa: E402
from django.urls import path, re_path  # noqa: E402

from jobs.api.http.patient import Patient  # noqa: E402
from jobs.runs.live.consumers import JobConsumer, no_such_socket  # noqa: E402
from webapp.safety import refuse_exposed  # noqa: E402
from webapp.serving.doors import Doors  # noqa: E402
from webapp.serving.one_thread import OneThreadHandler  # noqa: E402
from webapp.serving.peers import addressed  # noqa: E402

refuse_exposed()

sockets = URLRouter(
    [
        path("ws/jobs/<str:job_id>/", JobConsumer.as_asgi()),
        re_path("", no_such_socket),  # type: ignore[arg-type]  # Channels routes to ASGI applications
    ]
)

application = addressed(
    Doors(
        ProtocolTypeRouter(
            {
                "http": Patient(OneThreadHandler()),
                # Who is asking is read by the consumer itself, again and again.
                "websocket": AllowedHostsOriginValidator(SessionMiddlewareStack(sockets)),
            }
        )
    )
)
