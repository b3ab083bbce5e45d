"""What a refusal is about, where that is named in the address: the parameter of the path that names it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

# Parameters of paths that have another name than the thing; of several the one that the address has.
CALLED: Final[Mapping[str, tuple[str, ...]]] = {
    "job": ("job_id", "run"),
    "member": ("user",),
    "baseline": ("branch",),
    "file": ("place",),
    **dict.fromkeys(("host", "pool", "primitive"), ("name",)),
    **dict.fromkeys(("token", "import", "webhook", "invitation"), ("key",)),
}


def parameter_of(what: str | None, address: Collection[str]) -> str | None:
    """Of a thing that is not there, or that somebody may not; None where the path has none. What the path does not name
    is about its outermost: it is in a project, or of a job."""
    called = CALLED.get(what, (what,)) if what else ()
    return next((name for name in (*called, *address) if name in address), None)
