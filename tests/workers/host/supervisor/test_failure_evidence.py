"""Evidence of failures: scripts that fail under torchrun, and output of libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.diagnosis.items import diagnosis, look
from tests.support.host import build_launch_order
from tests.support.processes import ROOT, base_environment, scale_timeout
from workers.host.attempts import AttemptDir
from workers.host.rank_files import read_failure
from workers.host.supervisor.exit_report import AttemptEnd, SummaryBuilder, build_exit_report
from workers.host.supervisor.failure_evidence import MAX_EVIDENCE_LINES, ErrorOutput, FailureEvidence
from workers.host.supervisor.log_tail import LogTail
from workers.host.supervisor.memory_kills import MemoryKillWatch

MISMATCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(8))
dist.all_reduce(torch.ones(1025 if dist.get_rank() == 1 else 262144))
"""
CHAINED = """
import sys
def load(name):
    return {}[name]
def configure():
    try:
        load("dim")
    except KeyError:
        raise RuntimeError("cannot configure the model")
print("a warning of a library", file=sys.stderr)
configure()
"""
SPAWNED = """
import torch.multiprocessing as mp
def work(rank):
    if rank == 1:
        raise ValueError("shard 7 is empty")
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
SUBPROCESS = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "raise OSError('cannot read data.bin')"], check=True)
"""
INVALID_MEMORY = """
import ctypes
def read_weights():
    ctypes.string_at(8)
read_weights()
"""
TOO_LARGE = """
import torch
def build():
    return torch.empty(2**52)
build()
"""
KILLED = """
import os, signal, sys
print("Traceback (most recent call last):\\nValueError: handled", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_script(folder: Path, script: str, num_ranks: int = 1) -> dict[str, Any]:
    """Run a script under torchrun, and return its exit report."""
    attempt = AttemptDir(folder, "job", 1)
    attempt.logs.mkdir(parents=True)
    (folder / "train.py").write_text(script)
    watch = MemoryKillWatch()
    options = [f"--failure={attempt.failure_file}", f"--logs={attempt.logs}", f"--ranks={num_ranks}", "--name=job"]
    command = [sys.executable, "-m", "workers.host.launch", *options, "workers.meter", str(folder / "train.py")]
    ended = subprocess.run(
        command, cwd=ROOT, env=base_environment(), capture_output=True, timeout=scale_timeout(120), check=False
    )
    assert ended.returncode == 1, ended.stderr.decode()
    tail = LogTail(attempt.logs, range(num_ranks), 2**20, frozenset({os.geteuid()}))
    tail.read(final=True)
    failure = read_failure(attempt, range(num_ranks))
    end = AttemptEnd(1, failure, None, "", 1.0, memory_kills=watch)
    order = build_launch_order(slots=list(range(num_ranks)))
    return dict(build_exit_report(attempt, order, end, SummaryBuilder(), tail))


def explain(report: dict[str, Any]) -> Any:
    """Return the verdict of a run with this exit report."""
    found = diagnosis({"dp": 2})
    found.end("failed", report)
    return look(found)


def test_evidence_of_a_mismatch_is_the_message_of_the_library(tmp_path: Path) -> None:
    report = run_script(tmp_path, MISMATCH, num_ranks=2)
    assert report["error"].startswith("gloo::EnforceNotMet: ")
    assert report["error"].endswith("Is there a distributed collective mismatch in your code?")
    assert "Extension modules" not in "".join(report["evidence"])
    verdict = explain(report)
    assert "distributed collective mismatch" in verdict["reason"]
    assert "distributed collective mismatch" in verdict["evidence"][-1]["text"]
    assert verdict["sentence"].endswith("(train.py:5).")


def test_evidence_of_chained_exceptions_names_the_first(tmp_path: Path) -> None:
    report = run_script(tmp_path, CHAINED)
    assert (report["error"], report["first_error"]) == ("RuntimeError: cannot configure the model", "KeyError: 'dim'")
    assert report["reason"] == "rank 0 ended with exit code 1: RuntimeError: cannot configure the model"
    assert not any("warning" in line for line in report["evidence"])
    verdict = explain(report)
    assert verdict["sentence"] == "Failed: rank 0, RuntimeError: cannot configure the model (train.py:9)."
    assert verdict["reason"].endswith("It followed from KeyError: 'dim'")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "error"),
    [(SPAWNED, "ValueError: shard 7 is empty"), (SUBPROCESS, "OSError: cannot read data.bin")],
)
def test_evidence_is_the_exception_of_the_child_process(tmp_path: Path, script: str, error: str) -> None:
    report = run_script(tmp_path, script)
    assert report["error"] == error
    assert report["evidence"][-1].endswith(error)
    assert explain(report)["sentence"].startswith(f"Failed: rank 0, {error}")


@pytest.mark.extended
def test_evidence_of_an_invalid_access_is_the_line_of_the_user(tmp_path: Path) -> None:
    report = run_script(tmp_path, INVALID_MEMORY)
    assert report["signal"] == "SIGSEGV"
    assert "error" not in report
    assert report["evidence"][-1].strip() == "Fatal Python error: Segmentation fault"
    verdict = explain(report)
    assert verdict["sentence"] == "Failed: rank 0 was killed by signal 11 (SIGSEGV) (train.py:4)."
    assert verdict["reason"] == "The process accessed invalid memory, often in native code."


@pytest.mark.extended
def test_failed_allocation_has_its_size(tmp_path: Path) -> None:
    verdict = explain(run_script(tmp_path, TOO_LARGE))
    assert verdict["reason"] == "The failed allocation needs 16384.00 TiB."


@pytest.mark.extended
def test_cause_of_sigkill_is_unknown_without_evidence(tmp_path: Path) -> None:
    report = run_script(tmp_path, KILLED)
    assert report["signal"] == "SIGKILL"
    assert "error" not in report, "a handled exception is not the cause"
    assert report["kill"]["oom_kills"] in (0, None)
    assert explain(report)["reason"].startswith("The cause of SIGKILL is unknown.")


def test_launcher_that_sigkill_ended_has_the_counts_of_the_kernel(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "launcher.log").write_text("Traceback (most recent call last):\nValueError: handled\n")
    tail = LogTail(logs, range(1), 2**20, frozenset({os.geteuid()}))
    tail.read(final=True)
    end = AttemptEnd(-9, None, None, "", 1.0, memory_kills=MemoryKillWatch())
    report = build_exit_report(AttemptDir(tmp_path, "job", 1), build_launch_order(), end, SummaryBuilder(), tail)
    assert (report["reason"], "error" in report) == ("torchrun was killed by SIGKILL", False)
    assert report["kill"]["oom_kills"] in (0, None)
    assert explain(dict(report))["reason"].startswith("The cause of SIGKILL is unknown.")


C10_ERROR = """
step 5
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in /opt/libc10.so)
frame #1: c10::detail::torchCheckFail() + 0x64 (0x7f in /opt/libc10.so)

