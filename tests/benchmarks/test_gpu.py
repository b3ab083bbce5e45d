"""Check `make gpu` without a GPU: its runner on small programs, and its parts on gloo."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import machine, running
from benchmarks.gpu.__main__ import DOCS
from benchmarks.gpu.machine import Fingerprint, Machine, find_cluster, find_gpu_problem
from benchmarks.gpu.metering import read_nccl_totals
from benchmarks.gpu.parts import list_parts
from benchmarks.gpu.plan import MAX_MEMORY_SHARE, predict_reserved_bytes
from benchmarks.gpu.rates import IN_FP8, list_impossible_rates, measure_rates, predict_rates
from benchmarks.gpu.results import PartResult
from benchmarks.gpu.running import BenchmarkPart, run_parts
from benchmarks.gpu.table import format_counts, format_lines, format_page
from benchmarks.gpu.training import sum_kernel_times
from planner.facts.parse_spec import parse_spec
from planner.facts.spec_rules import find_unsupported_fields
from planner.hardware.catalog import ACCELERATORS, CLUSTERS
from planner.hardware.kernel_time import compute_gemm_seconds
from planner.hardware.kernels import Gemm
from planner.hardware.stacks import STACKS
from tests.parity.cases import LAYOUTS
from tests.support.processes import ROOT, is_gone, scale_timeout, wait_until
from tests.workers.host.test_machine import FakeNvml, NoDriver
from workers.host.hardware import Gpus

GIB = 2**30
HERE = Fingerprint(torch="2", device="none", count=1, commit="c", small=True)
WRITES = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
with (folder / "runs").open("a") as runs:
    print(sys.argv[2], file=runs)
found = {"measured": {"x": float(sys.argv[3])}, "beside": {}, "wrong": [], "notes": []}
Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(found))
"""


def writes(folder: Path, name: str, x: float = 1.0, within: float = 0.5) -> BenchmarkPart:
    argv = (sys.executable, "-c", WRITES, str(folder), name, str(x))
    return BenchmarkPart(name, name, argv, predicted={"x": 1.0}, within={"x": within})


def states(results: list[PartResult]) -> list[str]:
    return [result["state"] for result in results]


def run(
    parts: list[BenchmarkPart], folder: Path, machine: Fingerprint = HERE, *, fresh: bool = False, left_s: float = 3600
) -> list[PartResult]:
    return run_parts(parts, folder, machine, lambda _line: None, running.read_clock() + left_s, fresh=fresh)


def runs(folder: Path) -> list[str]:
    return (folder / "runs").read_text().split()


def test_reports_a_failed_part_and_runs_the_others(tmp_path: Path) -> None:
    breaks = BenchmarkPart("breaks", "", (sys.executable, "-c", "raise ValueError('the reason')"))
    says_nothing = BenchmarkPart("silent", "", (sys.executable, "-c", "pass"))
    skipped = BenchmarkPart("none", "", skip="no GPU")
    parts = [breaks, says_nothing, writes(tmp_path, "far", x=3.0), skipped, writes(tmp_path, "good")]
    results = run(parts, tmp_path)
    assert states(results) == ["failed", "failed", "failed", "skipped", "passed"]
    assert "the reason" in results[0]["why"]
    assert "-66.7%" in results[2]["why"]
    assert format_counts(results) == "1 passed, 3 failed, 0 cut, 1 skipped"
    assert "| x | 1 | 3 | -66.7% |" in format_page(results, HERE, "command")


