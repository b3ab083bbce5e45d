"""`make gpu`, as far as a machine without a GPU can try it: its runner on small programs, its parts on gloo."""

from __future__ import annotations

import json
import multiprocessing
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

from benchmarks.gpu import running
from benchmarks.gpu.__main__ import DOCS
from benchmarks.gpu.kernels import shares
from benchmarks.gpu.machine import Fingerprint, Machine, cluster_of, why_none
from benchmarks.gpu.metering import told_by_nccl
from benchmarks.gpu.parts import all_parts
from benchmarks.gpu.plan import ROOM, held_bytes
from benchmarks.gpu.rates import IN_FP8, above_peak, measure, predictions
from benchmarks.gpu.results import Result
from benchmarks.gpu.running import Part, run_parts
from benchmarks.gpu.table import count, lines, page
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


def writes(folder: Path, name: str, x: float = 1.0, within: float = 0.5) -> Part:
    argv = (sys.executable, "-c", WRITES, str(folder), name, str(x))
    return Part(name, name, argv, predicted={"x": 1.0}, within={"x": within})


def states(results: list[Result]) -> list[str]:
    return [result["state"] for result in results]


def run(
    parts: list[Part], folder: Path, machine: Fingerprint = HERE, *, fresh: bool = False, left_s: float = 3600
) -> list[Result]:
    return run_parts(parts, folder, machine, lambda _line: None, running.now() + left_s, fresh=fresh)


def runs(folder: Path) -> list[str]:
    return (folder / "runs").read_text().split()


def test_a_part_that_fails_is_told_and_stops_no_other(tmp_path: Path) -> None:
    breaks = Part("breaks", "", (sys.executable, "-c", "raise ValueError('the reason')"))
    says_nothing = Part("silent", "", (sys.executable, "-c", "pass"))
    skipped = Part("none", "", skip="no GPU")
    parts = [breaks, says_nothing, writes(tmp_path, "far", x=3.0), skipped, writes(tmp_path, "good")]
    results = run(parts, tmp_path)
    assert states(results) == ["failed", "failed", "failed", "skipped", "passed"]
    assert "the reason" in results[0]["why"]
    assert "-66.7%" in results[2]["why"]
    assert count(results) == "1 passed, 3 failed, 0 cut, 1 skipped"
    assert "| x | 1 | 3 | -66.7% |" in page(results, HERE, "command")


def test_a_part_beyond_its_time_leaves_no_process(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    says = f"{child}; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    result = run([Part("endless", "", (sys.executable, "-c", says), limit_s=scale_timeout(1.5))], tmp_path)[0]
    assert result["state"] == "failed"
    assert "longer than" in result["why"]
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_what_passed_is_kept_on_this_machine_and_commit_alone(tmp_path: Path) -> None:
    parts = [writes(tmp_path, "a"), writes(tmp_path, "far", x=3.0)]
    run(parts, tmp_path)
    assert [r.get("kept", False) for r in run(parts, tmp_path)] == [True, False]
    assert runs(tmp_path) == ["a", "far", "far"]
    run(parts[:1], tmp_path, {**HERE, "commit": "d"})  # type: ignore[typeddict-item]  # the same fields
    run(parts[:1], tmp_path, {**HERE, "commit": "d"}, fresh=True)  # type: ignore[typeddict-item]
    assert runs(tmp_path)[3:] == ["a", "a"]


def test_what_was_kept_has_the_day_on_which_it_was_found(tmp_path: Path) -> None:
    run([writes(tmp_path, "a")], tmp_path)
    found = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**found, "day": "2026-01-31"}))
    results = run([writes(tmp_path, "a"), writes(tmp_path, "b")], tmp_path)
    assert f"`command` wrote this page, 2026-01-31 to {found['day']}, 1 x none" in page(results, HERE, "command")


def test_raw_results_do_not_replace_the_written_page() -> None:
    assert DOCS.parent == ROOT / "docs" / "notebook"


def test_a_prediction_is_written_before_its_run(tmp_path: Path) -> None:
    looks = f"assert __import__('pathlib').Path({str(tmp_path / 'a.predicted.json')!r}).exists(); " + WRITES
    part = Part("a", "", (sys.executable, "-c", looks.lstrip(), str(tmp_path), "a", "1"), predicted={"x": 1.0})
    assert states(run([part], tmp_path)) == ["passed"]


def test_a_run_that_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """By the kernel, so that nothing of it could put anything in order."""
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


