"""What a project hands its jobs reaches the processes of the job, and nothing else of the host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contracts.control import VERSION, LaunchOrder
from contracts.security import encrypt_variables
from planner.facts.parse_spec import parse_spec
from tests.support.host import Host, host
from tests.support.processes import RedisServer

KEY = bytes(32)  # tests.support.host gives it
SECRET = "not-to-be-seen-7f3a"
LOOK = """
import json, os
print(json.dumps({name: os.environ.get(name) for name in ("HF_TOKEN", "PYTHONPATH", "MESHBOARD_HOST_KEY")}), flush=True)
"""
SPEC = {
    "kind": "script",
    "name": "look",
    "layout": {"dp": 1},
    "train": {"global_batch": 1},
    "script": {"path": "look.py"},
}


@pytest.fixture
def running_host(redis_service: RedisServer, tmp_path: Path) -> Iterator[Host]:
    with host(redis_service, tmp_path / "host") as made:
        scripts = made.folder / "scripts"
        scripts.mkdir()
        (scripts / "look.py").write_text(LOOK)
        with made.worker():
            yield made


def ordered(made: Host, job: str, sealed: list[str]) -> Any:
    spec = parse_spec(SPEC).model_dump()
    order = LaunchOrder(v=VERSION, job=job, attempt=1, spec=spec, slots=[0], expires=2**40, owner=1, variables=sealed)
    made.send(order)
    made._ordered.append((job, 1))
    return made.exit_of(job)


def test_a_job_sees_its_project_s_variables_and_its_host_s_files_do_not(running_host: Host) -> None:
    names = {"HF_TOKEN": SECRET}
    told = ordered(running_host, "sees", encrypt_variables([bytes([1] * 32), KEY], "sees", 1, names))
    assert told["outcome"] == "succeeded", told
    lines = [line for item in running_host.items("sees", "log") for line in item["lines"]]
    seen = next(json.loads(line) for line in lines if line.startswith('{"HF_TOKEN"'))
    assert seen["HF_TOKEN"] == SECRET
    assert seen["MESHBOARD_HOST_KEY"] is None
    own = [path for path in running_host.run_dir.rglob("*") if path.is_file() and "logs" not in path.parts]
    assert any(path.name == "order.json" for path in own)
    assert [path for path in own if SECRET.encode() in path.read_bytes()] == []
    broken = ordered(running_host, "another", encrypt_variables([KEY], "sees", 1, names))
    assert broken["outcome"] == "failed"
    assert (
        "cannot decrypt the variables of the project: the variables were encrypted for another attempt"
        in broken["reason"]
    )
