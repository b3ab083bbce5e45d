"""Published measurements beside what the planner says of them.

    python -m benchmarks.published --rows FILE [--worst N] [--gap] [--vtrain-multi FILE]

FILE holds the columns of the open rows (docs/explanation/planner.md names them). Every figure comes from constants in
`planner/`: nothing is fitted here. Rows are also told apart by a hash of their configuration: constants were chosen on
the fit half, so that the report half is nearer the truth (docs/explanation/planner.md says what of it was in sight).

Of each half there are three tables of step times: with what is known of a row's recipe and release; as a spec says it,
which is what a user's page computes; and what it computes where the spec names its stack and no more of its software.
`holds`: how many of the rows lie in the interval that is told there. Of the report half the first line is told apart
too: rows of a model, GPU and precision of which the fit half has any, and rows of which it has none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.planner import vtrain
from benchmarks.published.gap import print_gap
from benchmarks.published.mapping import stack_of
from benchmarks.published.predict import UNASKED, Answer, Predictor
from benchmarks.published.rows import PublishedRow, SkipError, read_rows
from benchmarks.published.said import Said
from benchmarks.published.scores import Choice, confusion, errors, first_choice, kendall, sure
from planner.cost.learning import compute_error, is_within_margin

PLANNERS = "an error of the planner: "


def answers_of(rows: Iterable[PublishedRow | SkipError]) -> tuple[list[Answer], list[tuple[str, str, str]]]:
    """Answers, and (source, stack, reason) of every row left out. A row never ends the run; what is the planner's own
    fault begins with `PLANNERS`."""
    predictor = Predictor()
    answers: list[Answer] = []
    skipped: list[tuple[str, str, str]] = []
    for row in rows:
        if isinstance(row, SkipError):
            skipped.append(("?", "?", str(row)))
            continue
        try:
            answers.append(predictor.answer(row))
        except SkipError as reason:
            skipped.append((row.source, stack_of(row), str(reason)))
        except (ValueError, ArithmeticError, LookupError, TypeError, AssertionError) as error:
            words = str(error).splitlines()[0][:60] if str(error) else ""
            own = "" if isinstance(error, (ValueError, ArithmeticError)) else PLANNERS
            skipped.append((row.source, stack_of(row), f"{own}{type(error).__name__} {words}"))
    return answers, skipped


def report(answers: Sequence[Answer], skipped: Sequence[tuple[str, str, str]]) -> None:
    """Print all tables."""
    halves: list[tuple[str, Callable[[Answer], bool]]] = [
        ("all rows", lambda a: True),
        ("fit half", lambda a: a.row.is_fit_half),
        ("report half", lambda a: not a.row.is_fit_half),
    ]
    fitted = {a.row.setting for a in answers if a.row.is_fit_half and a.row.kind == "time"}
    for title, belongs in halves:
        part = [a for a in answers if belongs(a)]
        print(f"\n=== {title}: {len(part)} rows")
        step_times(part)
        spoken([(a, a.said) for a in part if a.row.kind == "time"], "step time, stack and software in the spec")
        if title == "report half":
            seen_and_unseen([a for a in part if a.row.kind == "time"], fitted)
        spoken([(a, a.alone) for a in part], "step time, only the stack in the spec")
        intervals(part)
        rankings(part)
        fit(part)
        memory(part)
        peaks = [(a, a.said) for a in part if a.row.kind == "peak"]
        spoken(peaks, "peak memory, stack and software in the spec", below="too low")
    without = [a for a in answers if isinstance(a.said, str) and a.said != UNASKED]
    unsaid = [(a.row.source, a.planned.stack, str(a.said)) for a in without]
    skips("skipped", skipped)
    skips("predicted with all settings, but not as a spec", unsaid)


def skips(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the number of rows by source, stack, and reason."""
    print(f"\n{title}: {len(rows)} rows")
    for (source, stack, reason), count in sorted(Counter(rows).items(), key=lambda told: (-told[1], told[0])):
        print(f"  {count:>5}  {source:<40.40} {stack:<14} {reason}")


