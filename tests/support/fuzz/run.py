"""schemathesis against a running site, with the document as it is served."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import ROOT
from tests.support.web import Site

LINKS_AT_ONCE = 5  # of more, few are followed before it has seen enough


class Fuzzed(NamedTuple):
    """How a run went."""

    passed: bool
    cases: int  # generated
    text: str
    links: tuple[int, int] = (0, 0)  # followed, of how many


def document_of(site: Site) -> Any:
    """As it is served."""
    return site.call("GET", "/api/v1/schema", headers=site.token("owner")).json()


def linked(document: Any) -> list[list[str]]:
    """What makes a thing, by the shortest way, with some of what it links to: each link once."""
    makers = {
        operation["operationId"]: (path.count("{"), sorted(links))
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if (links := operation["responses"].get("201", {}).get("links"))
    }
    found: dict[tuple[str, ...], list[str]] = {}
    for maker, (parameters, links) in sorted(makers.items(), key=lambda item: item[1][0]):
        if tuple(links) not in found:
            above = next((one for one, (_, theirs) in makers.items() if maker in theirs), None) if parameters else None
            found[tuple(links)] = [maker] if above is None else [above, maker]
    return [[*way, *part] for links, way in found.items() for part in _parts(links)]


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[first : first + LINKS_AT_ONCE] for first in range(0, len(names), LINKS_AT_ONCE)]


def follow(site: Site, folder: Path, name: str, operations: Iterable[str], *options: str) -> Fuzzed:
    """Some of the document's links, from what was made with bodies that work (`tests.support.fuzz.bodies`)."""
    hooks = {"SCHEMATHESIS_HOOKS": "tests.support.fuzz.bodies", "PYTHONPATH": str(ROOT)}
    chosen = [part for operation in operations for part in ("--include-operation-id", operation)]
    return _run(site, folder, name, ("--phases", "stateful", "--mode", "positive", *chosen, *options), hooks)


def fuzz(site: Site, folder: Path, name: str | None, *options: str) -> Fuzzed:
    """Every check, as `name`, or as nobody."""
    return _run(site, folder, name, options, {})


def _run(site: Site, folder: Path, name: str | None, options: Iterable[str], environment: dict[str, str]) -> Fuzzed:
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / "openapi.json"
    document.write_text(json.dumps(document_of(site)))
    argv = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(ROOT / "tests/schemathesis.toml")]
    argv += ["run", str(document), "--url", site.url, "--checks", "all", "--continue-on-failure", "--no-color"]
    argv += options
    if name is not None:
        argv += ["--header", f"Authorization: {site.token(name)['Authorization']}"]
    environment = {**os.environ, **environment}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    counted = re.search(r"(\d+) generated", done.stdout)
    followed = re.search(r"API Links: +(\d+) covered / (\d+) selected", done.stdout)
    return Fuzzed(
        done.returncode == 0,
        int(counted[1]) if counted else 0,
        done.stdout + done.stderr,
        (int(followed[1]), int(followed[2])) if followed else (0, 0),
    )
