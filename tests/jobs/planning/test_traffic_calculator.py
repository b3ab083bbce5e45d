"""The Traffic calculator and its numbers."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User


def test_the_page_works_before_any_script_runs(owner: User, client: Any) -> None:
    assert client.get("/planner/traffic/").status_code == 302
    client.force_login(owner)
    page = client.get("/planner/traffic/?b=1&s=512&h=8192&over=h")
    assert page.context["lesson"]["order"].startswith("DP > TP")
    assert "unusual order" in page.content.decode()
    assert page.context["curves"]["variable"] == "h"


def test_numbers_as_json_and_senseless_ones_by_name(owner: User, client: Any) -> None:
    client.force_login(owner)
    made = client.get("/planner/traffic/numbers/?b=8&over=h").json()
    assert made["curves"]["variable"] == "h"
    assert made["lesson"]["setting"]["b"] == 8
    refused = client.get("/planner/traffic/numbers/?b=none&k=2").json()
    assert [e["field"] for e in refused["errors"]] == ["b"]
    assert 'role="alert"><code>b</code>' in client.get("/planner/traffic/?b=0").content.decode()


def test_addresses_of_earlier_versions_lead_to_the_new_pages(owner: User, client: Any) -> None:
    client.force_login(owner)
    for old, new in {
        "/what-if/?cluster=h100": "/planner/?cluster=h100",
        "/learn/?b=8&over=h": "/planner/traffic/?b=8&over=h",
    }.items():
        answer = client.get(old)
        assert (answer.status_code, answer["Location"]) == (301, new)
