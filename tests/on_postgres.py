"""Run the tests of the board on PostgreSQL: `python -m tests.on_postgres [PYTEST ARGUMENTS]`.

The default suite uses SQLite, which converts types silently and has one writer. Only its races use PostgreSQL.
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
