"""The command `meshboard-meter`: exit codes, signals, tokens, and rejections by the board."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, base_environment, is_gone, scale_timeout, wait_until
from tests.support.web import TlsSite, create_certificate
from tests.workers.external_runs.conftest import metered
from workers.external_runs.__main__ import main
from workers.external_runs.external_run import get_slurm_tasks
from workers.external_runs.registration import RegistrationRequest, RunRefusedError

SLEEP = ["sh", "-c", "echo here $$; exec sleep 600"]
GROWN_SILENT = """
import django; django.setup()
from datetime import timedelta
from django.utils import timezone
from jobs.models import Member
from jobs.queue.inbound.reconcile import check_external_runs
Member.objects.filter(ended=None).update(heard=timezone.now() - timedelta(seconds=31))
check_external_runs()
"""
WRONG_USE = [
    (["--url", "http://board.example.org"], SLEEP, "would send the token unencrypted"),
    (["--url", "ftp://x"], SLEEP, "Use an address such as"),
    (["--url", "https://me:secret@board"], SLEEP, "Remove the user name and password"),
    (["--ca-file", "/no/such/file"], SLEEP, "No such file"),
    (["--node", "1", "--ranks", "1"], SLEEP, "`--node` is 1. Use 0 to 0."),
    (["--run", "nonsense"], SLEEP, "Use ID:TOKEN from the board"),
    (["--spec", "/no/such/file"], SLEEP, "--spec"),
    ([], ["torchrun", "--nnodes", "2", "train.py"], "the same --key"),
    ([], ["torchrun", "--nnodes", "1:2", "train.py"], "Use one number"),
    ([], ["torchrun", "--nproc-per-node", "many", "train.py"], "Use a number, gpu, cpu, or auto"),
    ([], ["torchrun", "--no-such-option", "x", "train.py"], "no-such-option"),
]
UNWATCHED = """
import sys
from workers.host.supervisor.telemetry_server import TelemetryServer

async def full(*_args):
    raise OSError(28, "No space left on device")

