"""Client addresses behind a trusted proxy are valid IP addresses."""

from __future__ import annotations

from pathlib import Path

import httpx
import psycopg
import pytest

from tests.support.postgres import postgres_server
from tests.support.processes import RedisServer, scale_timeout
from tests.support.web import run_site
from webapp.serving import request_guard

CASES = {
    "203.0.113.9": "203.0.113.9",
    "10.1.2.3:4711": "10.1.2.3",
    "unknown": "0.0.0.0",
    "_hidden": "0.0.0.0",
    "2001:db8::1": "2001:db8::",  # the login limit counts a customer's network as one address
    "fe80::1%eth0": "fe80::",
}


def test_login_works_on_postgresql(redis_service: RedisServer, tmp_path: Path) -> None:
    trusted = {"MESHBOARD_TRUSTED_PROXIES": "127.0.0.1"}
    with postgres_server() as url, run_site(url, redis_service, tmp_path / "web", **trusted) as board:
        for content in CASES:
            own = {"X-Forwarded-For": content}
            with httpx.Client(base_url=board.url, headers=own, timeout=scale_timeout(10)) as client:
                client.get("/login/")
                form = {"username": "nobody", "password": "x", "csrfmiddlewaretoken": client.cookies["csrftoken"]}
                answer = client.post("/login/", data=form, headers={"Referer": f"{board.url}/login/"})
                assert answer.status_code == 200, content
        with psycopg.connect(url) as database:
            stored = database.execute("SELECT host(ip_address) FROM axes_accessattempt ORDER BY id").fetchall()
    assert {address for (address,) in stored} == set(CASES.values())


@pytest.mark.parametrize(
    "content", ["", "unknown", "a" * 60, "\uff11\uff12.1.1.1", "\xef\xbc\x91.1.1.1", "[::1", "::1%"]
)
def test_replaces_invalid_addresses(content: str) -> None:
    assert request_guard.parse_client_address(content) in (request_guard.UNKNOWN, "::1")
