"""The admin in the product's own colours, read from the design tokens of every other page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import reverse_lazy

TOKENS = Path(__file__).resolve().parents[1] / "static" / "css" / "tokens.css"
MARK = "img/mark.svg"


def tokens() -> dict[str, tuple[str, str]]:
    """{token: (light, dark)} of the colours in tokens.css."""
    found = re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", TOKENS.read_text())
    return {name: (light, dark) for name, light, dark in found}


def _mixed(color: str, share: int, other: str) -> str:
    return f"color-mix(in oklab, {color} {share}%, {other})"


def colors() -> dict[str, dict[str, str]]:
    """Unfold's two ramps: greys are the surfaces and inks, the primary one runs through both accents."""
    token = tokens()
    (accent, bright), (wash, deep_wash) = token["accent"], token["accent-wash"]
    return {
        "base": {
            "50": token["page"][0],
            "100": token["sunken"][0],
            "200": token["line"][0],
            "300": token["part-bubble"][0],
            "400": token["ink-faint"][1],
            "500": token["ink-faint"][0],
            "600": token["ink-soft"][0],
            "700": token["line"][1],
            "800": token["raised"][1],
            "900": token["surface"][1],
            "950": token["page"][1],
        },
        "primary": {
            "50": wash,
            "100": _mixed(bright, 25, "white"),
            "200": _mixed(bright, 45, "white"),
            "300": _mixed(bright, 70, "white"),
            "400": bright,
            "500": _mixed(bright, 50, accent),
            "600": accent,
            "700": _mixed(accent, 85, "black"),
            "800": _mixed(accent, 70, "black"),
            "900": _mixed(accent, 50, "black"),
            "950": deep_wash,
        },
    }


def _mark(_request: HttpRequest) -> str:
    return static(MARK)


def _style(_request: HttpRequest) -> str:
    return static("css/admin.css")


def _may(right: str) -> Callable[[HttpRequest], bool]:
    return lambda request: bool(getattr(request, "user", None)) and request.user.has_perm(right)


def _may_run_queue(request: HttpRequest) -> bool:
    return _may("jobs.change_job")(request)


def _navigation(_request: HttpRequest) -> list[dict[str, Any]]:
    """The board's pages first, as its own bar has them; then what is kept, each for who may look at it."""

    def model(name: str, title: str, icon: str, app: str = "jobs") -> dict[str, Any]:
        link = reverse_lazy(f"admin:{app}_{name}_changelist")
        return {"title": title, "icon": icon, "link": link, "permission": _may(f"{app}.view_{name}")}

    board: list[dict[str, Any]] = [
        {"title": "Overview", "icon": "dashboard", "link": reverse_lazy("overview")},
        {"title": "Jobs", "icon": "list", "link": reverse_lazy("job-list")},
        {"title": "Queue", "icon": "low_priority", "link": reverse_lazy("queue"), "permission": _may_run_queue},
        {"title": "Audit log", "icon": "history", "link": reverse_lazy("audit"), "permission": _may_run_queue},
    ]
    for item in board:
        item["active"] = lambda _request: False  # Unfold marks "/" as active on each page of the admin
    objects = [
        model("job", "Jobs", "work"),
        model("host", "Hosts", "dns"),
        model("project", "Projects", "folder"),
        model("pool", "Pools", "workspaces"),
        model("reservation", "Reservations", "event"),
        model("deadletter", "Dead letters", "mail"),
    ]
    people = [model("user", "Users", "person", "auth"), model("group", "Groups", "group", "auth")]
    return [
        {"title": "Board", "separator": True, "items": board},
        {"title": "Objects", "separator": True, "items": objects},
        {"title": "People", "separator": True, "items": people},
    ]


def unfold() -> dict[str, Any]:
    """The setting UNFOLD."""
    return {
        "SITE_TITLE": "Meshboard",
        "SITE_HEADER": "Meshboard",
        "SITE_URL": "/",
        "SITE_ICON": {"light": _mark, "dark": _mark},
        "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": _mark}],
        "STYLES": [_style],
        "COLORS": colors(),
        "BORDER_RADIUS": "5px",
        "SIDEBAR": {"show_all_applications": True, "navigation": _navigation},
    }
