"""Check the site of `make docs` and /docs: no warnings, login, CSP, and no path outside the site."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from markdown import markdown
from mkdocs.exceptions import Abort
from playwright.sync_api import expect

from manual import build
from manual.markdown import indent_nested_blocks
from tests.support.browser import open_context, run_chromium
from tests.support.processes import ROOT
from webapp.views import MOVED_PAGES

CODE = re.compile(r"<code>.*?</code>|<pre>.*?</pre>", re.S)
# What the CSP forbids, or would fetch from elsewhere: none of it may be in a page.
FORBIDDEN = {
    "a script in the page": re.compile(r"<script(?![^>]*\bsrc=)"),
    "a style in the page": re.compile(r"<style|<[^>]*\sstyle="),
    "a handler in the page": re.compile(r"<[^>]*\son[a-z]+="),
    "something from elsewhere": re.compile(r"<(?:script|img|iframe|source)[^>]*\bsrc=\"(?:https?:)?//"),
    "a style sheet from elsewhere": re.compile(r"<link[^>]*\bhref=\"(?:https?:)?//"),
    "a javascript: address": re.compile(r"<[^>]*javascript:", re.I),
}


@pytest.fixture
def reader(db: None, client: Any, django_user_model: Any, site: Path, settings: Any) -> Any:
    settings.DOCS_ROOT = site
    user = django_user_model.objects.create_user("reader", password="reader-password")
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


def test_pages_follow_the_content_security_policy(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    found = {
        (str(page.relative_to(site)), words)
        for page in pages
        for words, pattern in FORBIDDEN.items()
        if pattern.search(CODE.sub("", page.read_text()))
    }
    assert found == set()
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\((?!['\"]?data:)", sheet.read_text()), sheet


def test_site_excludes_the_notebook(site: Path) -> None:
    assert list((ROOT / "docs" / "notebook").glob("*.md"))
    assert not (site / "notebook").exists()


def test_search_index_has_every_term(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    terms = {entry["title"]: entry for entry in entries if "#term-" in entry["location"]}
    assert len(terms) > 80
    assert terms["micro-batch"]["text"].startswith("The sequences that a rank processes")
    page = (site / "reference" / "glossary" / "index.html").read_text()
    assert [one for one in terms.values() if f'id="{one["location"].split("#")[1]}"' not in page] == []


def test_serves_pages_with_the_content_security_policy(reader: Any) -> None:
    answer = reader.get("/docs/explanation/architecture/")
    assert answer.status_code == 200
    assert answer["Content-Type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in answer["Content-Security-Policy"]
    assert "Life of a job" in answer.content.decode()
    again = reader.get(answer.request["PATH_INFO"], headers={"If-Modified-Since": answer["Last-Modified"]})
    assert (again.status_code, again.content) == (304, b"")


def test_serves_every_file_of_the_site(reader: Any, site: Path) -> None:
    for file in (f for f in site.rglob("*") if f.is_file()):
        path = str(file.relative_to(site)).removesuffix("index.html")
        assert reader.get(f"/docs/{path}").content == file.read_bytes(), path
    assert reader.get("/docs/reference/spec")["Location"] == "/docs/reference/spec/"


@pytest.mark.parametrize(
    "path",
    [
        "../mkdocs.yml",
        "%2e%2e/secret.html",
        "%252e%252e/secret.html",
        "..%5csecret.html",
        "reference/../../secret.html",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "index.html%00.png",
        "leads-out/secret.html",
        "leads-out.html",
        "of-no-type.txt",
        "reference",
        "nothing/",
        "x" * 5000,
    ],
)
def test_serves_no_file_outside_the_site(reader: Any, settings: Any, tmp_path: Path, path: str) -> None:
    root = tmp_path / "site"
    (root / "reference").mkdir(parents=True)
    (tmp_path / "secret.html").write_text("secret")
    for name in ("index.html", "of-no-type.txt"):
        (root / name).write_text("open")
    (root / "leads-out").symlink_to(tmp_path)
    (root / "leads-out.html").symlink_to(tmp_path / "secret.html")
    settings.DOCS_ROOT = root
    answer = reader.get(f"/docs/{path}")
    assert answer.status_code == 404
    assert b"secret" not in answer.content


def test_redirects_moved_pages(reader: Any, site: Path) -> None:
    assert len(MOVED_PAGES) >= 9
    for old, new in MOVED_PAGES.items():
        for path in (f"/docs/{old}", f"/docs/{old}/"):
            answer = reader.get(path)
            assert (answer.status_code, answer["Location"]) == (301, f"/docs/{new}/"), path
        assert reader.get(f"/docs/{new}/").status_code == 200, new


def test_docs_need_a_login_and_reject_post(client: Any, reader: Any) -> None:
    assert reader.post("/docs/").status_code == 405
    reader.logout()
    for path in ("/docs/", "/docs/reference/spec/", "/docs/search/search_index.json"):
        assert client.get(path)["Location"].startswith("/login/?next=")


def test_explains_how_to_build_the_docs(reader: Any, settings: Any, tmp_path: Path) -> None:
    settings.DOCS_ROOT = tmp_path / "none"
    for path in ("/docs/", "/docs/reference/spec/"):
        answer = reader.get(path)
        assert answer.status_code == 404
        assert "make docs" in answer.content.decode()


def test_pages_link_to_the_docs(reader: Any) -> None:
    assert re.search(r'<a href="/docs/" data-go="\w">Documentation</a>', reader.get("/").content.decode())


@pytest.mark.parametrize("wrong", ["[a](nothing.md)", "[a](index.md#nothing)", "![a](nothing.png)", "[a](/queue/)"])
def test_dead_link_fails_the_build_and_keeps_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    into, docs = tmp_path / "site", tmp_path / "docs"
    for folder in (into, docs):
        folder.mkdir()
    (into / "index.html").write_text("as it was")
    (docs / "index.md").write_text(f"# Start\n\n{wrong}\n")
    config = tmp_path / "mkdocs.yml"
    stored = (
        build.CONFIG.read_text()
        .replace("../docs", str(docs))
        .replace("custom_dir: theme", f"custom_dir: {build.CONFIG.parent}/theme")
    )
    config.write_text(stored.replace("hooks:\n  - hooks.py\n", ""))
    monkeypatch.setattr(build, "CONFIG", config)
    monkeypatch.setattr(build, "PLACEHOLDERS", {})
    with pytest.raises(Abort):
        build.build_site(into)
    assert [f.name for f in into.iterdir()] == ["index.html"]
    (docs / "index.md").write_text("# Start\n")
    assert build.build_site(into) == 1
    assert "as it was" not in (into / "index.html").read_text()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["docs", "mkdocs.yml", "site"]


@pytest.mark.slow
def test_browser_shows_and_searches_the_site(csp_server: str) -> None:
    output: list[str] = []
    with run_chromium() as browser:
        page = open_context(browser).new_page()
        page.on("console", lambda m: output.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: output.append(str(error)))
        page.goto(f"{csp_server}/reference/spec/")
        page.press("body", "/")
        page.keyboard.type("micro_batches")
        page.keyboard.press("Enter")
        found = page.locator("#mkdocs-search-results a[href*='/spec/#']").first
        found.wait_for()
        found.click()
        page.wait_for_url(f"{csp_server}/reference/spec/**")
    assert output == []


@pytest.mark.parametrize(("term", "anchor"), [("micro-batch", "term-micro-batch"), ("gloo", "term-gloo")])
def test_search_lists_the_meaning_of_a_term_first(csp_server: str, term: str, anchor: str) -> None:
    with run_chromium() as browser:
        page = open_context(browser).new_page()
        page.goto(f"{csp_server}/reference/spec/")
        page.press("body", "/")
        page.keyboard.type(term)
        page.keyboard.press("Enter")
        first = page.locator("#mkdocs-search-results a").first
        expect(first).to_have_attribute("href", re.compile(f"/reference/glossary/#{anchor}$"))


STEPS = """1. Install:
   ```
   pip install \\
     meshboard
   ```
   Then log in.
2. Choose a command:

   | installation | command |
   |---|---|
   | `make up` | `make` |

   Start it.
   - one
   - two
3. Look.

```
1. not a list
   ```
"""


def html() -> str:
    return markdown(indent_nested_blocks(STEPS), extensions=["tables", "fenced_code", "sane_lists"], tab_length=4)


def test_keeps_code_and_numbering_in_steps() -> None:
    assert html().count("<ol>") == 1
    steps = re.search(r"<ol>(.*)</ol>", html(), re.S)
    assert steps
    assert "<pre><code>pip install \\\n  meshboard\n</code></pre>" in steps[1]
    assert "<p>Then log in.</p>" in steps[1]


def test_keeps_tables_and_lists_in_steps() -> None:
    assert re.search(
        r"Choose a command:.*<table>.*</table>.*Start it\..*<ul>\s*<li>one</li>.*<li>.*Look\.", html(), re.S
    )
    assert "|" not in re.sub(r"<pre>.*?</pre>", "", html(), flags=re.S)


def test_keeps_code_outside_lists() -> None:
    text = "a\n\n```\n1. not a list\n   three spaces\n```\n"
    assert indent_nested_blocks(text) == text
