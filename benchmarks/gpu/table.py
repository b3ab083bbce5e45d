"""Format results as lines of a terminal and as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.machine import Fingerprint
from benchmarks.gpu.results import OUT_OF_TIME, PartResult

COLUMNS = ("", "expected", "measured", "error")
WIDTHS = (62, 13, 13, 9)


def list_rows(result: PartResult) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, expected value, measured value, and error of each figure."""
    for name, measured in result["measured"].items():
        expected = result["beside"].get(name)
        error = f"{expected / measured - 1:+.1%}" if expected and measured else ""
        yield name, "" if expected is None else f"{expected:,.4g}", f"{measured:,.4g}", error


def format_lines(results: Sequence[PartResult]) -> Iterator[str]:
    """Yield the tables for a terminal, then the parts that did not run, then the count."""
    for result in results:
        yield f"\n{result['title']}: {format_state(result)}"
        for note in result["notes"]:
            yield f"  {note}"
        for row in [COLUMNS, *list_rows(result)] if result["measured"] else []:
            name, *figures = row
            padded = (f"{text:>{width}}" for text, width in zip(figures, WIDTHS[1:], strict=True))
            yield f"  {name:<{WIDTHS[0]}}{''.join(padded)}"
    yield ""
    yield from list_unfinished(results)
    yield format_counts(results)


def format_state(result: PartResult) -> str:
    return f"{result['state']}: {result['why']}" if result["why"] else result["state"]


def list_unfinished(results: Sequence[PartResult]) -> Iterator[str]:
    """List the parts that ran out of time or did not start."""
    cut = [result["part"] for result in results if result["state"] == "cut"]
    if cut:
        yield f"Cut for lack of time; run the command again to give them more ({len(cut)}): {', '.join(cut)}."
    names = [result["part"] for result in results if result["why"] == OUT_OF_TIME]
    if names:
        yield f"Not started; run the command again to continue ({len(names)}): {', '.join(names)}."


def format_counts(results: Sequence[PartResult]) -> str:
    states = [result["state"] for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "cut", "skipped"))


def format_days(results: Sequence[PartResult]) -> str:
    """Return the range of days; results of earlier calls count too."""
    found = sorted({result["day"] for result in results})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def format_page(results: Sequence[PartResult], machine: Fingerprint, command: str) -> str:
    """Return the raw results as a page of the notebook."""
    host = f"{machine['count']} x {machine['device']}, torch {machine['torch']}, commit {machine['commit']}"
    found = [
        "# GPU benchmark results",
        "",
        f"`{command}` wrote this page, {format_days(results)}, {host}: {format_counts(results)}.",
        "",
        "Expected values are predictions written before the run, profiler counts, or limits.",
        "The error is expected minus measured, divided by measured.",
    ]
    found += ["", *list_unfinished(results)]
    for result in results:
        found += [
            "",
            f"## {result['title']}",
            "",
            f"{format_state(result)}.",
            *(f"\n{note}." for note in result["notes"]),
        ]
        if result["measured"]:
            found += ["", f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|"]
            found += [f"| {' | '.join(row)} |" for row in list_rows(result)]
    return "\n".join(found) + "\n"
