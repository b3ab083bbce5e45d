"""Logs and pages of rejected requests and server errors."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path


def fail(_: object) -> None:
    raise ZeroDivisionError("ours")


urlpatterns = [path("fail/", fail)]


@pytest.mark.django_db
def test_rejected_request_logs_no_traceback(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    client.force_login(User.objects.create_user("owner"))
    with caplog.at_level(logging.WARNING, "django.request"):
        answer = client.post("/queue/pause/")
    assert answer.status_code == 403
    assert "Only staff can change the queue." in answer.content.decode()
    (line,) = [record for record in caplog.records if record.name == "django.request"]
    assert "Forbidden" in line.getMessage()
    assert line.exc_info is None


def test_server_error_logs_a_traceback(settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.ROOT_URLCONF, settings.MIDDLEWARE = __name__, []
    with caplog.at_level(logging.WARNING, "django.request"):
        assert Client(raise_request_exception=False).get("/fail/").status_code == 500
    assert any(record.exc_info for record in caplog.records if record.name == "django.request")


def test_missing_csrf_token_gets_a_page(db: None) -> None:
    asker = Client(enforce_csrf_checks=True)
    answer = asker.post("/login/", {"username": "a", "password": "b"})
    assert answer.status_code == 403
    text = answer.content.decode()
    assert "Nothing changed" in text
    assert "DEBUG" not in text
