"""Run each tool and judge its output: "clean", "found", or "not checked"."""

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

from tests.security.advisories import Advisories, serve_advisories

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
CODE = ("contracts", "planner", "jobs", "webapp", "workers", "client/meshboard")
MAX_ADVISORY_AGE = timedelta(days=90)  # maximum age of advisories for the verdict "clean"
SHIPPED = ("web", "worker", "local", "docs")  # extras; development tools run only on developer machines

# Accepted findings of bandit: (rule, files below, reason). pyproject.toml lists rules that are disabled.
ACCEPTED_FINDINGS = [
    ("B608", "jobs/runs/history/", "builds SQL from constant names and binds user input to a ?"),
    ("B108", "workers/host/isolation.py", "in bubblewrap, each job has a separate /tmp and /dev/shm"),
    ("B310", "workers/host/doctor.py", "the line before checks that the address begins with http:// or https://"),
    ("B104", "webapp/serving/request_guard.py", "the wildcard address is text and never bound"),
    ("B104", "workers/slurm.py", "nodes of one allocation connect to each other"),
    ("B606", "client/meshboard/commands/board.py", "replaces itself with the command that the user typed"),
    ("B606", "workers/host/join.py", "replaces itself with the host worker, whose argv is constant"),
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
# psycopg is not modified or linked statically, and a user of the wheel can replace it.
EXCEPTIONS = {
    "psycopg": "LGPL-3.0-only",
    "psycopg-binary": "LGPL-3.0-only",
    "psycopg-pool": "LGPL-3.0-only",
    # Its own license is BSD-3-Clause. The second text is about "QR Code", a registered trademark of DENSO WAVE.
    "qrcode": "BSD License; Other/Proprietary License",
}


class CheckResult(NamedTuple):
    """Verdict of a tool, with a summary line and details."""

    name: str
    verdict: Literal["clean", "found", "not checked"]
    words: str
    lines: list[str]


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / argv[0]), *argv[1:]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )


def check_code(folders: Iterable[str] = CODE) -> CheckResult:
    """Run bandit with every severity."""
    done = _run(["bandit", "-q", "-c", "pyproject.toml", "-f", "json", "-r", *folders])
    if done.returncode not in (0, 1):
        return CheckResult("bandit", "not checked", done.stderr.strip()[-200:], [])
    results = json.loads(done.stdout)["results"]
    found = [r for r in results if get_reason_to_accept(r["test_id"], r["filename"]) is None]
    lines = [f"{r['test_id']} {r['filename']}:{r['line_number']} {r['issue_text']}" for r in found]
    return CheckResult(
        "bandit", "found" if found else "clean", f"{len(found)} new, {len(results) - len(found)} known", lines
    )


def get_reason_to_accept(rule: str, path: str) -> str | None:
    """Return the reason why a finding is accepted, or None."""
    inner = path.removeprefix(f"{ROOT}/").removeprefix("./")
    return next((why for known, below, why in ACCEPTED_FINDINGS if rule == known and inner.startswith(below)), None)


def audit_packages(lock: Path, *options: str) -> CheckResult:
    """Run pip-audit on every pinned version. A package missing in its database counts as not vulnerable."""
    argv = ["pip-audit", "-r", str(lock), "--no-deps", "--disable-pip", "-f", "json", "--progress-spinner", "off"]
    done = _run([*argv, "--timeout", "10", *options])
    try:
        listed = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return CheckResult("pip-audit", "not checked", f"no vulnerability database could be queried: {last[:200]}", [])
    return judge_audit(listed)


def audit_packages_offline(lock: Path, known: Advisories) -> CheckResult:
    """Audit with advisories from files. Vulnerabilities found after the newest file are unknown."""
    with serve_advisories(known) as address, tempfile.TemporaryDirectory() as cache:
        result = audit_packages(lock, "--vulnerability-service", "osv", "--osv-url", address, "--cache-dir", cache)
    age = datetime.now(UTC) - known.newest
    words = f"{result.words}, of {known.count:,} advisories up to {known.newest:%Y-%m-%d}"
    if result.verdict == "clean" and age > MAX_ADVISORY_AGE:
        return CheckResult(
            result.name, "not checked", f"{words}: {age.days} days old, over {MAX_ADVISORY_AGE.days}", []
        )
    return result._replace(words=words)


def judge_audit(listed: list[dict[str, Any]]) -> CheckResult:
    """Judge the package list of pip-audit."""
    vulnerabilities = [
        f"{one['name']} {one['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'no version'}"
        for one in listed
        for found in one.get("vulns", [])
    ]
    skipped = [one["name"] for one in listed if "skip_reason" in one]
    if vulnerabilities:
        return CheckResult(
            "pip-audit",
            "found",
            f"{len(vulnerabilities)} known vulnerabilities in {len(listed)} packages",
            vulnerabilities,
        )
    if skipped or not listed:
        words = f"{len(skipped)} of {len(listed)} packages were skipped: not in the database, or it was not reachable"
        return CheckResult("pip-audit", "not checked", words, [])
    return CheckResult("pip-audit", "clean", f"no known vulnerability in {len(listed)} packages", [])


def list_shipped_packages() -> list[str]:
    """List installed packages that the web, host and demo extras need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *(line for e in SHIPPED for line in project["optional-dependencies"][e])]
    open_ends, found = [Requirement(line) for line in required], set[str]()
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


def check_licences() -> CheckResult:
    """Check the licenses of shipped packages with the list above."""
    names = list_shipped_packages()
    done = _run(["pip-licenses", "--python", sys.executable, "--format", "json", "--packages", *names])
    listed = [(canonicalize_name(one["Name"]), one["License"]) for one in json.loads(done.stdout)]
    wrong = [f"{name}: {licence}" for name, licence in listed if not is_allowed(name, licence)]
    words = f"{len(wrong)} of {len(listed)} packages have a licence that is not on the list"
    return CheckResult("licences", "found" if wrong else "clean", words, wrong)


def is_allowed(name: str, licence: str) -> bool:
    """Return True if all licenses joined by AND or ";" are allowed, and one of those joined by OR."""
    if EXCEPTIONS.get(name) == licence:
        return True
    plain = licence.replace("(MPL 2.0)", "[MPL 2.0]").replace("(ISCL)", "[ISCL]").replace("(", "").replace(")", "")
    plain = plain.replace("[", "(").replace("]", ")")
    return all(any(choice.strip() in LICENCES for choice in part.split(" OR ")) for part in re.split(r" AND |;", plain))


def write_sbom(target: Path) -> CheckResult:
    """Write a CycloneDX file of this environment."""
    target.parent.mkdir(exist_ok=True)
    argv = ["cyclonedx-py", "environment", sys.executable, "--pyproject", "pyproject.toml", "--output-reproducible"]
    done = _run([*argv, "--of", "JSON", "-o", str(target), "--validate"])
    if done.returncode:
        return CheckResult("SBOM", "not checked", done.stderr.strip()[-200:], [])
    components = json.loads(target.read_text())["components"]
    return CheckResult("SBOM", "clean", f"{len(components)} components in {target.name}", [])
