"""Keep words that readers did not understand out of docs, pages, and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "contracts", "jobs", "manual", "planner", "webapp", "workers")
GENERATED = ("/migrations/", "/vendor/", "/site/", "/notebook/", "/build/")

# Each was rated unclear by engineers who had never seen the product. The comment is what to write.
UNCLEAR = re.compile(
    r"\b("
    r"tells?|told|foretold"  # report, show, predict
    r"|beside"  # next to, compared with, in addition to
    r"|whoever"  # the user, the owner
    r"|anew|meanwhile|of late|seldomer"  # again, while, recently, less often
    r"|mends?|mended|ails?"  # fix, is wrong
    r"|stands still|stood still"  # is stuck, makes no progress
    r"|optimiser|colour|behaviour|licence"  # American spelling
    r")\b",
    re.IGNORECASE,
)
MIN_WORDS = 3  # a shorter string is a key or a name
Reader = Callable[[Path], Iterator[tuple[int, str]]]


@pytest.mark.parametrize("pattern", ["*.md", "docs/**/*.md", "templates/**/*.html", "templates/**/*.txt"])
def test_texts_use_common_words(pattern: str) -> None:
    assert list(_unclear_lines(pattern, _lines)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_use_common_words(package: str) -> None:
    assert list(_unclear_lines(f"{package}/**/*.py", _python_messages)) == []
    assert list(_unclear_lines(f"{package}/**/*.js", _script_strings)) == []


def test_the_check_finds_an_unclear_word(tmp_path: Path) -> None:
    source = tmp_path / "message.py"
    source.write_text('"""It is told here."""\nreason = "The host was told nothing about it."\n')
    assert [text for _, text in _python_messages(source) if UNCLEAR.search(text)] == [
        "The host was told nothing about it."
    ]


def _unclear_lines(pattern: str, read: Reader) -> Iterator[str]:
    for path in sorted(ROOT.glob(pattern)):
        if any(part in f"/{path.relative_to(ROOT)}" for part in GENERATED) or path.name == "CHANGELOG.md":
            continue
        for line, text in read(path):
            found = UNCLEAR.search(text)
            if found:
                yield f"{path.relative_to(ROOT)}:{line}: {found.group()}: {text.strip()[:120]}"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text without its comments, code, and link targets."""
    text = re.sub(r"{#.*?#}|{%.*?%}|{{.*?}}|<script.*?</script>|```.*?```", _blank, path.read_text(), flags=re.S)
    for number, line in enumerate(text.splitlines(), 1):
        yield number, re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", line)


def _python_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the string literals of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if len(node.value.split()) >= MIN_WORDS:
            yield node.lineno, node.value


def _script_strings(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for text in re.findall(r"\"([^\"\n]*)\"|`([^`\n]*)`", line.partition(" //")[0]):
            words = re.sub(r"\$\{[^}]*(?:\}|$)", " ", "".join(text))
            if len(words.split()) >= MIN_WORDS and not line.lstrip().startswith(("//", "*", "/*")):
                yield number, words


def _blank(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n")
