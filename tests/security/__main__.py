"""Run bandit, pip-audit, a license check and an SBOM (var/sbom.cdx.json), and print one table (`make security`).

Exit code 1 means findings. Exit code 3 means no findings, but an incomplete check.
A check is incomplete if pip-audit has no network or skips a package. For a machine without a network,
`--advisories FOLDER` reads known vulnerabilities from files (`tests/security/advisories.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.security.advisories import Advisories
from tests.security.checks import (
    ROOT,
    CheckResult,
    audit_packages,
    audit_packages_offline,
    check_code,
    check_licences,
    write_sbom,
)

EXIT = {"clean": 0, "found": 1, "not checked": 3}


LOCK = ROOT / "requirements.lock"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advisories", type=Path, help="a folder of files in the Open Source Vulnerability format")
    folder = parser.parse_args().advisories
    try:
        known = Advisories(folder) if folder else None
    except ValueError as error:
        parser.error(f"--advisories: {error}")
    audited = audit_packages_offline(LOCK, known) if known else audit_packages(LOCK)
    results = [check_code(), audited, check_licences(), write_sbom(ROOT / "var" / "sbom.cdx.json")]
    for result in results:
        print(f"{result.name:<10} {result.verdict:<12} {result.words}")
        for line in result.lines:
            print(f"           {line}")
    return verdict(results)


def verdict(results: list[CheckResult]) -> int:
    """Return the exit code. Findings count more than incomplete checks."""
    codes = {EXIT[result.verdict] for result in results}
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    Path("var").mkdir(exist_ok=True)
    sys.exit(main())
