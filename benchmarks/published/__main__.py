"""Compare published measurements with predictions for unknown software.

    python -m benchmarks.published --rows FILE [FILE ...]

The files have the columns of docs/explanation/planner.md. A row is predicted from its columns alone: model,
accelerator, layout, batch, precision, and recompute. The headline leaves each source out: the constants are chosen on
the rows of all other sources, and then the source is predicted. Each source has the same weight.

No constant is fitted on accelerators before the A100 or on rows of tier C. These have facts that contradict each
other, or a feature that the planner lacks. Separate tables list them.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.published.columns import OLD_GPUS, compute_peak_bytes, identify_meter, identify_stack, read_columns
from benchmarks.published.fit import NAMES, PRIORS, Estimate, Fit, MeasuredRow, build_stack, estimate_rows
from benchmarks.published.rows import PublishedRow, SkipError, read_rows
from benchmarks.published.scores import (
    choose_first,
    compute_kendall_tau,
    compute_quantile,
    count_fits,
    summarize_errors,
)
from planner.cost.learning import compute_memory_interval, compute_time_interval, is_within_margin, scale_to_measured
from planner.cost.timing import Timer
from planner.facts.model_shapes import compute_model_flops
from planner.facts.spec import JobSpec
from planner.hardware.stacks import STACKS

MAX_REFERENCES = 2  # measured steps that a user types


class TimedRow(NamedTuple):
    """A row with a step time: its source's name of the stack, and its estimate without rows of its source."""

    row: PublishedRow
    measured: MeasuredRow
    estimate: Estimate

    @property
    def error(self) -> float:
        return self.estimate.seconds / self.measured.measured_s - 1

    @property
    def is_in_interval(self) -> bool:
        planned = self.measured.planned
        share = compute_time_interval(planned.cluster, planned.spec, None, self.estimate.host_share)["share"]
        return is_within_margin(share, self.measured.measured_s, self.estimate.seconds)


def read_files(paths: Sequence[Path]) -> tuple[list[PublishedRow], Counter[tuple[str, str]]]:
    """Return the rows of all files that can be read, and counts of (source, reason) of the others."""
    found: list[PublishedRow] = []
    skipped: Counter[tuple[str, str]] = Counter()
    for row in (row for path in paths for row in read_rows(path)):
        if isinstance(row, SkipError):
            skipped["?", str(row)] += 1
        elif row.has_adapters:
            skipped[row.source, "adapters with frozen weights"] += 1
        else:
            found.append(row)
    return found, skipped


def plan_times(
    rows: Sequence[PublishedRow], skipped: Counter[tuple[str, str]]
) -> list[tuple[PublishedRow, MeasuredRow]]:
    """Return the rows with a step time, planned for unknown software."""
    found = []
    for row in rows:
        if row.kind != "time":
            continue
        try:
            planned = read_columns(row, "unknown")
            seconds = _get_measured_s(row, planned.spec)
        except (SkipError, ValueError) as error:
            skipped[row.source, " ".join(str(error).split())[:80]] += 1
            continue
        found.append((row, MeasuredRow(row.source, planned, seconds, is_headline(row))))
    return found


def is_headline(row: PublishedRow) -> bool:
    return row.text("tier") != "C" and not is_old(row)


def is_old(row: PublishedRow) -> bool:
    return any(gpu in row.text("gpu") for gpu in OLD_GPUS)


def _get_measured_s(row: PublishedRow, spec: JobSpec) -> float:
    seconds = row.seconds
    if seconds is None:
        seconds = compute_model_flops(spec) / (row.value * 1e12 * spec.layout.world_size)
    if seconds <= 0:
        raise SkipError("no step time")
    return seconds


def hold_out(
    timed: Sequence[tuple[PublishedRow, MeasuredRow]], fit: Fit, group: Callable[[PublishedRow], str]
) -> list[TimedRow]:
    """Return the rows, each group predicted with constants from the sources that are not in the group."""
    groups: dict[str, list[tuple[PublishedRow, MeasuredRow]]] = defaultdict(list)
    for row, measured in timed:
        groups[group(row)].append((row, measured))
    found = []
    for members in groups.values():
        stack = fit.leave_out({row.source for row, _ in members})
        estimates = estimate_rows([measured for _, measured in members], stack)
        found += [TimedRow(row, measured, one) for (row, measured), one in zip(members, estimates, strict=True)]
    return found


