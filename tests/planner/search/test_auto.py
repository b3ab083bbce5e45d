"""A layout that is chosen: the search's first, within what was asked, told why; or why there is none."""

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


def chosen(
    auto: Any,
    *rooms: HostCapacity,
    gangs: Sequence[HostGang] = (),
    cluster: Cluster = H100,
    max_seconds: float = math.inf,
    **changes: Any,
) -> Choice:
    data = {**BIG, **changes, "layout": "auto" if auto is None else {"auto": auto}}
    asked = parse_auto_spec(data)
    assert asked is not None
    there = Capacity(rooms or (HostCapacity(8, cluster.accelerator.memory_bytes),), gangs)
    return find_fastest_layout(parse_draft(data), cluster, asked, there, max_seconds=max_seconds)


def refused(auto: Any, *rooms: HostCapacity, gangs: Sequence[HostGang] = (), **changes: Any) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as error:
        chosen(auto, *rooms, gangs=gangs, **changes)
    return [(p.field, p.message) for p in error.value.problems]


def test_it_is_the_searchs_first_choice_and_can_run() -> None:
    choice = chosen({"ranks": 8})
    assert find_problems(choice.spec) == []
    best = search(parse_draft({**BIG, "layout": "auto"}), H100, Constraints(8, runnable=True)).best
    assert (choice.spec.layout, choice.spec.train) == (best[0].spec.layout, best[0].spec.train)
    assert choice.chosen["runners_up"][0]["step_s"] == best[1].timing.step_s
    assert choice.chosen["runners_up"][0]["slower"] == pytest.approx(best[1].timing.step_s / best[0].timing.step_s - 1)
    assert choice.chosen["considered"] > 100
    for word in ("per step (data sheet, ", "of 79.10 GiB on the fullest rank", "8 ranks", "slower"):
        assert word in choice.chosen["why"]
    json.dumps(choice.chosen)


def test_zero_is_never_chosen_where_no_other_rank_shares_the_state() -> None:
    """Of ranks that all divide the model, ZeRO-3 was chosen, and then refused as a layout that cannot be."""
    tiny = {"model": {"preset": "llama-tiny"}, "train": {"global_batch": 8, "seq_len": 128}}
    choice = chosen({"ranks": 4, "zero": 3}, **tiny)
    assert len(choice.chosen["runners_up"]) == 4
    for told in [choice.chosen, *choice.chosen["runners_up"]]:
        assert told["layout"].get("dp", 1) * told["layout"].get("cp", 1) > 1
    [(field, message)] = refused({"ranks": 4, "dp": 1, "cp": 1, "zero": 3}, **tiny)
    assert (field, "ZeRO needs dp or cp of 2 or more" in message) == ("layout.auto", True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_that_hardly_holds_a_process_is_a_limit_too(device: str) -> None:
    """Less than a peak may be off leaves none that surely fits, which was taken for no limit at all."""
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {"seq_len": 128}, "resources": {"device": device}}
    cluster = CLUSTERS["cpu" if device == "cpu" else "h100"]
    [(field, message)] = refused({"max_memory_bytes": 2**20}, cluster=cluster, **tiny)
    assert field == "layout.auto"
    assert "memory" in message
    assert message.endswith("GiB of 0.00 GiB per rank.")


def test_every_constraint_holds_of_it_and_of_the_runners_up() -> None:
    choice = chosen({"tp": 2, "zero": [1, 3], "max_ranks": 4, "max_micro_batch": 2})
    assert choice.chosen["asked"] == {"tp": 2, "zero": [1, 3], "max_ranks": 4, "max_micro_batch": 2}
    for told in [choice.chosen, *choice.chosen["runners_up"]]:
        assert told["layout"]["tp"] == 2
        assert told["layout"]["zero"] in (1, 3)
        assert told["ranks"] <= 4
    assert choice.spec.micro_batch_size <= 2


