"""`make containers`: build both images, run docker-compose.yml, and print a table of what works, with image sizes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.containers.project import IMAGES, NO_BUILD_VARIABLE, OVERRIDE_VARIABLE, find_engine_problem
from tests.faults.__main__ import run


def print_image_sizes() -> None:
    for image in IMAGES:
        found = subprocess.run(
            ["docker", "image", "inspect", "--format", "{{.Size}}", image], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            print(f"image {image}: {int(found.stdout) / 1e6:,.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.containers", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--override", type=Path, metavar="FILE", help="another Compose file, for build settings")
    parser.add_argument("--no-build", action="store_true", help="use the images of an earlier run")
    options, rest = parser.parse_known_args()
    if problem := find_engine_problem():
        print(f"make containers is skipped: {problem}")
        return 0
    if options.override is not None:
        os.environ[OVERRIDE_VARIABLE] = str(options.override.resolve())
    if options.no_build:
        os.environ[NO_BUILD_VARIABLE] = "1"
    code = run([Path(__file__).parent], ["--timeout=1800", *rest])
    print_image_sizes()
    return code


if __name__ == "__main__":
    sys.exit(main())
