"""An attempt for a supervisor in the test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.host import build_launch_order
from workers.disk import write_json
from workers.host.attempts import AttemptDir, get_attempt_dir


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = get_attempt_dir(tmp_path / "runs", "job", 1)
    made.host_dir.mkdir(parents=True)
    made.logs.mkdir(parents=True)
    write_json(made.order_file, build_launch_order())
    return made