def test_more_ranks_are_taken_only_where_they_pay() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    lame = CLUSTERS["cpu"].model_copy(update={"node": CLUSTERS["cpu"].node.model_copy(update={"bytes_per_s": 1e5})})
    assert chosen(None, HostCapacity(8, 8 * GIB), cluster=lame, **tiny).spec.layout.world_size == 1
    assert chosen(None, HostCapacity(8, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny).spec.layout.world_size > 1


def test_the_memory_is_that_of_the_least_host_it_may_be_placed_on() -> None:
    roomy = chosen({"ranks": 4}, HostCapacity(8, 80 * GIB), HostCapacity(2, 8 * GIB))
    tight = chosen({"ranks": 4}, HostCapacity(8, 80 * GIB), HostCapacity(4, 40 * GIB))
    assert roomy.chosen["memory_bytes"] > 40 * GIB, "the host with 2 slots cannot take 4 ranks"
    assert tight.chosen["memory_bytes"] <= 40 * GIB
    assert "The free memory is less than the margin of error of the estimate." in tight.chosen["why"]


def test_memory_is_kept_free_for_what_the_estimate_may_be_off() -> None:
    """What fitted a host's 48 GiB by a hair was chosen, though its peak may be 15% and half a GiB higher."""
    choice = chosen({"ranks": 8, "tp": 2, "pp": 1, "cp": 1}, HostCapacity(8, 48 * GIB))
    for told in [choice.chosen, *choice.chosen["runners_up"]]:
        assert 1.15 * told["memory_bytes"] + GIB / 2 <= 48 * GIB
    assert "by less than" not in choice.chosen["why"]


FOUR = HostCapacity(4, 80 * GIB)
SMALL = H100.model_copy(update={"per_node": 4})


def test_over_several_hosts_it_has_more_ranks_and_tp_inside_one() -> None:
    choice = chosen(
        {"max_micro_batch": 2, "zero": [1, 3]}, FOUR, FOUR, gangs=[HostGang((4, 4), 80 * GIB)], cluster=SMALL
    )
    assert choice.spec.layout.world_size == 8
    assert [told["layout"].get("tp", 1) <= 4 for told in [choice.chosen, *choice.chosen["runners_up"]]] == [True] * 5
    assert chosen({"max_micro_batch": 2, "zero": 1}, FOUR, FOUR, cluster=SMALL).spec.layout.world_size == 4


def test_more_hosts_are_taken_only_where_they_pay() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    slow = CLUSTERS["cpu"].network.model_copy(update={"bytes_per_s": 1e5})
    lame = CLUSTERS["cpu"].model_copy(update={"per_node": 2, "network": slow})
    two, gang = HostCapacity(2, 8 * GIB), HostGang((2, 2), 8 * GIB)
    assert chosen(None, two, two, gangs=[gang], cluster=lame, **tiny).spec.layout.world_size <= 2


def test_hosts_that_tp_does_not_fill_hold_fewer_ranks() -> None:
    five, gang = HostCapacity(5, 80 * GIB), HostGang((5, 5), 80 * GIB)
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {"global_batch": 40}, "resources": {}}
    told = chosen({"ranks": 10, "zero": 1}, five, five, gangs=[gang], **tiny).chosen
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
def test_what_several_hosts_cannot_hold_is_refused_at_its_field(auto: Any, field: str, text: str) -> None:
    assert refused(auto, FOUR, FOUR, gangs=[HostGang((4, 4), 80 * GIB)], cluster=SMALL) == [(field, text)]


def test_where_nothing_fits_the_arithmetic_is_told() -> None:
    ((field, text),) = refused({"ranks": 2}, HostCapacity(8, 16 * GIB))
    assert field == "layout.auto"
    for word in (
        "None of ",
        "on 2 ranks",
        "memory: model state does not fit",
        "The smallest layout, ",
        "GiB of 16.00 GiB",
    ):
        assert word in text


