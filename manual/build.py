"""Build the documentation site in a temporary folder, then replace the served site with two renames."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import django
from mkdocs.commands.build import build as mkdocs_build
from mkdocs.config import load_config

from manual.markdown import GLOSSARY, add_to_search

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
CONFIG = ROOT / "manual" / "mkdocs.yml"
# The generators of reference pages import Django settings. They connect to neither a database nor Redis.
PLACEHOLDERS = {
    "DJANGO_SETTINGS_MODULE": "webapp.settings",
    "MESHBOARD_SECRET_KEY": "only-to-read-the-code-0123456789-0123456789-0123456789",
    "MESHBOARD_REDIS_URL": "redis://127.0.0.1",
}


def build_site(into: Path = SITE) -> int:
    """Build the site and return the number of pages. A warning is an error. Raises mkdocs.exceptions.Abort."""
    sys.path.insert(0, str(ROOT / "client"))  # Prefer this checkout to an installed package.
    for name, value in PLACEHOLDERS.items():
        os.environ.setdefault(name, value)
    django.setup()
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="meshboard-docs-") as folder:
        made = Path(folder) / "site"
        mkdocs_build(load_config(str(CONFIG), site_dir=str(made), strict=True))
        add_to_search(made / "search", (ROOT / "docs" / GLOSSARY).read_text())
        for unserved in (made / "sitemap.xml.gz", made / "sitemap.xml"):
            unserved.unlink(missing_ok=True)  # sitemaps need the board's address
        replace_folder(into, made)
    return sum(1 for _ in into.rglob("*.html"))


def replace_folder(into: Path, made: Path) -> None:
    """Replace the folder `into` with `made`, using two renames on one file system."""
    draft, old = into.with_name(into.name + ".new"), into.with_name(into.name + ".old")
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(made, draft)
    if into.exists():
        into.rename(old)
    draft.rename(into)
    shutil.rmtree(old, ignore_errors=True)
