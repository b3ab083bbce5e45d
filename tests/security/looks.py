"""Each tool run and its answer judged: "clean", "found", or "not checked"."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.security.advisories import Advisories, served

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CODE = ("contracts", "planner", "jobs", "webapp", "workers", "client/meshboard")
OLDEST = timedelta(days=90)  # of advisories that may call a version clean
SHIPPED = ("web", "worker", "local", "docs")  # extras; tools of development run nowhere else

# What bandit finds and we keep: (rule, files below, why). Rules that are off altogether stand in pyproject.toml.
KEPT = [
    ("B608", "jobs/runs/history/", "SQL is put together from names of ours; what was asked is bound to a ?"),
    ("B108", "workers/host/isolation.py", "in bubblewrap a job has a /tmp and a /dev/shm of its own"),
    ("B310", "workers/host/doctor.py", "the address begins with http:// or https://, the line before says so"),
    ("B104", "webapp/serving/request_guard.py", "the address of nobody, which is written and never bound"),
    ("B104", "workers/slurm.py", "the nodes of one allocation meet; each says its own address"),
    ("B606", "client/meshboard/commands/board.py", "becomes the command that its user typed"),
    ("B606", "workers/host/join.py", "becomes the host worker, whose argv is ours"),
    ("B405", "client/meshboard/gate/report.py", "writes XML and reads none"),
    ("B403", "contracts/safe_unpickle.py", "reads the names of pickle operations, and runs none"),
    ("B105", "webapp/settings.py", "the name of a model"),
    ("B105", "jobs/api/openapi.py", "an example of how a token begins"),
    ("B105", "jobs/api/project_views.py", "an example of how an invitation begins"),
    ("B105", "jobs/pages/projects.py", "the name of a class"),
]
LICENCES = {
    *("MIT", "MIT License", "MIT-0", "MIT-CMU", "0BSD", "ISC", "ISC License (ISCL)", "Zlib", "CC0-1.0", "PSF-2.0"),
    *("Apache-2.0", "apache-2.0", "Apache Software License", "Apache 2.0 License", "Apache-2.0 WITH LLVM-exception"),
    *("BSD", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License", "BSD 3-Clause", "CNRI-Python"),
    *("MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)", "Python Software Foundation License", "BSL-1.0"),
}
# psycopg is not changed or linked statically, and who has the wheel may put another in its place.
EXCEPTIONS = {
    "psycopg": "LGPL-3.0-only",
    "psycopg-binary": "LGPL-3.0-only",
    "psycopg-pool": "LGPL-3.0-only",
    # Its own text is BSD-3-Clause's; the second is of "QR Code", a word that DENSO WAVE has registered.
    "qrcode": "BSD License; Other/Proprietary License",
}


class Look(NamedTuple):
    """What a tool says, in a line, and what there is to tell of it."""

    name: str
    verdict: Literal["clean", "found", "not checked"]
    words: str
    lines: list[str]


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / argv[0]), *argv[1:]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )


def code(rooms: Iterable[str] = CODE) -> Look:
    """bandit, every severity."""
    done = _run(["bandit", "-q", "-c", "pyproject.toml", "-f", "json", "-r", *rooms])
    if done.returncode not in (0, 1):
        return Look("bandit", "not checked", done.stderr.strip()[-200:], [])
    results = json.loads(done.stdout)["results"]
    found = [r for r in results if kept(r["test_id"], r["filename"]) is None]
    lines = [f"{r['test_id']} {r['filename']}:{r['line_number']} {r['issue_text']}" for r in found]
    return Look("bandit", "found" if found else "clean", f"{len(found)} new, {len(results) - len(found)} known", lines)


def kept(rule: str, path: str) -> str | None:
    """Why a finding stays."""
    inner = path.removeprefix(f"{ROOT}/").removeprefix("./")
    return next((why for known, below, why in KEPT if rule == known and inner.startswith(below)), None)


def audit(lock: Path, *options: str) -> Look:
    """pip-audit on every pinned version. One that its database does not have, it calls no vulnerability."""
    argv = ["pip-audit", "-r", str(lock), "--no-deps", "--disable-pip", "-f", "json", "--progress-spinner", "off"]
    done = _run([*argv, "--timeout", "10", *options])
    try:
        told = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return Look("pip-audit", "not checked", f"no database of vulnerabilities could be asked: {last[:200]}", [])
    return judged(told)


def audit_offline(lock: Path, known: Advisories) -> Look:
    """By advisories in files. What has been found since the newest of them, nobody here knows."""
    with served(known) as address, tempfile.TemporaryDirectory() as cache:
        look = audit(lock, "--vulnerability-service", "osv", "--osv-url", address, "--cache-dir", cache)
    age = datetime.now(UTC) - known.newest
    words = f"{look.words}, of {known.count:,} advisories up to {known.newest:%Y-%m-%d}"
    if look.verdict == "clean" and age > OLDEST:
        return Look(look.name, "not checked", f"{words}: {age.days} days old, over {OLDEST.days}", [])
    return look._replace(words=words)


def judged(told: list[dict[str, Any]]) -> Look:
    """pip-audit's own list."""
    holes = [
        f"{one['name']} {one['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no version'}"
        for one in told
        for hole in one.get("vulns", [])
    ]
    skipped = [one["name"] for one in told if "skip_reason" in one]
    if holes:
        return Look("pip-audit", "found", f"{len(holes)} known holes in {len(told)} packages", holes)
    if skipped or not told:
        words = (
            f"{len(skipped)} of {len(told)} packages were skipped: the database has none of them, or none was reached"
        )
        return Look("pip-audit", "not checked", words, [])
    return Look("pip-audit", "clean", f"no known hole in {len(told)} packages", [])


