"""Automatic layout choice: the best layout within the constraints, the reasons, or the reason for none."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from planner.__main__ import main
from planner.facts.spec import JobSpec
from planner.facts.spec_rules import find_problems
from planner.facts.validation import SpecError
from planner.hardware.catalog import CLUSTERS
from planner.hardware.cluster import Cluster
from planner.search.auto_layout import (
    Capacity,
    Choice,
    HostCapacity,
    HostGang,
    find_fastest_layout,
    parse_auto_spec,
    parse_draft,
)
from planner.search.layout_search import Constraints, LayoutSearchResult, search
from planner.search.neighbors import find_neighbors

GIB = 2**30
H100 = CLUSTERS["h100"]
BIG: dict[str, Any] = {
    "model": {"preset": "llama3-8b"},
    "train": {"global_batch": 64, "seq_len": 2048, "precision": "bf16"},
    "resources": {"device": "cuda"},
}


def choose(
    auto: Any,
    *rooms: HostCapacity,
    gangs: Sequence[HostGang] = (),
    cluster: Cluster = H100,
    max_layouts: float = math.inf,
    **changes: Any,
) -> Choice:
    data = {**BIG, **changes, "layout": "auto" if auto is None else {"auto": auto}}
    asked = parse_auto_spec(data)
    assert asked is not None
    there = Capacity(rooms or (HostCapacity(8, cluster.accelerator.memory_bytes),), gangs)
    return find_fastest_layout(parse_draft(data), cluster, asked, there, max_layouts=max_layouts)


def get_problems(
    auto: Any, *rooms: HostCapacity, gangs: Sequence[HostGang] = (), **changes: Any
) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as error:
        choose(auto, *rooms, gangs=gangs, **changes)
    return [(p.field, p.message) for p in error.value.problems]


def test_choice_is_the_first_search_result_and_can_run() -> None:
    choice = choose({"ranks": 8})
    assert find_problems(choice.spec) == []
    best = search(parse_draft({**BIG, "layout": "auto"}), H100, Constraints(8, runnable=True)).best
    assert (choice.spec.layout, choice.spec.train) == (best[0].spec.layout, best[0].spec.train)
    assert choice.chosen["runners_up"][0]["step_s"] == best[1].timing.step_s
    assert choice.chosen["runners_up"][0]["slower"] == pytest.approx(best[1].timing.step_s / best[0].timing.step_s - 1)
    assert choice.chosen["considered"] > 100
    for word in ("per step (data sheet, ", "of 79.10 GiB on the fullest rank", "8 ranks", "slower"):
        assert word in choice.chosen["why"]
    json.dumps(choice.chosen)


def test_zero_is_not_chosen_if_no_other_rank_shares_the_state() -> None:
    """Choose no ZeRO-3 if all ranks divide the model, because validation rejects that layout."""
    tiny = {"model": {"preset": "llama-tiny"}, "train": {"global_batch": 8, "seq_len": 128}}
    choice = choose({"ranks": 4, "zero": 3}, **tiny)
    assert len(choice.chosen["runners_up"]) == 4
    for told in [choice.chosen, *choice.chosen["runners_up"]]:
        assert told["layout"].get("dp", 1) * told["layout"].get("cp", 1) > 1
    [(field, message)] = get_problems({"ranks": 4, "dp": 1, "cp": 1, "zero": 3}, **tiny)
    assert (field, "ZeRO needs dp or cp of 2 or more" in message) == ("layout.auto", True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_small_memory_limit_still_applies(device: str) -> None:
    """A limit below the error margin of a peak leaves no layout that fits."""
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {"seq_len": 128}, "resources": {"device": device}}
    cluster = CLUSTERS["cpu" if device == "cpu" else "h100"]
    [(field, message)] = get_problems({"max_memory_bytes": 2**20}, cluster=cluster, **tiny)
    assert field == "layout.auto"
    assert "memory" in message
    assert message.endswith("GiB of 0.00 GiB per rank.")


def test_choice_and_runners_up_obey_every_constraint() -> None:
    choice = choose({"tp": 2, "zero": [1, 3], "max_ranks": 4, "max_micro_batch": 2})
    assert choice.chosen["asked"] == {"tp": 2, "zero": [1, 3], "max_ranks": 4, "max_micro_batch": 2}
    for told in [choice.chosen, *choice.chosen["runners_up"]]:
        assert told["layout"]["tp"] == 2
        assert told["layout"]["zero"] in (1, 3)
        assert told["ranks"] <= 4
    assert choice.spec.micro_batch_size <= 2


def test_more_ranks_are_chosen_only_if_they_pay() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    lame = CLUSTERS["cpu"].model_copy(update={"node": CLUSTERS["cpu"].node.model_copy(update={"bytes_per_s": 1e5})})
    assert choose(None, HostCapacity(8, 8 * GIB), cluster=lame, **tiny).spec.layout.world_size == 1
    assert choose(None, HostCapacity(8, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny).spec.layout.world_size > 1


def test_memory_limit_is_that_of_the_smallest_candidate_host() -> None:
    roomy = choose({"ranks": 4}, HostCapacity(8, 80 * GIB), HostCapacity(2, 8 * GIB))
    tight = choose({"ranks": 4}, HostCapacity(8, 80 * GIB), HostCapacity(4, 40 * GIB))
    assert roomy.chosen["memory_bytes"] > 40 * GIB, "the host with 2 slots cannot take 4 ranks"
    assert tight.chosen["memory_bytes"] <= 40 * GIB
    assert "The free memory is less than the margin of error of the estimate." in tight.chosen["why"]


def test_choice_reserves_memory_for_the_error_of_the_estimate() -> None:
    """Reject a layout close to a host's 48 GiB, because its peak may be 15% and half a GiB higher."""
    choice = choose({"ranks": 8, "tp": 2, "pp": 1, "cp": 1}, HostCapacity(8, 48 * GIB))
    for told in [choice.chosen, *choice.chosen["runners_up"]]:
        assert 1.15 * told["memory_bytes"] + GIB / 2 <= 48 * GIB
    assert "by less than" not in choice.chosen["why"]


