"""Run the steps of the Dockerfile on files of this machine: `make image-test`.

An overlay over / discards all writes, so that `useradd`, `COPY`, and `pip install` run unchanged, as root or as USER,
with a new virtual environment as the Python of the image. Only the base image is not tested. Needs root. Packages come
from the index of pip.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "/opt/image-python"
HOST = "MESHBOARD_REDIS_URL=redis://unused MESHBOARD_HOST_KEY=00 MESHBOARD_RUN_DIR=/var/lib/meshboard/runs"
# What the finished image has to do at least, as its USER.
IMAGE_CHECKS = {
    "web": [
        "test -s $MESHBOARD_STATIC_ROOT/css/tokens.css && test -s $MESHBOARD_STATIC_ROOT/admin/css/base.css",
        "MESHBOARD_SECRET_KEY=$(head -c 48 /dev/urandom | base64 -w0) MESHBOARD_REDIS_URL=redis://127.0.0.1 "
        "python -c 'import webapp.asgi'",
        "! python -c 'import torch' 2>/dev/null",
        "ssh -V",
        "test -s docs/site/index.html && ! python -c 'import mkdocs' 2>/dev/null",
        "touch /var/lib/meshboard/writable",
    ],
    "worker": [
        f"{HOST} python -c 'import workers.host.app, workers.trainer'",
        "! python -c 'import django' 2>/dev/null",
        "bwrap --version",
        f"{HOST} python -m workers.host.isolation",
        "touch /var/lib/meshboard/writable",
    ],
}


def parse_dockerfile(path: Path) -> list[tuple[str, str]]:
    """Return (instruction, rest of the line), without comments and with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def list_steps(target: str) -> list[tuple[str, str]]:
    """Return the steps of a stage, after those of the stage that it starts from."""
    stages: dict[str, list[tuple[str, str]]] = {}
    for word, rest in parse_dockerfile(ROOT / "Dockerfile"):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = current = list(stages.get(base, []))
        else:
            current.append((word, rest))
    return stages[target]


@contextlib.contextmanager
def mount_overlay() -> Iterator[Path]:
    """Mount an overlay whose writes go to memory."""
    with tempfile.TemporaryDirectory(prefix="meshboard-image-") as folder:
        space, root = Path(folder), Path(folder) / "root"
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
        try:
            for name in ("root", "upper", "work"):
                (space / name).mkdir()
            layers = f"lowerdir=/,upperdir={space}/upper,workdir={space}/work"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(root)], check=True)
            for name in ("proc", "dev"):
                subprocess.run(["mount", "--rbind", "--make-rslave", f"/{name}", str(root / name)], check=True)
            yield root
        finally:
            subprocess.run(["umount", "--recursive", "--lazy", str(root)], check=False)
            subprocess.run(["umount", "--lazy", folder], check=False)


class BuildState:
    """Environment, folder, and user, which instructions change."""

    def __init__(self, root: Path) -> None:
        self._root, self._user, self._directory = root, "root", "/"
        self._environment = {"PATH": f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

    def run_instruction(self, word: str, rest: str) -> None:
        match word:
            case "ENV":
                self._environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "WORKDIR":
                self._directory = rest
                self._inside(rest).mkdir(parents=True, exist_ok=True)
            case "USER":
                self._user = rest
            case "COPY":
                *sources, target = rest.split()
                for source in sources:
                    self._copy(source, target)
            case "RUN":
                self.run(rest)
            case _:
                raise ValueError(f"tests/image.py does not know {word}")

    def run(self, command: str) -> None:
        environment = dict(self._environment)
        if self._user == "root":  # pip's own settings, as a build would be given them by its machine
            environment |= {"HOME": "/root"}
        argv = ["chroot", str(self._root), "setpriv", f"--reuid={self._user}", "--clear-groups"]
        shell = f"cd {shlex.quote(self._directory)} && {{ {command}\n}}"
        subprocess.run([*argv, "sh", "-ec", shell], env=environment, check=True)

    def _copy(self, source: str, target: str) -> None:
        into = self._inside(f"{self._directory}/{target}")
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(ROOT / source, into)

    def _inside(self, path: str) -> Path:
        return self._root / path.lstrip("/")


def build(target: str) -> None:
    started = time.monotonic()
    with mount_overlay() as root:
        image = BuildState(root)
        for closed in Path(sys.executable).resolve().parents:  # in somebody's home, say
            (root / str(closed).lstrip("/")).chmod(0o755)
        image.run(f"{sys.executable} -m venv --clear {PYTHON}")
        for word, rest in list_steps(target):
            print(f"{target}: {word} {rest}", flush=True)
            image.run_instruction(word, rest)
        for proof in IMAGE_CHECKS[target]:
            print(f"{target}: proof: {proof}", flush=True)
            image.run(proof)
    print(f"{target}: built and proven in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[*IMAGE_CHECKS], help="all of them by default")
    options = parser.parse_args().target
    for target in IMAGE_CHECKS if options is None else [options]:
        build(target)


if __name__ == "__main__":
    main()