def grouped(answers: Sequence[Answer]) -> Iterable[tuple[str, list[Answer]]]:
    """Yield all answers, then each stack, then each source."""
    yield "all", list(answers)
    for stack in sorted({a.planned.stack for a in answers}):
        yield f"stack {stack}", (part := [a for a in answers if a.planned.stack == stack])
        tuned = [a for a in part if not a.planned.own_tests]
        if 0 < len(tuned) < len(part):  # Megatron-LM's functional tests: tiny, deterministic, bound by the host
            yield f"stack {stack} without its own tests", tuned
    for source in sorted({a.row.source for a in answers}, key=str.lower):
        yield source, [a for a in answers if a.row.source == source]


def _heads(title: str, below: str = "too fast") -> str:
    columns = f"{'mean':>7} {'median':>7} {'p90':>8} {'worst':>8} {'bias':>7} {below:>9} {'inside':>6}"
    return f"{title:<52} {'rows':>5} {columns}"


def step_times(answers: Sequence[Answer]) -> None:
    """Print the errors with all settings known, which have no interval."""
    times = [a for a in answers if a.row.kind == "time"]
    print(_heads("step time, all settings known"))
    for name, part in grouped(times):
        _errors(name, [a.error for a in part], [])
    alike: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for a in times:
        alike[a.planned.stack, a.planned.cluster.accelerator.name, *a.row.setting[:4]].append(abs(a.error))
    if alike:
        off = mean(mean(each) for each in alike.values())
        print(f"{'mean over stacks, GPUs, and models':<52} {len(alike):>5} {off:>7.1%}")


def seen_and_unseen(times: Sequence[Answer], fitted: set[tuple[str, ...]]) -> None:
    """Split the report half by whether the fit half has the same model, GPU, and precision."""
    for title, seen in (("seen", True), ("unseen", False)):
        part = [a for a in times if (a.row.setting in fitted) is seen]
        _errors(f"{title} in the fit half, all settings known", [a.error for a in part], [])
        said = [(a.said, a.measured) for a in part if isinstance(a.said, Said)]
        held = [is_within_margin(one.share, measured, one.predicted) for one, measured in said]
        _errors(
            f"{title} in the fit half, stack and software",
            [one.predicted / measured - 1 for one, measured in said],
            held,
        )


def spoken(answers: Sequence[tuple[Answer, Said | str]], title: str, below: str = "too fast") -> None:
    """Print the errors of the estimates on a page, and how often the interval contains the measured value."""
    print(_heads(title, below))
    said = {id(a): one for a, one in answers if isinstance(one, Said)}
    for name, part in grouped([a for a, _ in answers]):
        pairs = [(said[id(a)], a.measured) for a in part if id(a) in said]
        told = [is_within_margin(one.share, measured, one.predicted) for one, measured in pairs]
        _errors(name, [one.predicted / measured - 1 for one, measured in pairs], told)


def _errors(name: str, off: Sequence[float], told: Sequence[bool]) -> None:
    if found := errors(off):
        print(
            f"{name:<52.52} {found.rows:>5} {found.mean:>7.1%} {found.median:>7.1%} {found.most:>8.1%}"
            f" {found.worst:>+8.0%} {found.bias:>+7.1%} {found.too_fast:>9.0%}"
            f" {f'{mean(told):.0%}' if told else '-':>6}"
        )


def intervals(answers: Sequence[Answer]) -> None:
    """What `planner.hardware.stacks` tells beside what these rows by themselves would have it tell."""
    print(f"{'interval of a step, as a spec says it':<70} {'rows':>5} {'told':>7} {'needed':>7} {'inside':>6}")
    kinds: dict[str, list[tuple[Said, float]]] = defaultdict(list)
    for a in answers:
        for said in dict.fromkeys((a.said, a.alone)) if a.row.kind == "time" else ():
            if isinstance(said, Said):
                kinds[f"{a.planned.stack}, {said.known}, {said.waits}"].append((said, a.measured))
    for name, part in sorted(kinds.items()):
        needed = sure([compute_error(measured, said.predicted) for said, measured in part])
        told = max(said.share for said, _ in part)
        held = mean(is_within_margin(said.share, measured, said.predicted) for said, measured in part)
        print(f"{name:<70} {len(part):>5} {told:>7.0%} {needed:>7.0%} {held:>6.0%}")


