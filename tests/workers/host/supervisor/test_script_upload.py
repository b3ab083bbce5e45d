"""The host's download of an uploaded script, and its unpacking as the job's user."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from contracts.control import VERSION, LaunchOrder
from tests.contracts.test_archives import make_file, make_special, pack_tar
from tests.support.processes import PAGE_BYTES, mount_full_disk
from workers.host.attempts import AttemptDir, claim_attempt
from workers.host.settings import DEFAULT_JOB_USER, HostSettings
from workers.host.supervisor import script_upload
from workers.host.supervisor.http_transport import BoardClient
from workers.host.supervisor.script_upload import UploadError, needs_upload, prepare_upload
from workers.meter.script import find_script_of_spec

ARCHIVE = pack_tar([make_file("train.py"), make_file("pkg/run.sh", b"x", 0o755)])
SECRET = "a" * 64
Respond = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serve(respond: Respond) -> Iterator[str]:
    """Serve GET requests with a function, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, content: bytes, status: int = 200, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


def make_settings(folder: Path, **more: Any) -> HostSettings:
    return HostSettings(
        redis_url="",
        name="h",
        slots=2,
        device="cpu",
        run_dir=folder / "runs",
        data_root=folder / "data",
        checkpoint_root=folder / "checkpoints",
        script_root=folder / "scripts",
        trainer_module="workers.trainer",
        **more,
    )


def make_order(archive: bytes, **script: Any) -> LaunchOrder:
    sha256 = hashlib.sha256(archive).hexdigest()
    spec = {"kind": "script", "layout": {"dp": 2}, "script": {"path": "train.py", "upload": sha256, **script}}
    order = LaunchOrder(v=VERSION, job="job", attempt=1, spec=spec, slots=[0, 1], expires=0.0)
    order["upload"] = {"sha256": sha256, "size": len(archive), "secret": SECRET}
    return order


def prepare(order: LaunchOrder, settings: HostSettings, url: str) -> AttemptDir:
    attempt = claim_attempt(settings.run_dir, order)
    assert attempt is not None
    asyncio.run(prepare_upload(attempt, order, settings, BoardClient(url)))
    return attempt


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_unpacks_the_upload_into_the_folder_of_the_attempt(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def respond(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.path, handler.headers["Authorization"]))
        send(handler, ARCHIVE, 503 if len(seen) == 1 else 200)

    order, settings = make_order(ARCHIVE), make_settings(tmp_path)
    with serve(respond) as url:
        attempt = prepare(order, settings, url)
    assert seen == [("/api/v1/runs/job/1/upload", f"Upload {SECRET}")] * 2, "a busy board is asked again"
    assert list_files(attempt.upload) == ["pkg/run.sh", "train.py"]
    assert stat.S_IMODE((attempt.upload / "pkg/run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((attempt.upload / "train.py").stat().st_mode) == 0o644
    assert list_files(attempt.host_dir) == ["order.json"], "the archive is deleted"
    script = find_script_of_spec(attempt.spec, attempt.upload)
    assert (script.file, script.cwd) == (attempt.upload / "train.py", attempt.upload)


def test_script_of_an_upload_runs_at_its_top(tmp_path: Path) -> None:
    order = make_order(ARCHIVE)
    order["spec"]["script"]["path"] = "pkg/run.sh"
    with serve(lambda handler: send(handler, ARCHIVE)) as url:
        attempt = prepare(order, make_settings(tmp_path), url)
    script = find_script_of_spec(attempt.spec, attempt.upload)
    assert (script.search, script.cwd) == (attempt.upload / "pkg", attempt.upload)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the user")
def test_upload_belongs_to_the_user_of_the_job() -> None:
    with tempfile.TemporaryDirectory() as name, serve(lambda handler: send(handler, ARCHIVE)) as url:
        Path(name).chmod(0o711)  # other users cannot enter the folders of pytest
        attempt = prepare(make_order(ARCHIVE), make_settings(Path(name), job_user=DEFAULT_JOB_USER), url)
        owners = {path.stat().st_uid for path in (attempt.upload, *attempt.upload.rglob("*"))}
        assert owners == {DEFAULT_JOB_USER.uid}
        assert stat.S_IMODE(attempt.upload.stat().st_mode) == 0o700, "no other user can read it"


FAILURES: dict[str, tuple[bytes, Respond, str]] = {
    "changed": (ARCHIVE, lambda h: send(h, ARCHIVE[:-1] + b"x"), "the checksum of the downloaded upload is"),
    "longer": (ARCHIVE, lambda h: send(h, ARCHIVE + b"x" * 10**6), "does not have the expected size"),
    "shorter": (ARCHIVE, lambda h: send(h, ARCHIVE[:-1]), "does not have the expected size"),
    "cut": (ARCHIVE, lambda h: send(h, ARCHIVE[:-1], length=len(ARCHIVE)), "the board does not answer"),
    "deleted": (
        ARCHIVE,
        lambda h: send(h, b'{"errors": [{"field": "run", "in": "path", "message": "It was deleted."}]}', 404),
        "cannot be downloaded: It was deleted.",
    ),
    "outside": ((bad := pack_tar([make_file("train.py"), make_file("../x.py")])), lambda h: send(h, bad), "leads out"),
    "link": ((link := pack_tar([make_special("a", tarfile.SYMTYPE, "/")])), lambda h: send(h, link), "is a link"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failed_upload_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(script_upload, "DOWNLOAD_RETRY_S", 0.0)
    archive, respond, words = FAILURES[name]
    settings = make_settings(tmp_path)
    with serve(respond) as url, pytest.raises(UploadError, match=words):
        prepare(make_order(archive), settings, url)
    assert not (settings.run_dir / "job/1/upload").exists()
    assert list_files(settings.run_dir / ".host/job") == ["1/order.json"]


def test_full_disk_leaves_no_files(tmp_path: Path) -> None:
    archive = pack_tar([make_file("train.py"), make_file("large.txt", bytes(64 * PAGE_BYTES))])
    with mount_full_disk(tmp_path / "disk") as disk:
        filler = disk / "filling"
        os.truncate(filler, filler.stat().st_size - 32 * PAGE_BYTES)
        settings = make_settings(disk)
        with (
            serve(lambda handler: send(handler, archive)) as url,
            pytest.raises(UploadError, match="No space left on device"),
        ):
            prepare(make_order(archive), settings, url)
        assert not (settings.run_dir / "job/1/upload").exists()


def test_deleted_upload_has_a_message(tmp_path: Path) -> None:
    order = make_order(ARCHIVE)
    assert needs_upload(order)
    del order["upload"]
    with pytest.raises(UploadError, match="was deleted from the board"):
        prepare(order, make_settings(tmp_path), "http://127.0.0.1:1")