def group_errors(rows: Sequence[TimedRow]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = defaultdict(list)
    for one in rows:
        errors[one.row.source].append(one.error)
    return dict(sorted(errors.items(), key=lambda item: item[0].lower()))


def print_errors(title: str, rows: Sequence[TimedRow], *, by_source: bool = True) -> None:
    """Print the errors of step times, and the share of rows inside the interval of the page."""
    errors = group_errors(rows)
    print(f"\n{title:<62} {'sources':>7} {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7} {'inside':>7}")
    for name, each in errors.items() if by_source else ():
        _print_line(name, {name: each}, [one for one in rows if one.row.source == name])
    _print_line("each source with the same weight", errors, rows)


def _print_line(name: str, errors: dict[str, list[float]], rows: Sequence[TimedRow]) -> None:
    if (found := summarize_errors(errors)) is None:
        return
    inside: dict[str, list[bool]] = defaultdict(list)
    for one in rows:
        inside[one.row.source].append(one.is_in_interval)
    covered = mean(mean(each) for each in inside.values())
    print(
        f"{name:<62.62} {found.sources:>7} {found.rows:>5} {found.mean:>7.1%} {found.median:>7.1%} {found.bias:>+7.1%}"
        f" {covered:>7.0%}"
    )


def print_known_stacks(rows: Sequence[PublishedRow]) -> None:
    """Print the errors of rows whose stack the planner knows. Its constants were chosen on rows of these sources."""
    timers: dict[str, Timer] = {}
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    inside: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if row.kind != "time" or not is_headline(row) or (stack := identify_stack(row)) == "unknown":
            continue
        try:
            planned = read_columns(row, stack)
            measured = _get_measured_s(row, planned.spec)
        except (SkipError, ValueError):
            continue  # listed with the reason for unknown software
        timer = timers.setdefault(planned.cluster.model_dump_json(), Timer(planned.cluster))
        timing = timer.get_step(planned.spec)
        seconds = timing.step_s * planned.scale
        errors[stack][row.source].append(seconds / measured - 1)
        share = compute_time_interval(planned.cluster, planned.spec, None, timing.host_share)["share"]
        inside[stack].append(is_within_margin(share, measured, seconds))
    title = "known stack, whose constants were chosen on these sources"
    print(f"\n{title:<62} {'sources':>7} {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7} {'inside':>7}")
    for stack, each in sorted(errors.items()):
        if found := summarize_errors(each):
            needed = compute_quantile({name: [abs(math.log1p(x)) for x in own] for name, own in each.items()}, 0.9)
            print(
                f"{stack:<62} {found.sources:>7} {found.rows:>5} {found.mean:>7.1%} {found.median:>7.1%}"
                f" {found.bias:>+7.1%} {mean(inside[stack]):>7.0%} (90% within a factor of {math.exp(needed):.2f})"
            )


def print_references(rows: Sequence[TimedRow]) -> None:
    """Print the errors after a user types measured steps of the same model, averaged over all choices of them."""
    groups: dict[tuple[str, ...], list[TimedRow]] = defaultdict(list)
    for one in rows:
        groups[one.row.source, *(one.row.text(name) for name in ("gpu", "layers", "hidden", "precision"))].append(one)
    large = [members for members in groups.values() if len(members) > MAX_REFERENCES + 1]
    print(f"\n{'after measured steps of the same model':<62} {'sources':>7} {'rows':>5} {'mean':>7} {'90%':>7}")
    for number in range(MAX_REFERENCES + 1):
        errors: dict[str, list[float]] = defaultdict(list)
        for members in large:
            for chosen in combinations(members, number):
                ratios = [one.measured.measured_s / one.estimate.seconds for one in chosen]
                ratio = scale_to_measured(ratios).ratio if ratios else 1.0
                errors[members[0].row.source] += [
                    abs(ratio * (1 + one.error) - 1) for one in members if one not in chosen
                ]
        if errors:
            found = mean(mean(each) for each in errors.values())
            print(
                f"{f'{number} measured steps':<62} {len(errors):>7} {sum(map(len, large)):>5} {found:>7.1%}"
                f" {compute_quantile(errors, 0.9):>7.0%}"
            )


def print_rankings(rows: Sequence[TimedRow]) -> None:
    """Print how well the layouts of one model, accelerator, and number of GPUs are ranked.

    The regret is the time of the layout that is predicted to be the fastest, over the best time.
    """
    sweeps: dict[tuple[str, ...], list[TimedRow]] = defaultdict(list)
    for one in rows:
        sweeps[one.row.sweep_key].append(one)
    found = []
    for members in sweeps.values():
        times = [
            (
                one.estimate.seconds / one.row.count("global_batch"),
                one.measured.measured_s / one.row.count("global_batch"),
            )
            for one in members
        ]
        order = compute_kendall_tau(times) if len(times) >= 3 else None
        choice = choose_first([*times], min(measured for _, measured in times))
        if order is not None and choice is not None and choice.regret is not None:
            found.append((members[0].row.source, order, choice.regret))
    if found:
        orders, regrets = [order for _, order, _ in found], [regret for *_, regret in found]
        print(
            f"\nranking of layouts: {len(found)} sweeps of {len({name for name, *_ in found})} sources, Kendall's tau"
            f" {mean(orders):.2f}, first choice slower by {mean(regrets):.1%}, at most {max(regrets):.0%}"
        )


def print_memory(rows: Sequence[PublishedRow]) -> None:
    """Print whether rows fit, and the errors of peak memory, for unknown software."""
    fits: list[tuple[bool, bool]] = []
    errors: dict[str, list[float]] = defaultdict(list)
    inside: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if not is_headline(row) or row.kind == "steady":
            continue
        try:
            planned = read_columns(row, "unknown")
            meter = identify_meter(row) if row.kind == "peak" else "device"
            needed = compute_peak_bytes(planned.spec, planned.cluster, meter)
        except (SkipError, ValueError):
            continue  # listed with the reason for step times
        if row.kind == "peak":
            errors[row.source].append(needed / row.num_bytes - 1)
            share = compute_memory_interval(planned.cluster, planned.spec, None, needed)["share"]
            inside[row.source].append(is_within_margin(share, row.num_bytes, needed))
            continue
        fits.append((needed <= planned.cluster.accelerator.memory_bytes, row.kind == "time"))
    if counts := count_fits(fits):
        print(
            f"\nfits in memory: {counts.rows} rows, {counts.right:.1%} right; {counts.ran_said_not} ran, but are"
            f" predicted not to fit; {counts.out_said_fits} ran out of memory, but are predicted to fit"
        )
    if found := summarize_errors(errors):
        covered = mean(mean(each) for each in inside.values())
        print(
            f"peak memory: {found.sources} sources, {found.rows} rows, mean {found.mean:.1%},"
            f" median {found.median:.1%}, bias {found.bias:+.1%}, inside {covered:.0%}"
        )
    for name, each in sorted(errors.items()):
        size = [abs(error) for error in each]
        print(f"  {name:<60.60} {len(each):>4} {mean(size):>7.1%} {mean(each):>+7.1%} {mean(inside[name]):>5.0%}")


def print_constants(fit: Fit) -> None:
    """Print the prior and fitted constants, and how wide intervals of 90% must be."""
    print(f"\n{'constant':<20} {'prior':>9} {'fitted':>9}")
    for name, value in zip(NAMES, fit.constants, strict=True):
        print(f"{name:<20} {PRIORS[name][0]:>9.3g} {math.exp(value):>9.3g}")


def print_margins(rows: Sequence[TimedRow]) -> None:
    """Print the factor that bounds 90% of the held-out rows, and how many rows are inside one from other sources."""
    for title, low, high in (("no wait for the host", 0.0, 0.2), ("20% or more of the step waits", 0.2, 2.0)):
        errors: dict[str, list[float]] = defaultdict(list)
        for one in rows:
            if low <= one.estimate.host_share < high:
                errors[one.row.source].append(abs(math.log1p(one.error)))
        if errors:
            needed = math.exp(compute_quantile(errors, 0.9))
            print(f"90% of step times within a factor of {needed:.2f}: {title}, {len(errors)} sources")
            if len(errors) > 1:
                print(f"    inside an interval from the other sources: {mean(_cover_each(errors)):.0%}")


def _cover_each(errors: dict[str, list[float]]) -> list[float]:
    """Return for each source the share of its errors inside the bound of 90% of the other sources."""
    return [
        mean(one <= compute_quantile({other: x for other, x in errors.items() if other != name}, 0.9) for one in each)
        for name, each in errors.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the planner with published measurements.")
    parser.add_argument("--rows", type=Path, nargs="+", required=True, metavar="FILE", help="CSV of measurements")
    options = parser.parse_args()
    try:
        rows, skipped = read_files(options.rows)
    except (OSError, ValueError) as error:
        parser.error(f"--rows: {error}")
    timed = plan_times(rows, skipped)
    fit = Fit([measured for _, measured in timed])
    held_out = hold_out(timed, fit, lambda row: row.source)
    headline = [one for one in held_out if is_headline(one.row)]
    print_errors("step time, each source predicted without its own rows", headline)
    print_margins(headline)
    by_stack = hold_out([each for each in timed if each[1].is_fitted], fit, identify_stack)
    print_errors("step time, each stack predicted without its own sources", by_stack, by_source=False)
    old = [one for one in held_out if is_old(one.row)]
    print_errors("accelerators before the A100, on which no constant is fitted", old)
    print_margins(old)
    rest = [one for one in held_out if one.row.text("tier") == "C" and not is_old(one.row)]
    print_errors("rows with contradictions, or with features that the planner lacks", rest)
    for title, stack in (("fitted on all sources", build_stack(fit.constants)), ("planner", STACKS["unknown"])):
        own = [measured for _, measured in timed]
        seen = [TimedRow(row, one, e) for (row, one), e in zip(timed, estimate_rows(own, stack), strict=True)]
        seen = [one for one in seen if is_headline(one.row)]
        print_errors(f"step time with the constants of the {title}", seen, by_source=False)
    print_known_stacks(rows)
    print_references(headline)
    print_rankings(headline)
    print_memory(rows)
    print_constants(fit)
    print(f"\nskipped: {skipped.total()} rows")
    for (source, reason), count in sorted(skipped.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:>5}  {source:<40.40} {reason}")


if __name__ == "__main__":
    main()
