"""Theme of the admin pages, with the colors of all other pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import reverse_lazy

TOKENS = Path(__file__).resolve().parent / "static" / "css" / "tokens.css"
MARK = "img/mark.svg"


def read_color_tokens() -> dict[str, tuple[str, str]]:
    """Return the (light, dark) colors of each token in tokens.css."""
    found = re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", TOKENS.read_text())
    return {name: (light, dark) for name, light, dark in found}


def _mixed(color: str, share: int, other: str) -> str:
    return f"color-mix(in oklab, {color} {share}%, {other})"


def build_color_ramps() -> dict[str, dict[str, str]]:
    """Return the two color ramps of unfold: grays of surfaces and text, and accents."""
    token = read_color_tokens()
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
    """Return the sidebar: pages of the board, then models, each with the permission to view it."""

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


def build_unfold_settings() -> dict[str, Any]:
    """Return the setting UNFOLD."""
    return {
        "SITE_TITLE": "Meshboard",
        "SITE_HEADER": "Meshboard",
        "SITE_URL": "/",
        "SITE_ICON": {"light": _mark, "dark": _mark},
        "SITE_FAVICONS": [{"rel": "icon", "type": "image/svg+xml", "href": _mark}],
        "STYLES": [_style],
        "COLORS": build_color_ramps(),
        "BORDER_RADIUS": "5px",
        "SIDEBAR": {"show_all_applications": True, "navigation": _navigation},
    }
