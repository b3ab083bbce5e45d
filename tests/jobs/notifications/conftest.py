"""Allow webhooks to receivers on loopback, which are private addresses by default."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import pytest

LOCAL = [ip_network("127.0.0.1/32")]


@pytest.fixture
def local_receivers(settings: Any, db: None) -> None:
    settings.WEBHOOK_NETWORKS, settings.WEBHOOK_PORTS = LOCAL, range(1, 65536)
    settings.BOARD_URL = "https://board.example"
