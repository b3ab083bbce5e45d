"""What a page says is proven of a run, and what is not."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.support.modules import call


@pytest.mark.parametrize(
    ("gradient", "limit", "precision", "words"),
    [
        (6e-7, 1e-5, "fp32", "gradients match the reference within 6e-7"),
        (0.059, 0.1, "bf16", "gradients differ from the reference by at most 0.059, within the bf16 limit of 0.1"),
        (0.26, 0.1, "bf16", "gradients differ from the reference by at most 0.26, within the bf16 limits"),
        (0.02, 0.1, "fp32", "gradients differ from the reference by at most 0.02, within the limit of 0.1"),
    ],
)
def test_what_is_beside_one_process_is_called_equal_only_where_rounding_alone_is_between(
    modules: Page, gradient: float, limit: float, precision: str, words: str
) -> None:
    figures = {"steps": 1, "tensors": 60, "update": 2e-4, "loss": 2e-7, "norm": 7e-7, "seconds": 0.3}
    one = {"state": "equal", "why": "the loss ran away", "gradient": gradient, "limit": limit, **figures}
    told = call(modules, "job/proof.js", "return m.processProof({one_process: x[0]}, true, x[1])", [one, precision])
    assert (told["tone"], told["words"]) == ("good", words)
    assert told["more"].endswith("The check took 300 ms.\nthe loss ran away")


@pytest.mark.parametrize(
    ("state", "finished", "tone", "words", "more"),
    [
        ("due", False, "good", "gradients match the reference within 6e-7", "A final check runs when the job ends."),
        ("due", True, "good", "gradients match the reference within 6e-7", "The run ended before the final check."),
        (
            "equal",
            True,
            "good",
            "gradients match the reference within 6e-7",
            "Final check (one extra step",
        ),
        (
            "apart",
            True,
            "bad",
            "differs from the reference in the final check",
            "Final check (one extra step",
        ),
        ("not checked", True, "good", "gradients match the reference within 6e-7", "No final check: nan"),
    ],
)
def test_what_one_step_more_showed_is_told_with_the_first(
    modules: Page, state: str, finished: bool, tone: str, words: str, more: str
) -> None:
    nothing = {
        "tensors": 60,
        "update": 2e-4,
        "loss": 2e-7,
        "norm": 7e-7,
        "seconds": 0.3,
        "gradient": 6e-7,
        "limit": 1e-5,
    }
    proof = {
        "one_process": {"state": "equal", "why": "", "steps": 3, **nothing},
        "end": {"state": state, "why": "nan", "steps": 1, **nothing},
    }
    told = call(modules, "job/proof.js", "return m.processProof(x[0], x[1], 'fp32')", [proof, finished])
    assert (told["tone"], told["words"]) == (tone, words)
    assert told["more"].splitlines()[1].startswith(more)
    if state in ("equal", "apart"):
        assert told["more"].splitlines()[2] == "nan", "its limits, and of which step it was beyond them"


@pytest.mark.parametrize(
    ("turned", "words"),
    [
        (0, "for 9,216 tokens, summed over layers. The router of the reference chooses the same experts as the run."),
        (
            1,
            "summed over layers. The router of the reference prefers another expert for 1 token, "
            "by at most 4e-3 of the spread of expert log-probabilities.",
        ),
        (
            44,
            "summed over layers. The router of the reference prefers another expert for 44 tokens, "
            "by at most 4e-3 of the spread of expert log-probabilities.",
        ),
    ],
)
def test_choices_that_one_process_took_over_are_told(modules: Page, turned: int, words: str) -> None:
    figures = {"steps": 3, "tensors": 60, "update": 0.2, "loss": 2e-7, "norm": 7e-7, "seconds": 0.3, "gradient": 0.02}
    choices = {"tokens": 9216, "turned": turned, "gap": 0.004 if turned else 0}
    one = {"state": "equal", "why": "bf16 allows ...", "limit": 0.1, "choices": choices, **figures}
    told = call(modules, "job/proof.js", "return m.processProof({one_process: x}, true, 'bf16')", one)
    assert told["more"].endswith(f"{words}\nbf16 allows ...")


def test_a_rank_that_trained_on_other_rows_is_told_where_replicas_are(modules: Page) -> None:
    rows = {"what": "rows", "name": "step 1", "axis": "dp", "ranks": [3], "apart": 1, "limit": 0}
    proof = {"replicas": {"steps": [1], "parts": 60, "copied": 60, "apart": 0}, "wrong": [rows]}
    told = call(modules, "job/proof.js", "return m.replicaProof(x)", proof)
    assert (told["tone"], told["words"]) == ("bad", "1 rank trained on other data")


@pytest.mark.parametrize(
    ("end", "tone", "words"),
    [
        ("due", "", "not checked"),
        ("equal", "good", "gradients match the reference within 6e-7"),
        ("apart", "bad", "differs from the reference in the final check"),
    ],
)
def test_an_attempt_without_a_step_of_its_own_is_told_by_its_one_step_more(
    modules: Page, end: str, tone: str, words: str
) -> None:
    figures = {"tensors": 60, "update": 0, "loss": 0, "norm": 0, "seconds": 0.3, "gradient": 6e-7, "limit": 1e-5}
    one = {"state": "not checked", "why": "no step was left to train", "steps": 4, **figures}
    proof = {"one_process": one, "end": {"state": end, "why": "", "steps": 1, **figures}}
    told = call(modules, "job/proof.js", "return m.processProof(x, true, 'fp32')", proof)
    assert (told["tone"], told["words"]) == (tone, words)
    assert told["more"].startswith("no step was left to train\n")


def test_a_verdict_of_nothing_says_so(modules: Page) -> None:
    row = {"predicted_bytes": 0, "measured_bytes": 0, "predicted_count": 0, "measured_count": 0}
    script = "return m.trafficProof({verdicts: new Map([[0, x]])}, null, true, true, 1)"
    nothing = call(modules, "job/proof.js", script, [row])
    assert nothing["more"] == "Total traffic difference over all phases of 1 rank (no traffic expected, none measured)."
    barrier = {**row, "predicted_count": 1, "measured_count": 1}
    assert (
        call(modules, "job/proof.js", script, [barrier])["more"]
        == "Total traffic difference over all phases of 1 rank."
    )


def test_verdicts_of_some_ranks_are_no_verdict_of_all(modules: Page) -> None:
    row = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_bytes": 8, "measured_bytes": 8}
    row |= {"predicted_count": 1, "measured_count": 1}
    script = """
    const told = m.trafficProof({verdicts: new Map(x.map((row, i) => [i, [row]]))}, null, true, true, 8);
    return [told.tone, told.words, told.more];
    """
    some = call(modules, "job/proof.js", script, [row, row])
    assert some == ["", "0 B, 0 calls", "Total traffic difference over all phases of 2 of 8 ranks."]
    assert call(modules, "job/proof.js", script, [row] * 8) == [
        "good",
        "0 B, 0 calls",
        "Total traffic difference over all phases of 8 ranks.",
    ]
    table = """
    const [body, summary] = [document.createElement("tbody"), document.createElement("p")];
    m.showVerdicts(body, summary, {verdicts: new Map(x.map((row, i) => [i, [row]]))}, 8);
    return [summary.textContent, summary.dataset.tone];
    """
    agree = "no difference in bytes or calls."
    assert call(modules, "job/tables.js", table, [row, row]) == [f"2 of 8 ranks: {agree}", ""]
    assert call(modules, "job/tables.js", table, [row] * 8) == [f"All 8 ranks: {agree}", "good"]
