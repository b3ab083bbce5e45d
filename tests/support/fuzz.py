"""schemathesis against a running site, with the document as it is served."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import ROOT
from tests.support.web import Site


class Fuzzed(NamedTuple):
    """How a run went."""

    passed: bool
    cases: int  # generated
    text: str


def fuzz(site: Site, folder: Path, name: str | None, *options: str) -> Fuzzed:
    """Every check, as `name`, or as nobody."""
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / "openapi.json"
    document.write_bytes(site.call("GET", "/api/v1/schema", headers=site.token("owner")).body)
    argv = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(ROOT / "tests/schemathesis.toml")]
    argv += ["run", str(document), "--url", site.url, "--checks", "all", "--continue-on-failure", "--no-color"]
    argv += options
    if name is not None:
        argv += ["--header", f"Authorization: {site.token(name)['Authorization']}"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    counted = re.search(r"(\d+) generated", done.stdout)
    return Fuzzed(done.returncode == 0, int(counted[1]) if counted else 0, done.stdout + done.stderr)