def test_what_failed_before_takes_no_time_from_what_was_not_reached(tmp_path: Path) -> None:
    """Else a call would spend all of its time where the one before it did, and reach no more."""
    far, good = writes(tmp_path, "far", x=3.0), writes(tmp_path, "good")
    run([far], tmp_path)
    results = run([far, good], tmp_path)
    assert runs(tmp_path) == ["far", "good", "far"]
    assert states(results) == ["failed", "passed"]
    sleeps = replace(far, argv=(sys.executable, "-c", "import time; time.sleep(1000)"))
    told = run([sleeps, good], tmp_path, left_s=0)
    assert states(told) == ["failed", "passed"], "not skipped: it is known to fail"
    assert states(run([replace(far, skip="no GPU")], tmp_path)) == ["skipped"]


def command(folder: Path, *only: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--small", "--folder", str(folder), "--only", *only]


def said(argv: list[str]) -> list[str]:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_meter_counts_what_the_profiler_does(tmp_path: Path) -> None:
    told = said(command(tmp_path, "metering", "wire"))
    assert told[-1] == "1 passed, 0 failed, 0 cut, 2 skipped"
    assert told[0].startswith("3 parts: 0 passed before, 2 skipped, 1 to run in at most 23 min ")
    assert "wire: skipped in 0 s: no GPU" in told
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
def test_an_accelerator_is_known_by_its_name(name: str, gib: int, cluster: str | None) -> None:
    assert cluster_of(name, gib * GIB) == cluster


def test_a_machine_without_a_gpu_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert why_none() == f"torch {torch.__version__} is a build without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "built for 13.0, sees no GPU" in why_none()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "without NCCL" in why_none()
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert why_none() == ""


class Shared(FakeNvml):
    """Somebody else's 30 GiB on the second of two."""

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * GIB, used=30 * GIB if handle else GIB)


def test_a_gpu_that_others_use_is_told_beside_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "Gpus", lambda: Gpus(Shared(), tmp_path))
    (result,) = run([writes(tmp_path, "a")], tmp_path)
    assert [note.partition(",")[0] for note in result["notes"]] == ["GPU 1 already held 30.0 GiB"]
    monkeypatch.setattr(running, "Gpus", lambda: Gpus(NoDriver(), tmp_path))
    assert run([writes(tmp_path, "b")], tmp_path)[0]["notes"] == []


@cache
def planned(ranks: int, cluster: str | None) -> list[Part]:
    """Of a machine with GPUs."""
    memory = 79 * GIB if cluster != "a100-40gb" else 39 * GIB
    return all_parts(Machine("cuda", "a GPU", ranks, memory, CLUSTERS[cluster] if cluster else None), small=False)


def on_one_gpu(cluster: str) -> list[Part]:
    return planned(1, cluster)


@pytest.mark.parametrize(("ranks", "cluster"), [(1, "h100"), (2, "a100-40gb"), (8, "h100"), (3, None)])
def test_every_part_can_be_planned_for_a_machine_with_gpus(ranks: int, cluster: str | None) -> None:
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


def test_a_compiled_run_is_not_predicted_as_an_eager_one() -> None:
    parts = {part.name: part for part in on_one_gpu("h100")}
    eager, compiled = (parts[f"speed-gpt2-xl-bf16-{how}"].predicted["step, ms"] for how in ("eager", "compiled"))
    assert compiled < eager


def test_a_time_that_is_spent_is_told_as_such(tmp_path: Path) -> None:
    results = run([writes(tmp_path, "a"), writes(tmp_path, "b")], tmp_path, left_s=0)
    assert [(result["state"], "run the command again" in result["why"]) for result in results] == [
        ("skipped", True)
    ] * 2
    told = "Not started; run the command again to continue (2): a, b."
    assert list(lines(results))[-2:] == [told, "0 passed, 0 failed, 0 cut, 2 skipped"]
    assert told in page(results, HERE, "command")
    again = run([writes(tmp_path, "a")], tmp_path)
    assert list(lines(again))[-2:] == ["", "1 passed, 0 failed, 0 cut, 0 skipped"]


def test_what_tells_most_of_a_machine_comes_first() -> None:
    kinds = [kind for kind, _ in groupby(part.name.split("-")[0] for part in on_one_gpu("h100"))]
    assert kinds == ["metering", "wire", "rates", "memory", "speed", "parity", "layouts"]


def test_every_layout_is_tried() -> None:
    (part,) = (part for part in on_one_gpu("h100") if part.name == "layouts")
    assert sorted(part.argv[part.argv.index("cuda") + 1 :]) == sorted(LAYOUTS)


