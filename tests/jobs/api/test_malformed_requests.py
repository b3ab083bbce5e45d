"""Malformed requests to a server with PostgreSQL return a client error and never 500."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from jobs.api.problems import CONTENT_TYPE
from tests.planner.wrong_specs import GOOD
from tests.support.processes import scale_timeout
from tests.support.web import Site

HUGE = "0000000019999999999999999999999"
NUL = "a\x00b"


def get_errors(response: Any) -> list[dict[str, str]]:
    """Check the structure of a problem document, and return its errors."""
    assert response.headers["Content-Type"] == CONTENT_TYPE
    problem = response.json()
    assert (set(problem), problem["status"]) == ({"type", "title", "status", "detail", "errors"}, response.status)
    assert problem["errors"]
    assert all(set(error) - {"in"} == {"field", "pointer", "message"} for error in problem["errors"])
    return list(problem["errors"])


@pytest.mark.parametrize("limit", [HUGE, "²", "٣", "0", "201", "-1", "1.0", "007", ""])
def test_invalid_limit_is_400(postgres_site: Site, limit: str) -> None:
    from urllib.parse import quote

    response = postgres_site.call(
        "GET", f"/api/v1/jobs?limit={quote(limit)}", headers=postgres_site.build_token_header("owner")
    )
    assert response.status == 400
    assert get_errors(response)[0]["field"] == "limit"


@pytest.mark.parametrize("token", ["²³", "\xff" * 64, "wrong", ""])
def test_invalid_token_is_401(postgres_site: Site, token: str) -> None:
    response = postgres_site.call("GET", "/api/v1/jobs", headers={"Authorization": f"Token {token}"})
    assert response.status == 401
    get_errors(response)


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/jobs/%00",
        "/api/v1/jobs?limit=%00",
        "/api/v1/hosts/%00/profile",
        "/hosts/%00/",
        "/jobs/a%00b/",
        "/collectives/%00/",
        "/jobs/new/?from=%00",
        "/admin/jobs/job/?owner__id__exact=%00",
        "/login/once/?sesame=%00",
    ],
)
def test_nul_in_an_address_is_400(postgres_site: Site, path: str) -> None:
    for headers in (postgres_site.build_token_header("staff"), postgres_site.build_cookie_header("staff")):
        response = postgres_site.call("GET", path, headers=headers)
        assert response.status == 400
        if path.startswith("/api/"):
            get_errors(response)


@pytest.mark.parametrize("path", ["/", "/api/v1/jobs", "/admin/"])
def test_nul_in_a_cookie_is_400(postgres_site: Site, path: str) -> None:
    response = postgres_site.call("GET", path, headers={"Cookie": 'sessionid="aaaaaaaa\\000aaaaaaaa"'})
    assert response.status == 400


def set_field(spec: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    section, _, name = field.rpartition(".")
    if not section:
        return {**spec, name: value}
    return {**spec, section: {**spec.get(section, {}), name: value}}


TEXTS = [
    "name",
    "kind",
    "model.preset",
    "model.arch",
    "layout.schedule",
    "train.data",
    "train.column",
    "train.tokenizer",
    "train.resume",
    "resources.device",
    "resources.host",
    "script.path",
    "surprise",
    NUL,
]


@pytest.mark.parametrize("field", TEXTS, ids=ascii)
def test_invalid_text_in_a_spec_is_422(postgres_site: Site, field: str) -> None:
    """PostgreSQL rejects NUL, and a half surrogate pair cannot be encoded."""
    headers = postgres_site.build_token_header("owner")
    for text in (NUL, "\ud800"):
        spec = set_field(GOOD, field, text)
        submitted = postgres_site.call("POST", "/api/v1/jobs", spec, headers=headers)
        assert submitted.status == 422, submitted.body
        assert field.isprintable() is False or any(e["field"] == field for e in get_errors(submitted)), submitted.body
        planned = postgres_site.call("POST", "/api/v1/plan", spec, headers=headers)
        assert planned.status == 200
        assert planned.json()["problems"]
        for path in ("plan/search", "plan/explain"):
            response = postgres_site.call("POST", f"/api/v1/{path}", {"spec": spec, "ranks": 4}, headers=headers)
            assert response.status in (200, 422), response.body  # A search ignores the layout.


@pytest.mark.parametrize("cluster", [5, [], {}, True, "host:" + NUL, "host:\ud800", "\ud800", NUL], ids=ascii)
def test_invalid_cluster_is_422(postgres_site: Site, cluster: object) -> None:
    headers = postgres_site.build_token_header("owner")
    for path in ("plan/search", "plan/explain"):
        body = {"spec": GOOD, "cluster": cluster, **({"ranks": 4} if path == "plan/search" else {})}
        response = postgres_site.call("POST", f"/api/v1/{path}", body, headers=headers)
        assert response.status == 422, response.body
        assert get_errors(response)[0]["field"] == "cluster"


@pytest.mark.parametrize(("depth", "status"), [(30, 422), (32, 400), (500, 400), (100_000, 400)])
def test_deeply_nested_json_is_400(postgres_site: Site, depth: int, status: int) -> None:
    """A fixed limit, because JSON parsers accept different depths."""
    body = b'{"name": ' + b"[" * depth + b"]" * depth + b"}"
    response = postgres_site.call("POST", "/api/v1/jobs", body, headers=postgres_site.build_token_header("owner"))
    assert response.status == status
    get_errors(response)


def test_too_many_query_fields_are_400(postgres_site: Site) -> None:
    response = postgres_site.call(
        "GET", "/api/v1/jobs?" + "a=b&" * 3000, headers=postgres_site.build_token_header("owner")
    )
    assert response.status == 400
    get_errors(response)


def test_concurrent_submits_with_one_key_create_one_job(postgres_site: Site) -> None:
    for turn in range(5):
        headers = {**postgres_site.build_token_header("owner"), "Idempotency-Key": f"race-{turn}"}
        specs = [GOOD, GOOD, GOOD, {**GOOD, "name": "other"}]

        def submit(spec: dict[str, Any], headers: dict[str, str] = headers) -> Any:
            return postgres_site.call("POST", "/api/v1/jobs", spec, headers=headers)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(submit, specs))
        by_name: dict[str, list[Any]] = {"good": answers[:3], "other": answers[3:]}
        winner = "other" if answers[3].status == 201 else "good"
        accepted, rejected = by_name.pop(winner), next(iter(by_name.values()))
        assert [a.status for a in accepted].count(201) == 1
        assert {a.status for a in accepted} <= {200, 201}
        assert len({a.json()["id"] for a in accepted}) == 1
        assert {a.status for a in rejected} == {422}
        assert {get_errors(a)[0]["field"] for a in rejected} == {"Idempotency-Key"}


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_api_errors_are_never_html(postgres_site: Site, method: str) -> None:
    for path, status in (
        ("/api", 404),
        ("/api/", 404),
        ("//api/v1/jobs", 404),
        ("/api/v2/jobs", 404),
        ("/api/v1/jobs/a/b/c", 404),
        ("/api/v1/presets", 405),
    ):
        response = postgres_site.call(method, path, headers=postgres_site.build_token_header("owner"))
        if status == 405 and method == "GET":
            continue
        assert response.status == status
        get_errors(response)
    assert b"<html" in postgres_site.call("GET", "/nowhere/").body


async def _handshake(site: Site, path: str, headers: dict[str, str], origin: str | None) -> int:
    try:
        async with connect(f"ws://127.0.0.1:{site.port}{path}", origin=origin, additional_headers=headers):  # type: ignore[arg-type]
            return 101
    except InvalidStatus as error:
        return error.response.status_code


@pytest.mark.parametrize(
    ("path", "origin"),
    [
        ("/ws/", None),
        ("/ws/nothing/", None),
        ("/", None),
        ("/ws/jobs/a%00b/", None),
        ("/ws/jobs/x/", "http://["),
        ("/ws/jobs/x/", "http://127.0.0.1:99999999"),
        ("/ws/jobs/x/", "\xff"),
    ],
)
def test_rejects_invalid_websocket_handshakes(postgres_site: Site, path: str, origin: str | None) -> None:
    before = postgres_site.log.count("Traceback")
    origin_header = postgres_site.url if origin is None else origin
    assert (
        asyncio.run(_handshake(postgres_site, path, postgres_site.build_cookie_header("owner"), origin_header)) == 403
    )
    assert postgres_site.log.count("Traceback") == before


@pytest.mark.parametrize("query", ["attempt=²", "attempt=-1", "attempt=99999999999999999999", "attempt=%00"])
def test_websocket_ignores_an_invalid_attempt(postgres_site: Site, query: str) -> None:
    submitted = postgres_site.call("POST", "/api/v1/jobs", GOOD, headers=postgres_site.build_token_header("owner"))
    url = f"ws://127.0.0.1:{postgres_site.port}/ws/jobs/{submitted.json()['id']}/?{query}"

    async def first() -> Any:
        headers = postgres_site.build_cookie_header("owner")
        async with connect(url, origin=postgres_site.url, additional_headers=headers) as socket:  # type: ignore[arg-type]
            return msgpack.unpackb(await asyncio.wait_for(socket.recv(), scale_timeout(15)))

    if "%00" in query:
        with pytest.raises(InvalidStatus):
            asyncio.run(first())
        return
    assert asyncio.run(first())["job"]["id"] == submitted.json()["id"]


def test_unknown_host_header_is_400(postgres_site: Site) -> None:
    response = postgres_site.call("GET", "/api/v1/jobs", headers={"Host": "evil.example"})
    assert response.status == 400
    get_errors(response)


def test_large_body_is_413(postgres_site: Site) -> None:
    body = b" " * (3 * 2**20)
    for headers in ({}, postgres_site.build_token_header("owner"), {"Transfer-Encoding": "chunked"}):
        response = postgres_site.call("POST", "/api/v1/jobs", body, headers=headers)
        assert response.status == 413
        assert get_errors(response)[0]["message"] == "The request body is larger than 1 MB."
    assert postgres_site.call("POST", "/login/", body).status == 413


def test_forwarded_header_does_not_avoid_the_lockout(postgres_site: Site) -> None:
    """By default, uvicorn trusts this header from loopback."""
    cookie = postgres_site.call("GET", "/login/").headers["Set-Cookie"].split(";")[0]
    login_headers = {"Cookie": cookie, "X-CSRFToken": cookie.partition("=")[2]}
    login_headers["Content-Type"] = "application/x-www-form-urlencoded"

    def guess(turn: int) -> int:
        headers = {**login_headers, "X-Forwarded-For": f"192.0.2.{turn}"}
        return postgres_site.call("POST", "/login/", b"username=nobody&password=guess", headers=headers).status

    codes = [guess(turn) for turn in range(12)]
    assert codes[0] == 200
    assert codes[-1] == 429