def test_part_over_its_time_leaves_no_process(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    says = f"{child}; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    result = run([BenchmarkPart("endless", "", (sys.executable, "-c", says), limit_s=scale_timeout(1.5))], tmp_path)[0]
    assert result["state"] == "failed"
    assert "longer than" in result["why"]
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_reuses_passed_results_of_this_machine_and_commit_only(tmp_path: Path) -> None:
    parts = [writes(tmp_path, "a"), writes(tmp_path, "far", x=3.0)]
    run(parts, tmp_path)
    assert [r.get("kept", False) for r in run(parts, tmp_path)] == [True, False]
    assert runs(tmp_path) == ["a", "far", "far"]
    run(parts[:1], tmp_path, {**HERE, "commit": "d"})  # type: ignore[typeddict-item]  # the same fields
    run(parts[:1], tmp_path, {**HERE, "commit": "d"}, fresh=True)  # type: ignore[typeddict-item]
    assert runs(tmp_path)[3:] == ["a", "a"]


def test_reused_result_has_its_original_day(tmp_path: Path) -> None:
    run([writes(tmp_path, "a")], tmp_path)
    found = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**found, "day": "2026-01-31"}))
    results = run([writes(tmp_path, "a"), writes(tmp_path, "b")], tmp_path)
    assert f"`command` wrote this page, 2026-01-31 to {found['day']}, 1 x none" in format_page(results, HERE, "command")


def test_raw_results_do_not_replace_the_written_page() -> None:
    assert DOCS.parent == ROOT / "docs" / "notebook"


def test_writes_predictions_before_a_run(tmp_path: Path) -> None:
    looks = f"assert __import__('pathlib').Path({str(tmp_path / 'a.predicted.json')!r}).exists(); " + WRITES
    part = BenchmarkPart("a", "", (sys.executable, "-c", looks.lstrip(), str(tmp_path), "a", "1"), predicted={"x": 1.0})
    assert states(run([part], tmp_path)) == ["passed"]


def test_killed_run_continues(tmp_path: Path) -> None:
    """Use SIGKILL, after which no handler runs."""
    waits = f"while not __import__('os').path.exists({str(tmp_path / 'go')!r}): __import__('time').sleep(0.05)\n"
    says = "print(__import__('os').getpid(), flush=True)\n"
    argv = (sys.executable, "-c", says + waits + WRITES, str(tmp_path), "b", "1.0")
    second = replace(writes(tmp_path, "b"), argv=argv)
    parts = [writes(tmp_path, "a"), second]
    child = multiprocessing.get_context("fork").Process(target=run, args=(parts, tmp_path))
    child.start()
    log = tmp_path / "b.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the second part runs")
    child.kill()
    child.join()
    wait_until(
        lambda: is_gone(int(log.read_text())), "its program ends with it, and takes no time from what comes next"
    )
    assert not (tmp_path / "b.json").exists()
    (tmp_path / "go").touch()
    results = run(parts, tmp_path)
    assert states(results) == ["passed", "passed"]
    assert [result.get("kept", False) for result in results] == [True, False]
    assert runs(tmp_path).count("a") == 1


def test_failed_parts_run_after_parts_that_did_not_start(tmp_path: Path) -> None:
    """Otherwise a call could spend all its time on a part that failed before."""
    far, good = writes(tmp_path, "far", x=3.0), writes(tmp_path, "good")
    run([far], tmp_path)
    results = run([far, good], tmp_path)
    assert runs(tmp_path) == ["far", "good", "far"]
    assert states(results) == ["failed", "passed"]
    sleeps = replace(far, argv=(sys.executable, "-c", "import time; time.sleep(1000)"))
    row = run([sleeps, good], tmp_path, left_s=0)
    assert states(row) == ["failed", "passed"], "not skipped: it is known to fail"
    assert states(run([replace(far, skip="no GPU")], tmp_path)) == ["skipped"]


