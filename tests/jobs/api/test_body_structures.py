"""Bodies of wrong structure, to each REST operation that changes data, on PostgreSQL. No answer is an error 500."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from django.contrib.auth.models import User
from knox.models import AuthToken
from rest_framework.test import APIClient

from jobs.api.access import JoinThrottle
from jobs.models import Host, TokenGrant
from jobs.people.tokens import ALL_SCOPES
from jobs.queue import actions
from tests.planner.wrong_specs import GOOD
from tests.support.processes import RedisServer
from tests.support.structures import WRONG, change_structure

NUM_CASES = 4  # per operation


def build_body(schema: Any, components: Any, depth: int = 0) -> Any:
    """Return a body with every property of a schema, or null where the schema is too deep."""
    while "$ref" in schema:
        schema = components[schema["$ref"].rpartition("/")[2]]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return build_body(schema[key][0], components, depth)
    if "example" in schema or "default" in schema:
        return schema.get("example", schema.get("default"))
    if "properties" in schema and depth < 4:
        return {name: build_body(inner, components, depth + 1) for name, inner in schema["properties"].items()}
    if schema.get("type") == "array" and depth < 4:
        return [build_body(schema.get("items", {}), components, depth + 1)]
    return schema.get("enum", [None])[0] or {"integer": 1, "number": 1.0, "string": "x", "boolean": True}.get(
        schema.get("type")
    )


def list_cases(draw: Random, valid: Any, count: int) -> list[Any]:
    changed = [change_structure(draw, valid) if draw.random() < 0.9 else draw.choice(WRONG) for _ in range(count)]
    return [{"\ud800": 1}, *changed]


def check_operations(user: User, seed: int, count: int) -> list[str]:
    """Return a line for each answer that is an error of the server."""
    draw, job = Random(seed), actions.submit(user, GOOD)[0]
    client, token = APIClient(raise_request_exception=False), AuthToken.objects.create(user)
    TokenGrant.objects.create(token=token[0], scopes=list(ALL_SCOPES))
    as_user = {"HTTP_AUTHORIZATION": f"Token {token[1]}"}
    run = client.post("/api/v1/runs", {"world_size": 2}, format="json", **as_user).json()
    as_run = {"HTTP_AUTHORIZATION": f"Run {run['token']}"}
    document = client.get("/api/v1/schema", **as_user).json()
    names = {"job_id": job.id, "run": run["run"], "name": "host-a", "project": "default", "attempt": "1", "node": "0"}
    failed = []
    for route, operations in document["paths"].items():
        path = re.sub(r"{(\w+)}", lambda match: names.get(match[1], match[0]), route)
        for method, operation in operations.items():
            if method == "get":
                continue
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            built = build_body(content.get("schema", {}), document["components"]["schemas"])
            valid = GOOD if operation["operationId"] == "submitJob" else built or {}
            for body in list_cases(draw, valid, count if content else 0):
                text, headers = json.dumps(body), as_run if "{run}" in route else as_user
                found = client.generic(method.upper(), path, text, content_type="application/json", **headers)
                assert found.status_code != 429, "the test exceeds a rate limit"
                if found.status_code >= 500 and found.status_code != 503:
                    failed.append(f"{method} {path} {text[:300]}: {found.content!r}")
    return failed


@pytest.fixture
def board(
    postgres: None,
    redis_service: RedisServer,
    settings: Any,
    make_host: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
) -> User:
    settings.REDIS_URL = redis_service.url
    monkeypatch.setattr(JoinThrottle, "rate", "1000000/min")
    settings.REQUESTS_PER_MINUTE = settings.SUBMITS_PER_MINUTE = 10**6
    make_host()
    return User.objects.create_superuser("root", password="root-password")


def test_wrong_structure_is_no_internal_error(board: User) -> None:
    assert check_operations(board, 53, NUM_CASES) == []


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(5))
def test_many_wrong_structures_are_no_internal_error(board: User, seed: int) -> None:
    assert check_operations(board, seed, 30 * NUM_CASES) == []
