"""All pages: every named URL of Django with values for its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from django.contrib import admin
from django.urls import URLPattern, URLResolver, get_resolver, reverse

# Addresses that are not pages, with the effect of a request.
EXEMPT = {
    "login-once": "its link logs in, once",
    "job-history-table": "data, in columns",
    "docs-file": "a page of the built documentation",
    **dict.fromkeys(
        ("import", "import-data", "import-part", "import-progress", "import-read", "import-delete"),
        "of an uploaded trace: none is uploaded here",
    ),
    **dict.fromkeys(
        ("webhook", "webhook-change", "webhook-delete", "webhook-ping", "webhook-rotate", "webhook-redeliver"),
        "of a webhook: none is made here",
    ),
    "invitation": "its link is shown once",
    "account-session-end": "ends a session",
    "account-sign-on-remove": "removes a sign-on",
    **dict.fromkeys(("openid_connect_login", "openid_connect_callback"), "of a provider: none is set up here"),
}
PROGRAMS = ("api/", "admin/")  # REST answers programs; the admin's own table has its pages
# Values of the parameters of addresses. A URL with another parameter needs a value here or an exemption.
PARAMETERS = {"job_id", "name", "slug", "key", "project"}
QUERIES = {
    "job-list": ["", "?status=failed", "?q=nothing+is+called+so"],
    "job-new": ["", "?from={trained}"],
    "plan-explain": [],
    "compare": ["?jobs={trained},{piped}"],
}
JOB_TABS = ("training", "traffic", "time", "memory", "verification", "logs", "hosts")
SLUGS = ("all-reduce", "all-gather", "broadcast", "barrier", "send-recv")
LOGGED_OUT = ("login",)


class World(NamedTuple):
    """Objects of the board: job ids by kind, a host, and a project."""

    jobs: dict[str, str]
    host: str
    project: str = "default"


class Shown(NamedTuple):
    """A page with the name of its pictures."""

    name: str
    path: str
    logged_in: bool = True


def named_urls() -> dict[str, set[str]]:
    """Return every named URL outside PROGRAMS with its parameters."""
    return {name: parameters for name, parameters, _ in _walk(get_resolver())}


def unknown() -> dict[str, set[str]]:
    """Return the named URLs with parameters that have no values here."""
    return {
        name: parameters - PARAMETERS
        for name, parameters in named_urls().items()
        if name not in EXEMPT and parameters - PARAMETERS
    }


def pages(world: World) -> list[Shown]:
    """Return all pages. The caller skips JSON and addresses without GET."""
    found = [shown for name, parameters in named_urls().items() for shown in _of(name, parameters, world)]
    return [*found, Shown("not-found", "/nothing/is/here/"), *_of_admin()]


def _of(name: str, parameters: set[str], world: World) -> Iterator[Shown]:
    if name in EXEMPT or parameters - PARAMETERS:
        return
    for label, arguments in _arguments(name, parameters, world):
        for query in QUERIES.get(name, [""]):
            words = "-".join(part for part in (name, label, _word(query)) if part)
            path = reverse(name, kwargs=arguments) + query.format(**world.jobs)
            yield Shown(words, path, name not in LOGGED_OUT)
            if name == "job-detail" and label == "trained":
                yield from (Shown(f"{words}-{tab}", f"{path}#{tab}") for tab in JOB_TABS)


def _arguments(name: str, parameters: set[str], world: World) -> list[tuple[str, dict[str, str]]]:
    if parameters == {"job_id"}:
        jobs = world.jobs if name == "job-detail" else {"trained": world.jobs["trained"]}
        return [(label, {"job_id": job}) for label, job in jobs.items()]
    if parameters == {"slug"}:
        return [(slug, {"slug": slug}) for slug in SLUGS]
    of_project = name.startswith("project") or "project" in parameters
    return [("", dict.fromkeys(parameters, world.project if of_project else world.host))]


def _word(query: str) -> str:
    """Return a file name for a query."""
    return "-".join(re.findall(r"[a-z]+", query))[:24]


def _of_admin() -> Iterator[Shown]:
    yield Shown("admin", reverse("admin:index"))
    for model in admin.site._registry:
        label = f"{model._meta.app_label}_{model._meta.model_name}"
        yield Shown(f"admin-{label}", reverse(f"admin:{label}_changelist"))


def _walk(resolver: Any, prefix: str = "", outer: frozenset[str] = frozenset()) -> Iterator[tuple[str, set[str], str]]:
    for entry in resolver.url_patterns:
        route = prefix + str(entry.pattern)
        parameters = outer | set(entry.pattern.converters)
        if route.startswith(PROGRAMS):
            continue
        if isinstance(entry, URLResolver):
            yield from _walk(entry, route, frozenset(parameters))
        elif isinstance(entry, URLPattern) and entry.name:
            yield entry.name, set(parameters), route
