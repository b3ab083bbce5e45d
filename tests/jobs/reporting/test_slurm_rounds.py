"""Run passes of the Slurm engine against scripted command output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from jobs.models import Attempt, Job, RunToken, Status
from jobs.queue import actions
from jobs.queue.slurm import attempts as slurm_attempts
from jobs.queue.slurm import engine as engines
from jobs.queue.slurm.commands import (
    CommandResult,
    PollRequest,
    PollResult,
    Slurm,
    SlurmUnavailableError,
    SubmissionDeferredError,
    SubmissionRejectedError,
    poll,
)
from jobs.queue.slurm.engine import SlurmEngine
from jobs.queue.slurm.script import Site, Submission
from jobs.queue.slurm.states import format_job_name
from tests.support.processes import wait_until

SPEC: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 1}, "resources": {"engine": "slurm"}}
FAILED = "sbatch: error: Batch job submission failed: "
LIMIT = (
    f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{FAILED}"
    "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
)


class Answers:
    """Answer each command with its scripted output, or with success and no output."""

    def __init__(self, **said: CommandResult | Callable[[Sequence[str]], CommandResult]) -> None:
        self.said, self.asked = said, list[list[str]]()

    def run(self, argv: Sequence[str], *, deadline_s: float, stdin: str = "") -> CommandResult:
        self.asked.append(list(argv))
        said = self.said.get(argv[0], CommandResult(0, "", ""))
        return said(argv) if callable(said) else said

    def names(self, command: str) -> list[str]:
        """Return the ids of jobs in the order of the arguments of a command."""
        words = [word for argv in self.asked if argv[0] == command for word in argv]
        return [word.partition("=")[2] for word in words if word.startswith("--job-name=")]


def slurm(**said: CommandResult | Callable[[Sequence[str]], CommandResult]) -> Slurm:
    return Slurm(Answers(**said))  # type: ignore[arg-type]


@pytest.fixture
def site(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(engines, "POLL_INTERVAL_S", 0.0)
    made = Site(str(tmp_path), "/usr/bin/python3", "https://board")
    settings.SLURM = made._asdict()
    return made


def engine_with(site: Site, door: Answers) -> SlurmEngine:
    engine = SlurmEngine(site)
    engine._slurm = Slurm(door)  # type: ignore[arg-type]
    return engine


def until(engine: SlurmEngine, reached: Callable[[], object], what: str) -> None:
    def passed() -> object:
        for step in (engine.place, engine.observe, engine.cancel, engine.start):
            step()
        return reached()

    wait_until(passed, what, 20)


@pytest.mark.parametrize(
    ("words", "meant", "told"),
    [
        (LIMIT, SubmissionDeferredError, "QOSMaxWallDurationPerJobLimit"),
        (f"{FAILED}Unable to create job record, try again", SubmissionDeferredError, "try again"),
        (f"{FAILED}Invalid partition name specified", SubmissionRejectedError, "^Invalid partition name specified$"),
        (
            "sbatch: error: Invalid --exclude specification",
            SubmissionRejectedError,
            "^Invalid --exclude specification$",
        ),
        (f"{FAILED}Unable to contact slurm controller (connect failure)", SlurmUnavailableError, "Unable to contact"),
        ("Killed", SlurmUnavailableError, "Killed"),
    ],
)
def test_sbatch_errors_belong_to_the_job_or_to_slurm(words: str, meant: type[Exception], told: str) -> None:
    with pytest.raises(meant, match=told):
        slurm(sbatch=CommandResult(1, "", words)).submit([], "")


def test_job_rejected_for_now_does_not_block_others(owner: User, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "MAX_SUBMISSIONS_PER_POLL", 1)
    limited, other = (actions.submit(owner, SPEC)[0] for _ in range(2))

    def sbatch(argv: Sequence[str]) -> CommandResult:
        return (
            CommandResult(1, "", LIMIT)
            if f"--job-name={format_job_name(limited.id, 1)}" in argv
            else CommandResult(0, "77\n", "")
        )

    door = Answers(sbatch=sbatch)
    engine = engine_with(site, door)
    until(engine, lambda: Attempt.objects.get(job=other).engine_id == "77", "the other one is submitted")
    until(
        engine, lambda: door.names("sbatch").count(format_job_name(limited.id, 1)) > 1, "the limited one is tried again"
    )
    until(engine, lambda: not RunToken.objects.filter(attempt__job=limited).exists(), "its token is deleted")
    limited, other = Job.objects.get(id=limited.id), Job.objects.get(id=other.id)
    assert limited.status == Status.QUEUED
    assert limited.wait_reason.startswith(
        "Slurm does not accept the job at the moment: sbatch: error: QOSMaxWallDurationPerJobLimit"
    )
    assert "Cannot query" not in other.wait_reason


def test_drops_nul_bytes_of_script_output() -> None:
    assert slurm(tail=CommandResult(0, "Traceback\0\0 boom", "")).read_tail("x") == "Traceback boom"


def test_failing_update_of_an_attempt_does_not_block_others(
    owner: User, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (actions.submit(owner, SPEC)[0] for _ in range(2))
    engine = SlurmEngine(site)
    engine.place()
    refuse = slurm_attempts.reject

    def some(attempt: Attempt, why: str) -> None:
        if attempt.job_id == bad.id:
            raise ValueError("cannot be written")
        refuse(attempt, why)

    monkeypatch.setattr(slurm_attempts, "reject", some)
    with pytest.raises(ValueError, match="cannot be written"):
        engine._apply(PollResult(rejected={format_job_name(job.id, 1): "no" for job in (bad, good)}))
    assert Job.objects.get(id=good.id).status == Status.FAILED


NO_ACCOUNTS = CommandResult(
    1, "", "sacct: error: failed to open persistent connection to host:dbd:6819: Connection refused"
)


def test_squeue_is_enough_without_accounting() -> None:
    ending, over, new, gone = (format_job_name(job, 1) for job in ("ending", "over", "new", "gone"))
    listed = f"5|RUNNING|p|n1|N/A|{ending}|None\n6|COMPLETED|p|n2|N/A|{over}|None\n"
    door = Answers(squeue=CommandResult(0, listed, ""), sacct=NO_ACCOUNTS)
    known = {ending: "5", over: "6", new: "", gone: "4"}
    news = poll(Slurm(door), PollRequest(known, (Submission(new, (), ""),), frozenset({ending})))  # type: ignore[arg-type]
    assert {name: job.state for name, job in news.jobs.items()} == {ending: "RUNNING", over: "COMPLETED"}
    assert (news.absent, news.submitted) == (frozenset(), {})
    assert news.trouble.startswith("sacct: sacct: error: failed to open persistent connection")
    assert [argv[-1] for argv in door.asked if argv[0] == "scancel"] == ["5"]
    assert [argv for argv in door.asked if argv[0] == "sbatch"] == []


def test_pending_job_keeps_its_reason_without_accounting(owner: User, site: Site) -> None:
    waiting, new = (actions.submit(owner, SPEC)[0] for _ in range(2))
    listed = f"5|PENDING|p||N/A|{format_job_name(waiting.id, 1)}|Priority\n"
    engine = engine_with(site, Answers(squeue=CommandResult(0, listed, ""), sacct=NO_ACCOUNTS))

    def reasons() -> dict[str, str]:
        return dict(Job.objects.values_list("id", "wait_reason"))

    until(engine, lambda: "Cannot query Slurm: sacct" in reasons()[new.id], "it is told")
    assert reasons()[waiting.id] == "Slurm: waiting for Priority: jobs with a higher priority are ahead"
    engine._record_trouble("sacct: still", {waiting.id})
    assert reasons() == {
        waiting.id: "Slurm: waiting for Priority: jobs with a higher priority are ahead",
        new.id: "Cannot query Slurm: sacct: still",
    }


def test_late_submission_keeps_its_token_and_ends_earlier_ones(owner: User, site: Site) -> None:
    job, _ = actions.submit(owner, SPEC)
    name, listed = format_job_name(job.id, 1), list[str]()
    door = Answers(squeue=lambda _: CommandResult(0, "".join(listed), ""), sbatch=CommandResult(1, "", "Killed"))
    engine = engine_with(site, door)
    until(engine, lambda: name in door.names("sbatch"), "it is sent, and Slurm does not answer")
    first = RunToken.objects.earliest("id")
    attempt = Attempt.objects.get()
    slurm_attempts.prepare_submission(attempt, site, "")  # as the next round does, in whose look the first one is there
    listed.append(f"5|PENDING|p||N/A|{name}|Priority\n")
    until(engine, lambda: Attempt.objects.get().engine_id == "5", "it is found")
    assert RunToken.objects.filter(pk=first.pk).exists()
    engine._apply(PollResult(submitted={name: "6"}))
    assert RunToken.objects.get() == RunToken.objects.latest("id") != first


def test_slurm_is_not_queried_in_each_pass(owner: User, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "POLL_INTERVAL_S", 1e6)
    ending, barred = (actions.submit(owner, SPEC)[0] for _ in range(2))
    name = format_job_name(ending.id, 1)
    door = Answers(
        squeue=CommandResult(0, f"5|RUNNING|p|n1|N/A|{name}|None\n", ""), sbatch=CommandResult(0, "77\n", "")
    )
    engine = engine_with(site, door)
    engine.place()
    Job.objects.filter(id=barred.id).update(held=True)
    until(engine, lambda: Job.objects.get(id=ending.id).status == Status.STARTING, "it runs")
    assert actions.cancel(Job.objects.get(id=ending.id), "owner")
    until(engine, lambda: "scancel" in [argv[0] for argv in door.asked], "scancel runs")
    until(engine, lambda: not engine._thread.busy, "the round is over")
    asked = len(door.asked)
    for _ in range(3):
        engine.observe()
        assert not engine._thread.busy
    assert len(door.asked) == asked
    Job.objects.filter(id=barred.id).update(held=False)
    until(
        engine, lambda: Attempt.objects.get(job=barred).engine_id == "77", "a job without restrictions is sent at once"
    )
