"""Checks of runs against limits and baselines. Compared runs need one spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from meshboard import answers
from meshboard.errors import WrongError
from meshboard.gate.measures import (
    TRAFFIC,
    Limit,
    MissingValueError,
    RunMeasures,
    format_value,
    get_interval,
    get_mean,
    get_unit,
    parse_facts,
    parse_job,
)

Verdict = Literal["ok", "unsure", "FAIL"]
MAX_NAMED_COLLECTIVES = 8
NO_BASELINE = "A relative limit needs a baseline. Set --baseline."


class CheckResult(NamedTuple):
    """Result of one check.

    Args:
        value: Mean of the runs, or None if it is unknown.
        baseline: Mean of the baseline runs.
        why: Reason for a failed or unsure check.
        low: Lower bound of the 95% interval of `value`, or None if the noise is unknown.
        high: Upper bound of the interval.
    """

    what: str
    verdict: Verdict
    value: float | None
    baseline: float | None
    bound: float | None
    unit: str
    why: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def ok(self) -> bool:
        return self.verdict != "FAIL"

    @property
    def change(self) -> float | None:
        """Difference relative to the baseline: 0.1 is +10%."""
        if self.value is None or not self.baseline:
            return None
        return (self.value - self.baseline) / abs(self.baseline)


def check_limits(
    runs: Sequence[RunMeasures],
    baselines: Sequence[RunMeasures],
    limits: Sequence[Limit],
    *,
    exact: bool = False,
    as_planned: bool = False,
    sure: bool = False,
) -> list[CheckResult]:
    """Check runs against limits. A check without data fails.

    Bytes and calls are exact, so each run is compared with the newest baseline. For other measures, the mean of the
    runs is compared with the mean of the baselines, and the check fails if the mean exceeds the limit. If the mean is
    within the limit and its confidence interval is not, the check is unsure.

    Args:
        baselines: Baseline runs, newest first.
        exact: Fail unless bytes and calls of each axis and collective equal the baseline.
        as_planned: Fail unless the measured traffic equals the predicted traffic.
        sure: Fail checks that are unsure or have no interval.
    """
    results = [_check_limit(runs, baselines, limit, sure) for limit in dict.fromkeys(limits)]
    if exact:
        results += _check_exact(runs, baselines)
    if as_planned:
        results += [_check_plan(run, _get_suffix(run, runs)) for run in runs]
    return _number_duplicates(results)


def _number_duplicates(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Give each check its own name, because readers of JUnit merge equal names."""
    counts = Counter[str]()
    numbered = []
    for result in results:
        counts[result.what] += 1
        number = counts[result.what]
        numbered.append(result if number == 1 else result._replace(what=f"{result.what} {number}"))
    return numbered


def _get_suffix(run: RunMeasures, runs: Sequence[RunMeasures]) -> str:
    return f" of {run.name}" if len(runs) > 1 else ""


def _check_limit(
    runs: Sequence[RunMeasures], baselines: Sequence[RunMeasures], limit: Limit, sure: bool
) -> CheckResult:
    what, unit = f"{limit.measure} ({limit.side})", get_unit(limit.measure)
    try:
        if TRAFFIC.fullmatch(limit.measure):
            return _check_traffic(what, runs, baselines[:1], limit)
        values = [run.get_value(limit.measure) for run in runs]
        baseline_values = [run.get_value(limit.measure) for run in baselines]
    except MissingValueError as error:
        return CheckResult(what, "FAIL", None, None, None, unit, str(error))
    mean = get_mean(values)
    if limit.relative and not baseline_values:
        return CheckResult(what, "FAIL", mean, None, None, unit, NO_BASELINE)
    baseline = get_mean(baseline_values) if baseline_values else None
    result = CheckResult(what, "FAIL", mean, baseline, limit.get_bound(baseline or 0.0), unit)
    compared = baseline_values if limit.relative else ()
    is_met = limit.is_met_by(mean, baseline or 0.0)
    return _decide(result, is_met, sure, get_interval(values, compared), _count_runs(values, compared))


def _decide(
    result: CheckResult, is_met: bool, sure: bool, interval: tuple[float, float] | None, runs: str
) -> CheckResult:
    """Set the verdict and the interval of a result. `runs` describes the runs in messages."""
    if interval is None:
        words = f"The noise of {runs} is unknown. --sure needs two runs or two baseline runs, with values above 0."
        verdict: Verdict = "ok" if is_met and not sure else "FAIL"
        return result._replace(verdict=verdict, why=words if is_met and sure else "")
    low, high = interval
    bound = result.bound
    assert bound is not None, "a limit has a bound"
    result = result._replace(low=low, high=high)
    if low == high or not low <= bound <= high:
        return result._replace(verdict="ok" if is_met else "FAIL")
    if not is_met:
        words = f"The mean exceeds the limit by less than the noise of {runs}. Submit more runs to decide."
        return result._replace(why=words)
    words = f"The mean is within the limit, but the margin is smaller than the noise of {runs}."
    return result._replace(verdict="FAIL" if sure else "unsure", why=words)


