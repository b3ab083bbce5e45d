"""Compare published measurements with the predictions of the planner.

    python -m benchmarks.published --rows FILE [--worst N] [--gap] [--vtrain-multi FILE]

FILE has the columns of the open rows (see docs/explanation/planner.md). All figures use constants in `planner/`.
Nothing is fitted here. A hash of the configuration divides the rows into two halves. Constants were fitted on the fit
half, so the report half shows the error on unseen rows.

Each half has three tables of step times: with all known facts of the recipe and release, with all facts that a spec can
have, and with a spec that names only the stack. A user's page shows the second. `holds` is the share of rows inside the
interval of the page. The first table of the report half is also split by whether the fit half has the same model, GPU,
and precision.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.planner import print_vtrain
from benchmarks.published.gap import print_gap
from benchmarks.published.mapping import choose_stack
from benchmarks.published.predict import NOT_ESTIMATED, PageEstimate, Predictor, RowPrediction
from benchmarks.published.rows import PublishedRow, SkipError, read_rows
from benchmarks.published.scores import (
    FirstChoice,
    choose_first,
    compute_kendall_tau,
    compute_upper_bound,
    count_fits,
    summarize_errors,
)
from planner.cost.learning import compute_error, is_within_margin

PLANNER_ERROR = "an error of the planner: "


def answer_rows(rows: Iterable[PublishedRow | SkipError]) -> tuple[list[RowPrediction], list[tuple[str, str, str]]]:
    """Return predictions, and (source, stack, reason) of skipped rows.

    A row never ends the run. Reasons that are errors of the planner begin with `PLANNER_ERROR`.
    """
    predictor = Predictor()
    answers: list[RowPrediction] = []
    skipped: list[tuple[str, str, str]] = []
    for row in rows:
        if isinstance(row, SkipError):
            skipped.append(("?", "?", str(row)))
            continue
        try:
            answers.append(predictor.predict(row))
        except SkipError as reason:
            skipped.append((row.source, choose_stack(row), str(reason)))
        except (ValueError, ArithmeticError, LookupError, TypeError, AssertionError) as error:
            words = str(error).splitlines()[0][:60] if str(error) else ""
            own = "" if isinstance(error, (ValueError, ArithmeticError)) else PLANNER_ERROR
            skipped.append((row.source, choose_stack(row), f"{own}{type(error).__name__} {words}"))
    return answers, skipped


def print_report(answers: Sequence[RowPrediction], skipped: Sequence[tuple[str, str, str]]) -> None:
    """Print all tables."""
    halves: list[tuple[str, Callable[[RowPrediction], bool]]] = [
        ("all rows", lambda a: True),
        ("fit half", lambda a: a.row.is_fit_half),
        ("report half", lambda a: not a.row.is_fit_half),
    ]
    fitted = {a.row.setting_key for a in answers if a.row.is_fit_half and a.row.kind == "time"}
    for title, belongs in halves:
        part = [a for a in answers if belongs(a)]
        print(f"\n=== {title}: {len(part)} rows")
        print_step_times(part)
        print_page_estimates(
            [(a, a.said) for a in part if a.row.kind == "time"], "step time, stack and software in the spec"
        )
        if title == "report half":
            print_seen_and_unseen([a for a in part if a.row.kind == "time"], fitted)
        print_page_estimates([(a, a.alone) for a in part], "step time, only the stack in the spec")
        print_intervals(part)
        print_rankings(part)
        print_fit(part)
        print_memory(part)
        peaks = [(a, a.said) for a in part if a.row.kind == "peak"]
        print_page_estimates(peaks, "peak memory, stack and software in the spec", below="too low")
    without = [a for a in answers if isinstance(a.said, str) and a.said != NOT_ESTIMATED]
    unsaid = [(a.row.source, a.planned.stack, str(a.said)) for a in without]
    print_skips("skipped", skipped)
    print_skips("predicted with all settings, but not as a spec", unsaid)


def print_skips(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the number of rows by source, stack, and reason."""
    print(f"\n{title}: {len(rows)} rows")
    for (source, stack, reason), count in sorted(Counter(rows).items(), key=lambda told: (-told[1], told[0])):
        print(f"  {count:>5}  {source:<40.40} {stack:<14} {reason}")


def group_answers(answers: Sequence[RowPrediction]) -> Iterable[tuple[str, list[RowPrediction]]]:
    """Yield all predictions, then those of each stack, then those of each source."""
    yield "all", list(answers)
    for stack in sorted({a.planned.stack for a in answers}):
        yield f"stack {stack}", (part := [a for a in answers if a.planned.stack == stack])
        tuned = [a for a in part if not a.planned.own_tests]
        if 0 < len(tuned) < len(part):  # Megatron-LM's functional tests: tiny, deterministic, bound by the host
            yield f"stack {stack} without its own tests", tuned
    for source in sorted({a.row.source for a in answers}, key=str.lower):
        yield source, [a for a in answers if a.row.source == source]


