"""Order of the pages in the site's navigation.

Pages that are not listed come last in the part of their folder. Listed pages that do not exist are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Title of a part: its folder, and its pages in order.
PARTS: dict[str, tuple[str, list[str]]] = {
    "Tutorial": ("tutorial", ["tutorial/index.md"]),
    "How to": (
        "howto",
        [
            "howto/choose-a-layout.md",
            "howto/read-a-verdict.md",
            "howto/own-script.md",
            "howto/elsewhere.md",
            "howto/import-a-trace.md",
            "howto/gate-a-build.md",
            "howto/from-python.md",
            "howto/add-a-host.md",
            "howto/calibrate.md",
            "howto/slurm.md",
            "howto/deploy.md",
            "howto/backup.md",
            "howto/upgrade.md",
            "howto/secret-key.md",
            "howto/people.md",
            "howto/notifications.md",
        ],
    ),
    "Explanation": (
        "explanation",
        [
            "explanation/strategies.md",
            "explanation/traffic.md",
            "explanation/collectives.md",
            "explanation/architecture.md",
            "explanation/planner.md",
            "explanation/memory.md",
            "explanation/training.md",
            "explanation/lab.md",
            "explanation/diagnosis.md",
            "explanation/timeline.md",
            "explanation/queue.md",
            "explanation/gangs.md",
            "explanation/slurm.md",
            "explanation/failures.md",
            "explanation/history.md",
            "explanation/access.md",
            "explanation/security.md",
            "explanation/host-security.md",
            "explanation/isolation.md",
            "explanation/witness.md",
            "explanation/mutations.md",
        ],
    ),
    "Reference": (
        "reference",
        [
            "reference/glossary.md",
            "reference/features.md",
            "reference/pages.md",
            "reference/spec.md",
            "reference/trainer.md",
            "reference/api.md",
            "reference/rest.md",
            "reference/errors.md",
            "reference/command.md",
            "reference/settings.md",
            "reference/host-settings.md",
            "reference/service-limits.md",
            "reference/metrics.md",
            "reference/formulas.md",
            "reference/bounds.md",
            "reference/measurement.md",
            "reference/accuracy.md",
            "reference/figures.md",
            "reference/measured.md",
            "reference/parity.md",
            "reference/gpu.md",
        ],
    ),
    "Development": ("development", ["development/code-map.md"]),
}
START = "index.md"
DEFAULT_PART = "Reference"  # for pages outside the folders above


def build_navigation(pages: Iterable[str]) -> list[Any]:
    """Return the navigation in mkdocs' format for pages with paths below docs/."""
    existing = set(pages) - {START}
    folders = {folder for folder, _ in PARTS.values()}
    unlisted = sorted(existing - {page for _, order in PARTS.values() for page in order})
    result: list[Any] = [START]
    for part, (folder, order) in PARTS.items():
        members = [page for page in order if page in existing]
        members += [page for page in unlisted if page.startswith(f"{folder}/")]
        if part == DEFAULT_PART:
            members += [page for page in unlisted if page.split("/")[0] not in folders]
        if members:
            result.append({part: members})
    return result
