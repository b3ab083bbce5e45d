"""`make security`: bandit, pip-audit, licences and a list of what is inside (var/sbom.cdx.json), in one table.

Exit code 1 where something was found, 3 where nothing was but something could not be looked at: without a network,
pip-audit knows no holes, and a package that it skipped is not a clean one. `--advisories FOLDER` is for there: what is
known is read from files, and is as old as they are (`tests/security/advisories.py`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.security.advisories import Advisories
from tests.security.looks import ROOT, Look, audit, audit_offline, code, inside, licences

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
    audited = audit_offline(LOCK, known) if known else audit(LOCK)
    looks = [code(), audited, licences(), inside(ROOT / "var" / "sbom.cdx.json")]
    for look in looks:
        print(f"{look.name:<10} {look.verdict:<12} {look.words}")
        for line in look.lines:
            print(f"           {line}")
    return verdict(looks)


def verdict(looks: list[Look]) -> int:
    """What was found counts more than what was not looked at."""
    codes = {EXIT[look.verdict] for look in looks}
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    Path("var").mkdir(exist_ok=True)
    sys.exit(main())
