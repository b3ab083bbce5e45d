"""The order of the site's pages. One that is not listed stands at the end of its folder's part; one that is listed
and not there yet is left out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Part -> its folder, and its pages in order.
PARTS: dict[str, tuple[str, list[str]]] = {
    "Tutorial": ("tutorial", ["tutorial/index.md"]),
    "How to": (
        "howto",
        [
            "howto/choose-a-layout.md",
            "howto/read-a-verdict.md",
            "howto/own-script.md",
            "howto/elsewhere.md",
            "howto/gate-a-build.md",
            "howto/from-python.md",
            "ci.md",
            "howto/add-a-host.md",
            "howto/slurm.md",
            "howto/deploy.md",
            "howto/upgrade.md",
            "howto/people.md",
            "howto/notifications.md",
        ],
    ),
    "Explanation": (
        "explanation",
        [
            "explanation/strategies.md",
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
            "explanation/history.md",
            "explanation/security.md",
            "explanation/witness.md",
            "explanation/mutations.md",
        ],
    ),
    "Reference": (
        "reference",
        [
            "reference/features.md",
            "reference/pages.md",
            "reference/spec.md",
            "reference/api.md",
            "reference/rest.md",
            "reference/errors.md",
            "reference/command.md",
            "reference/settings.md",
            "reference/metrics.md",
            "reference/formulas.md",
            "reference/bounds.md",
            "reference/figures.md",
            "reference/measured.md",
            "reference/parity.md",
            "reference/gpu.md",
        ],
    ),
}
START = "index.md"
ELSE = "Reference"  # of what lies in no part's folder


def nav(pages: Iterable[str]) -> list[Any]:
    """mkdocs' own form, of the pages that there are (paths below docs/)."""
    there = set(pages) - {START}
    listed = {page for _, order in PARTS.values() for page in order}
    left = sorted(there - listed)
    found: list[Any] = [START]
    for part, (folder, order) in PARTS.items():
        more = [page for page in left if page.startswith(f"{folder}/")]
        if part == ELSE:
            more += [page for page in left if page.split("/")[0] not in {f for f, _ in PARTS.values()}]
        members = [page for page in order if page in there] + more
        if members:
            found.append({part: members})
    return found