def _count_runs(values: Sequence[float], baseline_values: Sequence[float]) -> str:
    runs = f"{len(values)} run{'s' if len(values) > 1 else ''}"
    baselines = f"{len(baseline_values)} baseline run{'s' if len(baseline_values) > 1 else ''}"
    return f"{runs} and {baselines}" if baseline_values else runs


def _check_traffic(what: str, runs: Sequence[RunMeasures], newest: Sequence[RunMeasures], limit: Limit) -> CheckResult:
    """Check the run that is furthest from the limit, and name collectives that differ.

    Raises:
        MissingValueError
    """
    kind, *key_start = limit.measure.split(".")
    unit = get_unit(limit.measure)
    worst = (max if limit.side == "max" else min)(runs, key=lambda run: run.get_value(limit.measure))
    value = worst.get_value(limit.measure)
    if limit.relative and not newest:
        return CheckResult(what, "FAIL", value, None, None, unit, NO_BASELINE)
    known = {key for run in (*runs, *newest) for key in run.get_traffic(kind)}
    if not any(list(key)[: len(key_start)] == key_start for key in known):
        names = ", ".join(sorted({".".join(key[: len(key_start)]) for key in known})) or "none"
        why = f"No run has traffic of {'.'.join(key_start)}. Use one of: {names}."
        return CheckResult(what, "FAIL", None, None, None, unit, why)
    baseline = newest[0].get_value(limit.measure) if newest else None
    is_met = limit.is_met_by(value, baseline or 0.0)
    why = "" if is_met or not newest else _list_changes(kind, key_start, worst, newest[0])
    if not is_met and len(runs) > 1:
        why = f"{worst.name}: {why}" if why else worst.name
    return CheckResult(what, "ok" if is_met else "FAIL", value, baseline, limit.get_bound(baseline or 0.0), unit, why)


def _list_changes(kind: str, key_start: Sequence[str], run: RunMeasures, baseline: RunMeasures) -> str:
    """Return the changes of each axis and collective, largest first."""
    ours, theirs = run.get_traffic(kind), baseline.get_traffic(kind)
    keys = [key for key in sorted({*ours, *theirs}) if list(key)[: len(key_start)] == list(key_start)]
    changes = {key: ours.get(key, 0.0) - theirs.get(key, 0.0) for key in keys}
    changed = sorted((key for key in keys if changes[key]), key=lambda key: -abs(changes[key]))
    unit = " calls" if kind == "calls" else ""
    named = [
        f"{axis} {op} {format_value(changes[axis, op], get_unit(kind), '+')}{unit}"
        for axis, op in changed[:MAX_NAMED_COLLECTIVES]
    ]
    more = len(changed) - MAX_NAMED_COLLECTIVES
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _check_exact(runs: Sequence[RunMeasures], baselines: Sequence[RunMeasures]) -> list[CheckResult]:
    if not baselines:
        return [CheckResult("exact", "FAIL", None, None, None, "", "--exact needs a baseline. Set --baseline.")]
    return [
        result
        for run in runs
        for kind in ("bytes", "calls")
        for result in _compare_traffic(kind, run, baselines[0], _get_suffix(run, runs))
    ]


def _compare_traffic(kind: str, run: RunMeasures, baseline: RunMeasures, suffix: str) -> list[CheckResult]:
    ours, theirs = run.get_traffic(kind), baseline.get_traffic(kind)
    unit = get_unit(kind)
    if not ours or not theirs:
        missing = run if not ours else baseline
        why = missing.describe_missing(kind, missing.no_traffic_reason)
        return [CheckResult(f"{kind} (exact){suffix}", "FAIL", None, None, None, unit, why)]
    results = []
    for axis, op in sorted({*ours, *theirs}):
        value, expected = ours.get((axis, op), 0.0), theirs.get((axis, op), 0.0)
        verdict: Verdict = "ok" if value == expected else "FAIL"
        results.append(CheckResult(f"{kind}.{axis}.{op} (exact){suffix}", verdict, value, expected, expected, unit))
    return results


