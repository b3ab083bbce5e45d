"""Vendored files are what they say, pages keep script and style out of the markup, and both travel compressed."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import unfold
from django.contrib.staticfiles import finders
from django.core.management import call_command
from django.test import Client, override_settings

from webapp import places
from webapp.admin.theme import unfold as admin_settings

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "webapp" / "static"
VENDOR = STATIC / "vendor"


def test_every_vendored_file_has_the_hash_its_readme_gives() -> None:
    readme = (VENDOR / "README.md").read_text()
    stated = dict(re.findall(r"\| `([^`]+)` \| `([0-9a-f]{64})` \|", readme))
    own = {"README.md", "uPlot.esm.d.ts", "decode.d.mts"}
    files = {str(f.relative_to(VENDOR)): f for f in VENDOR.rglob("*") if f.is_file() and f.name not in own}
    assert set(stated) == set(files)
    assert {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()} == stated


def test_templates_hold_no_inline_script_style_or_handler() -> None:
    for template in (ROOT / "templates").rglob("*.html"):
        text = template.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>", text), template
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text), template


def test_no_script_makes_html_or_code_of_text() -> None:
    for script in (STATIC / "js").rglob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), script


def test_static_files_travel_compressed(tmp_path: Path) -> None:
    with override_settings(STATIC_ROOT=tmp_path):
        call_command("collectstatic", "--no-input", verbosity=0)
        answer = Client().get("/static/js/format.js", headers={"accept-encoding": "gzip"})
    assert answer["Content-Encoding"] == "gzip"
    assert gzip.decompress(answer.getvalue()) == (STATIC / "js" / "format.js").read_bytes()


def test_the_admin_s_own_few_icons_are_all_that_it_shows() -> None:
    """Of either version of unfold that is locked, and of our navigation."""
    here = Path(unfold.__file__).parent
    pages = "\n".join(file.read_text() for file in here.rglob("*.html"))
    code = "\n".join(file.read_text() for file in here.rglob("*.py"))
    style = (here / "static" / "unfold" / "css" / "styles.css").read_text()
    shown = {*re.findall(r"material-symbols-outlined[^<>]*>\s*([a-z]\w*)\s*<", pages)}
    shown |= {*re.findall(r"""\bicon=["']([a-z]\w*)["']""", pages + code)}
    shown |= {*re.findall(r"""content:["']([a-z]\w*)["']""", style)}
    shown |= {item["icon"] for group in admin_settings()["SIDEBAR"]["navigation"](None) for item in group["items"]}
    assert len(shown) > 60
    assert shown - set((VENDOR / "symbols" / "icons.txt").read_text().split()) == set()


def test_the_admin_s_icons_are_served_in_the_place_of_unfold_s() -> None:
    found = Path(str(finders.find("unfold/fonts/material-symbols/styles.css")))
    [font] = re.findall(r'url\("([^"]+)"\)', found.read_text())
    assert (found.parent / font).resolve() == VENDOR / "symbols" / "icons.woff2"


def test_the_admin_loads_no_library_of_charts() -> None:
    """200 kB on each of its pages, none of which draws one: what unfold asks for by that name is ours, and empty."""
    found = Path(str(finders.find("unfold/js/chart/chart.js")))
    assert found.is_relative_to(STATIC)
    assert found.stat().st_size < 200
    own = "\n".join(file.read_text() for file in (places.templates() / "admin").rglob("*.html"))
    assert "components/chart" not in own
