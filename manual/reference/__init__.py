"""Pages that are generated from the code."""

from __future__ import annotations

from collections.abc import Callable

from manual.reference import collectives, command, formulas, rest, settings, spec

PAGES: dict[str, Callable[[], str]] = {
    "explanation/collectives.md": collectives.build_page,
    "reference/spec.md": spec.build_page,
    "reference/rest.md": rest.build_page,
    "reference/command.md": command.build_page,
    "reference/settings.md": settings.build_page,
    "reference/formulas.md": formulas.build_page,
}


def generate_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path below docs/."""
    return {path: page() for path, page in PAGES.items()}