def command(folder: Path, *only: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--small", "--folder", str(folder), "--only", *only]


def said(argv: list[str]) -> list[str]:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_meter_matches_the_profiler(tmp_path: Path) -> None:
    row = said(command(tmp_path, "metering", "wire"))
    assert row[-1] == "1 passed, 0 failed, 0 cut, 2 skipped"
    assert row[0].startswith("3 parts: 0 passed before, 2 skipped, 1 to run in at most 23 min ")
    assert "wire: skipped in 0 s: no GPU" in row
    result = json.loads((tmp_path / "metering.json").read_text())
    exact = {name: value for name, value in result["measured"].items() if not name.endswith("us each")}
    assert exact == {name: result["beside"][name] for name in exact}
    assert exact["all_gather, 65,536 B, async: bytes"] == 5 * 65536


@pytest.mark.parametrize(
    ("name", "gib", "cluster"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA H100 PCIe", 79, None),
        ("NVIDIA H100 NVL", 93, None),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA GH200 480GB", 95, "gh200"),
        ("NVIDIA GB200", 184, "gb200"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("Tesla V100-SXM2-32GB", 31, "v100-32gb"),
        ("NVIDIA A100-PCIE-40GB", 39, "a100-40gb"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, None),
        ("NVIDIA GeForce RTX 4090", 24, None),
    ],
)
def test_finds_the_cluster_of_an_accelerator(name: str, gib: int, cluster: str | None) -> None:
    assert find_cluster(name, gib * GIB) == cluster


def test_explains_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_gpu_problem() == f"torch {torch.__version__} is a build without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "built for 13.0, sees no GPU" in find_gpu_problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "without NCCL" in find_gpu_problem()
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert find_gpu_problem() == ""


class Shared(FakeNvml):
    """A second GPU of which another program uses 30 GiB."""

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=30 * GIB if handle else GIB)


def test_reports_gpus_that_other_programs_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "Gpus", lambda: Gpus(Shared(), tmp_path))
    (result,) = run([writes(tmp_path, "a")], tmp_path)
    assert [note.partition(",")[0] for note in result["notes"]] == ["GPU 1 already held 30.0 GiB"]
    monkeypatch.setattr(running, "Gpus", lambda: Gpus(NoDriver(), tmp_path))
    assert run([writes(tmp_path, "b")], tmp_path)[0]["notes"] == []


@cache
def planned(ranks: int, cluster: str | None) -> list[BenchmarkPart]:
    """Of a machine with GPUs."""
    memory = 79 * GIB if cluster != "a100-40gb" else 39 * GIB
    return list_parts(Machine("cuda", "a GPU", ranks, memory, CLUSTERS[cluster] if cluster else None), small=False)


def on_one_gpu(cluster: str) -> list[BenchmarkPart]:
    return planned(1, cluster)


@pytest.mark.parametrize(("ranks", "cluster"), [(1, "h100"), (2, "a100-40gb"), (8, "h100"), (3, None)])
def test_plans_each_part_for_a_machine_with_gpus(ranks: int, cluster: str | None) -> None:
    parts = planned(ranks, cluster)
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    impossible = {part.name for part in parts if "not possible" in part.skip}
    # GPT-2's 12 heads are not for 8 ranks, llama-mini's sizes not for 3.
    assert impossible <= {"memory-gpt2-tp"} if ranks != 3 else "parity-dp" not in impossible
    for part in parts:
        assert part.skip or "TFLOP/s a rank" in part.predicted or not part.name.startswith("speed") or not cluster
    cut = [part for part in parts if part.name.startswith("speed-llama3-8b") and part.notes]
    assert any("of 32 layers" in note for part in cut for note in part.notes) == (ranks < 8)


def test_predicts_compiled_and_eager_runs_separately() -> None:
    parts = {part.name: part for part in on_one_gpu("h100")}
    eager, compiled = (parts[f"speed-gpt2-xl-bf16-{how}"].predicted["step, ms"] for how in ("eager", "compiled"))
    assert compiled < eager


def test_reports_parts_that_ran_out_of_time(tmp_path: Path) -> None:
    results = run([writes(tmp_path, "a"), writes(tmp_path, "b")], tmp_path, left_s=0)
    assert [(result["state"], "run the command again" in result["why"]) for result in results] == [
        ("skipped", True)
    ] * 2
    row = "Not started; run the command again to continue (2): a, b."
    assert list(format_lines(results))[-2:] == [row, "0 passed, 0 failed, 0 cut, 2 skipped"]
    assert row in format_page(results, HERE, "command")
    again = run([writes(tmp_path, "a")], tmp_path)
    assert list(format_lines(again))[-2:] == ["", "1 passed, 0 failed, 0 cut, 0 skipped"]


