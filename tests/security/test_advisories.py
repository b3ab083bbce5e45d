"""Advisories in files: pip-audit receives the answers that osv.dev would give."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.security.advisories import Advisories
from tests.security.checks import CheckResult, audit_packages_offline

RANGES = [{"introduced": "4.2"}, {"fixed": "4.2.15"}, {"introduced": "5.0"}, {"fixed": "5.0.8"}]


def build_advisory(name: str = "django", **affected: Any) -> dict[str, Any]:
    record = {"package": {"name": name, "ecosystem": "PyPI"}, **affected}
    return {"id": "PYSEC-1", "modified": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "affected": [record]}


def build_ranged_advisory(*events: dict[str, str]) -> dict[str, Any]:
    return build_advisory(ranges=[{"type": "GIT", "events": []}, {"type": "ECOSYSTEM", "events": list(events)}])


def write_advisories(folder: Path, record: dict[str, Any]) -> Advisories:
    (folder / "vulns").mkdir(exist_ok=True)
    (folder / "vulns" / "one.json").write_text(json.dumps(record))
    return Advisories(folder)


@pytest.mark.parametrize(
    ("record", "version", "expected"),
    [
        (build_ranged_advisory(*RANGES), "4.2.14", True),
        (build_ranged_advisory(*RANGES), "4.2.15", False),
        (build_ranged_advisory(*RANGES), "5.0.7", True),
        (build_ranged_advisory(*RANGES), "5.0.8", False),
        (build_ranged_advisory(*reversed(RANGES)), "5.0.7", True),  # in any order
        (build_ranged_advisory({"introduced": "0"}), "0.1", True),  # fixed in no version
        (build_ranged_advisory({"introduced": "0"}, {"last_affected": "2.10"}), "2.10", True),
        (build_ranged_advisory({"introduced": "0"}, {"last_affected": "2.10"}), "2.10.1", False),
        (build_advisory(versions=["1.0", "no version"]), "1.0.0", True),
        (build_advisory(versions=["1.0"]), "1.0.1", False),
    ],
)
def test_version_is_affected_if_listed_or_in_a_range(
    tmp_path: Path, record: dict[str, Any], version: str, expected: bool
) -> None:
    found = write_advisories(tmp_path, record).find("Django", version)
    assert [one["id"] for one in found] == ["PYSEC-1"] * expected


def audit_pin(folder: Path, record: dict[str, Any], pin: str) -> CheckResult:
    lock = folder / "requirements.lock"
    lock.write_text(f"{pin}\n")
    return audit_packages_offline(lock, write_advisories(folder, record))


def test_pip_audit_reads_advisories(tmp_path: Path) -> None:
    result = audit_pin(tmp_path, build_ranged_advisory(*RANGES), "django==5.0.7")
    assert (result.verdict, result.lines) == ("found", ["django 5.0.7: PYSEC-1, fixed in 4.2.15, 5.0.8"])
    assert audit_pin(tmp_path, build_ranged_advisory(*RANGES), "django==5.0.8").verdict == "clean"
    assert (
        audit_pin(
            tmp_path, build_ranged_advisory(*RANGES) | {"withdrawn": "2026-01-01T00:00:00Z"}, "django==5.0.7"
        ).verdict
        == "clean"
    )


def test_old_advisories_give_no_clean_verdict(tmp_path: Path) -> None:
    old = {"modified": f"{datetime.now(UTC) - timedelta(days=91):%Y-%m-%dT%H:%M:%SZ}"}
    result = audit_pin(tmp_path, build_ranged_advisory(*RANGES) | old, "django==5.0.8")
    assert result.verdict == "not checked"
    assert "91 days old, over 90" in result.words
    assert audit_pin(tmp_path, build_ranged_advisory(*RANGES) | old, "django==5.0.7").verdict == "found"


def test_folder_without_advisories_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no advisory"):
        Advisories(tmp_path)
