"""The libraries that stand in for CUDA and NCCL, compiled for one build of torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_cuda_linalg", "caffe2_nvrtc", "torch_python", "torch_nvshmem")
OURS = re.compile(r"^(cuda[A-Z]|cublas|nccl[A-Z]|cu[A-Z])")
NOT_OURS = re.compile(r"^cuFile")
# Asked for in passing: nothing depends on what they would do.
HARMLESS = {
    *("cudaFree", "cudaFreeAsync", "cudaStreamDestroy", "cudaGetLastError", "cudaPeekAtLastError"),
    *("cudaDeviceEnablePeerAccess", "cudaHostUnregister", "cudaThreadExchangeStreamCaptureMode", "cudaProfilerStop"),
    *("ncclGroupStart", "ncclGroupEnd", "ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize", "ncclCommDeregister"),
    *("cublasDestroy_v2",),
}


class NoStandInError(Exception):
    """Says what is missing."""


def build(site: Path, to: Path) -> dict[str, str]:
    """Environment in which the torch below `site` finds GPUs; the libraries are made in `to`.

    Raises:
        NoStandInError: a tool, or a CUDA build of torch, is missing.
    """
    if not (site / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise NoStandInError(f"{site} holds no CUDA build of torch")
    headers = next(site.glob("nvidia/cu*/include/cuda_runtime_api.h"), None)
    if headers is None:
        raise NoStandInError(f"{site} holds no header of CUDA's runtime")
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise NoStandInError(f"{tool} is missing: apt-get install gcc")
    wanted = set[str]()
    for name in LIBRARIES:
        wanted |= _undefined(site / "torch" / "lib" / f"lib{name}.so")
    sources = [HERE / "cuda.c", HERE / "nccl.c"]
    (to / "others.c").write_text(_others(wanted - _defined(sources)))
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-I", str(HERE), "-I", str(HERE / "include")]
    command += ["-I", str(headers.parent), *map(str, sources), str(to / "others.c"), "-lpthread"]
    runtime, driver = to / "libstandin.so", to / "libcuda.so.1"
    for library in (runtime, driver):
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoStandInError(f"gcc: {done.stderr[-2000:]}")
    return {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(to)}


def _undefined(library: Path) -> set[str]:
    told = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    names = (line.split()[-1].partition("@")[0] for line in told.stdout.splitlines())
    return {name for name in names if OURS.match(name) and not NOT_OURS.match(name)}


def _defined(sources: Iterable[Path]) -> set[str]:
    return {name for source in sources for name in re.findall(r"\b(cu\w+|nccl\w+)\(", source.read_text())}


def _others(names: Iterable[str]) -> str:
    lines = ['#include "pending.h"']
    for name in sorted(names):
        body = "return 0;" if name in HARMLESS else f'give_up("{name} is not stood in for");'
        lines.append(f"int {name}() {{ {body} }}")
    return "\n".join(lines) + "\n"
