"""Check that wheels of `make release` run without a checkout, in a clean environment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.board import Board
from tests.support.browser import log_in, open_context, run_chromium
from tests.support.processes import ROOT, base_environment, is_gone, wait_until
from webapp.runner import find_free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SPEC = {
    "name": "released",
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 2, "tp": 2, "zero": 1},
    "train": {"steps": 12, "global_batch": 8, "seq_len": 64},
}


def run(*argv: str | Path, cwd: Path, **environment: str) -> str:
    result = {**base_environment(), **environment}
    done = subprocess.run(list(map(str, argv)), env=result, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of `make release` for a copy of the files in git."""
    copy, into = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    run(sys.executable, "-m", "manual", cwd=copy)
    for project in (".", "client"):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", into, project, cwd=copy)
    return into


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of a clean environment with both wheels."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", folder, cwd=dist)
    server, client = next(dist.glob("meshboard-*.whl")), next(dist.glob("meshboard_client-*.whl"))
    lock = ROOT / "requirements.lock"
    # As whoever runs this has set up pip: a CPU build of torch comes from where they find it.
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "HOME"}
    run(folder / "bin/pip", "install", "-q", "-c", lock, f"{server}[web,worker,local]", client, cwd=dist, **pip)
    return folder / "bin"


def test_wheel_and_sdist_have_templates_static_files_and_docs(dist: Path) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    names = set(zipfile.ZipFile(dist / f"meshboard-{version}-py3-none-any.whl").namelist())
    for room, inside in (("templates", "webapp/templates"), ("webapp/static", "webapp/static")):
        files = [f for f in (ROOT / room).rglob("*") if f.is_file()]
        assert {f"{inside}/{f.relative_to(ROOT / room)}" for f in files} - names == set()
    assert {"webapp/documentation/index.html", "webapp/documentation/reference/spec/index.html"} <= names
    assert not [name for name in names if re.match(r"tests|benchmarks|manual|docs/", name)]
    with tarfile.open(dist / f"meshboard-{version}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "VERSION", "templates/base.html", "docs/site/index.html", "docs/index.md"} <= held
    assert (dist / f"meshboard_client-{version}-py3-none-any.whl").exists()


@pytest.fixture
def up(installed: Path, tmp_path: Path) -> Iterator[Board]:
    """Run `meshboard-up` outside a checkout, with its default state folder."""
    environment = {
        **{name: value for name, value in base_environment().items() if not name.startswith("MESHBOARD_")},
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "MESHBOARD_PORT": str(find_free_port()),
        "MESHBOARD_SLOTS": "4",
    }
    state, output = tmp_path / "state" / "meshboard", tmp_path / "out.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [installed / "meshboard-up"], env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    made = Board(state, process)
    services: dict[str, int] = {}
    try:
        wait_until(lambda: process.poll() is not None or b"Ctrl-C" in output.read_bytes(), "meshboard-up is up", 180)
        assert process.poll() is None, output.read_text()
        services = made.info["pids"]
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [name for name, pid in services.items() if not is_gone(pid)] == []
    assert b"Meshboard has stopped" in output.read_bytes()


def test_demo_runs_from_wheels_with_exact_traffic(up: Board, installed: Path, tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(SPEC))
    access = {"MESHBOARD_URL": up.url, "MESHBOARD_TOKEN": up.info["api_token"], "HOME": str(tmp_path)}

    result = json.loads(run(installed / "meshboard", "submit", spec, "--wait", "--json", cwd=tmp_path, **access))
    job = up.get_job(result["id"])
    assert job["status"] == "succeeded", job["exit"]
    run(
        installed / "meshboard",
        "gate",
        job["id"],
        "--baseline",
        job["id"],
        "--exact",
        "--as-planned",
        cwd=tmp_path,
        **access,
    )

    manage = {"MESHBOARD_SECRET_KEY": secrets.token_urlsafe(48), "MESHBOARD_REDIS_URL": "redis://127.0.0.1"}
    assert "doctor" in run(installed / "meshboard-manage", "help", cwd=tmp_path, HOME=str(tmp_path), **manage)
    with run_chromium() as browser:
        page = open_context(browser).new_page()
        log_in(page, up.url, up.login)
        page.goto(f"{up.url}/jobs/{job['id']}/")
        page.get_by_text("0 B").first.wait_for()
        page.goto(f"{up.url}/docs/reference/spec/")
        assert "The spec" in page.inner_text("h1")
    with urllib.request.urlopen(f"{up.url}/static/css/tokens.css") as answer:
        assert answer.read() == (ROOT / "webapp/static/css/tokens.css").read_bytes()
