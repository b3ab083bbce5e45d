"""The page of a login link that does not work."""

from __future__ import annotations

import time

import pytest
from django.contrib.auth.models import User
from django.test import Client
from sesame.utils import get_query_string

LINK = "/login/once/"


@pytest.fixture
def query(db: None) -> str:
    """A valid link for a user."""
    return str(get_query_string(User.objects.create_user("owner")))


def test_explains_a_used_login_link(query: str) -> None:
    assert Client().get(LINK + query).status_code == 302
    answer = Client().get(LINK + query)
    assert answer.status_code == 403
    assert "The login link was already used" in answer.content.decode()


def test_explains_an_expired_login_link(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr("sesame.tokens_v2.time.time", lambda: now + 16 * 60)
    answer = Client().get(LINK + query)
    assert answer.status_code == 403
    assert "valid for 15 minutes" in answer.content.decode()


@pytest.mark.parametrize("query", ["", "?sesame=", "?sesame=abc", "?sesame=%C3%A9", "?sesame=x%00"])
def test_explains_an_incomplete_login_link(db: None, query: str) -> None:
    answer = Client().get(LINK + query)
    assert answer.status_code == 403
    assert "The login link is incomplete" in answer.content.decode()