def _print_header(title: str, below: str = "too fast") -> str:
    columns = f"{'mean':>7} {'median':>7} {'p90':>8} {'worst':>8} {'bias':>7} {below:>9} {'inside':>6}"
    return f"{title:<52} {'rows':>5} {columns}"


def print_step_times(answers: Sequence[RowPrediction]) -> None:
    """Print the errors with all settings known, which have no interval."""
    times = [a for a in answers if a.row.kind == "time"]
    print(_print_header("step time, all settings known"))
    for name, part in group_answers(times):
        _print_errors(name, [a.error for a in part], [])
    alike: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for a in times:
        alike[a.planned.stack, a.planned.cluster.accelerator.name, *a.row.setting_key[:4]].append(abs(a.error))
    if alike:
        off = mean(mean(each) for each in alike.values())
        print(f"{'mean over stacks, GPUs, and models':<52} {len(alike):>5} {off:>7.1%}")


def print_seen_and_unseen(times: Sequence[RowPrediction], fitted: set[tuple[str, ...]]) -> None:
    """Split the report half by whether the fit half has the same model, GPU, and precision."""
    for title, seen in (("seen", True), ("unseen", False)):
        part = [a for a in times if (a.row.setting_key in fitted) is seen]
        _print_errors(f"{title} in the fit half, all settings known", [a.error for a in part], [])
        output = [(a.said, a.measured) for a in part if isinstance(a.said, PageEstimate)]
        held = [is_within_margin(one.share, measured, one.predicted) for one, measured in output]
        _print_errors(
            f"{title} in the fit half, stack and software",
            [one.predicted / measured - 1 for one, measured in output],
            held,
        )


def print_page_estimates(
    answers: Sequence[tuple[RowPrediction, PageEstimate | str]], title: str, below: str = "too fast"
) -> None:
    """Print the errors of the estimates on a page, and how often the interval contains the measured value."""
    print(_print_header(title, below))
    output = {id(a): one for a, one in answers if isinstance(one, PageEstimate)}
    for name, part in group_answers([a for a, _ in answers]):
        pairs = [(output[id(a)], a.measured) for a in part if id(a) in output]
        result = [is_within_margin(one.share, measured, one.predicted) for one, measured in pairs]
        _print_errors(name, [one.predicted / measured - 1 for one, measured in pairs], result)


def _print_errors(name: str, off: Sequence[float], told: Sequence[bool]) -> None:
    if found := summarize_errors(off):
        print(
            f"{name:<52.52} {found.rows:>5} {found.mean:>7.1%} {found.median:>7.1%} {found.most:>8.1%}"
            f" {found.worst:>+8.0%} {found.bias:>+7.1%} {found.too_fast:>9.0%}"
            f" {f'{mean(told):.0%}' if told else '-':>6}"
        )


def print_intervals(answers: Sequence[RowPrediction]) -> None:
    """Print intervals of `planner.hardware.stacks`, and those that these rows alone would give."""
    print(f"{'interval of a step, as a spec says it':<70} {'rows':>5} {'told':>7} {'needed':>7} {'inside':>6}")
    kinds: dict[str, list[tuple[PageEstimate, float]]] = defaultdict(list)
    for a in answers:
        for output in dict.fromkeys((a.said, a.alone)) if a.row.kind == "time" else ():
            if isinstance(output, PageEstimate):
                kinds[f"{a.planned.stack}, {output.software_level}, {output.host_wait_level}"].append(
                    (output, a.measured)
                )
    for name, part in sorted(kinds.items()):
        needed = compute_upper_bound([compute_error(measured, output.predicted) for output, measured in part])
        result = max(output.share for output, _ in part)
        held = mean(is_within_margin(output.share, measured, output.predicted) for output, measured in part)
        print(f"{name:<70} {len(part):>5} {result:>7.0%} {needed:>7.0%} {held:>6.0%}")


def print_rankings(answers: Sequence[RowPrediction]) -> None:
    """Print ranking quality inside sweeps: at least three configurations of one file, model, kernels, and GPU count.

    `regret` is the time of the first choice of a search among layouts predicted to fit, over the best time. `ran out`
    is the number of sweeps in which the first choice ran out of memory.
    """
    sweeps: dict[tuple[str, ...], list[RowPrediction]] = defaultdict(list)
    for a in answers:
        if a.row.kind in ("time", "out_of_memory"):
            sweeps[*a.row.sweep_key, repr(a.planned.kernels)].append(a)
    found: dict[str, list[tuple[int, float, FirstChoice]]] = defaultdict(list)
    for part in sweeps.values():
        ran = [a for a in part if a.row.kind == "time"]
        times = _list_configurations(ran)
        order = compute_kendall_tau(times) if len(times) >= 3 else None
        offered = _list_configurations([a for a in ran if a.fits])
        short = [(a.predicted / a.row.count("global_batch"), None) for a in part if a.fits and a not in ran]
        choice = choose_first([*offered, *short], min((t for _, t in times), default=0.0))
        if order is not None and choice is not None:
            for name in ("all", f"stack {part[0].planned.stack}", part[0].row.source):
                found[name].append((len(times), order, choice))
    heads = f"{'sweeps':>7} {'Kendall':>8} {'regret':>7} {'worst':>7} {'ran out':>8}"
    print(f"{'ranking':<52} {'rows':>5} {heads}")
    for name in sorted(found, key=lambda name: (name != "all", not name.startswith("stack "), name.lower())):
        results = found[name]
        rows = sum(count for count, *_ in results)
        tau = sum(count * order for count, order, _ in results) / rows
        regrets = [choice.regret for *_, choice in results if choice.regret is not None]
        lost = len(results) - len(regrets)
        result = f"{mean(regrets):>7.1%} {max(regrets):>7.1%}" if regrets else f"{'-':>7} {'-':>7}"
        print(f"{name:<52.52} {rows:>5} {len(results):>7} {tau:>8.2f} {result} {lost:>8}")


