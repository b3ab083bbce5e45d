"""Pages that are generated from the code."""

from __future__ import annotations

from collections.abc import Callable

from manual.reference import formulas, pages, rest

PAGES: dict[str, Callable[[], str]] = {
    "explanation/collectives.md": pages.build_collectives_page,
    "reference/spec.md": pages.build_spec_page,
    "reference/rest.md": rest.build_page,
    "reference/command.md": pages.build_command_page,
    "reference/settings.md": pages.build_settings_page,
    "reference/formulas.md": formulas.build_page,
}


def generate_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path below docs/."""
    return {path: page() for path, page in PAGES.items()}
