"""Board for all attack tests, served like a deployment: uvicorn with every limit, a Redis, and SQLite."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.processes import run_redis
from tests.support.web import Site, run_site

SUBMITS_PER_MINUTE, LOGINS_PER_MINUTE = 60, 3
BROKEN: set[str] = set()  # ids of requests that a test made fail


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run the board, and check at the end that its log has no other traceback."""
    folder = tmp_path_factory.mktemp("doors")
    settings = {
        "MESHBOARD_SUBMITS_PER_MINUTE": str(SUBMITS_PER_MINUTE),
        "MESHBOARD_LOGINS_PER_MINUTE": str(LOGINS_PER_MINUTE),
        "MESHBOARD_LOG_FORMAT": "json",
        "MESHBOARD_METRICS_TOKEN": "metrics-of-the-doors-0123456789-0123456789",
    }
    with (
        run_redis(folder / "redis") as redis,
        run_site(f"sqlite:///{folder}/board.sqlite3", redis, folder / "web", **settings) as made,
    ):
        yield made
        lines = [json.loads(line) for line in made.log.splitlines() if line.startswith("{")]
        assert [line for line in lines if "exc_info" in line and line["request_id"] not in BROKEN] == []
        assert "Traceback (most recent call last):\n" not in made.log, "a line is an object, a traceback too"


def session(served: Site, name: str) -> dict[str, str]:
    """Return the headers of a browser with the CSRF token of its forms."""
    token = "c" * 32
    cookie = f"{served.build_cookie_header(name)['Cookie']}; csrftoken={token}"
    return {"Cookie": cookie, "X-CSRFToken": token}