Fatal Python error: Aborted

Current thread 0x00007f2b (most recent call first):
  <no Python frame>

Thread 0x00007f2a (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
"""
NCCL_SOURCE = "../torch/csrc/distributed/c10d/NCCLUtils.hpp:268"
NCCL_ERROR = f"""
[rank3]: Traceback (most recent call last):
[rank3]:   File "/srv/train.py", line 30, in <module>
[rank3]:     dist.all_reduce(t)
[rank3]: torch.distributed.DistBackendError: NCCL error in: {NCCL_SOURCE}, unhandled cuda error, NCCL version 2.21.5
[rank3]: ncclUnhandledCudaError: Call to CUDA function failed.
[rank3]: Last error:
[rank3]: Cuda failure 2 'out of memory'
"""
TIMEOUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=66, OpType=ALLREDUCE) "
    "ran for 600012 milliseconds before timing out."
)
WATCHDOG = f"""
[rank1]:[E1129 12:00:00.123 ProcessGroupNCCL.cpp:616] {TIMEOUT}
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: {TIMEOUT}
Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:618 (most recent call first):
frame #0: c10::Error::Error() + 0x96 (0x7f in /opt/libc10.so)
"""
GLIBC = "step 7\ndouble free or corruption (!prev)\nFatal Python error: Aborted\n"


def find(text: str, recorded: str = "", *, by_signal: bool = False) -> FailureEvidence:
    output = ErrorOutput()
    output.add(text.split("\n"))
    return output.find_evidence(recorded, by_signal=by_signal)


def test_finds_errors_of_libraries() -> None:
    found = find(C10_ERROR, by_signal=True)
    assert found.message.startswith("c10::Error: CUDA error: an illegal memory access was encountered")
    assert not any("frame #" in line or "threading" in line for line in found.lines)
    recorded = f"torch.distributed.DistBackendError: NCCL error in: {NCCL_SOURCE}"
    assert find(NCCL_ERROR).message.endswith("Last error: Cuda failure 2 'out of memory'")
    assert find(NCCL_ERROR, recorded).lines[-1] == "[rank3]: Cuda failure 2 'out of memory'"
    assert find(WATCHDOG, by_signal=True).message == TIMEOUT
    assert find(GLIBC, by_signal=True).message == "double free or corruption (!prev)"


def test_a_handled_exception_is_no_evidence() -> None:
    handled = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: retried\n'
    assert find(handled + "progress\n" * 100).message == ""
    assert find(handled, by_signal=True) == FailureEvidence("")
    assert find(handled + "Fatal Python error: Segmentation fault", by_signal=True).message == ""
    assert find(handled + GLIBC, by_signal=True).message == "ValueError: retried", "the process aborts at its end"
    later = handled + "progress\n" * 100 + handled.replace("ValueError: retried", "OSError: fatal")
    assert (find(later).message, find(later).first) == ("OSError: fatal", "")


def test_stacks_of_many_threads_do_not_hide_the_error() -> None:
    stack = "Thread 0x00007f2a (most recent call first):\n" + '  File "/w/t.py", line 3 in wait\n' * 40
    frames = '  File "deep.py", line 1, in f\n' * 1000
    trace = f"Traceback (most recent call last):\n{frames}RecursionError: deep\n"
    found = find(C10_ERROR + stack * 100, by_signal=True)
    assert found.message.startswith("c10::Error: CUDA error")
    assert [line for line in found.lines if "t.py" in line] == ['  File "/w/t.py", line 3 in wait'] * 3
    found = find(trace, "RecursionError: deep")
    assert len(found.lines) <= MAX_EVIDENCE_LINES
    assert found.lines[-1] == "RecursionError: deep"
