"""Advisories in files answer as osv.dev would, to pip-audit itself."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.security.advisories import Advisories
from tests.security.looks import Look, audit_offline

RANGES = [{"introduced": "4.2"}, {"fixed": "4.2.15"}, {"introduced": "5.0"}, {"fixed": "5.0.8"}]


def advisory(name: str = "django", **affected: Any) -> dict[str, Any]:
    told = {"package": {"name": name, "ecosystem": "PyPI"}, **affected}
    return {"id": "PYSEC-1", "modified": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "affected": [told]}


def ranged(*events: dict[str, str]) -> dict[str, Any]:
    return advisory(ranges=[{"type": "GIT", "events": []}, {"type": "ECOSYSTEM", "events": list(events)}])


def written(folder: Path, told: dict[str, Any]) -> Advisories:
    (folder / "vulns").mkdir(exist_ok=True)
    (folder / "vulns" / "one.json").write_text(json.dumps(told))
    return Advisories(folder)


@pytest.mark.parametrize(
    ("told", "version", "expected"),
    [
        (ranged(*RANGES), "4.2.14", True),
        (ranged(*RANGES), "4.2.15", False),
        (ranged(*RANGES), "5.0.7", True),
        (ranged(*RANGES), "5.0.8", False),
        (ranged(*reversed(RANGES)), "5.0.7", True),  # in any order
        (ranged({"introduced": "0"}), "0.1", True),  # and mended nowhere
        (ranged({"introduced": "0"}, {"last_affected": "2.10"}), "2.10", True),
        (ranged({"introduced": "0"}, {"last_affected": "2.10"}), "2.10.1", False),
        (advisory(versions=["1.0", "no version"]), "1.0.0", True),
        (advisory(versions=["1.0"]), "1.0.1", False),
    ],
)
def test_a_version_is_hit_where_it_is_listed_or_in_a_range(
    tmp_path: Path, told: dict[str, Any], version: str, expected: bool
) -> None:
    found = written(tmp_path, told).of("Django", version)
    assert [one["id"] for one in found] == ["PYSEC-1"] * expected


def audited(folder: Path, told: dict[str, Any], pin: str) -> Look:
    lock = folder / "requirements.lock"
    lock.write_text(f"{pin}\n")
    return audit_offline(lock, written(folder, told))


def test_pip_audit_reads_them(tmp_path: Path) -> None:
    look = audited(tmp_path, ranged(*RANGES), "django==5.0.7")
    assert (look.verdict, look.lines) == ("found", ["django 5.0.7: PYSEC-1, mended in 4.2.15, 5.0.8"])
    assert audited(tmp_path, ranged(*RANGES), "django==5.0.8").verdict == "clean"
    assert (
        audited(tmp_path, ranged(*RANGES) | {"withdrawn": "2026-01-01T00:00:00Z"}, "django==5.0.7").verdict == "clean"
    )


def test_old_advisories_call_nothing_clean(tmp_path: Path) -> None:
    old = {"modified": f"{datetime.now(UTC) - timedelta(days=91):%Y-%m-%dT%H:%M:%SZ}"}
    look = audited(tmp_path, ranged(*RANGES) | old, "django==5.0.8")
    assert look.verdict == "not checked"
    assert "91 days old, over 90" in look.words
    assert audited(tmp_path, ranged(*RANGES) | old, "django==5.0.7").verdict == "found"


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no advisory"):
        Advisories(tmp_path)
