"""A synthetic board with a thousand hosts, jobs, queued jobs and ranks of one job, and two hundred projects."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack

from benchmarks.history import OPS, build_step
from tests.screens import company
from tests.screens.pages import World
from tests.support.telemetry import build_pipeline_step

HOSTS, JOBS, QUEUED = 1_000, 1_200, 1_000
PP, DP, TP = 8, 16, 8
RANKS, SLOTS = PP * DP * TP, 8
STEPS, STEP_S = 30, 2.0
SPEC = {
    "name": f"synthetic: {RANKS:,} ranks that do not run, on hosts that do not exist",
    "model": {"preset": "gpt3-175b"},
    "layout": {"dp": DP, "pp": PP, "tp": TP, "zero": 1},
    "train": {"global_batch": 1536, "seq_len": 2048, "micro_batches": 12, "steps": 1_000_000, "eval_every": 0},
    "resources": {"device": "cuda"},
}
SMALL = {
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 4, "tp": 2},
    "train": {"global_batch": 16, "seq_len": 128, "steps": 1_000},
    "resources": {"device": "cuda"},
}
NAMES = (
    "synthetic-pretraining-of-a-mixture-whose-name-goes-on-without-one-space-until-there-is-no-more-room",
    "synthetic: a long name of many words which says what the run is for, whose it is and why it runs",
    "synthetic run",
)


def fill(redis: Any, history: Path) -> World:
    """Fill the database of Django's settings, a Redis and a folder of histories."""
    from django.contrib.auth.models import User
    from django.utils import timezone

    from jobs.models import TERMINAL, Attempt, Host, Job, Member, SlotAllocation, StateChange, Status
    from planner.cost.estimate import estimate
    from planner.facts.kinds import get_num_slots
    from planner.facts.parse_spec import parse_spec

    [owner, staff] = [User.objects.get(username=name) for name in ("owner", "staff")]
    now, pick = timezone.now(), random.Random(1)
    made = company.fill(owner, staff)
    gpu = {"slots": SLOTS, "device": "cuda", "device_name": "a synthetic GPU", "memory_bytes": 80 * 2**30}
    hosts = [
        Host(name=name, boot_id="b", last_seen=now + timedelta(days=1), drained=n % 97 == 0, **gpu)
        for n, name in enumerate(f"rack-{n // 40:02}-node-{n % 40:02}.synthetic.example.internal" for n in range(HOSTS))
    ]
    Host.objects.bulk_create(hosts)
    [big, small] = [parse_spec(spec) for spec in (SPEC, SMALL)]
    stored = {
        spec.name: {
            "owner": owner, "spec": spec.model_dump(), "kind": spec.kind, "device": "cuda", "estimate": estimate(spec),
            "num_slots": get_num_slots(spec), "unit": SLOTS, "max_hosts": 0,
        }
        for spec in (big, small)
    }  # fmt: skip
    why = "needs 1,024 free slots of cuda hosts; 976 are free on 122 hosts, 48 on hosts that are drained"
    earlier = [
        Job(
            **stored[small.name],
            name=f"{NAMES[n % 3][:90]} {n}",
            status=TERMINAL[n % len(TERMINAL)],
            project=made.projects[n % len(made.projects)],
        )
        for n in range(JOBS)
    ]
    waiting = [
        Job(**stored[big.name], name=f"{NAMES[n % 3][:90]} {n}", priority=pick.choice((0, 0, 5)), wait_reason=why)
        for n in range(QUEUED)
    ]
    ended = Job(**stored[big.name], name=f"synthetic: {RANKS:,} ranks, ended", status=Status.SUCCEEDED)
    running = Job(**stored[big.name], name=big.name, status=Status.RUNNING)
    Job.objects.bulk_create([*earlier, *waiting, ended, running], batch_size=200)
    summary = {"steps": STEPS, "tokens_per_s": 1e6, "losses": [], "eval_losses": [], "cells": {}, "verdict": {}}
    exit_report = {"outcome": "succeeded", "reason": "ended", "log_tail": [], "summary": summary}
    for job, exit in ((ended, exit_report), (running, None)):
        attempt = Attempt.objects.create(job=job, number=1, exit=exit)
        members = [
            Member(
                attempt=attempt, node=node, host=hosts[node], host_name=hosts[node].name, first_rank=node * SLOTS,
                num_ranks=SLOTS, ordered=now, ended=now if exit else None,
            )
            for node in range(RANKS // SLOTS)
        ]  # fmt: skip
        Member.objects.bulk_create(members)
        went = (Status.QUEUED, Status.STARTING, Status.RUNNING, *([Status.SUCCEEDED] if exit else []))
        StateChange.objects.bulk_create(StateChange(job=job, status=status, attempt=1) for status in went)
        if exit is None:
            SlotAllocation.objects.bulk_create(
                SlotAllocation(host=hosts[member.node], slot=slot, member=member)
                for member in members
                for slot in range(SLOTS)
            )
    publish_telemetry(redis, running.id)
    write_history(history, ended.id)
    return World({"trained": ended.id, "running": running.id, "earlier": earlier[0].id}, hosts[3].name, made.project)


def publish_telemetry(redis: Any, job: str) -> None:
    """Publish telemetry in the format of a supervisor."""
    from contracts.names import telemetry_stream

    with redis.pipeline(transaction=False) as sent:
        for node, number, batch in generate_batches(job, time.time() - STEPS * STEP_S):
            sent.xadd(telemetry_stream(job, 1, node), {"b": msgpack.packb(batch), "n": number})
            if node == 0:
                sent.execute()
        sent.execute()


def write_history(root: Path, job: str) -> None:
    """Write histories in the format of the recorder."""
    from jobs.runs.history.recording.attempt_recorder import AttemptRecorder, RecordedEntry

    recording = AttemptRecorder(root, job, 1)
    recording.get_positions(RANKS // SLOTS)
    for node, number, batch in generate_batches(job, time.time() - 3600, ends=True):
        recording.add_entries(node, [RecordedEntry(f"{number + 1}-0", number, 0, msgpack.packb(batch))])
        if node == 0:
            recording.commit_if_due()
    recording.finish("succeeded", "", time.time() - 3600 + STEPS * STEP_S)


def verdict(rank: int, now: float) -> dict[str, Any]:
    """Return a verdict that matches the plan except for one rank."""
    off = 4096 if rank == 77 else 0
    rows = [
        {
            "phase": "step", "op": op, "axis": axis, "predicted_count": 12 * STEPS, "measured_count": 12 * STEPS,
            "predicted_bytes": 12_000_000 * STEPS, "measured_bytes": 12_000_000 * STEPS + off,
        }
        for op, axis in OPS
    ]  # fmt: skip
    return {"kind": "verdict", "rank": rank, "time": now, "rows": rows, "peak_bytes": 2**36}


def generate_batches(job: str, began: float, *, ends: bool = False) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (node, number, batch) per host and step, with a timeline in the last step and verdicts at the end."""
    timelines = build_pipeline_step(PP, DP, TP, step=STEPS)
    for step in range(1, STEPS + 1):
        now = began + step * STEP_S
        for node in range(RANKS // SLOTS):
            items: list[Any] = []
            for rank in range(node * SLOTS, (node + 1) * SLOTS):
                if step == 1:
                    items.append({"kind": "phase", "rank": rank, "time": now, "phase": "step"})
                items.append({**build_step(rank, step, 1_000_000, STEP_S), "time": now + rank * 1e-5})
                line = f"\x1b[32mINFO\x1b[0m synthetic line {step} of rank {rank}: " + "the maximum per rank " * (
                    rank % 9
                )
                items.append({"kind": "log", "rank": rank, "time": now, "first": step - 1, "lines": [line]})
                if step % 5 == 0:
                    held = 2**36 + rank * 2**20
                    gauge = {
                        "kind": "gauge",
                        "rank": rank,
                        "time": now,
                        "resident_bytes": held,
                        "allocated_bytes": held,
                    }
                    items.append(gauge)
                if step == STEPS and ends:
                    items.append(verdict(rank, now))
                if step == STEPS:
                    items.append({**timelines[rank], "time": now, "began": now - timelines[rank]["step_s"]})
            yield node, step - 1, {
                "v": 1, "job": job, "attempt": 1, "time": now, "items": items, "host": f"node-{node}",
                "clock": {"offset_s": 0.0, "within_s": 0.0005},
            }  # fmt: skip
