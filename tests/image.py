"""`make image-test`: the Dockerfile's very steps, on this machine's files instead of the base image's.

An overlay over / takes every write and is thrown away, so that `useradd`, `COPY`, `pip install` and the rest run as
they are written, as root or as the USER named, with a fresh virtual environment as the image's Python. What stays
unproven is the base image itself. Needs root, and the packages come from wherever pip is set up to find them.
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
PROOFS = {
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


def dockerfile(path: Path) -> list[tuple[str, str]]:
    """(instruction, the rest of its line), comments out and continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def steps_of(target: str) -> list[tuple[str, str]]:
    """The steps of a stage, those of the stage that it starts from first."""
    stages: dict[str, list[tuple[str, str]]] = {}
    for word, rest in dockerfile(ROOT / "Dockerfile"):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = current = list(stages.get(base, []))
        else:
            current.append((word, rest))
    return stages[target]


@contextlib.contextmanager
def overlay() -> Iterator[Path]:
    """A root whose every write goes to memory."""
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


class Image:
    """The state that instructions change: environment, directory, user."""

    def __init__(self, root: Path) -> None:
        self._root, self._user, self._directory = root, "root", "/"
        self._environment = {"PATH": f"{PYTHON}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

    def do(self, word: str, rest: str) -> None:
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
    with overlay() as root:
        image = Image(root)
        for closed in Path(sys.executable).resolve().parents:  # in somebody's home, say
            (root / str(closed).lstrip("/")).chmod(0o755)
        image.run(f"{sys.executable} -m venv --clear {PYTHON}")
        for word, rest in steps_of(target):
            print(f"{target}: {word} {rest}", flush=True)
            image.do(word, rest)
        for proof in PROOFS[target]:
            print(f"{target}: proof: {proof}", flush=True)
            image.run(proof)
    print(f"{target}: built and proven in {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=[*PROOFS], help="all of them by default")
    asked = parser.parse_args().target
    for target in PROOFS if asked is None else [asked]:
        build(target)


if __name__ == "__main__":
    main()