TelemetryServer.start = full
from workers.external_runs.cli import main
sys.exit(main())
"""


def test_passes_output_and_exit_code_and_hides_the_token(serving: TlsSite, tmp_path: Path) -> None:
    messages = "env; echo to stderr >&2; exit 7"
    with metered(serving, tmp_path, "--name", "words", command=["sh", "-c", messages]) as run:
        assert run.process.wait(scale_timeout(60)) == 7
    assert "MESHBOARD_TELEMETRY=" in run.terminal
    assert "to stderr" in run.terminal
    assert "No rank is metered" in run.terminal
    assert serving.users["owner"]["token"] not in run.terminal
    result = serving.wait_for_status("words", "failed")
    assert result["exit"]["exit_code"] == 7
    assert result["exit"]["reason"] == "sh ended with exit code 7"
    assert "to stderr" in result["exit"]["log_tail"]


def test_returns_the_shell_code_of_a_signal(serving: TlsSite, tmp_path: Path) -> None:
    with metered(serving, tmp_path, "--name", "signal", command=["sh", "-c", "kill -9 $$"]) as run:
        assert run.process.wait(scale_timeout(60)) == 128 + 9
    assert "SIGKILL" in serving.wait_for_status("signal", "failed")["exit"]["reason"]


def test_missing_command_leaves_no_run(serving: TlsSite, tmp_path: Path) -> None:
    with metered(serving, tmp_path, "--name", "missing", command=["/no/such/program"]) as run:
        assert run.process.wait(scale_timeout(60)) == 127
    assert "No such file" in run.terminal
    assert serving.find_job("missing") is None


def test_ctrl_c_reaches_the_command_and_cancels_the_run(serving: TlsSite, tmp_path: Path) -> None:
    with metered(serving, tmp_path, "--name", "ctrl-c", command=SLEEP) as run:
        serving.wait_for_status("ctrl-c", "running")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(scale_timeout(60)) == 128 + 2
    assert (
        serving.wait_for_status("ctrl-c", "cancelled")["exit"]["reason"]
        == "ended by SIGINT on the machine that launched it"
    )


def test_cancel_on_the_board_ends_the_command(serving: TlsSite, tmp_path: Path) -> None:
    with metered(serving, tmp_path, "--name", "cancel", command=SLEEP) as run:
        job = serving.wait_for_status("cancel", "running")
        assert serving.call("POST", f"/api/v1/jobs/{job['id']}/cancel").status == 200
        assert run.process.wait(scale_timeout(60)) == 128 + 15
    assert "Cancelled on the board" in run.terminal
    assert serving.wait_for_status("cancel", "cancelled")["exit"]["reason"] == "cancelled on request"


def test_killed_meter_leaves_the_command_and_an_unreachable_run(serving: TlsSite, tmp_path: Path) -> None:
    with metered(serving, tmp_path, "--name", "killed", command=SLEEP) as run:
        job = serving.wait_for_status("killed", "running")
        pid = int(
            wait_until(lambda: [line for line in run.terminal.splitlines() if "here" in line], "it")[0].split()[1]
        )
        run.process.kill()
        run.process.wait()
        try:
            assert not is_gone(pid)
            path = f"/api/v1/jobs/{job['id']}/give-up"
            assert serving.call("POST", path).status == 409
            serving.run_python(GROWN_SILENT)
            reason = serving.wait_for_status("killed", "unreachable")["history"][-1]["reason"]
            assert reason.startswith(f"no contact with {job['host']} ")
            assert serving.call("POST", path, "stranger").status == 404
            assert serving.call("POST", path, "staff").status == 200
            assert serving.wait_for_status("killed", "lost")["history"][-1]["reason"] == "marked as lost by staff"
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MESHBOARD_TOKEN": "x" * 64}, "refused this run (Invalid token.). Training continues"),
        (
            {"MESHBOARD_RUN": "abcdefghij:" + "x" * 43},
            "refused this run (The run token is invalid.). Training continues",
        ),
    ],
)
def test_rejection_by_the_board_does_not_stop_training(
    serving: TlsSite, tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with metered(serving, tmp_path, command=["sh", "-c", "echo trained"], **changes) as run:
        assert run.process.wait(scale_timeout(60)) == 0
    assert words in run.terminal
    assert "trained" in run.terminal


def test_sends_no_token_to_an_untrusted_certificate(serving: TlsSite, tmp_path: Path) -> None:
    other = create_certificate(tmp_path)
    with metered(serving, tmp_path, "--name", "untrusted", "--ca-file", str(other), command=SLEEP) as run:
        wait_until(lambda: "the certificate is not trusted" in run.terminal, "it says so")
        run.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "Ctrl-C stops the wait" in run.terminal, "it waits for the board")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(scale_timeout(60)) == 128 + 15
    assert serving.find_job("untrusted") is None


@pytest.mark.parametrize(("options", "command", "words"), WRONG_USE)
def test_reports_invalid_options_before_the_start(
    options: list[str],
    command: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    monkeypatch.setenv("MESHBOARD_URL", "https://127.0.0.1:1")
    monkeypatch.setenv("MESHBOARD_TOKEN", "token")
    monkeypatch.setattr("sys.argv", ["meshboard-meter", *options, "--", *command])
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main() == 2
    assert words in capfd.readouterr().err


def test_names_a_missing_package() -> None:
    """Check an installation with only the board's packages."""
    program = (
        "import sys; sys.modules['psutil'] = None; from workers.external_runs.__main__ import main; sys.exit(main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=scale_timeout(30)
    )
    words = "meshboard-meter: The package psutil is missing. Install it with pip install 'meshboard[worker]'.\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (127, "", words)


def test_runs_the_command_when_metering_is_impossible(tmp_path: Path) -> None:
    """Check a full disk. The command runs without the meter."""
    argv = [sys.executable, "-c", UNWATCHED, "--url", "https://127.0.0.1:1", "--"]
    environment = {**base_environment(), "MESHBOARD_TOKEN": "x" * 40, "TMPDIR": str(tmp_path)}
    command = ["sh", "-c", "echo trained $MESHBOARD_TOKEN; exit 7"]
    ran = subprocess.run([*argv, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (7, "trained\n")
    assert "Meshboard does not meter or report this run" in ran.stderr
    assert "No space left on device" in ran.stderr
    assert not list(tmp_path.iterdir())
    ran = subprocess.run([*argv, "/no/such"], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 127


def test_run_of_one_node_has_a_unique_key() -> None:
    """Check that a lost response does not open a second run."""
    request = RegistrationRequest(None, "token", {})
    first, second = (request.add_size(1, 2).request for _ in range(2))
    assert len(first["key"]) > 20
    assert first["key"] != second["key"]


def test_run_of_several_nodes_needs_a_key() -> None:
    with pytest.raises(RunRefusedError, match="Use the same --key on each node"):
        RegistrationRequest(None, "token", {}).add_size(2, 4)
    request = RegistrationRequest(None, "token", {}, "mine").add_size(2, 4).request
    assert request == {"world_size": 8, "nodes": 2, "key": "mine"}


@pytest.mark.parametrize(
    ("environment", "tasks"),
    [
        ({}, 1),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_STEP_ID": "batch", "SLURM_STEP_NUM_TASKS": "8"}, 1),
    ],
)
def test_counts_the_tasks_of_a_slurm_step(environment: dict[str, str], tasks: int) -> None:
    assert get_slurm_tasks(environment) == tasks
