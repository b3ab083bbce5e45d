"""Compile the libraries that replace CUDA and NCCL, for one build of torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = ("torch_cuda", "c10_cuda", "torch_cuda_linalg", "caffe2_nvrtc", "torch_python", "torch_nvshmem")
CUDA_SYMBOL = re.compile(r"^(cuda[A-Z]|cublas|nccl[A-Z]|cu[A-Z])")
EXCLUDED_SYMBOL = re.compile(r"^cuFile")
# Symbols without effect: torch calls them, and no result depends on them.
NO_OP_FUNCTIONS = {
    *("cudaFree", "cudaFreeAsync", "cudaStreamDestroy", "cudaGetLastError", "cudaPeekAtLastError"),
    *("cudaDeviceEnablePeerAccess", "cudaHostUnregister", "cudaThreadExchangeStreamCaptureMode", "cudaProfilerStop"),
    *("ncclGroupStart", "ncclGroupEnd", "ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize", "ncclCommDeregister"),
    *("cublasDestroy_v2",),
}


class StandInBuildError(Exception):
    """A tool or a CUDA build of torch is missing."""


def build(site: Path, to: Path) -> dict[str, str]:
    """Return the environment in which the torch in `site` finds GPUs. The libraries are created in `to`.

    Raises:
        StandInBuildError: A tool or a CUDA build of torch is missing.
    """
    if not (site / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise StandInBuildError(f"{site} holds no CUDA build of torch")
    headers = next(site.glob("nvidia/cu*/include/cuda_runtime_api.h"), None)
    if headers is None:
        raise StandInBuildError(f"{site} holds no header of CUDA's runtime")
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise StandInBuildError(f"{tool} is missing: apt-get install gcc")
    wanted = set[str]()
    for name in LIBRARIES:
        wanted |= _list_undefined_symbols(site / "torch" / "lib" / f"lib{name}.so")
    sources = [HERE / "cuda.c", HERE / "nccl.c"]
    (to / "others.c").write_text(_generate_stubs(wanted - _list_defined_symbols(sources)))
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-I", str(HERE), "-I", str(HERE / "include")]
    command += ["-I", str(headers.parent), *map(str, sources), str(to / "others.c"), "-lpthread"]
    runtime, driver = to / "libstandin.so", to / "libcuda.so.1"
    for library in (runtime, driver):
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise StandInBuildError(f"gcc: {done.stderr[-2000:]}")
    return {"LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(to)}


def _list_undefined_symbols(library: Path) -> set[str]:
    result = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    names = (line.split()[-1].partition("@")[0] for line in result.stdout.splitlines())
    return {name for name in names if CUDA_SYMBOL.match(name) and not EXCLUDED_SYMBOL.match(name)}


def _list_defined_symbols(sources: Iterable[Path]) -> set[str]:
    return {name for source in sources for name in re.findall(r"\b(cu\w+|nccl\w+)\(", source.read_text())}


def _generate_stubs(names: Iterable[str]) -> str:
    lines = ['#include "pending.h"']
    for name in sorted(names):
        body = "return 0;" if name in NO_OP_FUNCTIONS else f'give_up("{name} has no stand-in");'
        lines.append(f"int {name}() {{ {body} }}")
    return "\n".join(lines) + "\n"
