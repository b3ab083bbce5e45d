"""Check attacks 1 to 11 and 27: access without permission, and rates of requests.

The tests run against a served board. docs/explanation/security.md lists the attacks.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from knox.crypto import hash_token

from tests.attacks.conftest import LOGINS_PER_MINUTE, SUBMITS_PER_MINUTE, session
from tests.planner.wrong_specs import GOOD
from tests.support.web import Site
from tests.webapp.test_public_routes import BY_ITS_OWN_TOKEN, PUBLIC, paths


@pytest.fixture(scope="module")
def job(served: Site) -> str:
    return served.submit_job(GOOD)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/jobs/{id}"),
        ("GET", "/api/v1/jobs/{id}/logs/0"),
        ("GET", "/api/v1/jobs/{id}/history"),
        ("GET", "/api/v1/jobs/{id}/history/steps?format=parquet"),
        ("GET", "/api/v1/jobs/{id}/trace?step=0"),
        ("POST", "/api/v1/jobs/{id}/cancel"),
        ("POST", "/api/v1/jobs/{id}/requeue"),
        ("GET", "/jobs/{id}/"),
        ("GET", "/jobs/{id}/timeline/"),
        ("POST", "/jobs/{id}/cancel/"),
    ],
)
def test_1_job_of_another_user_returns_404(served: Site, job: str, method: str, path: str) -> None:
    who = served.build_token_header("stranger") if path.startswith("/api/") else session(served, "stranger")
    assert served.call(method, path.format(id=job), headers=who).status == 404
    assert (
        served.call("GET", f"/api/v1/jobs/{job}", headers=served.build_token_header("owner")).json()["status"]
        == "queued"
    )


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_2_every_route_requires_authentication(served: Site, method: str) -> None:
    wrong = {}
    for path in paths():
        if path in PUBLIC | BY_ITS_OWN_TOKEN | {"admin/login/"}:
            continue
        status = _without_redirect(served, method, f"/{path}")
        if status not in ({401} if path.startswith("api/") else {302, 401, 403}):
            wrong[path] = status
    assert wrong == {}


def _without_redirect(served: Site, method: str, path: str) -> int:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    return int(served.send_raw(head.encode()).split()[1])


@pytest.mark.parametrize(
    ("path", "who", "status"),
    [
        ("/api/v1/jobs/{id}/cancel", "viewer", 403),
        ("/api/v1/jobs/{id}/requeue", "viewer", 403),
        ("/api/v1/queue/pause", "viewer", 403),
        ("/api/v1/queue/pause", "owner", 403),
        ("/api/v1/join-tokens", "owner", 403),
        ("/api/v1/hosts/x/drain", "owner", 403),
    ],
)
def test_3_read_only_role_changes_nothing(served: Site, job: str, path: str, who: str, status: int) -> None:
    body: Any = {} if path.endswith("join-tokens") else None
    assert served.call("POST", path.format(id=job), body, headers=served.build_token_header(who)).status == status
    assert (
        served.call("GET", f"/api/v1/jobs/{job}", headers=served.build_token_header("owner")).json()["status"]
        == "queued"
    )


def test_3_admin_requires_staff(served: Site) -> None:
    cookie = served.build_cookie_header("owner")["Cookie"]
    for path in ("/admin/", "/admin/jobs/job/", "/admin/auth/user/"):
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{cookie}"
        answer = served.send_raw(head.replace("sessionid", "Cookie: sessionid").encode() + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 302")
        assert b"location: /admin/login/" in answer.lower()


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/jobs/{id}/cancel/", "/queue/pause/", "/logout/", "/plan/"])
def test_8_cross_site_request_changes_nothing(served: Site, job: str, path: str) -> None:
    for more in ({}, {"X-CSRFToken": "c" * 32}, {"Origin": "http://evil.example"}):
        headers = {**served.build_cookie_header("staff"), **more}
        assert served.call("POST", path.format(id=job), GOOD, headers=headers).status == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1:1@evil.example", ""])
def test_9_foreign_host_header_returns_400(served: Site, host: str) -> None:
    for path in ("/login/", "/api/v1/jobs"):
        assert served.call("GET", path, headers={"Host": host}).status == 400


def test_10_only_token_hash_is_stored_and_expired_or_deleted_token_returns_401(served: Site) -> None:
    path = served.database_url.removeprefix("sqlite:///")
    for change in ("UPDATE knox_authtoken SET expiry = '2020-01-01'", "DELETE FROM knox_authtoken"):
        wish = {"name": "expires", "scopes": ["read"]}
        token = served.call("POST", "/api/v1/tokens", wish, headers=served.build_token_header("owner")).json()["token"]
        headers = {"Authorization": f"Token {token}"}
        assert served.call("GET", "/api/v1/jobs", headers=headers).status == 200
        with sqlite3.connect(path) as board:
            [row] = board.execute("SELECT * FROM knox_authtoken WHERE digest = ?", [hash_token(token)]).fetchall()
            assert not any(token in str(value) for value in row)
            board.execute(f"{change} WHERE digest = ?", [hash_token(token)])
        assert served.call("GET", "/api/v1/jobs", headers=headers).status == 401


def test_10_token_is_limited_to_its_scopes_and_revoked_token_returns_401(served: Site, job: str) -> None:
    wish = {"name": "reads", "scopes": ["read"]}
    made = served.call("POST", "/api/v1/tokens", wish, headers=served.build_token_header("owner")).json()
    reads = {"Authorization": f"Token {made['token']}"}
    assert served.call("GET", f"/api/v1/jobs/{job}", headers=reads).status == 200
    for path in ("/api/v1/jobs", f"/api/v1/jobs/{job}/cancel", "/api/v1/tokens"):
        assert served.call("POST", path, headers=reads).status == 403
    assert served.call(
        "DELETE", f"/api/v1/tokens/{made['key']}", headers=served.build_token_header("owner")
    ).status in (200, 204)
    assert served.call("GET", f"/api/v1/jobs/{job}", headers=reads).status == 401


@pytest.mark.parametrize("query", ["token={}", "access_token={}", "Authorization=Token%20{}", "auth={}", "api_key={}"])
def test_11_token_in_an_address_grants_nothing_and_is_not_logged(served: Site, query: str) -> None:
    token = served.users["owner"]["token"]
    for path in ("/api/v1/jobs", "/api/v1/nowhere", "/login/", "/api/v1/schema", "/nowhere/"):
        answer = served.call("GET", f"{path}?{query.format(token)}")
        assert answer.status == (401 if path in ("/api/v1/jobs", "/api/v1/schema") else answer.status)
        assert token.encode() not in answer.body
    assert '"path": "/api/v1/jobs"' in served.log, "requests are logged"
    assert token not in served.log


def test_27_submits_and_logins_are_rate_limited(served: Site) -> None:
    codes = []
    for _ in range(2 * SUBMITS_PER_MINUTE + 1):  # a minute may begin between two requests
        answer = served.call("POST", "/api/v1/jobs", {}, headers=served.build_token_header("stranger"))
        codes.append(answer.status)
        if answer.status == 429:
            break
    assert set(codes) == {422, 429}
    assert int(answer.headers["Retry-After"]) > 0
    form = {"Cookie": f"csrftoken={'c' * 32}", "X-CSRFToken": "c" * 32}
    form["Content-Type"] = "application/x-www-form-urlencoded"
    for turn in range(2 * LOGINS_PER_MINUTE + 1):
        tried = served.call("POST", "/login/", f"username=u{turn}&password=x".encode(), headers=form)
        if tried.status == 429:
            break
    assert (tried.status, int(tried.headers["Retry-After"])) == (429, 60)