def _check_plan(run: RunMeasures, suffix: str) -> CheckResult:
    what = f"as planned{suffix}"
    if run.plan_difference is None:
        why = f"Some ranks of {run.name} have no traffic check."
        return CheckResult(what, "FAIL", None, None, None, "B", why)
    num_bytes, calls = run.plan_difference
    verdict: Verdict = "ok" if run.plan_difference == (0, 0) else "FAIL"
    return CheckResult(what, verdict, num_bytes, None, 0.0, "B", f"{calls} calls differ" if calls else "")


COMPARED_FIELDS = ("kind", "model", "layout", "train", "resources", "script", "lab", "dry_ranks")
# These fields change no measurement. The seed is part of the noise. The board has an equal list.
IGNORED_FIELDS = {
    *("model.preset", "train.seed"),
    *(f"resources.{name}" for name in ("host", "pool", "labels", "max_hosts", "stack", "software")),
    *(f"resources.slurm.{name}" for name in ("partition", "account", "qos", "time_limit", "constraint", "exclude")),
}
MAX_NAMED_FIELDS = 4


class BaselineRuns(NamedTuple):
    """Runs of a baseline, newest first.

    Args:
        spec: Spec of the runs, or None if the board does not return it.
        excluded: Runs of the branch that are not part of the baseline, as the board returns them.
        reasons: A sentence per reason for excluded runs.
    """

    name: str
    runs: list[RunMeasures]
    spec: answers.StoredSpec | None
    excluded: Sequence[answers.ExcludedRun] = ()
    reasons: Sequence[str] = ()


def baseline_from_job(name: str, job: answers.JobDetail) -> BaselineRuns:
    """Return a baseline of one job. Raises MissingValueError if the job has not succeeded."""
    return BaselineRuns(name, [parse_job(job)], job.get("spec"))


def baseline_from_branch(name: str, content: answers.Baseline) -> BaselineRuns:
    """Return the baseline of a branch. An older board returns neither the spec nor excluded runs."""
    runs = [parse_facts(run["name"], run["facts"]) for run in content["runs"]]
    excluded = content.get("left_aside", ())
    return BaselineRuns(name, runs, content.get("spec"), excluded, explain_excluded(name, content))


def explain_excluded(name: str, content: answers.Baseline) -> list[str]:
    """Return a sentence per reason for which runs of a branch are not part of the baseline."""
    excluded, jobs = content.get("left_aside", ()), dict[str, list[str]]()
    for run in excluded:
        jobs.setdefault(run["why"], []).append(run["job"])
    total = len(content["runs"]) + len(excluded)
    return [
        f"Baseline {name} excludes {len(ids)} of {total} runs: {reason} ({', '.join(ids)})"
        for reason, ids in jobs.items()
    ]


def check_same_baselines(baselines: Sequence[BaselineRuns]) -> None:
    """Raise WrongError if the baselines do not have one known spec."""
    if len(baselines) < 2:
        return
    for one in baselines:
        if one.spec is None:
            raise WrongError(
                f"Baseline {one.name} has no stored spec, so the gate cannot combine it with other baselines."
                " Use one baseline."
            )
    check_same_spec([{"id": one.name, "spec": one.spec} for one in baselines], "baselines")


def check_same_spec(runs: Sequence[Mapping[str, Any]], what: str = "jobs") -> None:
    """Check that runs, each with `id` and `spec`, have one spec. Else their spread is not noise.

    Raises:
        WrongError: Specs differ. Names the first fields.
    """
    first = runs[0]
    for run in runs[1:]:
        fields = [
            f"{field}: {ours!r} and {theirs!r}"
            for field, ours, theirs in _find_differences(_select_fields(first), _select_fields(run), "")
        ]
        if fields:
            more = f" and {len(fields) - MAX_NAMED_FIELDS} more" if len(fields) > MAX_NAMED_FIELDS else ""
            words = (
                f"{what.capitalize()} {first['id']} and {run['id']} have different specs, so they cannot be averaged"
            )
            raise WrongError(f"{words}: {', '.join(fields[:MAX_NAMED_FIELDS])}{more}")


def _select_fields(run: Mapping[str, Any]) -> dict[str, Any]:
    spec = run.get("spec") or {}
    return {name: spec[name] for name in COMPARED_FIELDS if name in spec}


def _find_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield different fields of two specs. A spec of an older version lacks newer fields, which are skipped."""
    for name in ours:
        field = path + name
        if name not in theirs or field in IGNORED_FIELDS or ours[name] == theirs[name]:
            continue
        if isinstance(ours[name], dict) and isinstance(theirs[name], dict):
            yield from _find_differences(ours[name], theirs[name], f"{field}.")
        else:
            yield field, ours[name], theirs[name]