def test_a_model_too_large_is_cut_to_as_many_layers_as_fit() -> None:
    gpu = Machine("cuda", "a GPU", 1, 79 * GIB, CLUSTERS["h100"])
    (part,) = (part for part in on_one_gpu("h100") if part.name == "speed-llama3-8b-bf16-eager")
    spec = parse_spec(json.loads(part.argv[part.argv.index("--spec") + 1]))
    layers = spec.model.num_layers
    more = spec.model_copy(update={"model": spec.model.model_copy(update={"num_layers": layers + 1})})
    assert f"cut to {layers} of 32 layers, which fit" in part.notes
    assert held_bytes(spec, gpu) <= ROOM * gpu.memory_bytes < held_bytes(more, gpu)


@pytest.mark.parametrize(("ranks", "cluster"), [(1, "h100"), (2, "a100-40gb")])
def test_speed_is_asked_in_fp8_where_the_gpu_has_it(ranks: int, cluster: str) -> None:
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


def test_what_the_profiler_tells_of_nccl_is_read() -> None:
    kernel = {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "dur": 40.0}
    other = {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel", "dur": 1000.0}
    annotation = {**NCCL_EVENTS[0], "cat": "gpu_user_annotation"}
    told = told_by_nccl([*NCCL_EVENTS, kernel, other, annotation])
    assert told == (2, 2 * 16 * 4, pytest.approx(40e-6))


def test_a_step_s_kernels_are_told_by_what_they_are_for() -> None:
    names = (
        ("kernel", "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_TNT", 0, 3000),
        ("kernel", "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", 1000, 1000),
        ("kernel", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", 5000, 500),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5500, 250),
        ("cpu_op", "aten::mm", 0, 9000),
    )
    told, longest = shares([{"cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in names])
    assert told == {
        f"kernels of one more step, {kind}, ms": ms
        for kind, ms in (("products", 3.0), ("attention", 1.0), ("passes", 0.5), ("copies", 0.25), ("any", 3.75))
    }
    assert longest[0].startswith("3.0 ms nvjet")
    assert shares([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000}]) == ({}, []), "none ran"


def test_without_a_gpu_what_needs_one_is_skipped() -> None:
    parts = all_parts(Machine("cpu", "CPU", 2, 0, CLUSTERS["cpu"]), small=True)
    assert {p.name.split("-")[0] for p in parts if p.skip == "no GPU"} == {
        "memory",
        "speed",
        "wire",
    }
    assert any(p.name == "layouts" and "make parity" in p.skip for p in parts)


def test_no_part_asks_of_the_trainer_what_it_does_not_do() -> None:
    """It would compute in another precision, and the table would call that fp8."""
    parts = [*on_one_gpu("h100"), *all_parts(Machine("cpu", "CPU", 2, 0, CLUSTERS["cpu"]), small=True)]
    asked = {p.name: parse_spec(json.loads(p.argv[p.argv.index("--spec") + 1])) for p in parts if "--spec" in p.argv}
    assert {name: find_unsupported_fields(spec) for name, spec in asked.items() if find_unsupported_fields(spec)} == {}


def test_rates_are_measured_under_the_names_they_are_predicted_by() -> None:
    found = measure(torch.device("cpu"), small=True, narrow=True)
    predicted = predictions(ACCELERATORS["H100 SXM"], small=True)
    assert predicted.keys() <= found["measured"].keys()
    assert all(value > 0 for value in found["measured"].values())
    without = measure(torch.device("cpu"), small=True, narrow=False)["measured"]
    assert predictions(ACCELERATORS["A100 80GB"], small=True).keys() <= without.keys() < found["measured"].keys()


def test_rates_are_predicted_as_plans_of_what_runs_here_count_them() -> None:
    """Compare with the rate that a plan uses, not with a fixed share of the peak."""
    chip = ACCELERATORS["H100 SXM"]
    (told,) = [rate for name, rate in predictions(chip, small=False).items() if name.startswith("square: ")]
    one_wave = compute_gemm_seconds(Gemm(8192, 8192, 8192), chip, "bf16", 2)
    assert told == pytest.approx(2 * 8192**3 / one_wave / 1e12 * STACKS["ours"].gemm_hopper, rel=1e-3)


def test_a_rate_above_its_peak_was_not_timed_right() -> None:
    rates = {"a, TFLOP/s": 2.0, "b, us": 1e9, f"{IN_FP8}a, TFLOP/s": 3.0}
    assert above_peak(rates, 1e12, 4e12) == ["a, TFLOP/s: 2e+12 is above the peak"]
    assert above_peak(rates, 2e12, 2e12) == [f"{IN_FP8}a, TFLOP/s: 3e+12 is above the peak"]