def shipped() -> list[str]:
    """Names of what web, host and demo need, as far as it is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for e in SHIPPED for line in project["optional-dependencies"][e])]
    open_ends, found = [Requirement(line) for line in asked], set[str]()
    while open_ends:
        one = open_ends.pop()
        name = canonicalize_name(one.name)
        extras = [*one.extras, ""]
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            for line in needs:
                inner = Requirement(line)
                if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                    inner.marker = None
                    open_ends.append(inner)
    return sorted(found)


def licences() -> Look:
    """Of what is shipped, against the list above."""
    names = shipped()
    done = _run(["pip-licenses", "--python", sys.executable, "--format", "json", "--packages", *names])
    told = [(canonicalize_name(one["Name"]), one["License"]) for one in json.loads(done.stdout)]
    wrong = [f"{name}: {licence}" for name, licence in told if not allowed(name, licence)]
    words = f"{len(wrong)} of {len(told)} packages have a licence that is not on the list"
    return Look("licences", "found" if wrong else "clean", words, wrong)


def allowed(name: str, licence: str) -> bool:
    """Of several joined by AND or ";", all must be on the list; of those joined by OR, one."""
    if EXCEPTIONS.get(name) == licence:
        return True
    plain = licence.replace("(MPL 2.0)", "[MPL 2.0]").replace("(ISCL)", "[ISCL]").replace("(", "").replace(")", "")
    plain = plain.replace("[", "(").replace("]", ")")
    return all(any(choice.strip() in LICENCES for choice in part.split(" OR ")) for part in re.split(r" AND |;", plain))


def inside(target: Path) -> Look:
    """CycloneDX of this environment."""
    target.parent.mkdir(exist_ok=True)
    argv = ["cyclonedx-py", "environment", sys.executable, "--pyproject", "pyproject.toml", "--output-reproducible"]
    done = _run([*argv, "--of", "JSON", "-o", str(target), "--validate"])
    if done.returncode:
        return Look("SBOM", "not checked", done.stderr.strip()[-200:], [])
    components = json.loads(target.read_text())["components"]
    return Look("SBOM", "clean", f"{len(components)} components in {target.name}", [])
