"""What used to be a 500, on PostgreSQL and the server as it is deployed."""

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


def errors(answer: Any) -> list[dict[str, str]]:
    """Every refusal has the promised shape."""
    assert answer.headers["Content-Type"] == CONTENT_TYPE
    told = answer.json()
    assert (set(told), told["status"]) == ({"type", "title", "status", "detail", "errors"}, answer.status)
    assert told["errors"]
    assert all(set(error) - {"in"} == {"field", "pointer", "message"} for error in told["errors"])
    return list(told["errors"])


@pytest.mark.parametrize("limit", [HUGE, "²", "٣", "0", "201", "-1", "1.0", "007", ""])
def test_a_senseless_limit_is_400(postgres_site: Site, limit: str) -> None:
    from urllib.parse import quote

    answer = postgres_site.call(
        "GET", f"/api/v1/jobs?limit={quote(limit)}", headers=postgres_site.build_token_header("owner")
    )
    assert answer.status == 400
    assert errors(answer)[0]["field"] == "limit"


@pytest.mark.parametrize("token", ["²³", "\xff" * 64, "wrong", ""])
def test_a_token_that_is_none_is_401(postgres_site: Site, token: str) -> None:
    answer = postgres_site.call("GET", "/api/v1/jobs", headers={"Authorization": f"Token {token}"})
    assert answer.status == 401
    errors(answer)


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
        answer = postgres_site.call("GET", path, headers=headers)
        assert answer.status == 400
        if path.startswith("/api/"):
            errors(answer)


@pytest.mark.parametrize("path", ["/", "/api/v1/jobs", "/admin/"])
def test_nul_in_a_cookie_is_400(postgres_site: Site, path: str) -> None:
    answer = postgres_site.call("GET", path, headers={"Cookie": 'sessionid="aaaaaaaa\\000aaaaaaaa"'})
    assert answer.status == 400


def with_field(spec: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    room, _, name = field.rpartition(".")
    if not room:
        return {**spec, name: value}
    return {**spec, room: {**spec.get(room, {}), name: value}}


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
def test_no_text_of_a_spec_can_make_it_fall_over(postgres_site: Site, field: str) -> None:
    """NUL, which PostgreSQL refuses, and half a surrogate pair, which nothing can encode."""
    headers = postgres_site.build_token_header("owner")
    for text in (NUL, "\ud800"):
        spec = with_field(GOOD, field, text)
        submitted = postgres_site.call("POST", "/api/v1/jobs", spec, headers=headers)
        assert submitted.status == 422, submitted.body
        assert field.isprintable() is False or any(e["field"] == field for e in errors(submitted)), submitted.body
        planned = postgres_site.call("POST", "/api/v1/plan", spec, headers=headers)
        assert planned.status == 200
        assert planned.json()["problems"]
        for path in ("plan/search", "plan/explain"):
            answer = postgres_site.call("POST", f"/api/v1/{path}", {"spec": spec, "ranks": 4}, headers=headers)
            assert answer.status in (200, 422), answer.body  # a search ignores the layout


@pytest.mark.parametrize("cluster", [5, [], {}, True, "host:" + NUL, "host:\ud800", "\ud800", NUL], ids=ascii)
def test_hardware_that_is_no_name_is_422(postgres_site: Site, cluster: object) -> None:
    headers = postgres_site.build_token_header("owner")
    for path in ("plan/search", "plan/explain"):
        body = {"spec": GOOD, "cluster": cluster, **({"ranks": 4} if path == "plan/search" else {})}
        answer = postgres_site.call("POST", f"/api/v1/{path}", body, headers=headers)
        assert answer.status == 422, answer.body
        assert errors(answer)[0]["field"] == "cluster"


@pytest.mark.parametrize(("depth", "status"), [(30, 422), (32, 400), (500, 400), (100_000, 400)])
def test_json_nested_too_deep_is_400(postgres_site: Site, depth: int, status: int) -> None:
    """Else one reader bears what the next one raises on."""
    body = b'{"name": ' + b"[" * depth + b"]" * depth + b"}"
    answer = postgres_site.call("POST", "/api/v1/jobs", body, headers=postgres_site.build_token_header("owner"))
    assert answer.status == status
    errors(answer)


def test_more_fields_than_are_read_are_400(postgres_site: Site) -> None:
    answer = postgres_site.call(
        "GET", "/api/v1/jobs?" + "a=b&" * 3000, headers=postgres_site.build_token_header("owner")
    )
    assert answer.status == 400
    errors(answer)


def test_four_submits_at_once_with_one_key_are_one_job(postgres_site: Site) -> None:
    for turn in range(5):
        headers = {**postgres_site.build_token_header("owner"), "Idempotency-Key": f"race-{turn}"}
        specs = [GOOD, GOOD, GOOD, {**GOOD, "name": "other"}]

        def submit(spec: dict[str, Any], headers: dict[str, str] = headers) -> Any:
            return postgres_site.call("POST", "/api/v1/jobs", spec, headers=headers)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(submit, specs))
        by_name: dict[str, list[Any]] = {"good": answers[:3], "other": answers[3:]}
        winner = "other" if answers[3].status == 201 else "good"
        won, lost = by_name.pop(winner), next(iter(by_name.values()))
        assert [a.status for a in won].count(201) == 1
        assert {a.status for a in won} <= {200, 201}
        assert len({a.json()["id"] for a in won}) == 1
        assert {a.status for a in lost} == {422}
        assert {errors(a)[0]["field"] for a in lost} == {"Idempotency-Key"}


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_no_route_below_api_answers_html(postgres_site: Site, method: str) -> None:
    for path, status in (
        ("/api", 404),
        ("/api/", 404),
        ("//api/v1/jobs", 404),
        ("/api/v2/jobs", 404),
        ("/api/v1/jobs/a/b/c", 404),
        ("/api/v1/presets", 405),
    ):
        answer = postgres_site.call(method, path, headers=postgres_site.build_token_header("owner"))
        if status == 405 and method == "GET":
            continue
        assert answer.status == status
        errors(answer)
    assert b"<html" in postgres_site.call("GET", "/nowhere/").body


