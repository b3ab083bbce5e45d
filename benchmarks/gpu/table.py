"""Results as lines of a terminal, and as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.machine import Fingerprint
from benchmarks.gpu.results import SPENT, Result

WIDTHS = (62, 13, 13, 9)


def rows(result: Result) -> Iterator[tuple[str, str, str, str]]:
    """Each figure: its name, what it is compared with, what was measured, the difference as a share."""
    for name, measured in result["measured"].items():
        beside = result["beside"].get(name)
        apart = f"{measured / beside - 1:+.1%}" if beside else ""
        yield name, "" if beside is None else f"{beside:,.4g}", f"{measured:,.4g}", apart


def lines(results: Sequence[Result]) -> Iterator[str]:
    """The table of the terminal, and last the count, after what was not reached."""
    for result in results:
        yield f"\n{result['title']}: {told(result)}"
        for note in result["notes"]:
            yield f"  {note}"
        for row in [("", "beside", "measured", "apart"), *rows(result)] if result["measured"] else []:
            name, *figures = row
            padded = (f"{text:>{width}}" for text, width in zip(figures, WIDTHS[1:], strict=True))
            yield f"  {name:<{WIDTHS[0]}}{''.join(padded)}"
    yield ""
    yield from not_reached(results)
    yield count(results)


def told(result: Result) -> str:
    return f"{result['state']}: {result['why']}" if result["why"] else result["state"]


def not_reached(results: Sequence[Result]) -> Iterator[str]:
    """What there was no time for, or too little, if there was any such."""
    cut = [result["part"] for result in results if result["state"] == "cut"]
    if cut:
        yield f"Cut, and tried again by the same command, with more time ({len(cut)}): {', '.join(cut)}."
    names = [result["part"] for result in results if result["why"] == SPENT]
    if names:
        yield f"Not reached, and where the same command goes on ({len(names)}): {', '.join(names)}."


def count(results: Sequence[Result]) -> str:
    states = [result["state"] for result in results]
    return ", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "cut", "skipped"))


def days(results: Sequence[Result]) -> str:
    """On which they were found: what passed is kept from one call to the next."""
    told = sorted({result["day"] for result in results})
    return told[0] if len(told) == 1 else f"{told[0]} to {told[-1]}"


def page(results: Sequence[Result], machine: Fingerprint, command: str) -> str:
    """Markdown of docs/reference/gpu.md."""
    told_of = f"{machine['count']} x {machine['device']}, torch {machine['torch']}, commit {machine['commit']}"
    found = [
        "# What a machine with GPUs showed",
        "",
        f"`{command}`, {days(results)}, {told_of}: {count(results)}.",
        "It writes this page itself.",
        "\"beside\" is the planner's prediction, written down before the run, or the profiler's count.",
    ]
    found += ["", *not_reached(results)]
    for result in results:
        found += ["", f"## {result['title']}", "", f"{told(result)}.", *(f"\n{note}." for note in result["notes"])]
        if result["measured"]:
            found += ["", "| | beside | measured | apart |", "|---|---:|---:|---:|"]
            found += [f"| {' | '.join(row)} |" for row in rows(result)]
    return "\n".join(found) + "\n"
