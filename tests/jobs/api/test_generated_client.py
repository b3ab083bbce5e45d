"""A client that openapi-python-client generates from the served document can run a job."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest

from tests.support.board import run_board

GENERATOR = "openapi-python-client==0.29.1"
CONFIG = "post_hooks: []\nproject_name_override: foreign\npackage_name_override: foreign\n"
# Binary telemetry, which generated clients do not support.
UNSUPPORTED = (
    "POST /api/v1/runs/{run}/{attempt}/members/{node}/batches",
    "POST /api/v1/runs/{run}/{attempt}/members/{node}/report",
)
SCRIPT = """
import json, sys
from foreign import AuthenticatedClient
from foreign.api.jobs import get_results, list_jobs, submit_job, wait_for_job
from foreign.models import JobDetail, JobSpec, ProblemDetails, Results, WaitResult, WaitForJobFor

url, token, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
client = AuthenticatedClient(base_url=url, token=token, prefix="Token", timeout=120.0)
wrong = submit_job.sync(client=client, body=JobSpec.from_dict({**spec, "layout": {"tp": 3}}))
assert isinstance(wrong, ProblemDetails), wrong
assert wrong.status == 422
assert wrong.errors[0].pointer.startswith("/layout"), wrong
job = submit_job.sync(client=client, body=JobSpec.from_dict(spec), idempotency_key="foreign-1")
assert isinstance(job, JobDetail), job
again = submit_job.sync(client=client, body=JobSpec.from_dict(spec), idempotency_key="foreign-1")
assert again.id == job.id
waited = wait_for_job.sync(job.id, client=client, for_=WaitForJobFor.FINISHED, timeout=90)
assert isinstance(waited, WaitResult), waited
assert waited.reached and waited.job.status == "succeeded", waited
results = get_results.sync(job.id, client=client)
assert isinstance(results, Results), results
assert [listed.id for listed in list_jobs.sync(client=client, status="succeeded")] == [job.id]
print(json.dumps({"off_bytes": results.off_bytes}))
"""
SPEC = {
    "name": "foreign",
    "model": {"preset": "gpt-tiny"},
    "layout": {"tp": 2},
    "train": {"steps": 5, "global_batch": 4, "seq_len": 64},
}


def install_generator(folder: Path) -> str:
    """Install the generator in a separate environment, because it needs an older typer."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", GENERATOR]
    process = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return str(folder / "bin" / "openapi-python-client")


@pytest.mark.slow
def test_a_generated_client_submits_a_job_and_waits_for_it(tmp_path: Path) -> None:
    with run_board(tmp_path / "state", slots=2) as running:
        document = tmp_path / "openapi.json"
        document.write_text(json.dumps(running.call("GET", "schema")))
        (tmp_path / "config.yml").write_text(CONFIG)
        generate = [
            install_generator(tmp_path / "tool"),
            "generate",
            "--path",
            str(document),
            "--output-path",
            str(tmp_path / "made"),
        ]
        generate += ["--config", str(tmp_path / "config.yml")]
        generated = subprocess.run(generate, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert generated.returncode == 0, generated.stdout + generated.stderr
        warnings = [line for line in (generated.stdout + generated.stderr).splitlines() if "WARNING parsing" in line]
        assert all(any(path in line for path in UNSUPPORTED) for line in warnings), generated.stdout + generated.stderr
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "made")}
        argv = [
            str(tmp_path / "tool" / "bin" / "python"),
            "-c",
            SCRIPT,
            running.url,
            running.info["api_token"],
            json.dumps(SPEC),
        ]
        process = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        result = json.loads(process.stdout)
    assert result["off_bytes"] == 0, "the traffic equals the plan"
    assert "Unable to process schema" not in generated.stdout + generated.stderr