async def _handshake(site: Site, path: str, headers: dict[str, str], origin: str | None) -> int:
    try:
        async with connect(f"ws://127.0.0.1:{site.port}{path}", origin=origin, additional_headers=headers):  # type: ignore[arg-type]
            return 101
    except InvalidStatus as refused:
        return refused.response.status_code


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
def test_a_socket_nobody_serves_is_refused_before_it_opens(postgres_site: Site, path: str, origin: str | None) -> None:
    before = postgres_site.log.count("Traceback")
    given = postgres_site.url if origin is None else origin
    assert asyncio.run(_handshake(postgres_site, path, postgres_site.build_cookie_header("owner"), given)) == 403
    assert postgres_site.log.count("Traceback") == before


@pytest.mark.parametrize("query", ["attempt=²", "attempt=-1", "attempt=99999999999999999999", "attempt=%00"])
def test_a_senseless_attempt_to_resume_is_as_none(postgres_site: Site, query: str) -> None:
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


def test_a_host_that_is_not_served_is_400_in_the_api_s_shape(postgres_site: Site) -> None:
    answer = postgres_site.call("GET", "/api/v1/jobs", headers={"Host": "evil.example"})
    assert answer.status == 400
    errors(answer)


def test_a_body_over_the_bound_is_413_with_or_without_a_login(postgres_site: Site) -> None:
    body = b" " * (3 * 2**20)
    for headers in ({}, postgres_site.build_token_header("owner"), {"Transfer-Encoding": "chunked"}):
        answer = postgres_site.call("POST", "/api/v1/jobs", body, headers=headers)
        assert answer.status == 413
        assert errors(answer)[0]["message"] == "The request body is larger than 1 MB."
    assert postgres_site.call("POST", "/login/", body).status == 413


def test_a_rotating_header_from_loopback_does_not_get_round_the_lockout(postgres_site: Site) -> None:
    """uvicorn would believe it: loopback is its trusted proxy, unless it is told of others."""
    cookie = postgres_site.call("GET", "/login/").headers["Set-Cookie"].split(";")[0]
    kept = {"Cookie": cookie, "X-CSRFToken": cookie.partition("=")[2]}
    kept["Content-Type"] = "application/x-www-form-urlencoded"

    def guess(turn: int) -> int:
        headers = {**kept, "X-Forwarded-For": f"192.0.2.{turn}"}
        return postgres_site.call("POST", "/login/", b"username=nobody&password=guess", headers=headers).status

    codes = [guess(turn) for turn in range(12)]
    assert codes[0] == 200
    assert codes[-1] == 429
