"""`make security` passes nothing that it could not look at, and keeps no finding without a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.__main__ import verdict
from tests.security.looks import KEPT, ROOT, Look, allowed, audit, code, judged, kept, licences, shipped

FINE: dict[str, Any] = {"name": "fine", "version": "1", "vulns": []}
HOLE = {"name": "holed", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "skipped", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([FINE], "clean"),
        ([FINE, SKIPPED], "not checked"),
        ([FINE, SKIPPED, HOLE], "found"),
        ([], "not checked"),
    ],
)
def test_a_package_that_was_skipped_is_not_a_clean_one(told: list[dict[str, Any]], expected: str) -> None:
    assert judged(told).verdict == expected


def test_without_a_database_to_ask_the_audit_says_so(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("idna==3.20\n")
    look = audit(lock, "--vulnerability-service", "osv", "--osv-url", "http://127.0.0.1:1/v1/query")
    assert look.verdict == "not checked", look
    assert verdict([look]) == 3


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [(["clean", "clean"], 0), (["clean", "not checked"], 3), (["not checked", "found", "clean"], 1)],
)
def test_what_was_found_counts_most_and_what_was_not_looked_at_is_no_pass(verdicts: list[Any], expected: int) -> None:
    assert verdict([Look("x", one, "", []) for one in verdicts]) == expected


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("GNU Affero General Public License v3", False),
        ("BSD License; Other/Proprietary License", False),
        ("Mozilla Public License 2.0 (MPL 2.0)", True),
        ("UNKNOWN", False),
        ("", False),
        ("LGPL-3.0-only", False),
    ],
)
def test_a_licence_is_on_the_list_or_it_is_not(licence: str, expected: bool) -> None:
    assert allowed("some-package", licence) is expected
    assert allowed("psycopg", "LGPL-3.0-only")


def test_what_is_shipped_is_looked_at_with_what_it_needs() -> None:
    names = shipped()
    assert {"django", "torch", "kombu", "uvloop", "sympy"} <= set(names), "what they need as well"
    assert not {"pytest", "mypy", "playwright"} & set(names)
    assert licences().verdict == "clean"


def test_every_finding_that_is_kept_is_still_there_and_a_new_one_is_told(tmp_path: Path) -> None:
    assert [row for row in KEPT if not (ROOT / row[1]).exists()] == []
    assert kept("B608", "jobs/runs/history/store/query.py")
    assert kept("B608", "jobs/people/tokens.py") is None
    (tmp_path / "new.py").write_text("import subprocess\nsubprocess.run('ls', shell=True)\n")
    inside = ROOT / "contracts"  # one small room beside it, so that the run is quick
    look = code([str(inside)])
    assert look.verdict == "clean", look.lines
    assert code([str(tmp_path)]).verdict == "found"
