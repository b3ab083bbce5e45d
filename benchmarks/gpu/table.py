"""Format results as lines of a terminal and as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.machine import Fingerprint
from benchmarks.gpu.results import SPENT, Result

COLUMNS = ("", "expected", "measured", "error")
WIDTHS = (62, 13, 13, 9)


def rows(result: Result) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, expected value, measured value, and error of each figure."""
    for name, measured in result["measured"].items():
        expected = result["beside"].get(name)
        error = f"{expected / measured - 1:+.1%}" if expected and measured else ""
        yield name, "" if expected is None else f"{expected:,.4g}", f"{measured:,.4g}", error


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the tables for a terminal, then the parts that did not run, then the count."""
    for result in results:
        yield f"\n{result['title']}: {state_text(result)}"
        for note in result["notes"]:
            yield f"  {note}"
        for row in [COLUMNS, *rows(result)] if result["measured"] else []:
            name, *figures = row
            padded = (f"{text:>{width}}" for text, width in zip(figures, WIDTHS[1:], strict=True))
            yield f"  {name:<{WIDTHS[0]}}{''.join(padded)}"
    yield ""
    yield from not_reached(results)
    yield count(results)


def state_text(result: Result) -> str:
    return f"{result['state']}: {result['why']}" if result["why"] else result["state"]


def not_reached(results: Sequence[Result]) -> Iterator[str]:
    """List the parts that ran out of time or did not start."""
    cut = [result["part"] for result in results if result["state"] == "cut"]
    if cut:
        yield f"Cut for lack of time; run the command again to give them more ({len(cut)}): {', '.join(cut)}."
    names = [result["part"] for result in results if result["why"] == SPENT]
    if names:
        yield f"Not started; run the command again to continue ({len(names)}): {', '.join(names)}."


def count(results: Sequence[Result]) -> str:
    states = [result["state"] for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "cut", "skipped"))


def days(results: Sequence[Result]) -> str:
    """Return the range of days; results of earlier calls count too."""
    found = sorted({result["day"] for result in results})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def page(results: Sequence[Result], machine: Fingerprint, command: str) -> str:
    """Return the raw results as a page of the notebook."""
    host = f"{machine['count']} x {machine['device']}, torch {machine['torch']}, commit {machine['commit']}"
    found = [
        "# GPU benchmark results",
        "",
        f"`{command}` wrote this page, {days(results)}, {host}: {count(results)}.",
        "",
        "Expected values are predictions written before the run, profiler counts, or limits.",
        "The error is expected minus measured, divided by measured.",
    ]
    found += ["", *not_reached(results)]
    for result in results:
        found += [
            "",
            f"## {result['title']}",
            "",
            f"{state_text(result)}.",
            *(f"\n{note}." for note in result["notes"]),
        ]
        if result["measured"]:
            found += ["", f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|"]
            found += [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join(found) + "\n"
