"""Published large models: templates reach the published speed, and the search finds the published layouts."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.giants import MAX_LAYOUTS, PUBLISHED_RUNS, PublishedRun, list_reasons, list_time_parts
from planner.cost.estimate import estimate, parse_plannable
from planner.cost.timing import get_step_timing
from planner.facts.presets import TEMPLATES
from planner.facts.spec_rules import find_problems
from planner.hardware.catalog import CLUSTERS
from planner.search.layout_search import Constraints, _Finder, search


@pytest.mark.parametrize(
    ("name", "tflops"), [("llama3-405b-8k", 430), ("llama3-405b-16k", 400), ("llama3-405b-long", 380)]
)
def test_llama_3_405b_reaches_published_speed(name: str, tflops: float) -> None:
    """Compare with 2407.21783 table 4."""
    template = TEMPLATES[name]
    made = estimate(parse_plannable(template.spec), CLUSTERS[template.cluster])
    each = made["time"]["model_flops"] / made["time"]["step_s"] / made["world_size"] / 1e12
    assert each == pytest.approx(tflops, rel=0.1)
    assert made["fits"] or name == "llama3-405b-8k"


def test_llama_3_405b_with_few_data_ranks_fits_with_sharded_gradients() -> None:
    """2407.21783 section 3.3.2 shards optimizer states and gradients.

    ZeRO-1 keeps 12.6 GiB of fp32 gradients whole.
    """
    template = TEMPLATES["llama3-405b-8k"]
    sharded = {**template.spec, "layout": {**template.spec["layout"], "zero": 2}}
    fits = [estimate(parse_plannable(x), CLUSTERS[template.cluster])["fits"] for x in (template.spec, sharded)]
    assert fits == [False, True]


@pytest.mark.parametrize("giant", PUBLISHED_RUNS, ids=[g.name for g in PUBLISHED_RUNS])
def test_published_layouts_are_valid(giant: PublishedRun) -> None:
    assert find_problems(giant.spec) == []


@pytest.mark.slow
def test_time_limited_search_finds_the_best_layout_of_405b() -> None:
    """Within a page's few seconds, the order of degrees alone gives a step that is a quarter longer."""
    spec = parse_plannable(TEMPLATES["llama3-405b-8k"].spec)
    found = _Finder(spec, CLUSTERS["h100"], Constraints(16384)).find()
    soon = min(one.timing.step_s for one in islice(found, 300))
    assert soon == pytest.approx(min(soon, *(one.timing.step_s for one in found)), rel=0.02)


@pytest.mark.slow
def test_first_layouts_have_the_degrees_of_bloom_and_explain_its_slower_micro_batch() -> None:
    """Bloom's micro-batch of 2 fits with whole layers recomputed. One sequence recomputes less and is faster."""
    giant = next(g for g in PUBLISHED_RUNS if g.name.startswith("BLOOM"))
    cluster, theirs = CLUSTERS[giant.cluster], giant.spec.layout
    best = search(giant.spec, cluster, Constraints(theirs.world_size), limit=MAX_LAYOUTS).best
    assert (theirs.tp, theirs.pp, theirs.dp) in {(x.tp, x.pp, x.dp) for x in (found.spec.layout for found in best)}
    assert list_reasons(best[0].timing, get_step_timing(giant.spec, cluster)).startswith("recompute -")


def test_reasons_list_the_parts_that_differ() -> None:
    giant = PUBLISHED_RUNS[0]
    theirs = get_step_timing(giant.spec, CLUSTERS[giant.cluster])
    assert sum(list_time_parts(theirs).values()) == pytest.approx(theirs.step_s)
    faster = theirs._replace(step_s=theirs.step_s - theirs.bubble_s, bubble_s=0.0)
    assert list_reasons(faster, theirs) == f"bubble {-theirs.bubble_s / theirs.step_s:+.1%}"
    assert list_reasons(theirs, theirs) == ""
