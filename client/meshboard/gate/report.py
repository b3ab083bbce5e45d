"""The gate's rows as a table, as JUnit, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.etree import ElementTree

from meshboard.gate.judge import Row
from meshboard.show import words

HEAD = ("", "check", "measured", "baseline", "change", "limit", "")


def figure(value: float | None, unit: str) -> str:
    """With its unit; bytes in full, since a gate is about the last of them."""
    if value is None:
        return "-"
    if unit in ("B", "") and value == int(value):
        return f"{int(value):,}{' B' if unit else ''}"
    return f"{value:,.6g}{' ' + unit if unit else ''}"


def cells(row: Row) -> tuple[str, ...]:
    change = "-" if row.change is None else f"{row.change:+.2%}"
    baseline = figure(row.baseline, row.unit)
    if row.spread is not None:
        baseline += f" [{figure(row.spread[0], row.unit)} to {figure(row.spread[1], row.unit)}]"
    mark = "ok" if row.ok else "FAIL"
    return mark, row.what, figure(row.value, row.unit), baseline, change, figure(row.bound, row.unit), row.why


def table(rows: Sequence[Row]) -> str:
    """Plain text, failures first."""
    lines = [cells(row) for row in sorted(rows, key=lambda row: row.ok)]
    return f"{words.table(HEAD, lines)}\n{summary(rows)}"


def summary(rows: Sequence[Row]) -> str:
    failed = sum(not row.ok for row in rows)
    return f"{len(rows) - failed} passed, {failed} failed"


def markdown(rows: Sequence[Row], title: str) -> str:
    head = ["| | check | measured | baseline | change | limit | |", "|---|---|---|---|---|---|---|"]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    return "\n".join([f"### {title}: {summary(rows)}", "", *head, *body, ""])


def junit(rows: Sequence[Row], title: str) -> str:
    failed = sum(not row.ok for row in rows)
    suite = ElementTree.Element("testsuite", name=title, tests=str(len(rows)), failures=str(failed))
    for row in rows:
        case = ElementTree.SubElement(suite, "testcase", classname="meshboard.gate", name=row.what)
        if not row.ok:
            mark, _, value, baseline, change, bound, why = cells(row)
            told = why or f"{value}, the baseline {baseline}, the limit {bound}, changed by {change}"
            ElementTree.SubElement(case, "failure", message=told).text = f"{mark} {row.what}: {told}"
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def as_json(rows: Sequence[Row]) -> str:
    told = [{**row._asdict(), "change": row.change} for row in rows]
    return json.dumps({"ok": all(row.ok for row in rows), "rows": told}, indent=2)
