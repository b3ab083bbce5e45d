"""Results of the gate as a table, JUnit XML, Markdown, and JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from meshboard import formatting
from meshboard.formatting import remove_escapes
from meshboard.gate.checks import BaselineRuns, CheckResult
from meshboard.gate.measures import format_value

ORDER = ("FAIL", "unsure", "ok")
INTERVAL = "[a to b] is the 95% confidence interval (Welch 1947)"
# Not in https://www.w3.org/TR/xml/#charsets. XML parsers reject these characters as references too.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
HEAD = ("", "check", "measured", "baseline", "change", "limit", "")


def format_cells(result: CheckResult) -> tuple[str, ...]:
    """Return the cells of a result in the columns HEAD."""
    change = "-" if result.change is None else f"{result.change:+.2%}"
    value = format_value(result.value, result.unit)
    if result.low is not None:
        value += f" [{format_value(result.low, result.unit)} to {format_value(result.high, result.unit)}]"
    baseline, bound = format_value(result.baseline, result.unit), format_value(result.bound, result.unit)
    return result.verdict, result.what, value, baseline, change, bound, result.why


def format_table(results: Sequence[CheckResult], baselines: Sequence[BaselineRuns] = ()) -> str:
    """Return a plain text table, failures first."""
    lines = [format_cells(result) for result in sorted(results, key=lambda one: ORDER.index(one.verdict))]
    return "\n".join([formatting.format_table(HEAD, lines), format_summary(results), *_list_reasons(baselines)])


def _list_reasons(baselines: Sequence[BaselineRuns]) -> list[str]:
    return [remove_escapes(reason) for one in baselines for reason in one.reasons]


def format_summary(results: Sequence[CheckResult]) -> str:
    """Return the number of passed and failed checks, and a note if results have intervals."""
    failed, unsure = (sum(result.verdict == verdict for result in results) for verdict in ("FAIL", "unsure"))
    words = f"{len(results) - failed} passed, {failed} failed"
    words += f" ({unsure} of the passed limits unsure because of noise)" if unsure else ""
    return words + (f"; {INTERVAL}" if any(result.low is not None for result in results) else "")


def format_markdown(results: Sequence[CheckResult], title: str, baselines: Sequence[BaselineRuns] = ()) -> str:
    """Return a Markdown table with a heading."""
    head = ["| | check | measured | baseline | change | limit | |", "|---|---|---|---|---|---|---|"]
    body = ["| " + " | ".join(map(_escape_markdown, format_cells(result))) + " |" for result in results]
    reasons = [part for reason in _list_reasons(baselines) for part in ("", _escape_markdown(reason))]
    return "\n".join([f"### {title}: {format_summary(results)}", "", *head, *body, *reasons, ""])


def _escape_markdown(cell: str) -> str:
    text = remove_escapes(cell).replace("\\", "\\\\").replace("|", "\\|")
    return text.replace("&", "&amp;").replace("<", "&lt;")


def format_junit(
    results: Sequence[CheckResult], title: str, seconds: float, baselines: Sequence[BaselineRuns] = ()
) -> str:
    """Return JUnit XML. `seconds` is the duration of the gate."""
    root, suite = _make_suite(title, len(results), failures=sum(not one.ok for one in results), seconds=seconds)
    for result in results:
        case = _add_case(suite, result.what)
        if result.verdict == "ok":
            continue
        verdict, _, value, baseline, change, bound, why = format_cells(result)
        words = why if result.value is None else f"{value}, baseline {baseline}, limit {bound}, change {change}"
        words += f": {why}" if why and why != words else ""
        if result.ok:
            ElementTree.SubElement(case, "system-out").text = f"{verdict} {result.what}: {words}"
        else:
            ElementTree.SubElement(case, "failure", message=words).text = f"{verdict} {result.what}: {words}"
    if reasons := _list_reasons(baselines):
        ElementTree.SubElement(suite, "system-out").text = "\n".join(reasons)
    return _to_xml(root)


def format_unfinished_junit(title: str) -> str:
    """Return JUnit XML of a gate that has not finished, so that CI never reads the file of an older gate."""
    root, suite = _make_suite(title, 1, errors=1)
    ElementTree.SubElement(_add_case(suite, "verdict"), "error", message="The gate did not finish.")
    return _to_xml(root)


def _make_suite(
    title: str, tests: int, *, failures: int = 0, errors: int = 0, seconds: float = 0.0
) -> tuple[ElementTree.Element, ElementTree.Element]:
    """Return the root and its test suite. Some readers need a root of several suites."""
    counts = {"tests": str(tests), "failures": str(failures), "errors": str(errors)}
    attributes = {"name": title, **counts, "time": f"{seconds:.3f}"}
    root = ElementTree.Element("testsuites", attributes)
    return root, ElementTree.SubElement(root, "testsuite", attributes)


def _add_case(suite: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname="meshboard.gate", name=name, time="0")


def _to_xml(root: ElementTree.Element) -> str:
    text = NOT_XML.sub("\ufffd", ElementTree.tostring(root, encoding="unicode"))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'


def to_json(results: Sequence[CheckResult], baselines: Sequence[BaselineRuns] = ()) -> dict[str, Any]:
    """Return the results for `--json`."""
    rows = [{**result._asdict(), "ok": result.ok, "change": result.change} for result in results]
    excluded = [{"baseline": one.name, **run} for one in baselines for run in one.excluded]
    return {"ok": all(result.ok for result in results), "rows": rows, "left_aside": excluded}
