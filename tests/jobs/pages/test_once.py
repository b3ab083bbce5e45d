"""A form that is sent twice starts one job. Another form or content starts another job."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Job

SCRIPT = {"name": "mine", "script.path": "train.py", "layout.dp": "2", "resources.device": "cpu"}


def drawn(client: Any, path: str) -> dict[str, Any]:
    """Return the key of the form with valid values."""
    page = client.get(path)
    (key,) = re.findall(r'name="form_key" value="([^"]{16,})"', page.content.decode())
    return {**(SCRIPT if "script" in path else page.context["values"]), "form_key": key}


@pytest.mark.parametrize("path", ["/jobs/new/", "/jobs/script/", "/collectives/"])
def test_repeated_form_starts_one_job(path: str, owner: User, make_host: Any, client: Any) -> None:
    make_host()
    client.force_login(owner)
    form = drawn(client, path)
    first, second = client.post(path, form), client.post(path, form)
    assert (first.status_code, first["Location"]) == (302, second["Location"])
    assert Job.objects.count() == 1
    assert "sent more than once" in client.get(second["Location"]).content.decode()


def test_changed_or_new_form_starts_another_job(owner: User, client: Any) -> None:
    client.force_login(owner)
    form = drawn(client, "/jobs/new/")
    other = drawn(client, "/jobs/new/")
    without = {name: value for name, value in form.items() if name != "form_key"}
    for number, sent in enumerate([form, {**form, "name": "another"}, other, without, without], 1):
        assert client.post("/jobs/new/", sent).status_code == 302
        assert Job.objects.count() == number


def test_rejected_form_can_be_corrected_and_sent(owner: User, client: Any) -> None:
    client.force_login(owner)
    form = drawn(client, "/jobs/new/")
    assert client.post("/jobs/new/", {**form, "layout.tp": "3"}).status_code == 422
    assert client.post("/jobs/new/", form).status_code == 302
    assert Job.objects.count() == 1


def test_accepts_an_unknown_form_key(owner: User, client: Any) -> None:
    client.force_login(owner)
    form = drawn(client, "/jobs/new/")
    for key in ("", "x" * 5000, "\0\ud800"):
        assert client.post("/jobs/new/", {**form, "form_key": key.encode(errors="replace").decode()}).status_code == 302