FOUR = HostCapacity(4, 80 * GIB)
SMALL = H100.model_copy(update={"per_node": 4})


def test_several_hosts_give_more_ranks_with_tp_inside_one_host() -> None:
    choice = choose(
        {"max_micro_batch": 2, "zero": [1, 3]}, FOUR, FOUR, gangs=[HostGang((4, 4), 80 * GIB)], cluster=SMALL
    )
    assert choice.spec.layout.world_size == 8
    assert [told["layout"].get("tp", 1) <= 4 for told in [choice.chosen, *choice.chosen["runners_up"]]] == [True] * 5
    assert choose({"max_micro_batch": 2, "zero": 1}, FOUR, FOUR, cluster=SMALL).spec.layout.world_size == 4


def test_more_hosts_are_chosen_only_if_they_pay() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    slow = CLUSTERS["cpu"].network.model_copy(update={"bytes_per_s": 1e5})
    lame = CLUSTERS["cpu"].model_copy(update={"per_node": 2, "network": slow})
    two, gang = HostCapacity(2, 8 * GIB), HostGang((2, 2), 8 * GIB)
    assert choose(None, two, two, gangs=[gang], cluster=lame, **tiny).spec.layout.world_size <= 2


def test_hosts_not_divisible_by_tp_hold_fewer_ranks() -> None:
    five, gang = HostCapacity(5, 80 * GIB), HostGang((5, 5), 80 * GIB)
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {"global_batch": 40}, "resources": {}}
    told = choose({"ranks": 10, "zero": 1}, five, five, gangs=[gang], **tiny).chosen
    assert {one["layout"].get("tp", 1) for one in [told, *told["runners_up"]]} == {1}, (
        "2 x 4 = 8 slots in multiples of 2"
    )


@pytest.mark.parametrize(
    ("auto", "field", "text"),
    [
        (
            {"ranks": 9},
            "layout.auto.ranks",
            "`layout.auto.ranks` is 9, but the largest host has 4 slots, "
            "and 2 hosts of the same hardware model have 8 slots in total. "
            "Use at most 8.",
        ),
        (
            {"ranks": 8, "tp": 8},
            "layout.auto.tp",
            "`layout.auto.tp` is too large for 8 ranks, because a tp group stays inside one host: "
            "the largest host has 4 slots, and 2 hosts of the same hardware model have 8 slots in total.",
        ),
    ],
    ids=["too many", "tp across hosts"],
)
def test_model_too_large_for_several_hosts_is_rejected_at_its_field(auto: Any, field: str, text: str) -> None:
    assert get_problems(auto, FOUR, FOUR, gangs=[HostGang((4, 4), 80 * GIB)], cluster=SMALL) == [(field, text)]


def test_no_fitting_layout_reports_the_arithmetic() -> None:
    ((field, text),) = get_problems({"ranks": 2}, HostCapacity(8, 16 * GIB))
    assert field == "layout.auto"
    for word in (
        "None of ",
        "on 2 ranks",
        "memory: model state does not fit",
        "The smallest layout, ",
        "GiB of 16.00 GiB",
    ):
        assert word in text


