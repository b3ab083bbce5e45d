"""`make schemathesis`: every check of schemathesis over the document as served, by nobody, a user and staff; and, as
staff, its links from each thing that can be made to what may be asked of it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.fuzz import FuzzResult, follow_links, get_schema, list_link_chains, run_fuzz
from tests.support.postgres import postgres_server
from tests.support.processes import run_redis
from tests.support.web import Site, run_site

EXAMPLES = "20"  # an operation, of each phase that draws them
FEWEST_CASES = 2000
DRAWN = "examples,coverage,fuzzing"


def drawn(made: Site, folder: Path, who: str | None) -> bool:
    """Whether all went well, by `who`."""
    told = run_fuzz(made, folder / str(who), who, "--phases", DRAWN, "--max-examples", EXAMPLES)
    print(f"as {who or 'nobody'}: {told.cases} cases, {_ended(told)}", flush=True)
    return told.passed and told.cases >= FEWEST_CASES


def followed(made: Site, folder: Path, operations: Sequence[str]) -> bool:
    """Whether links were followed and all went well."""
    told = follow_links(made, folder / operations[-1], "staff", operations, "--max-examples", EXAMPLES)
    count, of = told.links
    print(f"{operations[0]}: {count} of {of} links followed in {told.cases} cases, {_ended(told)}", flush=True)
    return told.passed and count > 0


def _ended(told: FuzzResult) -> str:
    return "no failure" if told.passed else f"FAILED\n{told.text}"


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            postgres_server() as url,
            run_redis(folder / "redis") as redis,
            run_site(url, redis, folder / "web") as made,
        ):
            # First: of what is drawn, imports stay open until nobody may open another.
            went = [followed(made, folder, operations) for operations in list_link_chains(get_schema(made))]
            went += [drawn(made, folder, who) for who in (None, "owner", "staff")]
            broken = made.log.count("Traceback")
    print(f"{broken} tracebacks in the web's log")
    print(f"{sum(went)} passed, {went.count(False) + bool(broken)} failed")
    return 1 if broken or not all(went) else 0


if __name__ == "__main__":
    sys.exit(main())
