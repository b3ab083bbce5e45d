"""Serve advisories from a folder to pip-audit like osv.dev, for a machine without a network.

The folder has files in the Open Source Vulnerability format (https://ossf.github.io/osv-schema/), as YAML or JSON,
at any depth. Use a checkout of pypa/advisory-database, or the unpacked PyPI export of osv.dev.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

FIELDS = ("id", "aliases", "summary", "details", "affected", "withdrawn")


class Advisories:
    """Load advisories of a folder.

    Raises:
        ValueError: The folder has no advisory for PyPI.
    """

    def __init__(self, folder: Path) -> None:
        self._by_name: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.count, newest = 0, ""
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".json")):
            record = _read(path)
            names = {canonicalize_name(one["package"]["name"]) for one in _of_pypi(record)}
            for name in names:
                self._by_name[name].append(record)
            self.count += bool(names)
            newest = max(newest, str(record.get("modified", "")) if names else "")
        if not self.count:
            raise ValueError(f"{folder} holds no advisory for PyPI in the Open Source Vulnerability format")
        self.newest = datetime.fromisoformat(newest).astimezone(UTC)

    def find(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return the advisories that affect the version."""
        wanted_version, wanted = Version(version), canonicalize_name(name)
        return [
            {key: _plain(record[key]) for key in FIELDS if key in record}
            for record in self._by_name[wanted]
            if any(
                _hits(one, wanted_version)
                for one in _of_pypi(record)
                if canonicalize_name(one["package"]["name"]) == wanted
            )
        ]


@contextmanager
def serve_advisories(advisories: Advisories) -> Iterator[str]:
    """Answer osv.dev's `POST /v1/query` on a loopback address."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            wanted_version = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = advisories.find(wanted_version["package"]["name"], wanted_version["version"])
            body = json.dumps({"vulns": found} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    record = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=yaml.CSafeLoader)
    return record if isinstance(record, dict) else {}


def _of_pypi(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in record.get("affected", []) if one.get("package", {}).get("ecosystem") == "PyPI"]


def _hits(affected: dict[str, Any], wanted_version: Version) -> bool:
    """Return True if the version is listed or in a range, by the evaluation rules of the format."""
    if any(_version(text) == wanted_version for text in affected.get("versions", [])):
        return True
    ranges = [one["events"] for one in affected.get("ranges", []) if one["type"] == "ECOSYSTEM"]
    return any(_within(events, wanted_version) for events in ranges)


def _within(events: Sequence[dict[str, str]], wanted_version: Version) -> bool:
    inside = False
    for kind, text in sorted((pair for event in events for pair in event.items()), key=lambda p: _order(p[1])):
        bound = _order(text)
        if kind == "introduced" and wanted_version >= bound:
            inside = True
        if (kind == "fixed" and wanted_version >= bound) or (kind == "last_affected" and wanted_version > bound):
            inside = False
    return inside


def _order(text: str) -> Version:
    return _version(text) or Version("0.dev0")  # "0" and an invalid version sort before every version


def _version(text: str) -> Version | None:
    try:
        return None if text == "0" else Version(text)
    except InvalidVersion:
        return None


def _plain(value: Any) -> Any:
    """Convert YAML dates to text, because JSON has no dates."""
    return json.loads(json.dumps(value, default=str))
