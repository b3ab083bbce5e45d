"""What a refusal is about, where that is named in the address: views say it in words, as whoever reads it wants it, and
this finds the parameter of the path that they mean."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

NO_SUCH: Final = re.compile(r"\bno such (\w+)")
# Parameters of paths that have another name than the thing; of several the one that the address has.
CALLED: Final[Mapping[str, tuple[str, ...]]] = {
    "job": ("job_id", "run"),
    "member": ("user",),
    "baseline": ("branch",),
    "file": ("place",),
    **dict.fromkeys(("host", "pool", "primitive"), ("name",)),
    **dict.fromkeys(("token", "import", "webhook", "invitation"), ("key",)),
}


def parameter_of(words: str, address: Collection[str]) -> str | None:
    """The name of the path's parameter; None where the path has none. Words that name none of them are about the
    outermost: it is in a project, or of a job, that somebody may not do something."""
    missing = NO_SUCH.search(words)
    called = CALLED.get(missing[1], (missing[1],)) if missing else ()
    return next((name for name in (*called, *address) if name in address), None)
