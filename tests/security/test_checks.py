"""Security checks: incomplete checks do not pass, and each accepted finding has a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.security.__main__ import verdict
from tests.security.checks import (
    ACCEPTED_FINDINGS,
    ROOT,
    CheckResult,
    audit_packages,
    check_code,
    check_licences,
    get_reason_to_accept,
    is_allowed,
    judge_audit,
    list_shipped_packages,
)

FINE: dict[str, Any] = {"name": "fine", "version": "1", "vulns": []}
HOLE = {"name": "holed", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "skipped", "skip_reason": "Dependency not found"}


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([FINE], "clean"),
        ([FINE, SKIPPED], "not checked"),
        ([FINE, SKIPPED, HOLE], "found"),
        ([], "not checked"),
    ],
)
def test_skipped_package_is_not_clean(listed: list[dict[str, Any]], expected: str) -> None:
    assert judge_audit(listed).verdict == expected


def test_audit_without_a_database_is_not_checked(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("idna==3.20\n")
    result = audit_packages(lock, "--vulnerability-service", "osv", "--osv-url", "http://127.0.0.1:1/v1/query")
    assert result.verdict == "not checked", result
    assert verdict([result]) == 3


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [(["clean", "clean"], 0), (["clean", "not checked"], 3), (["not checked", "found", "clean"], 1)],
)
def test_findings_count_most_and_incomplete_checks_do_not_pass(verdicts: list[Any], expected: int) -> None:
    assert verdict([CheckResult("x", one, "", []) for one in verdicts]) == expected


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
def test_license_is_allowed_only_if_listed(licence: str, expected: bool) -> None:
    assert is_allowed("some-package", licence) is expected
    assert is_allowed("psycopg", "LGPL-3.0-only")


def test_shipped_packages_include_their_dependencies() -> None:
    names = list_shipped_packages()
    assert {"django", "torch", "kombu", "uvloop", "sympy"} <= set(names), "their dependencies as well"
    assert not {"pytest", "mypy", "playwright"} & set(names)
    assert check_licences().verdict == "clean"


def test_accepted_findings_still_exist_and_new_ones_are_reported(tmp_path: Path) -> None:
    assert [row for row in ACCEPTED_FINDINGS if not (ROOT / row[1]).exists()] == []
    assert get_reason_to_accept("B608", "jobs/runs/history/store/query.py")
    assert get_reason_to_accept("B608", "jobs/people/tokens.py") is None
    (tmp_path / "new.py").write_text("import subprocess\nsubprocess.run('ls', shell=True)\n")
    inside = ROOT / "contracts"  # one small folder keeps the run short
    result = check_code([str(inside)])
    assert result.verdict == "clean", result.lines
    assert check_code([str(tmp_path)]).verdict == "found"
