"""ASGI application: HTTP by Django, WebSockets by Channels, both behind `webapp.serving.request_guard`."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "webapp.settings")
django.setup()  # before anything imports models

from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from channels.security.websocket import AllowedHostsOriginValidator  # noqa: E402
from channels.sessions import SessionMiddlewareStack  # noqa: E402
from django.urls import path, re_path  # noqa: E402

from jobs.api.held_request_middleware import HeldRequestMiddleware  # noqa: E402
from jobs.runs.live.consumers import JobConsumer, reject_socket  # noqa: E402
from webapp.checks import run_deploy_checks  # noqa: E402
from webapp.serving.handler import SingleThreadHandler  # noqa: E402
from webapp.serving.request_guard import RequestGuard, normalize_client_address  # noqa: E402

run_deploy_checks()

sockets = URLRouter(
    [
        path("ws/jobs/<str:job_id>/", JobConsumer.as_asgi()),
        re_path("", reject_socket),  # type: ignore[arg-type]  # Channels routes to ASGI applications
    ]
)

application = normalize_client_address(
    RequestGuard(
        ProtocolTypeRouter(
            {
                "http": HeldRequestMiddleware(SingleThreadHandler()),
                # The consumer authenticates the user itself, repeatedly.
                "websocket": AllowedHostsOriginValidator(SessionMiddlewareStack(sockets)),
            }
        )
    )
)
