"""Install the packages of an uploaded script, then run its launcher: `python -m workers.host.upload_environment`.

It runs as the job's user and in the job's sandbox. The environment has the packages of the host's Python, so a
requirement that the host meets is not installed again. All output is in the log of the launcher.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NoReturn

REQUIREMENTS, LOCK = "requirements.txt", "uv.lock"
SETTING = "MESHBOARD_UPLOAD_ENVIRONMENTS"
EXIT_CODE = 78  # EX_CONFIG: the environment cannot be built
MAX_BUILD_S = 1200.0
MAX_ENVIRONMENT_BYTES = 10 * 2**30
DISK_CHECK_INTERVAL_S = 5.0
MEASUREMENT_TIMEOUT_S = 60.0
PIP_OPTIONS = ("--no-input", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off")


class EnvironmentBuildError(Exception):
    """The environment cannot be built. The message contains the reason."""


def find_package_list(upload: Path) -> Path | None:
    """Return the file at the top of an upload that lists its packages, or None."""
    names = (LOCK, REQUIREMENTS) if shutil.which("uv") else (REQUIREMENTS, LOCK)
    return next((upload / name for name in names if (upload / name).is_file()), None)


def build_environment(packages: Path, folder: Path) -> None:
    """Create an environment in an empty folder, and install the listed packages. Raises EnvironmentBuildError."""
    deadline = time.monotonic() + MAX_BUILD_S
    python = str(folder / "bin" / "python")

    def run(*command: str) -> None:
        _run(command, packages.parent, folder, deadline)

    _report(f"Installing the packages of {packages.name}.")
    run(sys.executable, "-m", "venv", "--system-site-packages", str(folder))
    _add_host_packages(folder)
    if packages.name == REQUIREMENTS:
        run(python, "-m", "pip", "install", *PIP_OPTIONS, "-r", str(packages))
        return
    if not (uv := shutil.which("uv")):
        raise EnvironmentBuildError(f"`{LOCK}` needs uv, which this host does not have. Add `{REQUIREMENTS}`.")
    exported = str(folder / "requirements.txt")
    run(uv, "export", "--frozen", "--no-emit-project", "--quiet", "--output-file", exported)
    run(uv, "pip", "install", "--no-cache", "--python", python, "-r", exported)


def build_variables(folder: Path) -> dict[str, str]:
    """Return the variables of a launcher whose ranks use the environment."""
    host, path = Path(sys.executable).parent, os.environ.get("PATH", os.defpath)
    return {
        "PATH": os.pathsep.join([str(folder / "bin"), str(host), path]),
        "VIRTUAL_ENV": str(folder),
        "PYTHON_EXEC": str(folder / "bin" / "python"),  # torchrun starts the ranks with it
    }


def _add_host_packages(folder: Path) -> None:
    """Let the environment import the packages of the host's Python, which may itself be in a virtual environment."""
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    of_host = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(own, "host_packages.pth").write_text("".join(f"{path}\n" for path in of_host))


def _run(command: tuple[str, ...], cwd: Path, folder: Path, deadline: float) -> None:
    """Run a command within the limits of time and disk space."""
    process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while True:
            try:
                code = process.wait(DISK_CHECK_INTERVAL_S)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise EnvironmentBuildError(f"The installation took longer than {MAX_BUILD_S:.0f} s.") from None
                _check_size(folder)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    _check_size(folder)
    if code:
        name = "uv" if Path(command[0]).name == "uv" else command[2]
        raise EnvironmentBuildError(f"{name} ended with exit code {code}. Read its last lines in the log.")


def _check_size(folder: Path) -> None:
    command = ["du", "-s", "-x", "-B1", "--", str(folder)]
    # Files can disappear during the measurement, which fails only for these files.
    result = subprocess.run(command, capture_output=True, text=True, timeout=MEASUREMENT_TIMEOUT_S, check=False)
    used = result.stdout.partition("\t")[0]
    if used.isdigit() and int(used) > MAX_ENVIRONMENT_BYTES:
        raise EnvironmentBuildError(
            f"The packages use {int(used):,} bytes of disk. The limit is {MAX_ENVIRONMENT_BYTES:,} bytes."
        )


def _report(text: str) -> None:
    sys.stderr.write(f"meshboard: {text}\n")
    sys.stderr.flush()


def main() -> int:
    """Parse the options before `--`. The words after `--` are the command of Python."""
    end = sys.argv.index("--")
    parser = argparse.ArgumentParser(prog="python -m workers.host.upload_environment", allow_abbrev=False)
    parser.add_argument("--upload", type=Path, required=True, help="folder of the unpacked upload")
    parser.add_argument("--folder", type=Path, required=True, help="empty folder for the environment")
    parser.add_argument("--allowed", choices=("0", "1"), required=True, help="1: the host allows environments")
    options = parser.parse_args(sys.argv[1:end])
    python, packages = sys.executable, find_package_list(options.upload)
    if packages is not None and options.allowed == "0":
        _report(f"{packages.name} is ignored. The admin of this host can allow it with {SETTING}=1.")
    elif packages is not None:
        try:
            build_environment(packages, options.folder)
        except (EnvironmentBuildError, OSError, subprocess.SubprocessError) as error:
            _report(f"The packages of {packages.name} cannot be installed. {error}")
            return EXIT_CODE
        _report("The packages are installed.")
        os.environ.update(build_variables(options.folder))
        python = os.environ["PYTHON_EXEC"]
    return _replace_process([python, *sys.argv[end + 1 :]])


def _replace_process(command: list[str]) -> NoReturn:
    os.execv(command[0], command)  # noqa: S606 - no shell is needed


if __name__ == "__main__":
    sys.exit(main())