def test_most_informative_parts_come_first() -> None:
    kinds = [kind for kind, _ in groupby(part.name.split("-")[0] for part in on_one_gpu("h100"))]
    assert kinds == ["metering", "wire", "rates", "memory", "speed", "parity", "layouts"]


def test_runs_each_layout() -> None:
    (part,) = (part for part in on_one_gpu("h100") if part.name == "layouts")
    assert sorted(part.argv[part.argv.index("cuda") + 1 :]) == sorted(LAYOUTS)


def test_reduces_a_large_model_to_layers_that_fit() -> None:
    gpu = Machine("cuda", "a GPU", 1, 79 * GIB, CLUSTERS["h100"])
    (part,) = (part for part in on_one_gpu("h100") if part.name == "speed-llama3-8b-bf16-eager")
    spec = parse_spec(json.loads(part.argv[part.argv.index("--spec") + 1]))
    layers = spec.model.num_layers
    more = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": layers + 1})})
    assert f"cut to {layers} of 32 layers, which fit" in part.notes
    assert predict_reserved_bytes(spec, gpu) <= MAX_MEMORY_SHARE * gpu.memory_bytes < predict_reserved_bytes(more, gpu)


@pytest.mark.parametrize(("ranks", "cluster"), [(1, "h100"), (2, "a100-40gb")])
def test_measures_fp8_speed_if_the_gpu_supports_it(ranks: int, cluster: str) -> None:
    parts = {part.name: part for part in planned(ranks, cluster)}
    for size, how in product(("gpt2-xl", "llama3-8b"), ("eager", "compiled")):
        assert f"speed-{size}-bf16_state-{how}" in parts
        unknown = "no product in fp8" in parts[f"speed-{size}-fp8-{how}"].skip
        assert unknown == (cluster == "a100-40gb")
    for part in parts.values():
        if "MFU, %" in part.predicted:
            peak = part.predicted["TFLOP/s a rank"] * 1e14 / part.predicted["MFU, %"]
            assert float(part.argv[part.argv.index("--peak-flops") + 1]) == pytest.approx(peak), "both are of one peak"


NCCL_EVENTS = [  # as torch's own tests of traces write them
    {"name": "record_param_comms", "cat": "cpu_op", "args": {"Collective name": name, "dtype": "Float", **sizes}}
    for name, sizes in (
        ("_allgather_base", {"In msg nelems": 8, "Out msg nelems": 16, "Group size": 2}),
        ("wait", {"In msg nelems": 0, "Out msg nelems": 0, "Group size": 2}),
        ("_reduce_scatter_base", {"In msg nelems": 16, "Out msg nelems": 8, "Group size": 2}),
    )
]


