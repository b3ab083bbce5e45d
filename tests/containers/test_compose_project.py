"""docker-compose.yml on a container engine, in this order: each test uses the project that the first one started."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.containers.project import STATE, Project, find_engine_problem, run_project

pytestmark = pytest.mark.slow
FOUR_RANKS: dict[str, Any] = {
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2},
    "train": {"steps": 6, "global_batch": 4, "seq_len": 32, "eval_every": 0, "warmup_steps": 1},
}
LONG: dict[str, Any] = {**FOUR_RANKS, "train": {**FOUR_RANKS["train"], "steps": 100_000, "verify": "off"}}
# Reads all that a job must not see, and reports the readable paths and the processes whose environment is readable.
CURIOUS = """
import glob, json, os, sys
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
secrets = [path for path in sys.argv[1:] if read(path)]
environments = {path: read(path) for path in glob.glob("/proc/[0-9]*/environ")}
processes = [path for path, text in environments.items() if text and b"MESHBOARD_ATTEMPT=" not in text]
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
found = {"secrets": secrets, "processes": processes, "root": os.getuid() == 0, "capabilities": status["CapEff"].strip()}
print("found " + json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    if problem := find_engine_problem():
        pytest.skip(problem)
    with run_project(tmp_path_factory.mktemp("containers")) as running:
        yield running


@pytest.fixture
def show(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that shows a text in the row of the test."""
    return lambda text: record_property("said", text)


def test_all_services_become_healthy(project: Project, show: Callable[[str], None]) -> None:
    show(f"healthy after {project.wait_until_healthy():.0f} s")


def test_person_logs_in_through_the_proxy_with_tls(project: Project, show: Callable[[str], None]) -> None:
    login = project.create_login()
    answers = project.open_pages(login, f"{project.url}/hosts/")
    assert [status for status, _ in answers] == [200, 200]
    assert answers[1][1].endswith("/hosts/"), "without a login, the board answers with the login page"

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    try:
        urllib.request.build_opener(Stay).open(f"http://127.0.0.1:{project.http_port}/hosts/", timeout=30)
        location = ""
    except urllib.error.HTTPError as moved:
        location = moved.headers["Location"]
    assert location == f"{project.url}/hosts/"
    show("HTTPS login, and port 80 redirects to the published HTTPS port")


def test_four_rank_job_succeeds(project: Project, show: Callable[[str], None]) -> None:
    project.wait_for_hosts("host-1")
    job = project.submit(FOUR_RANKS)
    ended = project.wait_for_job(job, "succeeded", "failed", "lost")
    assert ended["status"] == "succeeded", ended["history"]
    show(f"{ended['status']} on {ended['host']}")


def test_job_reads_no_secret_of_its_host(project: Project, show: Callable[[str], None]) -> None:
    script = "mkdir -p {0}/curious && cat > {0}/curious/read.py".format(f"{STATE}/scripts")
    project.execute("host", "sh", "-c", script, text=CURIOUS)
    files = [f"{STATE}/hosts/host-1.json", "/var/lib/meshboard-join/token", "/proc/1/environ", "/etc/shadow"]
    spec = {"kind": "script", "layout": {"dp": 1}, "script": {"path": "curious/read.py", "args": files}}
    job = project.submit(spec)
    ended = project.wait_for_job(job, "succeeded", "failed", "lost")
    logs = project.execute("host", "sh", "-c", f"cat $(find {STATE}/runs/{job} -name stdout.log)")
    assert ended["status"] == "succeeded", logs
    found = json.loads(next(line for line in logs.splitlines() if line.startswith("found ")).removeprefix("found "))
    assert found == {"secrets": [], "processes": [], "root": False, "capabilities": "0" * 16}
    environment = project.execute("host", "cat", "/proc/1/environ")
    assert project.secrets["MESHBOARD_JOIN_TOKEN"] not in environment
    show("own user, no capability, 0 of 4 files, 0 foreign environments")


def test_running_job_survives_restarts_of_the_board(project: Project, show: Callable[[str], None]) -> None:
    job = project.submit(LONG)
    project.wait_for_job(job, "running")
    project.compose("restart", "web")
    project.compose("kill", "-s", "KILL", "controller", "recorder")
    project.compose("start", "controller", "recorder")
    seconds = project.wait_until_healthy()
    now = project.wait_for_job(job, "running", "failed", "lost")
    assert now["status"] == "running", now["history"]
    project.call("POST", f"jobs/{job}/cancel")
    project.wait_for_job(job, "cancelled")
    show(f"running after web restarted and controller and recorder were killed; healthy after {seconds:.0f} s")


def test_two_hosts_run_one_job_each(project: Project, show: Callable[[str], None]) -> None:
    project.compose("up", "-d", "--no-build", "--scale", "host=2")
    project.wait_for_hosts("host-1", "host-2")
    jobs = [project.submit(LONG) for _ in range(2)]
    running = [project.wait_for_job(job, "running", "failed", "lost") for job in jobs]
    assert sorted(job["host"] for job in running) == ["host-1", "host-2"]
    project.call("POST", f"jobs/{jobs[0]}/cancel")
    project.wait_for_job(jobs[0], "cancelled")
    now = project.wait_for_job(jobs[1], "running", "failed", "lost")
    assert now["status"] == "running", now["history"]
    project.call("POST", f"jobs/{jobs[1]}/cancel")
    project.wait_for_job(jobs[1], "cancelled")
    show("one four-rank job on each of host-1 and host-2, at the same time")


def test_restarted_hosts_keep_their_names(project: Project, show: Callable[[str], None]) -> None:
    project.compose("restart", "host")
    project.wait_for_hosts("host-1", "host-2")
    show("host-1 and host-2 are connected again")
