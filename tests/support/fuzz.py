"""Run schemathesis against a running site with its own OpenAPI document."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import ROOT
from tests.support.web import Site

MAX_LINKS_PER_RUN = 5  # with more, schemathesis stops before it has followed most of them


class FuzzResult(NamedTuple):
    """Result of a run. `links` has the number of followed links and of selected links."""

    passed: bool
    cases: int
    text: str
    links: tuple[int, int] = (0, 0)


def get_schema(site: Site) -> Any:
    return site.call("GET", "/api/v1/schema", headers=site.build_token_header("owner")).json()


def list_link_chains(schema: Any) -> list[list[str]]:
    """Return lists of an operation that creates an object, after those it needs, and operations that it links to."""
    creators = {
        operation["operationId"]: (path.count("{"), sorted(links))
        for path, operations in schema["paths"].items()
        for operation in operations.values()
        if (links := operation["responses"].get("201", {}).get("links"))
    }
    chains: dict[tuple[str, ...], list[str]] = {}
    for creator, (num_parameters, links) in sorted(creators.items(), key=lambda item: item[1][0]):
        if tuple(links) not in chains:
            parents = [name for name, (_, linked) in creators.items() if creator in linked and num_parameters]
            chains[tuple(links)] = [*parents[:1], creator]
    return [
        [*chain, *links[first : first + MAX_LINKS_PER_RUN]]
        for links, chain in chains.items()
        for first in range(0, len(links), MAX_LINKS_PER_RUN)
    ]


def follow_links(site: Site, folder: Path, name: str, operations: Iterable[str], *options: str) -> FuzzResult:
    """Follow links between operations, with the valid bodies of `tests.support.fuzz_hooks`."""
    hooks = {"SCHEMATHESIS_HOOKS": "tests.support.fuzz_hooks", "PYTHONPATH": str(ROOT)}
    chosen = [option for operation in operations for option in ("--include-operation-id", operation)]
    stateful = ("--phases", "stateful", "--mode", "positive")
    return run_fuzz(site, folder, name, *stateful, *chosen, *options, variables=hooks)


def run_fuzz(
    site: Site, folder: Path, name: str | None, *options: str, variables: Mapping[str, str] | None = None
) -> FuzzResult:
    """Run all checks as a user, or without authentication if `name` is None."""
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / "openapi.json"
    document.write_text(json.dumps(get_schema(site)))
    argv = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(ROOT / "tests/schemathesis.toml")]
    argv += ["run", str(document), "--url", site.url, "--checks", "all", "--continue-on-failure", "--no-color"]
    argv += options
    if name is not None:
        argv += ["--header", f"Authorization: {site.build_token_header(name)['Authorization']}"]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    generated = re.search(r"(\d+) generated", done.stdout)
    followed = re.search(r"API Links: +(\d+) covered / (\d+) selected", done.stdout)
    return FuzzResult(
        done.returncode == 0,
        int(generated[1]) if generated else 0,
        done.stdout + done.stderr,
        (int(followed[1]), int(followed[2])) if followed else (0, 0),
    )
