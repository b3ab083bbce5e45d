"""`python -m tests.on_postgres [PYTEST ARGUMENTS]`: the board's tests on PostgreSQL, asked as the web asks it.

The default suite has them on SQLite, which takes any type for any other and has one writer at a time; only its races
are on PostgreSQL.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.settings import POSTGRES
from tests.support.postgres import postgres_server
from tests.support.processes import ROOT

TESTS = ["tests/jobs", "tests/webapp", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]


def main() -> int:
    with postgres_server() as url:
        argv = [sys.executable, "-m", "pytest", *(sys.argv[1:] or TESTS)]
        return subprocess.run(argv, env={**os.environ, POSTGRES: url}, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
