"""An attempt for a supervisor in the test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.orders import order
from workers.disk import write_json
from workers.host.attempts import AttemptDir, get_attempt_dir


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = get_attempt_dir(tmp_path / "runs", "job", 1)
    made.host_dir.mkdir(parents=True)
    made.logs.mkdir(parents=True)
    write_json(made.order_file, order())
    return made
