"""The sentence on the page Compare: which run is faster, and why."""

from __future__ import annotations

import pytest

from jobs.pages.jobs.speed_ranking import RunSpeed, compute_speedup, format_seconds, rank_speeds

SLOW = RunSpeed("demo-1", 0.1, 512, {("compute", "compute"): 0.07, ("exposed", "tp"): 0.03, ("hidden", "dp"): 0.5})
FAST = RunSpeed("demo-2", 0.08, 512, {("compute", "compute"): 0.072, ("exposed", "tp"): 0.008})


def text(*runs: RunSpeed | None, baseline: int = 0) -> str:
    found = rank_speeds(list(runs), baseline)
    return "" if found is None else found.text


def test_names_the_faster_run_and_its_largest_gain() -> None:
    words = (
        "demo-2 is 1.25 times as fast as demo-1: exposed tp communication takes 8.00 ms instead of 30.0 ms per step."
    )
    assert text(SLOW, FAST) == words
    assert text(SLOW, FAST, baseline=1) == words, "the baseline is the fast run"
    found = rank_speeds([SLOW, FAST], 0)
    assert found is not None
    assert found.note == "Step time: 80.0 ms compared with 100 ms."


def test_compares_samples_with_samples_only() -> None:
    one, other = SLOW._replace(unit="samples"), FAST._replace(unit="samples", tokens=1024)
    assert text(one, other) == "demo-2 is 2.50 times as fast as demo-1 in samples per second."
    assert text(one, FAST) == "", "samples are not tokens"


def test_compares_the_fastest_run_with_the_baseline() -> None:
    middle = RunSpeed("demo-3", 0.09, 512, {})
    assert text(SLOW, middle, FAST).startswith("demo-2 is 1.25 times as fast as demo-1: ")
    assert text(SLOW, middle, FAST, baseline=2).startswith("demo-2 is 1.12 times as fast as demo-3")
    assert text(None, middle, FAST).startswith("demo-2 is 1.12 times as fast as demo-3"), "the baseline has no step"


@pytest.mark.parametrize(
    ("fast", "words"),
    [
        (FAST._replace(parts={}), "demo-2 is 1.25 times as fast as demo-1."),
        (
            FAST._replace(parts={("compute", "compute"): 0.068, ("exposed", "tp"): 0.028}),
            "demo-2 is 1.25 times as fast as demo-1.",
        ),
        (FAST._replace(step_s=0.0975), "demo-2 and demo-1 are equally fast."),
        (FAST._replace(step_s=0.11, tokens=1024), "demo-2 is 1.82 times as fast as demo-1 in tokens per second."),
        (FAST._replace(tokens=None), ""),
        (None, ""),
    ],
    ids=["no parts", "no large part", "equal", "other batch", "other kind", "not measured"],
)
def test_omits_unknown_parts(fast: RunSpeed | None, words: str) -> None:
    assert text(SLOW, fast) == words


def test_ranks_only_runs_with_the_work_of_the_baseline() -> None:
    gpt, llama = {"model": "gpt", "sequence length": 128}, {"model": "llama", "sequence length": 64}
    slow, fast, other = SLOW._replace(work=gpt), FAST._replace(work=gpt), FAST._replace(name="demo-3", work=llama)
    differs = "The speed is not compared, because the runs differ in model and sequence length."
    assert text(slow, other) == differs
    found = rank_speeds([slow, other, fast], 0)
    assert found is not None
    assert found.text.startswith("demo-2 is 1.25 times as fast as demo-1: ")
    assert found.note.endswith(" demo-3 is not ranked, because its model and sequence length differ.")
    assert compute_speedup(other, slow) is None
    assert compute_speedup(fast, slow) == pytest.approx(1.25)


def test_formats_times_with_three_digits() -> None:
    assert [format_seconds(one) for one in (0, 42e-6, 8e-3, 0.1, 1.5)] == [
        "0 ms",
        "42.0 µs",
        "8.00 ms",
        "100 ms",
        "1.50 s",
    ]
