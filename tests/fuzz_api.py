"""`make schemathesis`: every check of schemathesis over the document as served, by nobody, a user and staff."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.fuzz import fuzz
from tests.support.postgres import postgres_server
from tests.support.processes import redis_server
from tests.support.web import site

EXAMPLES = "20"  # an operation, of each phase that draws them
FEWEST_CASES = 2000


def main() -> int:
    passed = failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            postgres_server() as url,
            redis_server(folder / "redis") as redis,
            site(url, redis, folder / "web") as made,
        ):
            for who in (None, "owner", "staff"):
                told = fuzz(made, folder / str(who), who, "--max-examples", EXAMPLES)
                print(
                    f"as {who or 'nobody'}: {told.cases} cases, {'no failure' if told.passed else 'FAILED'}", flush=True
                )
                if told.passed and told.cases >= FEWEST_CASES:
                    passed += 1
                else:
                    failed += 1
                    print(told.text)
            broken = made.log.count("Traceback")
    print(f"{broken} tracebacks in the web's log")
    print(f"{passed} passed, {failed + bool(broken)} failed")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
