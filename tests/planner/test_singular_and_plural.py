"""Singular and plural in the planner's messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, Discriminator, ValidationError

from planner.cost.estimate import estimate
from planner.explain import explain
from planner.facts.kinds import format_world_size
from planner.facts.parse_spec import convert_error, parse_fields, parse_spec
from planner.facts.spec import Layout
from planner.facts.spec_rules import find_problems
from planner.facts.validation import SpecError, format_count
from planner.hardware.catalog import CLUSTERS
from planner.report import format_estimate
from planner.search.neighbors import find_impossible_options
from tests.planner.wrong_specs import GOOD

ONE = {**GOOD, "layout": {"dp": 1}, "train": {"global_batch": 1, "micro_batches": 1, "seq_len": 128, "steps": 20}}


def test_count_of_one_uses_the_singular() -> None:
    assert [format_count(n, "slot") for n in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
    assert [format_count(n, "slot") for n in (0, 1, 2)] == ["0 slots", "1 slot", "2 slots"]
    assert format_count(1, "micro-batch", "micro-batches") == "1 micro-batch"
    assert format_count(3, "micro-batch", "micro-batches") == "3 micro-batches"


def test_explanations_of_traffic_use_the_singular() -> None:
    traffic = next(told for told in explain(parse_spec(GOOD), CLUSTERS["cpu"]) if told["figure"] == "traffic")
    numbers = {term["name"]: term["numbers"] for term in traffic["terms"]}
    assert numbers["world all-reduce over 4 ranks"].startswith("1 call, 16 B; sends ")


def test_rejections_use_the_singular() -> None:
    assert format_world_size(Layout()) == "dp 1 x pp 1 x tp 1 = 1 rank"
    with pytest.raises(SpecError, match=r"`train.micro_batches` is 1, but 1F1B on pp 2 needs 2"):
        parse_spec({**ONE, "layout": {"pp": 2}})
    with pytest.raises(SpecError, match=r"= 2 ranks, but the largest CPU host has 1 slot\. Use at most 1 rank\.$"):
        parse_spec({**ONE, "layout": {"tp": 2}}, slots=1)
    slurm = {"engine": "slurm", "slurm": {"nodes": 2}}
    with pytest.raises(SpecError, match=r"1 slot is not divisible by 2\. Use 1\."):
        parse_spec({**ONE, "resources": slurm})


def test_plan_words_use_the_singular() -> None:
    spec, cpu = parse_spec(ONE), CLUSTERS["cpu"]
    text = format_estimate(spec, estimate(spec, cpu), [])
    assert "1 rank (" in text
    assert "micro-batch 1 sequence x 1" in text
    assert "1 micro-batches" not in str(explain(spec, cpu))


def get_problem(text: str) -> str:
    raise ValueError(f"is no host {{like}} {text}")


class First(BaseModel):
    kind: Literal["first"]


class Second(BaseModel):
    kind: Literal["second"]


class Drawn(BaseModel):
    """Raise a validator's own message, and select by a quoted tag."""

    host: Annotated[str, AfterValidator(get_problem)] = ""
    part: Annotated[First | Second, Discriminator("kind")] | None = None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "{0}"}, '`host` is "{0}", which is no host {like} {0}.'),
        (
            {"part": {"kind": "{kind}"}},
            "`part` is an object. Input tag '{kind}' found using 'kind' does not match any of the expected tags",
        ),
    ],
)
def test_validator_message_and_quoted_tag_are_unchanged(given: Any, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Drawn.model_validate(given)
    (error,) = refused.value.errors(include_url=False)
    assert convert_error(error, Drawn).message.startswith(words)


def test_indivisible_degree_is_one_problem() -> None:
    """The heads, key/value heads and ffn_hidden_size of gpt-tiny are not divisible by 3."""
    spec = parse_fields({**GOOD, "layout": {"tp": 3}})
    assert [one.message for one in find_problems(spec) if one.field == "layout.tp"] == [
        "`layout.tp` is 3, but 4 heads are not divisible by 3. Use 1, 2 or 4."
    ]


def test_reason_of_a_choice_does_not_claim_that_it_is_on() -> None:
    spec = parse_fields({**GOOD, "layout": {"tp": 2}, "train": {**GOOD["train"], "seq_len": 127}})
    assert find_impossible_options(spec)["sequence_parallel"]["true"] == (
        "`layout.sequence_parallel` needs a seq_len divisible by tp 2, but seq_len is 127. Use seq_len 126 or 128."
    )