class Clock:
    """Time that passes while layouts are searched, which is told how much each search may take: it takes all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.searches = 0.0, 0
        monkeypatch.setattr("planner.search.auto_layout.time", self)
        monkeypatch.setattr("planner.search.auto_layout.search", self._search)

    def monotonic(self) -> float:
        return self.now

    def _search(self, spec: JobSpec, cluster: Cluster, limits: Constraints, **rest: Any) -> LayoutSearchResult:
        self.now += limits.max_seconds
        self.searches += 1
        return search(spec, cluster, limits._replace(max_seconds=math.inf), **rest)


def test_what_fits_by_little_is_found_in_the_time_of_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search of the same had no time left, and told that nothing fits."""
    clock = Clock(monkeypatch)
    told = chosen({"ranks": 4}, HostCapacity(4, 40 * GIB), max_seconds=5).chosen
    assert (clock.now, clock.searches) == (5, 1)
    assert "The free memory is less than the margin of error of the estimate." in told["why"]


def test_why_nothing_fits_is_told_within_the_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    [(_, text)] = refused({"ranks": 2, "tp": [1, 2], "zero": [0, 1]}, HostCapacity(8, 16 * GIB), max_seconds=5)
    assert clock.now == pytest.approx(5)
    assert "memory: model state does not fit" in text


def test_a_search_that_time_ended_does_not_say_that_nothing_can_be() -> None:
    """1 x 8 x 8 is 64: nothing had been looked at."""
    told = refused({"ranks": 64, "tp": [1, 2, 4, 8], "zero": [0, 1]}, HostCapacity(64, 40 * GIB), max_seconds=0)
    tried = f"0 layouts on 64 ranks of {H100.name}"
    text = f"`layout.auto` reached its time limit after {tried}. None fits. Set more layout fields."
    assert told == [("layout.auto", text)]


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
def test_a_senseless_constraint_is_refused_at_its_field(auto: Any, field: str, text: str) -> None:
    problem = refused(auto)[0]
    assert problem[0] == field
    assert text in problem[1]


def test_what_no_layout_makes_good_is_refused_as_itself() -> None:
    assert refused(None, train={**BIG["train"], "seq_len": 99999})[0][0] == "train.seq_len"
    assert refused(None, train={"steps": 0})[0][0] == "train.steps"
    told = refused(None, kind="dry_run")
    assert told == [("layout.auto", "`kind` is dry_run, but `layout.auto` needs train. Set a layout.")]
    with pytest.raises(SpecError, match=r"is set outside `layout\.auto`"):
        parse_auto_spec({"layout": {"auto": {}, "dp": 2}})


def test_the_command_prints_a_spec_that_can_be_submitted(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_cap_on_memory_that_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["auto", "--model", "gpt-tiny", "--cluster", "cpu", f"--max-memory-gib={text}"])
    assert "Use a number of GiB above 0" in capsys.readouterr().err


def test_zero_over_a_single_rank_is_no_choice_of_its_own() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    choice = chosen({"ranks": 1, "zero": [0, 1, 3]}, HostCapacity(8, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny)
    told = [choice.chosen, *choice.chosen["runners_up"]]
    assert choice.spec.layout.zero == 0
    assert len({line["words"].replace("ZeRO-1, ", "").replace("ZeRO-3, ", "") for line in told}) == len(told)
    assert not any("ZeRO" in near.change for near in find_neighbors(choice.spec, CLUSTERS["cpu"]))


def test_every_number_of_ranks_is_tried_that_the_words_tell_of() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {"global_batch": 12}, "resources": {}}
    choice = chosen({"dp": 3}, HostCapacity(4, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny)
    assert choice.spec.layout.dp == 3
    assert "with this margin on 1 to 4 ranks" in choice.chosen["why"]


def test_numbers_of_ranks_that_were_skipped_are_not_said_to_be_searched() -> None:
    tiny = {"model": {"preset": "gpt-tiny"}, "train": {}, "resources": {}}
    told = chosen({"tp": 1, "pp": 1}, HostCapacity(40, 8 * GIB), cluster=CLUSTERS["cpu"], **tiny).chosen
    assert "on 1 to 16, 32 and 40 ranks" in told["why"]
