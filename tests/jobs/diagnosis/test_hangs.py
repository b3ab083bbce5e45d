"""Detect hangs with the right rank, collective, and cause, and raise no alarm for slow runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from contracts.telemetry.batches import Item
from jobs.runs.diagnosis import Diagnosis, HostRanks
from tests.jobs.diagnosis.items import ITEM, NOW, diagnosis, look, step
from tests.jobs.diagnosis.simulated_steps import Act, Does, Meets, Player

WORLD = tuple(range(4))
TP = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in WORLD}
DP = {rank: (rank % 2, rank % 2 + 2) for rank in WORLD}
STEPS = 20
STOPPED_AT = NOW + 2.0  # 20 steps of 0.1 s
HOSTS = (HostRanks("host-a", 0, 2), HostRanks("host-b", 2, 2))


def item(kind: str, **what: Any) -> Item:
    return ITEM.validate_python({"kind": kind, **what})


def group(axis: str, ranks: Sequence[int]) -> dict[str, Any]:
    return {"axis": axis, "ranks": list(ranks), "nth": 0}


def in_call(axis: str, ranks: Sequence[int], sequence: int, op: str = "all_reduce", num_bytes: int = 4096) -> Any:
    """Return the position in a group whose collective number `sequence` blocks the rank."""
    told = {"group": group(axis, ranks), "issued": sequence, "ended": sequence - 1, "blocking": True}
    return {**told, "op": op, "payload_bytes": num_bytes, "since": STOPPED_AT}


def past(axis: str, ranks: Sequence[int], sequence: int) -> Any:
    """Return the position in a group whose first `sequence` collectives are complete."""
    return {"group": group(axis, ranks), "issued": sequence, "ended": sequence}


def stands(rank: int, now: float, groups: Sequence[Any], stack: Sequence[str] = (), **more: Any) -> Item:
    told = {"rank": rank, "time": now, "step": STEPS, "phase": "step", "still": now - STOPPED_AT, **more}
    return item("standing", **told, groups=list(groups), stack=list(stack))


def process(rank: int, now: float, state: str = "running", **more: Any) -> Item:
    told = {"cpu": 1.0, "throttled": 0.0, "stack": [], "silent_s": 0.0, **more}
    return item("process", rank=rank, time=now, state=state, **told)


def trained(step_s: float = 0.1, **how: Any) -> Diagnosis:
    """Return the diagnosis of a run that hangs after 20 steps."""
    found = diagnosis({"dp": 2, "tp": 2}, **how)
    found.add(item("phase", rank=0, time=NOW, phase="step"), 0)
    for number in range(1, STEPS + 1):
        for rank in WORLD:
            found.add(step(rank, number, step_s), 0)
    return found


def all_wait_for(found: Diagnosis, absent: int, now: float, stack: Sequence[str] = ("train.py:9 in f",)) -> None:
    """Block dp ranks in a collective that `absent` has not entered, and tp ranks in the next one."""
    for rank in WORLD:
        if rank == absent:
            found.add(stands(rank, now, [past("dp", DP[rank], 40), past("tp", TP[rank], 80)], stack), 0)
        elif absent in DP[rank]:
            found.add(stands(rank, now, [in_call("dp", DP[rank], 41), past("tp", TP[rank], 80)]), 0)
        else:
            found.add(stands(rank, now, [past("dp", DP[rank], 41), in_call("tp", TP[rank], 81)]), 0)


def test_ranks_without_a_report_have_unknown_cause() -> None:
    """Ranks behind a broken link cannot report. The verdict blamed their own code."""
    found = trained(members=HOSTS)
    for rank in (0, 1):
        found.add(stands(rank, STOPPED_AT + 10, [in_call("dp", DP[rank], 41), past("tp", TP[rank], 80)]), 0)
    assert look(found, STOPPED_AT + 10.5)["hang"] is None, "the reports can still arrive"
    hang = look(found, STOPPED_AT + 15.5)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"]) == ("unknown", [2, 3])
    assert "No current operation is known for rank" in hang["text"]


@pytest.mark.parametrize(
    ("stack", "cause"),
    [
        (["loop.py:88 in train", "workers/trainer/dataset.py:40 in batch"], "data"),
        (["loop.py:90 in train", "workers/checkpoint/manager.py:30 in save"], "checkpoint"),
        (["train.py:12 in step", "train.py:77 in sleepy"], "compute"),
    ],
)
def test_rank_outside_of_collectives_is_named_with_its_stack(stack: list[str], cause: str) -> None:
    found, now = trained(), STOPPED_AT + 12
    all_wait_for(found, 2, now, stack)
    told = look(found, now)
    hang = told["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"], hang["waiting"]) == (cause, [2], [0, 1, 3])
    assert hang["group"] == {"axis": "dp", "ranks": [0, 2], "size": 2, "nth": 0}
    assert (hang["op"], hang["sequence"]) == ("all_reduce", 41)
    assert hang["stack"] == stack
    assert told["state"] == ("notice" if cause == "checkpoint" else "hung")
    if cause == "compute":
        assert told["sentence"] == (
            "Stalled: no progress for 12 s. "
            "Ranks 0, 1 and 3 wait for rank 2, which did not enter all_reduce 41 on dp (ranks 0 and 2)."
        )
        assert (told["action"], told["action_rank"]) == ("open_log", 2)


def test_no_hang_before_the_threshold() -> None:
    found = trained()
    all_wait_for(found, 2, STOPPED_AT + 9)
    assert look(found, STOPPED_AT + 9)["hang"] is None


def test_threshold_depends_on_the_step_time() -> None:
    """The threshold is 10 s above the longest step."""
    found = trained(step_s=3.0)
    for after, hung in ((12.5, False), (13.5, True)):
        now = NOW + 60.0 + after
        for rank in WORLD:
            waits = [past("dp", DP[rank], 40)] if rank == 2 else [in_call("dp", DP[rank], 41)]
            found.add(stands(rank, now, waits, still=after), 0)
        assert (look(found, now)["hang"] is not None) == hung


@pytest.mark.parametrize(("state", "cause"), [("stopped", "stopped"), ("zombie", "dead"), ("gone", "dead")])
def test_stopped_or_dead_process_is_named(state: str, cause: str) -> None:
    found, now = trained(members=HOSTS), STOPPED_AT + 12
    for rank in (0, 1, 3):
        axis, ranks = ("dp", DP[rank]) if rank == 0 else ("tp", TP[rank])
        found.add(stands(rank, now, [in_call(axis, ranks, 41)]), 0)
    found.add(process(2, now, state, pid=4711, stack=["loop.py:12 in step"]), 1)
    told = look(found, now)
    assert told["hang"] is not None
    assert (told["hang"]["cause"], told["hang"]["ranks"], told["hang"]["host"]) == (cause, [2], "host-b")
    assert ("`kill -CONT 4711` on host host-b" in told["next"]) == (state == "stopped")
    assert told["action"] == ("" if state == "stopped" else "open_log")
    assert told["hang"]["stack"] == ["loop.py:12 in step"]
    assert told["reason"] == f"The process of rank 2 {'is stopped' if state == 'stopped' else 'has ended'}."


def test_ignores_process_states_before_the_hang() -> None:
    """Rank 1 was stopped briefly before the hang, which rank 2 causes."""
    found, now = trained(), STOPPED_AT + 12
    found.add(process(1, STOPPED_AT - 1, "stopped"), 0)
    all_wait_for(found, 2, now)
    hang = look(found, now)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"]) == ("compute", [2])


@pytest.mark.parametrize(
    ("delay", "cause"), [({"throttled": 0.9, "cpu": 0.1}, "quota"), ({"crowded": 0.9, "cpu": 0.1}, "compute")]
)
def test_threshold_of_a_starved_rank_grows_with_its_lack_of_cpu(delay: dict[str, float], cause: str) -> None:
    """A rank that gets a CPU in a tenth of the time needs 1 s for a step of 0.1 s. The threshold is 10 s more."""
    for after, state in ((10.5, "notice"), (11.5, "hung")):
        found, now = trained(), STOPPED_AT + after
        all_wait_for(found, 2, now)
        found.add(process(2, now, **delay), 0)
        verdict = look(found, now)
        assert verdict["hang"] is not None
        assert (verdict["state"], verdict["hang"]["cause"], verdict["hang"]["ranks"]) == (state, cause, [2])


def test_stuck_transfer_blames_the_link() -> None:
    found, now = trained(members=HOSTS), STOPPED_AT + 12
    for rank in WORLD:
        found.add(stands(rank, now, [in_call("dp", DP[rank], 41), past("tp", TP[rank], 80)]), rank // 2)
    told = look(found, now)
    assert told["hang"] is not None
    assert (told["hang"]["cause"], told["hang"]["ranks"], told["hang"]["sequence"]) == ("link", [], 41)
    assert told["hang"]["host"] == "host-a and host-b"


@pytest.mark.parametrize("through", [(0, 2), ()])
def test_broken_link_is_not_a_skipped_call(through: tuple[int, ...]) -> None:
    """One of two groups on a link completed before the link broke. Its ranks then wait inside their hosts."""
    found, now = trained(members=HOSTS), STOPPED_AT + 12
    for rank in WORLD:
        waits = [past("dp", DP[rank], 41), in_call("tp", TP[rank], 81)]
        if rank not in through:
            waits = [in_call("dp", DP[rank], 41), past("tp", TP[rank], 80)]
        found.add(stands(rank, now, waits), rank // 2)
    told = look(found, now)
    assert told["hang"] is not None
    assert (told["hang"]["cause"], told["hang"]["ranks"]) == ("link", [])
    assert told["hang"]["group"] == {"axis": "dp", "ranks": [1, 3] if through else [0, 2], "size": 2, "nth": 0}
    assert told["next"].startswith("Check the cables, routes, and firewalls of host-a and host-b")


def test_silent_host_blames_the_link() -> None:
    found, now = trained(members=HOSTS), STOPPED_AT + 12
    found.add(process(2, STOPPED_AT, "running"), 1)
    for rank in (0, 1):
        found.add(stands(rank, now, [in_call("dp", DP[rank], 41)]), 0)
    hang = look(found, now)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"], hang["host"]) == ("link", [2, 3], "host-b")


def test_silence_of_all_hosts_is_not_a_hang() -> None:
    found = trained()
    all_wait_for(found, 2, STOPPED_AT + 5)
    assert look(found, STOPPED_AT + 60)["hang"] is None


def test_finds_skipped_call_by_the_later_collective() -> None:
    """Rank 3 skipped its dp collective. Rank 1 waits for it there, and the others wait for rank 1."""
    found, player = trained(), Player(4)
    player.step = STEPS
    acts: dict[int, list[Act]] = {
        rank: [Does("forward", 0.1), Meets("dp", DP[rank]), Meets("world", WORLD)] for rank in WORLD
    }
    for told in player.play(acts):
        found.add(told, 0)
    now = STOPPED_AT + 12
    for rank in (0, 2, 3):
        done = past("dp", DP[rank], 40 if rank == 3 else 41)
        found.add(stands(rank, now, [done, in_call("world", WORLD, 41)]), 0)
    found.add(stands(1, now, [in_call("dp", DP[1], 41), past("world", WORLD, 40)]), 0)
    hang = look(found, now)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"], hang["sequence"]) == ("skipped call", [3], 41)
    assert hang["group"] == {"axis": "dp", "ranks": [1, 3], "size": 2, "nth": 0}


def test_rank_ahead_of_others_skipped_a_call() -> None:
    found, now = trained(), STOPPED_AT + 12
    found.add(item("phase", rank=3, time=STOPPED_AT, phase="teardown"), 0)
    for rank in (0, 1, 3):
        waits = [past("tp", TP[rank], 79 if rank == 3 else 80), in_call("world", WORLD, 1, "barrier", 0)]
        found.add(stands(rank, now, waits, step=STEPS + 1), 0)
    found.add(stands(2, now, [in_call("tp", TP[2], 80), past("world", WORLD, 0)]), 0)
    hang = look(found, now)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"]) == ("skipped call", [3])


@pytest.mark.parametrize(("odd", "cause"), [(("all_gather", 8192), "skipped call"), (("all_reduce", 999), "mismatch")])
def test_different_call_is_skipped_or_mismatched(odd: tuple[str, int], cause: str) -> None:
    """Three ranks are in an all-reduce of 4096 B. Rank 1 is in the next collective, or in an unknown one."""
    found, player = diagnosis({"dp": 4}), Player(4)
    found.add(item("phase", rank=0, time=NOW, phase="step"), 0)
    for number in range(1, STEPS + 1):
        for rank in WORLD:
            found.add(step(rank, number), 0)
    player.step = STEPS
    usual = (("all_reduce", 4096), ("all_gather", 8192), ("all_reduce", 64))
    acts: list[Act] = [Does("forward", 0.1), *(Meets("dp", WORLD, op, size) for op, size in usual)]
    for told in player.play(dict.fromkeys(WORLD, acts)):
        found.add(told, 0)
    now = STOPPED_AT + 12
    for rank in WORLD:
        op, size = odd if rank == 1 else usual[0]
        found.add(stands(rank, now, [in_call("dp", WORLD, 41, op, size)]), 0)
    hang = look(found, now)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"], hang["waiting"]) == (cause, [1], [0, 2, 3])


def test_missing_message_names_the_stage_in_its_own_code() -> None:
    found, now = trained(), STOPPED_AT + 12
    ranks = WORLD
    for rank in (0, 1, 3):
        waits = {"group": group("pp", ranks), "issued": 0, "ended": 0, "op": "recv", "blocking": True}
        found.add(stands(rank, now, [{**waits, "payload_bytes": 64, "since": STOPPED_AT}]), 0)
    early = {
        **waits,
        "blocking": False,
        "payload_bytes": 64,
        "since": STOPPED_AT,
    }  # for the next message
    found.add(stands(2, now, [early], ["stage.py:7 in forward"]), 0)
    hang = look(found, now)["hang"]
    assert hang is not None
    assert (hang["cause"], hang["ranks"], hang["sequence"]) == ("compute", [2], None)


@pytest.mark.parametrize("phase", ["setup", "proof", "eval"])
def test_slow_phases_are_not_hangs(phase: str) -> None:
    found, now = trained(), STOPPED_AT + 40
    found.add(item("phase", rank=1, time=STOPPED_AT, phase=phase), 0)
    all_wait_for(found, 2, now)
    assert look(found, now)["hang"] is None


def test_checkpoint_threshold_follows_earlier_checkpoints() -> None:
    """The threshold was 120 s, although earlier checkpoints took 2 s."""
    stack = ["loop.py:90 in train", "workers/checkpoint/manager.py:30 in save"]
    for after, state, word in ((11.0, "notice", "Waiting"), (13.0, "hung", "Stalled")):
        found, now = trained(), STOPPED_AT + after
        found.add(
            item(
                "checkpoint", rank=0, step=10, time=NOW, name="a/1/10", num_bytes=1, stall_s=2.0, save_s=2.0, problem=""
            ),
            0,
        )
        all_wait_for(found, 2, now, stack)
        verdict = look(found, now)
        assert verdict["hang"] is not None
        assert (verdict["state"], verdict["hang"]["cause"]) == (state, "checkpoint")
        assert verdict["sentence"].startswith(f"{word}: training has waited ")


def test_first_step_may_take_minutes() -> None:
    found, now = diagnosis({"dp": 2, "tp": 2}), STOPPED_AT + 200
    found.add(item("start", rank=0, time=STOPPED_AT, stage="built"), 0)
    all_wait_for(found, 2, now)
    assert look(found, now)["hang"] is None


def test_hang_ends_with_progress() -> None:
    found, now = trained(), STOPPED_AT + 12
    all_wait_for(found, 2, now)
    assert look(found, now)["hang"] is not None
    found.add(stands(2, now + 1, [past("dp", DP[2], 41)], still=0.0), 0)
    assert look(found, now + 2)["hang"] is None
