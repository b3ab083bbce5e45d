"""Every route except public ones requires a login. The test walks the resolver to find all routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from pytest_django import Settings

# Routes during a login: single sign-on, and an invitation that creates an account.
SIGN_ON = {"login/oidc/x/login/", "login/oidc/x/login/callback/", "login/cancelled/", "login/closed/", "login/new/"}
PUBLIC = {"login/", "login/once/", "account/two-factor/authenticate/", "invitations/", *SIGN_ON}
BY_ITS_OWN_TOKEN = {"api/v1/hosts/join"}  # shown by a board without users, which accepts no GET
FOR_PROGRAMS = ("api/", "metrics")
VALUES = {"str": "x", "slug": "x", "int": "1", "path": "x", "uuid": "00000000-0000-0000-0000-000000000000"}


def routes(resolver: URLResolver, before: str = "") -> Iterator[str]:
    """Yield each route as a path with its parameters filled in."""
    for entry in resolver.url_patterns:
        pattern = entry.pattern
        part = str(pattern)
        if pattern.converters:
            for name, converter in pattern.converters.items():
                kind = type(converter).__name__.removesuffix("Converter").lower().replace("string", "str")
                part = part.replace(f"<{kind}:{name}>", VALUES[kind]).replace(f"<{name}>", "x")
        if isinstance(entry, URLPattern):
            yield before + part
        else:
            yield from routes(entry, before + part)


def paths() -> list[str]:
    found = [path for path in routes(get_resolver()) if "(?P" not in path and "^" not in path]
    assert len(found) > 30
    return sorted(set(found))


@pytest.mark.django_db
def test_every_route_requires_a_login(client: Client, settings: Settings) -> None:
    settings.METRICS_TOKEN = "given"  # no metrics without a token
    wrong = {}
    for path in paths():
        answer = client.get(f"/{path}")
        if path in PUBLIC:
            continue
        if path in BY_ITS_OWN_TOKEN:
            content = answer.status_code == 405
        elif path.startswith(FOR_PROGRAMS):
            content = answer.status_code == 401
        else:
            content = answer.status_code == 302 and answer["Location"].startswith(
                ("/login/?next=", "/admin/login/?next=")
            )
        if not content and path != "admin/login/":
            wrong[path] = answer.status_code
    assert wrong == {}


@pytest.mark.django_db
def test_public_pages_respond(client: Client) -> None:
    assert client.get("/login/").status_code == 200
    assert client.get("/login/once/?sesame=wrong").status_code == 403