def test_layout_that_barely_fits_is_found_in_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not repeat an equal search."""
    searched: list[Constraints] = []

    def count(spec: JobSpec, cluster: Cluster, limits: Constraints, **rest: Any) -> LayoutSearchResult:
        searched.append(limits)
        return search(spec, cluster, limits, **rest)

    monkeypatch.setattr("planner.search.auto_layout.search", count)
    chosen = choose({"ranks": 4}, HostCapacity(4, 40 * GIB), max_layouts=5_000).chosen
    assert [limits.max_layouts for limits in searched] == [5_000]
    assert "The free memory is less than the margin of error of the estimate." in chosen["why"]


def test_reason_for_no_layout_is_reported_within_the_limit() -> None:
    limits = HostCapacity(8, 16 * GIB)
    [(_, text)] = get_problems({"ranks": 2, "tp": [1, 2], "zero": [0, 1]}, limits, max_layouts=5_000)
    assert "memory: model state does not fit" in text


def test_stopped_search_does_not_claim_that_no_layout_exists() -> None:
    """The product 1 x 8 x 8 is 64, and the search examined no layout."""
    found = get_problems({"ranks": 64, "tp": [1, 2, 4, 8], "zero": [0, 1]}, HostCapacity(64, 40 * GIB), max_layouts=0)
    tried = f"0 layouts on 64 ranks of {H100.name}"
    text = f"`layout.auto` reached its limit of layouts after {tried}. None fits. Set more layout fields."
    assert found == [("layout.auto", text)]


def test_stopped_search_says_that_faster_layouts_can_be_missing() -> None:
    chosen = choose({"ranks": 8}, HostCapacity(8, 80 * GIB), max_layouts=100).chosen
    assert not chosen["complete"]
    assert "The search reached its limit of layouts, so faster layouts can be missing." in chosen["why"]


@pytest.mark.parametrize(
    ("auto", "field", "text"),
    [
        ({"tp": 3, "ranks": 8}, "layout.auto", "has tp 3, because dp x pp x tp x cp is the number of ranks"),
        ({"ranks": 16}, "layout.auto.ranks", "is 16, but the largest host has 8 slots. Use at most 8."),
        ({"ranks": 8, "max_ranks": 4}, "layout.auto.ranks", "is 8. Use at most max_ranks 4."),
        ({"zero": 7}, "layout.auto.zero", "`layout.auto.zero` is 7. Use at most 3."),
        ({"tp": [1, "x"]}, "layout.auto.tp", 'is "x". Use a whole number.'),
        ({"zero": []}, "layout.auto.zero", "Use a list of 1 or more"),
        ({"surprise": 1}, "layout.auto.surprise", "is not a known field. Remove it. Fields: ranks, "),
        (5, "layout.auto", "`layout.auto` is 5. Use an object."),
        (
            {"dp": [1, 2, 4, 8], "tp": [1, 2, 4, 8], "pp": [1, 2, 4, 8], "zero": [0, 1]},
            "layout.auto",
            "has dp 4 x pp 4 x tp 4 x zero 2 = 128 combinations. Use at most 64.",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_constraint_is_rejected_at_its_field(auto: Any, field: str, text: str) -> None:
    problem = get_problems(auto)[0]
    assert problem[0] == field
    assert text in problem[1]


def test_problem_independent_of_layout_is_rejected_as_itself() -> None:
    assert get_problems(None, train={**BIG["train"], "seq_len": 99999})[0][0] == "train.seq_len"
    assert get_problems(None, train={"steps": 0})[0][0] == "train.steps"
    told = get_problems(None, kind="dry_run")
    assert told == [("layout.auto", "`kind` is dry_run, but `layout.auto` needs train. Set a layout.")]
    with pytest.raises(SpecError, match=r"is set outside `layout\.auto`"):
        parse_auto_spec({"layout": {"auto": {}, "dp": 2}})


def test_command_prints_a_spec_that_can_be_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gpt-tiny", "--cluster", "cpu", "--max-ranks", "4", "--tp", "1,2", "--zero", "1"]
    assert main(["auto", *flags, "--global-batch", "8", "--seq-len", "128", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spec"]["layout"]["zero"] == 1
    assert told["chosen"]["asked"] == {"tp": [1, 2], "zero": 1, "max_ranks": 4}
    assert main(["auto", *flags]) == 0
    assert "runners-up" in capsys.readouterr().out
    assert main(["auto", "--model", "gpt-tiny", "--balance", "cost"]) == 2
    assert "`layout.auto.balance` is not a known field" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "much"])
def test_invalid_memory_limit_is_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["auto", "--model", "gpt-tiny", "--cluster", "cpu", f"--max-memory-gib={text}"])
    assert "Use a number of GiB above 0" in capsys.readouterr().err


def test_zero_on_a_single_rank_is_not_a_separate_choice() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    choice = choose({"ranks": 1, "zero": [0, 1, 3]}, HostCapacity(8, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny)
    told = [choice.chosen, *choice.chosen["runners_up"]]
    assert choice.spec.layout.zero == 0
    assert len({line["words"].replace("ZeRO-1, ", "").replace("ZeRO-3, ", "") for line in told}) == len(told)
    assert not any("ZeRO" in near.change for near in find_neighbors(choice.spec, CLUSTERS["cpu"]))


def test_every_rank_count_in_the_words_is_tried() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {"global_batch": 12}, "resources": {}}
    choice = choose({"dp": 3}, HostCapacity(4, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny)
    assert choice.spec.layout.dp == 3
    assert "with this margin on 1 to 4 ranks" in choice.chosen["why"]


def test_skipped_rank_counts_are_not_reported_as_searched() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    told = choose({"tp": 1, "pp": 1}, HostCapacity(40, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny).chosen
    assert "on 1 to 16, 32 and 40 ranks" in told["why"]
