"""Advisories from a folder, for a machine without a network: pip-audit asks them as it asks osv.dev.

A folder of files in the Open Source Vulnerability format (https://ossf.github.io/osv-schema/), YAML or JSON, in any
depth: a checkout of pypa/advisory-database, or osv.dev's own export for PyPI, unpacked.
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

KEPT = ("id", "aliases", "summary", "details", "affected", "withdrawn")


class Advisories:
    """
    Raises:
        ValueError: no advisory for PyPI is in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._by_name: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.count, newest = 0, ""
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".json")):
            told = _read(path)
            names = {canonicalize_name(one["package"]["name"]) for one in _of_pypi(told)}
            for name in names:
                self._by_name[name].append(told)
            self.count += bool(names)
            newest = max(newest, str(told.get("modified", "")) if names else "")
        if not self.count:
            raise ValueError(f"{folder} holds no advisory for PyPI in the Open Source Vulnerability format")
        self.newest = datetime.fromisoformat(newest).astimezone(UTC)

    def of(self, name: str, version: str) -> list[dict[str, Any]]:
        """What is known of that version."""
        asked, wanted = Version(version), canonicalize_name(name)
        return [
            {key: _plain(told[key]) for key in KEPT if key in told}
            for told in self._by_name[wanted]
            if any(_hits(one, asked) for one in _of_pypi(told) if canonicalize_name(one["package"]["name"]) == wanted)
        ]


@contextmanager
def served(advisories: Advisories) -> Iterator[str]:
    """The address of an answer to osv.dev's `POST /v1/query`, on loopback."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = advisories.of(asked["package"]["name"], asked["version"])
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
    told = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=yaml.CSafeLoader)
    return told if isinstance(told, dict) else {}


def _of_pypi(told: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in told.get("affected", []) if one.get("package", {}).get("ecosystem") == "PyPI"]


def _hits(affected: dict[str, Any], asked: Version) -> bool:
    """As the format's section on evaluation says: it is listed, or lies in a range."""
    if any(_version(text) == asked for text in affected.get("versions", [])):
        return True
    ranges = [one["events"] for one in affected.get("ranges", []) if one["type"] == "ECOSYSTEM"]
    return any(_within(events, asked) for events in ranges)


def _within(events: Sequence[dict[str, str]], asked: Version) -> bool:
    inside = False
    for kind, text in sorted((pair for event in events for pair in event.items()), key=lambda p: _order(p[1])):
        bound = _order(text)
        if kind == "introduced" and asked >= bound:
            inside = True
        if (kind == "fixed" and asked >= bound) or (kind == "last_affected" and asked > bound):
            inside = False
    return inside


def _order(text: str) -> Version:
    return _version(text) or Version("0.dev0")  # "0" begins before every version, and so does what is none


def _version(text: str) -> Version | None:
    try:
        return None if text == "0" else Version(text)
    except InvalidVersion:
        return None


def _plain(value: Any) -> Any:
    """Without YAML's dates, which JSON has not."""
    return json.loads(json.dumps(value, default=str))
