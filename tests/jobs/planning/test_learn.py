"""The teaching page and its numbers."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User


def test_the_page_works_before_any_script_runs(owner: User, client: Any) -> None:
    assert client.get("/learn/").status_code == 302
    client.force_login(owner)
    page = client.get("/learn/?b=1&s=512&h=8192")
    assert page.context["lesson"]["order"].startswith("DP > TP")
    assert "TP &gt; DP has turned round" in page.content.decode()


def test_numbers_as_json_and_senseless_ones_by_name(owner: User, client: Any) -> None:
    client.force_login(owner)
    made = client.get("/learn/numbers/?b=8&over=h").json()
    assert made["curves"]["variable"] == "h"
    assert made["lesson"]["setting"]["b"] == 8
    refused = client.get("/learn/numbers/?b=none&k=2").json()
    assert [e["field"] for e in refused["errors"]] == ["b"]
    assert "must be a whole number" in client.get("/learn/?b=0").content.decode()
