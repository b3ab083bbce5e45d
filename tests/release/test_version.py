"""Check that the changelog and both packages have the version of the VERSION file."""

from __future__ import annotations

import re
import tomllib

from packaging.version import Version

from tests.support.processes import ROOT

VERSION = (ROOT / "VERSION").read_text().strip()


def test_packages_use_the_version_file() -> None:
    assert str(Version(VERSION)) == VERSION
    for folder in (ROOT, ROOT / "client"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        assert "version" not in project["project"]
        assert project["tool"]["setuptools"]["dynamic"]["version"] == {"file": "VERSION"}
        assert (folder / "VERSION").resolve() == ROOT / "VERSION"


def test_newest_changelog_section_has_this_version() -> None:
    sections = re.findall(r"^## \[(.*?)\](?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    versions = [Version(name) for name in sections if name != "Unreleased"]
    assert str(versions[0]) == VERSION
    assert versions == sorted(versions, reverse=True)
    assert f"## To {VERSION}" in (ROOT / "docs/howto/upgrade.md").read_text()
