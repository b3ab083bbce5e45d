"""Attribute waits to ranks, find stragglers and their causes, and report link speeds with their source."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from contracts.telemetry.batches import ClockOffset, Item
from contracts.telemetry.items import TimelineItem
from jobs.runs.diagnosis import Diagnosis, HostRanks, PlannedRun, VerdictPayload
from jobs.runs.diagnosis.bottlenecks import compute_chance
from jobs.runs.diagnosis.collective_timing import (
    TransferRoute,
    TransferStats,
    get_link_speed,
    match_calls,
    summarize_speeds,
)
from jobs.runs.diagnosis.traced_step import HostClocks, ProcessGroup, StepCollector, TracedStep
from tests.jobs.diagnosis.items import CPU, ITEM, NOW, diagnosis, look, step
from tests.jobs.diagnosis.simulated_steps import Act, Does, Meets, Passes, Player

TP = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(4)}  # dp 2 x tp 2: tp ranks are neighbours
DP = {rank: (rank % 2, rank % 2 + 2) for rank in range(4)}

Worked = Callable[[int], float]


def mesh(rank: int, seconds: float, data_s: float = 0.001) -> list[Act]:
    """Return a step of dp 2 x tp 2: half the work, a tp collective, twice, and then a dp collective."""
    half = Does("forward", seconds / 2)
    tp, dp = Meets("tp", TP[rank]), Meets("dp", DP[rank])
    return [Does("data", data_s), half, tp, Does("backward", seconds / 2), tp, dp]


def feed(found: Diagnosis, player: Player, acts: Sequence[Sequence[Act]], hosts: Sequence[int] = ()) -> None:
    """Add a step of every rank: its timeline and its duration."""
    before = player.now
    for rank, item in enumerate(player.play(dict(enumerate(acts)))):
        node = hosts[rank] if hosts else 0
        found.add(item, node)
        found.add(step(rank, player.step, player.now - before), node)


def run(found: Diagnosis, works: Worked, steps: int = 20, data: Worked = lambda _rank: 0.001) -> VerdictPayload:
    player, noise = Player(4), random.Random(1)
    for _ in range(steps):
        feed(found, player, [mesh(r, works(r) * noise.uniform(0.98, 1.02), data(r)) for r in range(4)])
    return look(found, NOW + player.now)


def test_charges_waits_to_their_root_cause() -> None:
    told = run(diagnosis({"dp": 2, "tp": 2}), lambda rank: 0.6 if rank == 3 else 0.5)
    late = told["stragglers"][0]
    assert (late["rank"], late["cause"]) == (3, "compute")
    assert late["seconds"] == pytest.approx(0.1, rel=0.15)
    assert late["share"] == pytest.approx(0.1 / 0.604, rel=0.15)
    by = {(wait["axis"], wait["rank"]): wait["seconds"] for wait in told["waits"]}
    assert by["tp", 3] > 0.02, "its neighbour waits for it there"
    assert by["dp", 3] > 0.05, "rank 0 waits for rank 2 there, and that waits for rank 3"
    assert by.get(("dp", 2), 0.0) < 0.01, "a rank that is late because it waited is not a cause"
    assert told["state"] == "slow"
    assert told["sentence"].startswith("Straggler: rank 3. Other ranks wait for rank 3 in 1")
    assert told["sentence"].endswith("% of each step since step 4.")
    assert told["reason"].startswith("Compute on rank 3 takes")
    assert "rank 3 arrives last in 100% of its dp collectives" in [fact["text"] for fact in told["evidence"]]
    assert (told["action"], told["action_rank"]) == ("open_log", 3)


def test_slow_data_loader_is_the_cause() -> None:
    told = run(diagnosis({"dp": 2, "tp": 2}), lambda _rank: 0.5, data=lambda rank: 0.12 if rank == 1 else 0.001)
    assert [(late["rank"], late["cause"]) for late in told["stragglers"]] == [(1, "data")]


def test_stopped_process_explains_slow_transfers() -> None:
    """The rank was stopped during a transfer, so its own work is as fast as ever."""
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for _ in range(30):
        acts = [mesh(rank, 0.2) for rank in range(4)]
        acts[2].insert(3, Does("eval", 0.2))
        items = player.play(dict(enumerate(acts)))
        for rank, item in enumerate(items):
            assert item["kind"] == "timeline"
            if rank == 2:
                _replace_work_by_wait(item, 0.2)
            found.add(item, 0)
            found.add(step(rank, player.step, item["step_s"]), 0)
    told = look(found, NOW + player.now)
    assert [(late["rank"], late["cause"]) for late in told["stragglers"]] == [(2, "unknown")], "nobody saw it stopped"
    found.add(process(2, NOW + player.now, state="stopped"), 0)
    told = look(found, NOW + player.now)
    assert [(late["rank"], late["cause"]) for late in told["stragglers"]] == [(2, "stopped")]
    assert "The process of rank 2 was stopped recently." in told["reason"]


@pytest.mark.parametrize(("times", "named"), [(0, []), (1, []), (2, [(2, "stopped")])])
def test_repeatedly_stopped_rank_is_a_straggler(times: int, named: list[tuple[int, str]]) -> None:
    """Steps between the stops are fast, so without process states this would count as contention in bursts."""
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for number in range(30):
        feed(found, player, [mesh(rank, 0.9 if rank == 2 and number % 2 else 0.5) for rank in range(4)])
        if number in (20, 25)[:times]:
            found.add(process(2, NOW + player.now, state="stopped"), 0)
    told = look(found, NOW + player.now)
    assert [(late["rank"], late["cause"]) for late in told["stragglers"]] == named
    assert ("rank 2" in told["sentence"] and "% of the time" in told["sentence"]) == bool(named)


@pytest.mark.parametrize(
    ("crowded", "cause"),
    [
        ({}, "compute"),
        ({3: 0.6}, "contention"),
        ({3: 0.3}, "compute"),
        (dict.fromkeys(range(4), 0.6), "compute"),
        ({0: 0.6}, "compute"),
    ],
)
def test_waits_for_a_cpu_core_are_contention(crowded: dict[int, float], cause: str) -> None:
    """The rank takes half a step longer, and waits 0.6 s more per second for a CPU core than its peers."""
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for _ in range(20):
        feed(found, player, [mesh(rank, 0.8 if rank == 3 else 0.4) for rank in range(4)])
        for rank, share in crowded.items():
            found.add(process(rank, NOW + player.now, crowded=share), 0)
    told = look(found, NOW + player.now)
    assert [(late["rank"], late["cause"]) for late in told["stragglers"]] == [(3, cause)]
    assert ("0.6" in told["reason"] or "600 ms" in told["reason"]) == (cause == "contention")


def test_small_delays_must_last_longer() -> None:
    """A cost of 1/8 of the step counts after 15 s, and a cost of 1/6 at once."""
    for works, steps, named in ((0.57, 17, []), (0.57, 27, [3]), (0.6, 15, [3])):
        found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
        for _ in range(steps):
            feed(found, player, [mesh(rank, works if rank == 3 else 0.5) for rank in range(4)])
        assert [late["rank"] for late in look(found, NOW + player.now)["stragglers"]] == named, (works, steps)


def test_slight_contention_is_reported() -> None:
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for _ in range(30):
        feed(found, player, [mesh(rank, 0.6 if rank == 3 else 0.5) for rank in range(4)])
        found.add(process(3, NOW + player.now, crowded=0.14), 0)
    told = look(found, NOW + player.now)
    assert [(late["rank"], late["cause"]) for late in told["stragglers"]] == [(3, "contention")]


def process(rank: int, now: float, **seen: object) -> Item:
    item = {"kind": "process", "rank": rank, "time": now, "state": "running", "cpu": 0.4, "throttled": 0.0}
    return ITEM.validate_python({**item, "stack": [], "silent_s": 0.3, **seen})


def _replace_work_by_wait(item: TimelineItem, seconds: float) -> None:
    """Replace the work after the first collective by a wait in this collective."""
    place = item["spans"]["work"].index("eval")
    for column in item["spans"].values():
        del column[place]  # type: ignore[attr-defined]
    for column in ("blocked_us", "ended_us"):
        item["calls"][column][0] += round(seconds * 1e6)  # type: ignore[literal-required]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_a_straggler(seed: int) -> None:
    noise = random.Random(seed)
    told = run(diagnosis({"dp": 2, "tp": 2}), lambda _rank: 0.5 * noise.lognormvariate(0.0, 0.2), steps=60)
    assert told["stragglers"] == []
    assert told["waits"], "it is still charged"


def test_bursts_of_contention_are_not_a_straggler() -> None:
    """The rank causes the longest wait in three of four steps, and none in the fourth."""
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for number in range(60):
        feed(
            found, player, [mesh(rank, 0.9 if rank == 2 and number % 10 not in (0, 3, 5) else 0.5) for rank in range(4)]
        )
    assert look(found, NOW + player.now)["stragglers"] == []


def test_briefly_late_rank_is_not_a_straggler() -> None:
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for number in range(40):
        feed(found, player, [mesh(rank, 0.9 if rank == 2 and 10 <= number < 13 else 0.5) for rank in range(4)])
        assert look(found, NOW + player.now)["stragglers"] == []


def test_straggler_has_a_first_step_and_ends() -> None:
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    noise = random.Random(3)
    for number in range(60):
        slow = 20 <= number < 40
        works = [0.5 * noise.uniform(0.95, 1.05) * (1.4 if slow and rank == 1 else 1.0) for rank in range(4)]
        feed(found, player, [mesh(rank, works[rank]) for rank in range(4)])
        if number == 39:
            late = look(found, NOW + player.now)["stragglers"][0]
            assert late["rank"] == 1
            assert 20 <= late["since_step"] <= 26
    assert look(found, NOW + player.now)["stragglers"] == []


def test_single_late_step_does_not_begin_a_straggler() -> None:
    found, player = diagnosis({"dp": 2, "tp": 2}), Player(4)
    for number in range(50):
        late = number == 2 or number >= 10
        feed(found, player, [mesh(rank, 0.8 if rank == 1 and late else 0.5) for rank in range(4)])
    assert player.step == 53
    assert [late["since_step"] for late in look(found, NOW + player.now)["stragglers"]] == [14]


def test_ignores_differences_within_clock_uncertainty() -> None:
    """One clock of two hosts is 40 ms ahead, known to 5 ms: 4 ms late is ignored, 50 ms late is not."""
    for late_s, named in ((0.004, False), (0.05, True)):
        clocks = HostClocks()
        clocks.update(0, ClockOffset(offset_s=0.0, within_s=0.001))
        clocks.update(1, ClockOffset(offset_s=-0.04, within_s=0.005))
        meeting = match_calls(_step(clocks, late_s), clocks)[0]
        assert meeting.last == (1 if named else None)
        assert bool(meeting.waits) == named
        if named:
            assert meeting.waits[0] == pytest.approx(late_s, abs=1e-5)
            assert meeting.transfer_s == pytest.approx(0.001, abs=1e-5)


def _step(clocks: HostClocks, late_s: float) -> TracedStep:
    gathering, player = StepCollector(2, clocks), Player(2, {1: 0.04})
    acts: dict[int, list[Act]] = {r: [Does("forward", 0.1 + late_s * r), Meets("dp", (0, 1))] for r in range(2)}
    first, second = player.play(acts)
    assert first["kind"] == second["kind"] == "timeline"
    assert gathering.add(first, 0) is None
    whole = gathering.add(second, 1)
    assert whole is not None
    return whole


def pipe(rank: int, forward_s: float, micro_batches: int, stages: int) -> list[Act]:
    """Return a GPipe step: all forwards, then all backwards of twice the time."""
    acts: list[Act] = []
    ranks = tuple(range(stages))
    for i in range(micro_batches):
        acts += [Passes(rank - 1, rank, ranks)] if rank else []
        acts.append(Does("forward", forward_s, i))
        acts += [Passes(rank, rank + 1, ranks)] if rank < stages - 1 else []
    for i in range(micro_batches):
        acts += [Passes(rank + 1, rank, ranks)] if rank < stages - 1 else []
        acts.append(Does("backward", 2 * forward_s, i))
        acts += [Passes(rank, rank - 1, ranks)] if rank else []
    return acts


def test_last_stage_to_drain_is_not_a_straggler() -> None:
    """All ranks meet at the end of the step, where the schedule makes the first stage last."""
    found, player = diagnosis(LAYOUT, TRAIN), Player(4)
    for _ in range(20):
        feed(found, player, [[*pipe(rank, 0.05, 4, 4), Meets("world", (0, 1, 2, 3))] for rank in range(4)])
    told = look(found, NOW + player.now)
    assert told["stragglers"] == []
    assert told["sentence"].startswith("Pipeline bubble: ")


LAYOUT = {"pp": 4, "schedule": "gpipe"}
TRAIN = {"micro_batches": 4, "global_batch": 32}


def test_bubble_suggests_more_micro_batches() -> None:
    found, player = diagnosis(LAYOUT, TRAIN), Player(4)
    for _ in range(20):
        feed(found, player, [pipe(rank, 0.05, 4, 4) for rank in range(4)])
    told = look(found, NOW + player.now)
    assert told["stragglers"] == []
    bubble = "Pipeline bubble: 43% of each step, with 4 micro-batches on 4 pipeline stages. "
    assert told["sentence"].startswith(bubble), "(4-1) / (4+4-1)"
    assert " times as fast." in told["sentence"]
    assert told["next"].startswith("Set `train.micro_batches` to ")
    assert told["action"] == "copy_job"


def test_ignores_validation_after_the_step() -> None:
    """Forward passes of the validation would make the last stage slow."""
    found, player = diagnosis(LAYOUT, TRAIN), Player(4)
    for _ in range(20):
        before = player.now
        for rank, item in enumerate(player.play({rank: pipe(rank, 0.05, 4, 4) for rank in range(4)})):
            assert item["kind"] == "timeline"
            end = round(item["step_s"] * 1e6)
            span = {
                "work": "forward",
                "chunk": 0,
                "micro_batch": 0,
                "from_us": end + 1,
                "to_us": end + (rank + 1) * end,
            }
            for name, column in item["spans"].items():
                column.append(span[name])  # type: ignore[attr-defined]
            found.add(item, 0)
            found.add(step(rank, player.step, player.now - before), 0)
    told = look(found, NOW + player.now)
    assert told["stragglers"] == []
    assert told["sentence"].startswith("Pipeline bubble: 43% of each step, with 4 micro-batches on 4 pipeline stages. ")


def test_slow_stage_is_separated_from_the_bubble() -> None:
    found, player = diagnosis(LAYOUT, TRAIN), Player(4)
    for _ in range(20):
        feed(found, player, [pipe(rank, 0.08 if rank == 2 else 0.05, 4, 4) for rank in range(4)])
    told = look(found, NOW + player.now)
    assert [(late["rank"], late["axis"], late["cause"]) for late in told["stragglers"]] == [(2, "pp", "compute")]
    assert told["state"] == "slow"


def test_chance_is_binomial() -> None:
    assert compute_chance(6, 6, 4) == pytest.approx(0.25**6)
    assert compute_chance(2, 0, 2) == pytest.approx(1.0)
    assert compute_chance(3, 2, 2) == pytest.approx(0.5)


def test_stragglers_name_their_hosts() -> None:
    found = diagnosis({"dp": 2, "tp": 2}, members=(HostRanks("host-a", 0, 2), HostRanks("host-b", 2, 2)))
    told = run(found, lambda rank: 0.6 if rank == 3 else 0.5)
    assert "rank 3 on host-b" in told["sentence"].lower()
    assert "host-b" in told["next"]


INSIDE, OUT = CPU.node.bytes_per_s, CPU.network.bytes_per_s


@pytest.mark.parametrize(
    ("hardware", "inside", "across"),
    [
        ({}, "data sheet", "data sheet"),
        ({"link_runs": 2}, "runs", "data sheet"),
        ({"link_runs": 2, "latency_alone": True}, "data sheet", "data sheet"),
        ({"basis": "calibrated"}, "calibrated", "calibrated"),
    ],
)
def test_link_speed_names_its_source(hardware: dict[str, Any], inside: str, across: str) -> None:
    hardware = CPU.model_copy(update=hardware).model_dump(mode="json")
    run = PlannedRun({}, {}, 4, hardware=hardware, members=[HostRanks("a", 0, 2), HostRanks("b", 2, 2)])
    assert get_link_speed(run, [0, 1]) == (INSIDE, inside)
    assert get_link_speed(run, [0, 2]) == (OUT, across)
    way = TransferRoute(ProcessGroup("dp", (0, 1), 0), "all_reduce", (0, 1))
    (group,) = summarize_speeds(run, [{way: TransferStats(1, 2**20, 0.001, 2**20 / 0.001)}])
    assert (group["link_bytes_s"], group["basis"]) == (INSIDE, inside)


def test_unknown_hardware_has_no_link_speed() -> None:
    assert get_link_speed(PlannedRun({}, {}, 2), [0, 1]) == (None, "")
