"""Download the uploaded script of an attempt from the board, and unpack it as the job's user."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import time
from typing import IO

from contracts.control import LaunchOrder, UploadOrder
from contracts.names import UPLOAD_SCHEME
from workers.disk import remove_path
from workers.host.attempts import AttemptDir
from workers.host.isolation import PACKAGE_ROOT, build_sandbox_prefix, build_user_prefix, make_owned_folder
from workers.host.processes import COOKIE_VARIABLE, RUN_DIR_VARIABLE
from workers.host.settings import HostSettings
from workers.host.supervisor.http_transport import BoardClient, NoAnswerError

DOWNLOAD_RETRY_S = 60.0
RETRY_INTERVAL_S = 1.0
UNPACK_TIMEOUT_S = 120.0
STOP_CHECK_INTERVAL_S = 0.2
MAX_PROBLEM_CHARS = 500
STOPPED = "the job was stopped while its upload was prepared"


class UploadError(Exception):
    """The upload of an attempt cannot be used. The message says why."""


def needs_upload(order: LaunchOrder) -> bool:
    """Return whether the script of an order is in an upload."""
    script = order["spec"].get("script")
    return isinstance(script, dict) and script.get("upload") is not None


async def prepare_upload(attempt: AttemptDir, order: LaunchOrder, settings: HostSettings, client: BoardClient) -> None:
    """Download, check, and unpack the upload, until the client is stopped. Delete the files after an error.

    Raises UploadError, OSError.
    """
    upload = order.get("upload")
    if upload is None:
        raise UploadError("the upload was deleted from the board. Upload the script again.")
    await asyncio.to_thread(_prepare, attempt, upload, settings, client)


def _prepare(attempt: AttemptDir, upload: UploadOrder, settings: HostSettings, client: BoardClient) -> None:
    archive = attempt.host_dir / "upload"
    try:
        with open(os.open(archive, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as file:
            _download(attempt, upload, client, file)
            file.seek(0)
            _unpack(attempt, settings, file, client.stopped)
    except BaseException:
        remove_path(attempt.upload)
        raise
    finally:
        archive.unlink(missing_ok=True)


def _download(attempt: AttemptDir, upload: UploadOrder, client: BoardClient, file: IO[bytes]) -> None:
    """Write the archive to a file, and check its size and checksum. Retries while the board is away."""
    path = f"/runs/{attempt.job}/{attempt.attempt}/upload"
    headers = {"Authorization": f"{UPLOAD_SCHEME} {upload.get('secret', '')}"}
    deadline = time.monotonic() + DOWNLOAD_RETRY_S
    while True:
        file.seek(0)
        file.truncate()
        try:
            answer = client.download(path, headers, file, upload["size"])
            if answer.status == 200:
                break
            problem, may_pass = answer.problem, answer.status == 429 or answer.status >= 500
        except NoAnswerError as error:
            problem, may_pass = f"the board does not answer: {error}", True
        if not may_pass or time.monotonic() > deadline:
            raise UploadError(f"the upload cannot be downloaded: {problem}")
        if client.stopped.wait(RETRY_INTERVAL_S):
            raise UploadError(STOPPED)
    file.flush()
    size = file.tell()
    if size != upload["size"]:
        raise UploadError(f"the downloaded upload does not have the expected size of {upload['size']:,} bytes")
    file.seek(0)
    found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # a file opened in binary mode
    if found != upload["sha256"]:
        raise UploadError(
            f"the checksum of the downloaded upload is {found[:16]}..., but {upload['sha256'][:16]}... was expected"
        )


def _unpack(attempt: AttemptDir, settings: HostSettings, archive: IO[bytes], stopped: threading.Event) -> None:
    """Unpack the archive in a process with the user and the sandbox of the job."""
    user, folder, sandboxed = settings.job_user, attempt.upload, settings.sandbox == "bwrap"
    for path in (folder, attempt.tmp):
        make_owned_folder(path, user)
    folder.chmod(0o700)
    prefix = build_sandbox_prefix(settings, [], [folder], attempt.tmp, folder) if sandboxed else []
    command = [*prefix, *build_user_prefix(user, sandboxed=sandboxed), sys.executable, "-m", "workers.host.unpack"]
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": str(PACKAGE_ROOT),
        # The host worker finds and ends the process with the attempt.
        COOKIE_VARIABLE: f"{attempt.job}/{attempt.attempt}",
        RUN_DIR_VARIABLE: str(attempt.run_dir),
    }
    deadline, pipe = time.monotonic() + UNPACK_TIMEOUT_S, subprocess.PIPE
    with subprocess.Popen([*command, str(folder)], cwd=folder, env=env, stdin=archive, stdout=pipe, stderr=pipe) as run:
        while True:
            try:
                output, errors = run.communicate(timeout=STOP_CHECK_INTERVAL_S)
                break
            except subprocess.TimeoutExpired:
                if not stopped.is_set() and time.monotonic() < deadline:
                    continue
                run.kill()
                late = f"unpacking the upload took longer than {UNPACK_TIMEOUT_S:.0f} s"
                raise UploadError(STOPPED if stopped.is_set() else late) from None
    if run.returncode == 0:
        return
    lines = (output.decode(errors="replace").strip() or errors.decode(errors="replace").strip()).splitlines()
    problem = lines[-1] if lines else f"exit code {run.returncode}"
    raise UploadError(f"the upload cannot be unpacked: {problem[:MAX_PROBLEM_CHARS]}")
