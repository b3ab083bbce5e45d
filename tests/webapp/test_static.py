"""Vendored files match their hashes, templates have no inline code, and static files are sent compressed."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import unfold
from django.contrib.staticfiles import finders
from django.core.management import call_command
from django.test import Client, override_settings

from webapp import installation
from webapp.admin_theme import build_unfold_settings as admin_settings

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "webapp" / "static"
VENDOR = STATIC / "vendor"


def test_vendored_files_match_their_hashes() -> None:
    readme = (VENDOR / "README.md").read_text()
    stated = dict(re.findall(r"\| `([^`]+)` \| `([0-9a-f]{64})` \|", readme))
    own = {"README.md", "uPlot.esm.d.ts", "decode.d.mts"}
    files = {str(f.relative_to(VENDOR)): f for f in VENDOR.rglob("*") if f.is_file() and f.name not in own}
    assert set(stated) == set(files)
    assert {name: hashlib.sha256(f.read_bytes()).hexdigest() for name, f in files.items()} == stated


def test_templates_have_no_inline_scripts_or_styles() -> None:
    for template in (ROOT / "templates").rglob("*.html"):
        text = template.read_text()
        assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>", text), template
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text), template


def test_scripts_create_no_html_or_code_from_text() -> None:
    for script in (STATIC / "js").rglob("*.js"):
        text = script.read_text()
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), script


def test_sends_static_files_compressed(tmp_path: Path) -> None:
    with override_settings(STATIC_ROOT=tmp_path):
        call_command("collectstatic", "--no-input", verbosity=0)
        answer = Client().get("/static/js/format.js", headers={"accept-encoding": "gzip"})
    assert answer["Content-Encoding"] == "gzip"
    assert gzip.decompress(answer.getvalue()) == (STATIC / "js" / "format.js").read_bytes()


def test_icon_font_has_all_icons_of_the_admin() -> None:
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


def test_serves_its_own_icons_for_unfold() -> None:
    found = Path(str(finders.find("unfold/fonts/material-symbols/styles.css")))
    [font] = re.findall(r'url\("([^"]+)"\)', found.read_text())
    assert (found.parent / font).resolve() == VENDOR / "symbols" / "icons.woff2"


def test_admin_loads_no_chart_library() -> None:
    """The empty file replaces 200 kB of unfold, because no admin page draws a chart."""
    found = Path(str(finders.find("unfold/js/chart/chart.js")))
    assert found.is_relative_to(STATIC)
    assert found.stat().st_size < 200
    own = "\n".join(file.read_text() for file in (installation.get_templates_dir() / "admin").rglob("*.html"))
    assert "components/chart" not in own
