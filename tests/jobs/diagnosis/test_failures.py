"""Find failures of the training and of the end of a run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jobs.runs.diagnosis import HostRanks
from jobs.runs.diagnosis.failures import TrainingHealth
from tests.jobs.diagnosis.items import ITEM, NOW, diagnosis, look, step


def test_traffic_of_some_ranks_is_marked_as_partial() -> None:
    found = diagnosis({"dp": 2})
    took = look(found)["planned"]["step_s"]  # type: ignore[index]
    found._planned["sure"] = 0.45  # type: ignore[index]
    for number in range(1, 9):
        for rank in (0, 1):
            found.add(step(rank, number, took), 0)
    found.add(ITEM.validate_python({"kind": "verdict", "rank": 1, "time": NOW, "rows": []}), 0)
    found.end("succeeded")
    ending = " matches the prediction. Traffic on 1 of 2 ranks matches the plan."
    assert look(found)["sentence"].endswith(ending)


def test_traffic_mismatch_names_ranks() -> None:
    found = diagnosis({"dp": 2})
    row = {"phase": "step", "op": "all_reduce", "axis": "dp", "predicted_count": 5, "measured_count": 6}
    row |= {"predicted_bytes": 100, "measured_bytes": 120}
    found.add(ITEM.validate_python({"kind": "verdict", "rank": 1, "time": NOW, "rows": [row]}), 0)
    told = look(found)
    assert told["sentence"] == "Traffic mismatch: 20 B, 1 call on 1 of 1 rank."
    assert told["evidence"][0]["ranks"] == [1]


def test_failed_run_names_its_cause() -> None:
    found = diagnosis({"dp": 2})
    report = {"outcome": "failed", "reason": "rank 1 was killed by SIGKILL", "rank": 1, "signal": "SIGKILL"}
    found.end("failed", {**report, "log_tail": ["Traceback", "", "boom"]})
    told = look(found)
    assert told["state"] == "failed"
    assert told["sentence"] == "Failed: rank 1 was killed by signal 9 (SIGKILL)."
    assert told["reason"].startswith("The cause of SIGKILL is unknown. The usual causes are ")
    check = "check the kernel log of the host for out-of-memory kills with `journalctl -k --grep='Killed process'`"
    assert told["next"] == f"Read the log of rank 1, and {check}."
    assert (told["action"], told["action_rank"]) == ("open_log", 1)
    assert [fact["text"] for fact in told["evidence"]] == ["Traceback", "boom"]


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [("SIGKILL", 0, "signal 9 (SIGKILL)"), ("SIGSEGV", 7, "signal 11 (SIGSEGV) after step 7"), ("signal 40", 0, "")],
)
def test_killed_rank_names_its_signal(name: str, step: int, words: str) -> None:
    found, reason = diagnosis({"dp": 2}), f"rank 1 was killed by {name} after step {step}"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "signal": name, "log_tail": []})
    assert look(found)["sentence"] == f"Failed: rank 1 was killed by {words or name}."


@pytest.mark.parametrize(
    ("error", "sentence", "why", "following"),
    [
        (
            "gradient norm is nan at step 3; learning rate 10 (9.5 at this step), gradient clip off, precision fp32",
            "Diverged: the gradient norm is NaN at step 3.",
            "At this step, the learning rate is 9.5, gradient clipping is off, and the precision is fp32.",
            "Lower the learning rate, or set gradient clipping.",
        ),
        (
            "loss is nan and gradient norm is inf at step 9; learning rate 1 (1 at this step), gradient clip 0.5, "
            "precision bf16",
            "Diverged: the loss is NaN and the gradient norm is infinite at step 9.",
            "At this step, the learning rate is 1, gradients are clipped to 0.5, and the precision is bf16.",
            "Lower the learning rate, or check the training data.",
        ),
    ],
)
def test_run_that_stopped_at_nan_diverged(error: str, sentence: str, why: str, following: str) -> None:
    found = diagnosis({"dp": 2})
    report = {"outcome": "failed", "reason": f"rank 1 ended with exit code 1: {error}", "rank": 1, "exit_code": 1}
    found.end("failed", {**report, "log_tail": ["boom"]})
    told = look(found)
    assert (told["state"], told["sentence"], told["reason"]) == ("failed", sentence, why)
    assert (told["next"], told["action"]) == (following, "copy_job")
    assert [fact["text"] for fact in told["evidence"]] == [report["reason"], "boom"]


def test_failure_evidence_has_meaningful_log_lines() -> None:
    found = diagnosis({"dp": 2})
    tail = ["\x1b[31mTraceback\x1b[0m", "    boom()", "    ~~~~^^", "  ^^^^^^^", "\x1b]0;title\x07Error: \x08no"]
    reason = "rank 1 ended with exit code 1: \x1b[1mno\x1b[0m"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "log_tail": tail})
    told = look(found)
    assert [fact["text"] for fact in told["evidence"]] == ["Traceback", "    boom()", "Error: no"]
    assert (told["sentence"], told["reason"]) == ("Failed: rank 1, no.", "The rank ended with exit code 1.")


def test_failure_names_rank_host_exception_and_source_line() -> None:
    found = diagnosis({"dp": 2}, members=(HostRanks("host-a", 0, 1), HostRanks("host-b", 1, 1)))
    tail = [
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/srv/scripts/train.py", line 12, in <module>',
        '[rank1]:   File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1773, in forward',
        "[rank1]: ValueError: boom",
    ]
    reason = "rank 1 ended with exit code 1: ValueError: boom"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "exit_code": 1, "log_tail": tail})
    told = look(found)
    assert told["sentence"] == "Failed: rank 1 on host-b, ValueError: boom (train.py:12)."
    assert told["reason"] == "An uncaught exception ended the rank with exit code 1."
    assert (told["next"], told["action"], told["action_rank"]) == ("Read the log of rank 1.", "open_log", 1)


def test_out_of_memory_suggests_smaller_batch_or_other_layout() -> None:
    found, reason = diagnosis({"dp": 2}), "rank 0 ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory."
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 0, "exit_code": 1, "log_tail": []})
    told = look(found)
    assert told["next"] == "Use a smaller micro-batch, or a layout that needs less memory per rank."
    assert told["action"] == "copy_job"


CUDA_ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 5.50 GiB is free. Process 2048 has 1.00 GiB memory in use. Including non-PyTorch memory, this process "
    "has 72.65 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 2.00 GiB is reserved "
    "by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)


def test_out_of_memory_shows_numbers_and_what_would_fit() -> None:
    found = diagnosis({"dp": 2}, {"global_batch": 64, "seq_len": 512})
    report = {"outcome": "failed", "reason": f"rank 0 ended with exit code 1: {CUDA_ERROR}", "rank": 0, "exit_code": 1}
    found.end("failed", {**report, "log_tail": [], "evidence": ['  File "/srv/train.py", line 3, in f', CUDA_ERROR]})
    verdict = look(found)
    assert verdict["sentence"].endswith("CUDA out of memory. Tried to allocate 20.00 GiB (train.py:3).")
    assert verdict["reason"] == "The failed allocation needs 20.00 GiB, and 5.50 GiB of 79.15 GiB is free."
    assert re.fullmatch(r"Set `train.micro_batches` to 2, which is planned to need \S+ MiB per rank\.", verdict["next"])
    texts = [fact["text"] for fact in verdict["evidence"]]
    assert texts[:3] == [
        "memory in use by rank 0: 72.65 GiB",
        "by part: tensors 70.00 GiB, reserved by PyTorch without a tensor 2.00 GiB, outside PyTorch 665.60 MiB",
        "memory in use by other processes: 1.00 GiB",
    ]
    assert texts[3].startswith("planned memory of rank 0: ")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
            "The failed allocation needs 64.00 GiB.",
        ),
        ("MemoryError", "An uncaught exception ended the rank with exit code 1."),
    ],
)
def test_out_of_memory_on_a_host_shows_only_known_numbers(error: str, reason: str) -> None:
    found = diagnosis({"dp": 2})
    gauge = {"kind": "gauge", "rank": 0, "time": NOW, "resident_bytes": 3 * 2**30}
    found.add(ITEM.validate_python(gauge), 0)
    text = f"rank 0 ended with exit code 1: {error}"
    found.end("failed", {"outcome": "failed", "reason": text, "rank": 0, "exit_code": 1, "log_tail": []})
    verdict = look(found)
    assert verdict["reason"] == reason
    assert verdict["evidence"][0]["text"] == "last measured memory of rank 0 on its host: 3.00 GiB"
    assert verdict["next"] == "Use a smaller micro-batch, or a layout that needs less memory per rank."


def test_sigkill_of_the_kernel_is_named() -> None:
    found = diagnosis({"dp": 2})
    report = {"outcome": "failed", "reason": "rank 1 was killed by SIGKILL after step 5", "rank": 1}
    text = "The kernel's out-of-memory killer ended process 4711 (python), which used 13.2 GiB of memory."
    kill = {"oom_kills": 1, "text": text}
    found.end("failed", {**report, "signal": "SIGKILL", "log_tail": ["step 5"], "kill": kill})
    verdict = look(found)
    assert verdict["sentence"] == (
        "Failed: rank 1 was killed by signal 9 (SIGKILL) after step 5, because the kernel ran out of memory."
    )
    assert (verdict["reason"], verdict["action"]) == (text, "copy_job")
    found = diagnosis({"dp": 2})
    text = "The kernel counted no out-of-memory kill on the host during this attempt."
    found.end("failed", {**report, "signal": "SIGKILL", "log_tail": [], "kill": {"oom_kills": 0, "text": text}})
    assert look(found)["reason"] == f"The cause of SIGKILL is unknown. {text}"
    assert look(found)["next"] == "Ask the users and check the batch system of the host who ended the process."


def test_long_reason_is_truncated_in_the_sentence_only() -> None:
    found, reason = diagnosis({"dp": 2}), "rank 1 ended with exit code 1: " + "long " * 80
    found.end("failed", {"outcome": "failed", "reason": reason.strip(), "rank": 1, "log_tail": ["boom"]})
    told = look(found)
    assert told["sentence"].endswith("…")
    assert len(told["sentence"]) < 220
    assert [fact["text"] for fact in told["evidence"]] == [reason.strip(), "boom"]


def test_run_stopped_with_its_host_suggests_retry() -> None:
    found = diagnosis({"dp": 2})
    found.end("failed", {"outcome": "failed", "reason": "the host was stopped", "exit_code": -15, "log_tail": ["x"]})
    assert (look(found)["next"], look(found)["action"]) == ("Retry the job when its host is back.", "retry")
    saved = {"kind": "checkpoint", "rank": 0, "time": NOW, "step": 40, "name": "job/1/step-00000040", "num_bytes": 1}
    found.add(ITEM.validate_python({**saved, "stall_s": 0.1, "save_s": 0.1, "problem": ""}), 0)
    assert look(found)["next"] == "Retry the job when its host is back, to resume after step 40."


def test_log_line_of_a_rank_is_not_taken_for_a_stopped_host() -> None:
    found, reason = diagnosis({"dp": 2}), "rank 1 ended with exit code 1: RuntimeError: the host was stopped"
    found.end("failed", {"outcome": "failed", "reason": reason, "rank": 1, "exit_code": 1, "log_tail": ["x"]})
    assert look(found)["next"] == "Read the log of rank 1."


@pytest.mark.parametrize(
    ("reason", "sentence", "why"),
    [
        (
            "the supervisor died without an exit report; its ranks were ended with it",
            "Lost: the supervisor died without an exit report.",
            "Its ranks were ended with it.",
        ),
        ("host small was rebooted", "Lost: host small was rebooted.", ""),
        ("", "Lost: the host reported no reason.", ""),
    ],
)
def test_lost_run_names_the_known_reason(reason: str, sentence: str, why: str) -> None:
    found = diagnosis({"dp": 2})
    found.end("lost", {"outcome": "lost", "reason": reason} if reason else None)
    told = look(found)
    assert (told["state"], told["sentence"], told["reason"]) == ("failed", sentence, why)
    assert (told["next"], told["action"]) == ("Check the host, then retry the job.", "retry")


def test_lost_run_with_checkpoint_can_resume_on_fewer_hosts() -> None:
    found = diagnosis({"dp": 2}, members=(HostRanks("host-a", 0, 1), HostRanks("host-b", 1, 1)))
    saved = {"kind": "checkpoint", "rank": 0, "time": NOW, "step": 40, "name": "job/1/step-00000040", "num_bytes": 1}
    found.add(ITEM.validate_python({**saved, "stall_s": 0.1, "save_s": 0.1, "problem": ""}), 0)
    found.end("lost", {"outcome": "lost", "reason": "host host-b was rebooted"})
    assert look(found)["action"] == "resume_smaller"


def test_empty_launcher_log_is_not_suggested() -> None:
    found = diagnosis({"dp": 1})
    report = {"outcome": "failed", "reason": "no room on small", "rank": None, "exit_code": None, "log_tail": []}
    found.end("failed", report)
    told = look(found)
    assert (told["sentence"], told["reason"], told["next"]) == ("Failed: no room on small.", "", "")


def test_reports_non_finite_and_growing_losses() -> None:
    found = diagnosis({"dp": 1})
    for number in range(1, 80):
        found.add(step(0, number, loss=5.0 - number / 40 if number < 40 else 4.0 + number / 10), 0)
    assert [trouble["kind"] for trouble in look(found)["training"]] == ["diverged"]
    found.add(step(0, 80, loss=None, not_finite="loss is nan"), 0)
    assert {trouble["kind"] for trouble in look(found)["training"]} == {"diverged", "not finite"}


def test_past_problems_are_listed_but_not_the_verdict() -> None:
    """Rare infinite gradients, high losses, and one failed checkpoint do not change a healthy verdict."""
    found = diagnosis({"dp": 1})
    checkpoint = {"kind": "checkpoint", "rank": 0, "time": NOW, "num_bytes": 1, "stall_s": 0.1, "save_s": 0.1}
    full = {"name": None, "problem": "no space left"}
    for number in range(1, 31):
        found.add(step(0, number, loss=3.0), 0)
    found.add(step(0, 31, loss=3.0, grad_norm=None, not_finite="gradient norm is inf"), 0)
    assert look(found)["sentence"] == "Diverged: the gradient norm is infinite at step 31."
    for number in range(32, 42):
        found.add(step(0, number, loss=9.0), 0)
    found.add(ITEM.validate_python({**checkpoint, "step": 41, **full}), 0)
    assert look(found)["state"] == "failed"
    for number in range(42, 70):
        found.add(step(0, number, loss=3.0), 0)
    assert look(found)["sentence"] == "Failed: the checkpoint after step 41 could not be written."
    found.add(ITEM.validate_python({**checkpoint, "step": 60, "name": "job/1/step-00000060", "problem": ""}), 0)
    told = look(found)
    assert told["state"] == "well"
    assert {trouble["kind"] for trouble in told["training"]} == {"not finite", "diverged", "checkpoint failed"}


def test_noisy_loss_does_not_diverge() -> None:
    found = diagnosis({"dp": 1})
    for number in range(1, 200):
        found.add(step(0, number, loss=3.0 + (number * 7919 % 13) / 10), 0)
    assert look(found)["training"] == []


def report_loss(health: TrainingHealth, step: int, loss: float | None, source: str = "log line", **more: Any) -> None:
    values = {} if loss is None else {"loss": loss}
    item: Any = {"kind": "metric", "rank": 0, "time": 1.0, "step": step, "source": source, "values": values, **more}
    health.add_metrics(item)


def test_script_whose_loss_is_nan_diverged() -> None:
    health = TrainingHealth()
    report_loss(health, 10, 2.5)
    report_loss(health, 20, None, not_finite={"loss": "nan", "val_loss": "nan"})
    assert [finding.sentence for finding in health.make_findings()] == ["Diverged: the loss is NaN at step 20."]
    assert health.reported == {"step": 20, "loss": None, "not_finite": "nan", "source": "log line"}
    for number in range(21, 45):
        report_loss(health, number, 2.0)
    assert list(health.make_findings()) == [], "the loss has become normal"


def test_loss_of_another_source_does_not_mix_with_the_preferred_one() -> None:
    health = TrainingHealth()
    for number in range(60):
        report_loss(health, number, 1.0, "wandb")
        report_loss(health, number, 100.0 + number)
    report_loss(health, 60, None, "numbered log line", not_finite={"loss": "inf"})
    assert list(health.make_findings()) == []
    for number in range(61, 75):
        report_loss(health, number, 50.0, "wandb")
    assert [finding.sentence[:30] for finding in health.make_findings()] == ["Diverged: loss 50 at step 74 i"]


def test_line_without_a_step_is_named_by_its_number() -> None:
    health = TrainingHealth()
    report_loss(health, 3, None, "numbered log line", not_finite={"loss": "-inf"})
    assert [finding.sentence for finding in health.make_findings()] == [
        "Diverged: the loss is negative infinity at report 3."
    ]