def rankings(answers: Sequence[Answer]) -> None:
    """Within a sweep: three configurations or more of one file, model, kernels, sequence, precision and number of GPUs.

    `regret` is of what a search takes first, of all in the sweep that are said to fit, over the best that ran; `ran
    out`: of how many sweeps that had no memory.
    """
    sweeps: dict[tuple[str, ...], list[Answer]] = defaultdict(list)
    for a in answers:
        if a.row.kind in ("time", "out_of_memory"):
            sweeps[*a.row.sweep, repr(a.planned.kernels)].append(a)
    found: dict[str, list[tuple[int, float, Choice]]] = defaultdict(list)
    for part in sweeps.values():
        ran = [a for a in part if a.row.kind == "time"]
        times = _configurations(ran)
        order = kendall(times) if len(times) >= 3 else None
        offered = _configurations([a for a in ran if a.fits])
        short = [(a.predicted / a.row.count("global_batch"), None) for a in part if a.fits and a not in ran]
        choice = first_choice([*offered, *short], min((t for _, t in times), default=0.0))
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
        told = f"{mean(regrets):>7.1%} {max(regrets):>7.1%}" if regrets else f"{'-':>7} {'-':>7}"
        print(f"{name:<52.52} {rows:>5} {len(results):>7} {tau:>8.2f} {told} {lost:>8}")


def _configurations(sweep: Sequence[Answer]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds a sequence of each configuration; one measured often counts once, by its mean."""
    measured: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    for a in sweep:
        measured[a.planned.spec.model_dump_json(), repr(a.planned.kernels)].append(a)
    return [
        (
            mean(a.predicted / a.row.count("global_batch") for a in same),
            mean(a.measured / a.row.count("global_batch") for a in same),
        )
        for same in measured.values()
    ]


def fit(answers: Sequence[Answer]) -> None:
    """Print whether rows fit; `of out` is the share of out-of-memory rows that are predicted to fit."""
    heads = ("ran:fits", "ran:not", "out:fits", "out:not", "right", "falsely", "of out")
    print(f"{'fit (measured:predicted)':<52} {'rows':>5} " + " ".join(f"{head:>8}" for head in heads))
    told = [a for a in answers if a.row.kind in ("time", "out_of_memory")]
    out = {a.row.source for a in told if a.row.kind == "out_of_memory"}
    parts = [("sources with out-of-memory rows", [a for a in told if a.row.source in out]), *grouped(told)]
    for name, part in parts:
        found = confusion([(a.fits, a.row.kind == "time") for a in part])
        if found:
            counts = " ".join(f"{n:>8}" for n in found)
            missed = "-" if found.missed is None else f"{found.missed:.1%}"
            print(f"{name:<52.52} {found.rows:>5} {counts} {found.right:>8.1%} {found.falsely_fits:>8.1%} {missed:>8}")


def memory(answers: Sequence[Answer]) -> None:
    print(f"{'memory':<52} {'rows':>5} {'mean':>7} {'median':>7} {'worst':>8} {'bias':>7}")
    for kind in ("peak", "steady"):
        for name, part in grouped([a for a in answers if a.row.kind == kind]):
            if found := errors([a.error for a in part]):
                label = f"{kind}, {name}"
                print(
                    f"{label:<52.52} {found.rows:>5} {found.mean:>7.1%} {found.median:>7.1%} {found.worst:>+8.0%}"
                    f" {found.bias:>+7.1%}"
                )


def worst(answers: Sequence[Answer], number: int) -> None:
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
    found, left_out = answers_of(rows)
    report(found, left_out)
    if options.worst:
        worst(found, options.worst)
    if options.gap:
        print_gap(found)
    print("\nother rows, not used for constants")
    vtrain(options.vtrain_multi)
    if any(reason.startswith(PLANNERS) for *_, reason in left_out):
        sys.exit("The planner failed on some rows. The skipped rows list them.")
