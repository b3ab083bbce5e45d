"""Page of the planner's formulas, from its docstrings and from the terms of an example."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from manual.reference.markdown import escape_markdown, format_code, format_table
from planner.explain import explain
from planner.facts.parse_spec import parse_spec

ROOT = Path(__file__).resolve().parents[2]
PATHS = ("planner/cost/**/*.py", "planner/explain.py", "planner/search/*.py", "planner/traffic_growth.py")
EXAMPLE = {
    "model": {"preset": "llama3-8b"},
    "layout": {"dp": 4, "pp": 2, "tp": 4, "cp": 2, "zero": 1, "sequence_parallel": True},
    "train": {"global_batch": 64, "micro_batches": 8, "seq_len": 8192, "precision": "bf16"},
    "resources": {"device": "cuda"},
}
HEAD = """# Formulas

This page lists the formulas of the planner.
The first part shows the terms of each predicted figure for an example layout. The form shows them for any layout
under “Explain”.
The second part lists the functions that compute these figures, by module.
"""
LAYOUT = (
    "llama3-8b over dp 4, pp 2, tp 4 with sequence parallel, cp 2, ZeRO-1; "
    "64 sequences of 8,192 tokens in 8 micro-batches, bf16"
)


def build_page() -> str:
    """Return the Markdown of the page."""
    parts = [HEAD, f"## The terms of an example\n\n{LAYOUT}.\n"]
    for figure in explain(parse_spec(EXAMPLE)):
        rows = (
            [
                term["name"],
                format_code(term["formula"]),
                escape_markdown(term["numbers"]),
                _value(term["value"], term["unit"]),
                escape_markdown(term["source"]),
            ]
            for term in figure["terms"]
        )
        parts += [f"### {figure['figure'].capitalize()} ({figure['kind']})\n"]
        parts.append(format_table(["term", "formula", "numbers", "value", "source"], rows))
    for path in list_modules():
        parts += [f"## {'.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')}\n"]
        parts += _module(path)
    return "\n".join(parts)


def list_modules() -> list[Path]:
    return [path for pattern in PATHS for path in sorted(ROOT.glob(pattern))]


def list_public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Yield public functions and classes with a docstring."""
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node)
        ):
            yield node


def _module(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    yield _paragraphs(ast.get_docstring(tree) or "")
    for node in list_public(tree):
        yield f"### {format_code(_signature(node))}\n"
        yield _paragraphs(ast.get_docstring(node) or "")


def _signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return node.name
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return f"{node.name}({', '.join(names)})"


def _paragraphs(text: str) -> str:
    return "\n\n".join(escape_markdown(part) for part in text.split("\n\n")) + "\n"


def _value(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 1000 or value == int(value) else f"{value:.4g} {unit}"
