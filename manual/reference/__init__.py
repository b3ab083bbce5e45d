"""Pages that the code writes about itself: what is not in the code is in none of them, and nothing is left out."""

from __future__ import annotations

from collections.abc import Callable

from manual.reference import collectives, command, formulas, rest, settings, spec

PAGES: dict[str, Callable[[], str]] = {
    "explanation/collectives.md": collectives.page,
    "reference/spec.md": spec.page,
    "reference/rest.md": rest.page,
    "reference/command.md": command.page,
    "reference/settings.md": settings.page,
    "reference/formulas.md": formulas.page,
}


def generated() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    return {path: page() for path, page in PAGES.items()}
