"""Build the site once with the command, which fails on warnings."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, base_environment


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("docs") / "site"
    argv = [sys.executable, "-m", "manual", "--into", str(into)]
    done = subprocess.run(argv, env=base_environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return into


@pytest.fixture
def csp_server(site: Path, settings: Any) -> Iterator[str]:
    """Serve the files of the site with the board's CSP."""
    directives = settings.CONTENT_SECURITY_POLICY["DIRECTIVES"]
    policy = "; ".join(f"{name} {' '.join(values)}" for name, values in directives.items())

    class Strict(http.server.SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", policy)
            super().end_headers()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Strict, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()