def test_reads_nccl_events_of_the_profiler() -> None:
    kernel = {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "dur": 40.0}
    other = {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel", "dur": 1000.0}
    annotation = {**NCCL_EVENTS[0], "cat": "gpu_user_annotation"}
    row = read_nccl_totals([*NCCL_EVENTS, kernel, other, annotation])
    assert row == (2, 2 * 16 * 4, pytest.approx(40e-6))


def test_sums_kernels_by_purpose() -> None:
    names = (
        ("kernel", "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_TNT", 0, 3000),
        ("kernel", "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", 1000, 1000),
        ("kernel", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", 5000, 500),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5500, 250),
        ("cpu_op", "aten::mm", 0, 9000),
    )
    row, longest = sum_kernel_times([{"cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in names])
    assert row == {
        f"kernels of one more step, {kind}, ms": ms
        for kind, ms in (("products", 3.0), ("attention", 1.0), ("passes", 0.5), ("copies", 0.25), ("any", 3.75))
    }
    assert longest[0].startswith("3.0 ms nvjet")
    assert sum_kernel_times([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000}]) == ({}, []), "none ran"


def test_skips_gpu_parts_without_a_gpu() -> None:
    parts = list_parts(Machine("cpu", "CPU", 2, 0, CLUSTERS["cpu"]), small=True)
    assert {p.name.split("-")[0] for p in parts if p.skip == "no GPU"} == {
        "memory",
        "speed",
        "wire",
    }
    assert any(p.name == "layouts" and "make parity" in p.skip for p in parts)


def test_parts_use_only_supported_trainer_settings() -> None:
    """Otherwise the trainer would use another precision than the table shows."""
    parts = [*on_one_gpu("h100"), *list_parts(Machine("cpu", "CPU", 2, 0, CLUSTERS["cpu"]), small=True)]
    request = {p.name: parse_spec(json.loads(p.argv[p.argv.index("--spec") + 1])) for p in parts if "--spec" in p.argv}
    assert {
        name: find_unsupported_fields(spec) for name, spec in request.items() if find_unsupported_fields(spec)
    } == {}


def test_measured_and_predicted_rates_have_equal_names() -> None:
    found = measure_rates(torch.device("cpu"), small=True, narrow=True)
    predicted = predict_rates(ACCELERATORS["H100 SXM"], small=True)
    assert predicted.keys() <= found["measured"].keys()
    assert all(value > 0 for value in found["measured"].values())
    without = measure_rates(torch.device("cpu"), small=True, narrow=False)["measured"]
    assert predict_rates(ACCELERATORS["A100 80GB"], small=True).keys() <= without.keys() < found["measured"].keys()


def test_predicted_rates_match_the_plan() -> None:
    """Compare with the rate that a plan uses, not with a fixed share of the peak."""
    chip = ACCELERATORS["H100 SXM"]
    (row,) = [rate for name, rate in predict_rates(chip, small=False).items() if name.startswith("square: ")]
    one_wave = compute_gemm_seconds(Gemm(8192, 8192, 8192), chip, "bf16", 2)
    assert row == pytest.approx(2 * 8192**3 / one_wave / 1e12 * STACKS["ours"].gemm_hopper, rel=1e-3)


def test_rejects_a_rate_above_the_peak() -> None:
    rates = {"a, TFLOP/s": 2.0, "b, us": 1e9, f"{IN_FP8}a, TFLOP/s": 3.0}
    assert list_impossible_rates(rates, 1e12, 4e12) == ["a, TFLOP/s: 2e+12 is above the peak"]
    assert list_impossible_rates(rates, 2e12, 2e12) == [f"{IN_FP8}a, TFLOP/s: 3e+12 is above the peak"]


def test_without_git_reuses_no_results_of_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a machine without git, or with a folder of another user."""
    source = tmp_path / "workers" / "a.py"
    source.parent.mkdir()
    source.write_text("1")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    first = machine.describe_commit()
    assert machine.describe_commit() == first
    source.write_text("2")
    assert machine.describe_commit() != first


def test_untracked_source_changes_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "a.py").write_text("1")
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
    for argv in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "a")):
        subprocess.run([*git, *argv], cwd=tmp_path, check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    clean = machine.describe_commit()
    (tmp_path / "workers" / "b.py").write_text("1")
    assert machine.describe_commit().startswith(f"{clean}+")


def test_part_that_passes_later_reports_its_failure(tmp_path: Path) -> None:
    run([writes(tmp_path, "shaky", x=3.0)], tmp_path)
    (again,) = run([writes(tmp_path, "shaky", x=1.0)], tmp_path)
    assert again["state"] == "passed"
    assert again["notes"][-1].startswith(f"failed before, on {again['day']}: x: the prediction has an error of ")
    (stored,) = run([writes(tmp_path, "shaky", x=1.0)], tmp_path)
    assert stored["notes"] == again["notes"]


JOINS = r"init_(process|metered)_group\("
ENDS = r"\brun_and_exit\b.*main|os\._exit\("


def programs_of_ranks() -> list[str]:
    found = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        text = path.read_text()
        if "__main__" in text and re.search(JOINS, text):
            found.append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("program", programs_of_ranks())
def test_rank_programs_exit_without_waiting_for_threads(program: str) -> None:
    assert re.search(ENDS, (ROOT / program).read_text()), f"{program} exits plainly"


def test_includes_the_rank_programs_of_make_gpu() -> None:
    row = {"metering", "wire", "training", "layouts_rank"}
    assert {f"benchmarks/gpu/{name}.py" for name in row} <= set(programs_of_ranks())
