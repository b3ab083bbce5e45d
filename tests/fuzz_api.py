"""Run schemathesis with all checks as no user, a user, and staff, and follow links as staff: `make schemathesis`."""

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
MIN_CASES = 2000
PHASES = "examples,coverage,fuzzing"


def check_generated_requests(made: Site, folder: Path, who: str | None) -> bool:
    """Return True if all generated requests passed."""
    result = run_fuzz(made, folder / str(who), who, "--phases", PHASES, "--max-examples", EXAMPLES)
    print(f"as {who or 'nobody'}: {result.cases} cases, {_print_result(result)}", flush=True)
    return result.passed and result.cases >= MIN_CASES


def check_links(made: Site, folder: Path, operations: Sequence[str]) -> bool:
    """Return True if links were followed and all requests passed."""
    result = follow_links(made, folder / operations[-1], "staff", operations, "--max-examples", EXAMPLES)
    count, of = result.links
    print(
        f"{operations[0]}: {count} of {of} links followed in {result.cases} cases, {_print_result(result)}", flush=True
    )
    return result.passed and count > 0


def _print_result(told: FuzzResult) -> str:
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
            went = [check_links(made, folder, operations) for operations in list_link_chains(get_schema(made))]
            went += [check_generated_requests(made, folder, who) for who in (None, "owner", "staff")]
            broken = made.log.count("Traceback")
    print(f"{broken} tracebacks in the web's log")
    print(f"{sum(went)} passed, {went.count(False) + bool(broken)} failed")
    return 1 if broken or not all(went) else 0


if __name__ == "__main__":
    sys.exit(main())
