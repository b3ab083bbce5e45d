"""An attempt that a supervisor of this process can be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.orders import order
from workers.host.attempts import AttemptDir, attempt_dir
from workers.host.files import write_json


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    made = attempt_dir(tmp_path / "runs", "job", 1)
    made.own.mkdir(parents=True)
    made.logs.mkdir(parents=True)
    write_json(made.order, order())
    return made
