"""The gate's rows as a table, as JUnit, as Markdown and as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from meshboard.gate.baselines import Baseline
from meshboard.gate.figures import figure
from meshboard.gate.judge import Row
from meshboard.show import words

ORDER = ("FAIL", "unsure", "ok")
INTERVAL = "[a to b] is the 95% confidence interval (Welch 1947)"
# Of https://www.w3.org/TR/xml/#charsets; what is not of it no reader takes, in references neither.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
HEAD = ("", "check", "measured", "baseline", "change", "limit", "")


def cells(row: Row) -> tuple[str, ...]:
    change = "-" if row.change is None else f"{row.change:+.2%}"
    value = figure(row.value, row.unit)
    if row.low is not None:
        value += f" [{figure(row.low, row.unit)} to {figure(row.high, row.unit)}]"
    baseline, bound = figure(row.baseline, row.unit), figure(row.bound, row.unit)
    return row.verdict, row.what, value, baseline, change, bound, row.why


def table(rows: Sequence[Row], held_to: Sequence[Baseline] = ()) -> str:
    """Plain text, failures first."""
    lines = [cells(row) for row in sorted(rows, key=lambda row: ORDER.index(row.verdict))]
    return "\n".join([words.table(HEAD, lines), summary(rows), *_aside(held_to)])


def _aside(held_to: Sequence[Baseline]) -> list[str]:
    return [words.clean(line) for one in held_to for line in one.why]


def summary(rows: Sequence[Row]) -> str:
    """Says of intervals what they are, where there are any."""
    failed, unsure = (sum(row.verdict == verdict for row in rows) for verdict in ("FAIL", "unsure"))
    told = f"{len(rows) - failed} passed, {failed} failed"
    told += f" ({unsure} of the passed limits unsure because of noise)" if unsure else ""
    return told + (f"; {INTERVAL}" if any(row.low is not None for row in rows) else "")


def markdown(rows: Sequence[Row], title: str, held_to: Sequence[Baseline] = ()) -> str:
    head = ["| | check | measured | baseline | change | limit | |", "|---|---|---|---|---|---|---|"]
    body = ["| " + " | ".join(map(_in_table, cells(row))) + " |" for row in rows]
    aside = [part for line in _aside(held_to) for part in ("", _in_table(line))]
    return "\n".join([f"### {title}: {summary(rows)}", "", *head, *body, *aside, ""])


def _in_table(cell: str) -> str:
    """As it is: no cell of its own, and no tag."""
    text = words.clean(cell).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("&", "&amp;").replace("<", "&lt;")


def junit(rows: Sequence[Row], title: str, took_s: float, held_to: Sequence[Baseline] = ()) -> str:
    """`took_s`: to ask and to judge."""
    whole, suite = _suites(title, len(rows), failures=sum(not row.ok for row in rows), took_s=took_s)
    for row in rows:
        case = _case(suite, row.what)
        if row.verdict == "ok":
            continue
        verdict, _, value, baseline, change, bound, why = cells(row)
        told = why if row.value is None else f"{value}, baseline {baseline}, limit {bound}, change {change}"
        told += f": {why}" if why and why != told else ""
        if row.ok:
            ElementTree.SubElement(case, "system-out").text = f"{verdict} {row.what}: {told}"
        else:
            ElementTree.SubElement(case, "failure", message=told).text = f"{verdict} {row.what}: {told}"
    if aside := _aside(held_to):
        ElementTree.SubElement(suite, "system-out").text = "\n".join(aside)
    return _written(whole)


def junit_without_verdict(title: str) -> str:
    """What lies there until there is one: a build whose gate was refused or killed finds no older run's."""
    whole, suite = _suites(title, 1, errors=1)
    ElementTree.SubElement(_case(suite, "verdict"), "error", message="The gate did not finish.")
    return _written(whole)


def _suites(
    title: str, tests: int, *, failures: int = 0, errors: int = 0, took_s: float = 0.0
) -> tuple[ElementTree.Element, ElementTree.Element]:
    """The document and its one suite. Some readers take none whose root is a single suite."""
    counts = {"tests": str(tests), "failures": str(failures), "errors": str(errors)}
    attributes = {"name": title, **counts, "time": f"{took_s:.3f}"}
    whole = ElementTree.Element("testsuites", attributes)
    return whole, ElementTree.SubElement(whole, "testsuite", attributes)


def _case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="meshboard.gate", name=name, time="0")


def _written(whole: ElementTree.Element) -> str:
    text = NOT_XML.sub("\ufffd", ElementTree.tostring(whole, encoding="unicode"))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'


def as_json(rows: Sequence[Row], held_to: Sequence[Baseline] = ()) -> dict[str, Any]:
    told = [{**row._asdict(), "ok": row.ok, "change": row.change} for row in rows]
    aside = [{"baseline": one.name, **run} for one in held_to for run in one.left_aside]
    return {"ok": all(row.ok for row in rows), "rows": told, "left_aside": aside}
