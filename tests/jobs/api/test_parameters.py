"""Parameters of an address: what a view says of them in the document is what it takes."""

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
RUNS = re.compile("/runs/|/hosts/join$")  # who asks there is no user


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def addresses() -> list[tuple[str, str, Any]]:
    """Method, an address with nothing there, and the operation."""
    return [
        (method, re.sub(r"{\w+}", "1", path), operation)
        for path, operations in openapi.get_document()["paths"].items()
        for method, operation in operations.items()
        if not RUNS.search(path)
    ]


def test_every_address_refuses_what_is_no_parameter_of_it(admin_user: User, api: Api, settings: Any) -> None:
    settings.REQUESTS_PER_MINUTE = settings.SUBMITS_PER_MINUTE = 10_000
    client, walked = api(admin_user), 0
    for method, address, operation in addresses():
        known = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"}
        answer = getattr(client, method)(f"{address}?zzz=1", {} if method != "get" else None, format="json")
        assert answer.status_code == 400, (method, address, answer.content)
        (error,) = answer.json()["errors"]
        assert (error["field"], error["in"]) == ("zzz", "query"), address
        assert all(name in error["message"] for name in known), address
        for name in known:
            twice = getattr(client, method)(f"{address}?{name}=1&{name}=1", format="json")
            (error,) = twice.json()["errors"]
            words = f"`{name}` appears several times in the URL. Send this parameter once."
            assert (twice.status_code, error["field"], error["message"]) == (400, name, words)
        walked += 1
    assert walked > 90


def test_every_view_of_rest_is_ours(api: Api) -> None:
    for _, address, _ in addresses():
        try:
            view = resolve(address).func
        except Resolver404:  # its converter takes no 1
            continue
        assert issubclass(view.view_class, APIView), address  # type: ignore[attr-defined]


def test_who_may_not_ask_is_told_that_first(api: Api) -> None:
    assert api(None).get("/api/v1/jobs?zzz=1").status_code == 401
