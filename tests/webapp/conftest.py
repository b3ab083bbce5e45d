"""Fixtures of the layers in front of Django."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import uvicorn

from tests.support.processes import wait_until
from tests.webapp.recording_app import PATIENCE_S, Behind
from webapp import serve
from webapp.serving import limits
from webapp.serving.request_guard import RequestGuard


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Behind]:
    for name in ("HEAD_TIMEOUT_S", "BODY_TIMEOUT_S"):
        monkeypatch.setattr(limits, name, PATIENCE_S)
    made = Behind()
    config = serve.build_config("127.0.0.1", made.port)
    config.app, config.factory, config.lifespan, config.log_level = RequestGuard(made), False, "off", "error"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server listens", 20)
        yield made
    finally:
        server.should_exit = True
        thread.join()
