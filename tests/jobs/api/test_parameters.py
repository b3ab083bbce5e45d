"""Views accept exactly the query parameters in the document."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.urls import Resolver404, resolve
from rest_framework.test import APIClient

from jobs.api import openapi
from jobs.api.views import APIView

Api = Callable[[User | None], APIClient]
RUNS = re.compile("/runs/|/hosts/join$")  # These routes have no user.


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def list_addresses() -> list[tuple[str, str, Any]]:
    """Return method, address of a missing object, and operation, for each operation."""
    return [
        (method, re.sub(r"{\w+}", "1", path), operation)
        for path, operations in openapi.get_document()["paths"].items()
        for method, operation in operations.items()
        if not RUNS.search(path)
    ]


def test_rejects_unknown_and_repeated_parameters(admin_user: User, api: Api, settings: Any) -> None:
    settings.REQUESTS_PER_MINUTE = settings.SUBMITS_PER_MINUTE = 10_000
    client, num_operations = api(admin_user), 0
    for method, address, operation in list_addresses():
        known = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"}
        response = getattr(client, method)(f"{address}?zzz=1", {} if method != "get" else None, format="json")
        assert response.status_code == 400, (method, address, response.content)
        (error,) = response.json()["errors"]
        assert (error["field"], error["in"]) == ("zzz", "query"), address
        assert all(name in error["message"] for name in known), address
        for name in known:
            repeated = getattr(client, method)(f"{address}?{name}=1&{name}=1", format="json")
            (error,) = repeated.json()["errors"]
            message = f"`{name}` appears several times in the URL. Send this parameter once."
            assert (repeated.status_code, error["field"], error["message"]) == (400, name, message)
        num_operations += 1
    assert num_operations > 90


def test_all_views_use_the_base_class(api: Api) -> None:
    for _, address, _ in list_addresses():
        try:
            view = resolve(address).func
        except Resolver404:  # The address needs another value than 1.
            continue
        assert issubclass(view.view_class, APIView), address  # type: ignore[attr-defined]


def test_login_is_checked_before_parameters(api: Api) -> None:
    assert api(None).get("/api/v1/jobs?zzz=1").status_code == 401