def _list_configurations(sweep: Sequence[RowPrediction]) -> list[tuple[float, float]]:
    """Return (predicted, measured) seconds per sequence of each configuration, averaged over repeats."""
    measured: dict[tuple[str, str], list[RowPrediction]] = defaultdict(list)
    for a in sweep:
        measured[a.planned.spec.model_dump_json(), repr(a.planned.kernels)].append(a)
    return [
        (
            mean(a.predicted / a.row.count("global_batch") for a in same),
            mean(a.measured / a.row.count("global_batch") for a in same),
        )
        for same in measured.values()
    ]


def print_fit(answers: Sequence[RowPrediction]) -> None:
    """Print whether rows fit; `of out` is the share of out-of-memory rows that are predicted to fit."""
    heads = ("ran:fits", "ran:not", "out:fits", "out:not", "right", "falsely", "of out")
    print(f"{'fit (measured:predicted)':<52} {'rows':>5} " + " ".join(f"{head:>8}" for head in heads))
    result = [a for a in answers if a.row.kind in ("time", "out_of_memory")]
    out = {a.row.source for a in result if a.row.kind == "out_of_memory"}
    parts = [("sources with out-of-memory rows", [a for a in result if a.row.source in out]), *group_answers(result)]
    for name, part in parts:
        found = count_fits([(a.fits, a.row.kind == "time") for a in part])
        if found:
            counts = " ".join(f"{n:>8}" for n in found)
            missed = "-" if found.missed_share is None else f"{found.missed_share:.1%}"
            print(
                f"{name:<52.52} {found.rows:>5} {counts} {found.right:>8.1%} {found.false_fit_share:>8.1%} {missed:>8}"
            )


def print_memory(answers: Sequence[RowPrediction]) -> None:
    print(f"{'memory':<52} {'rows':>5} {'mean':>7} {'median':>7} {'worst':>8} {'bias':>7}")
    for kind in ("peak", "steady"):
        for name, part in group_answers([a for a in answers if a.row.kind == kind]):
            if found := summarize_errors([a.error for a in part]):
                label = f"{kind}, {name}"
                print(
                    f"{label:<52.52} {found.rows:>5} {found.mean:>7.1%} {found.median:>7.1%} {found.worst:>+8.0%}"
                    f" {found.bias:>+7.1%}"
                )


def print_worst(answers: Sequence[RowPrediction], number: int) -> None:
    print(f"\n{number} step times with the largest errors")
    times = [a for a in answers if a.row.kind == "time"]
    for a in sorted(times, key=lambda a: -abs(a.error))[:number]:
        x, t = a.planned.spec.layout, a.planned.spec.train
        print(
            f"{a.error:>+7.0%} {a.measured:>9.4g} s  {a.row.text('model')[:30]:<30} {a.row.text('gpu')[:12]:<12}"
            f" tp{x.tp} cp{x.cp} pp{x.pp}v{x.virtual_stages} dp{x.dp} ep{x.ep} z{x.zero} m{t.micro_batches}"
            f" b{a.planned.spec.micro_batch_size} s{t.seq_len} {x.recompute} {t.precision} {t.attention}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the planner with published measurements.")
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE", help="CSV of measurements")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="also print the N largest step time errors")
    parser.add_argument("--gap", action="store_true", help="also print the constants behind errors of unknown settings")
    parser.add_argument("--vtrain-multi", type=Path, metavar="FILE", help="vTrain's ground_truth_multi.csv")
    options = parser.parse_args()
    try:
        rows = read_rows(options.rows)
    except (OSError, ValueError) as error:
        parser.error(f"--rows: {error}")
    found, left_out = answer_rows(rows)
    print_report(found, left_out)
    if options.worst:
        print_worst(found, options.worst)
    if options.gap:
        print_gap(found)
    print("\nother rows, not used for constants")
    print_vtrain(options.vtrain_multi)
    if any(reason.startswith(PLANNER_ERROR) for *_, reason in left_out):
        sys.exit("The planner failed on some rows. The skipped rows list them.")
