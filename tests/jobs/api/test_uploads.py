"""Uploads of scripts over REST: parts, checksums, quota, access, jobs, and deletion."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.codec import validate_launch_order
from jobs.core.credentials import derive_upload_secret
from jobs.models import Attempt, Job, Member, Outbox, Status, Upload
from jobs.planning import uploads
from jobs.queue import actions, orders
from tests.contracts.test_archives import make_file, make_special, pack_tar, pack_zip
from tests.support.processes import PAGE_BYTES, mount_full_disk

Api = Callable[[User | None], APIClient]
SCRIPT = b"print('hello')\n"
ARCHIVE = pack_tar([make_file("train.py"), make_file("pkg/run.py"), make_file("pkg/data.txt", b"x")])
PART_BYTES = 100


@pytest.fixture(autouse=True)
def _state(settings: Any, tmp_path: Path) -> None:
    settings.STATE_DIR = tmp_path


def compute_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def open_upload(client: APIClient, content: bytes, name: str = "demo.tar.gz", **more: Any) -> Any:
    return client.post("/api/v1/uploads", {"name": name, "size": len(content), **more}, format="json")


def send_part(client: APIClient, key: str, offset: object, part: bytes) -> Any:
    return client.put(f"/api/v1/uploads/{key}?offset={offset}", part, content_type="application/octet-stream")


def finish(client: APIClient, key: str, **body: Any) -> Any:
    return client.post(f"/api/v1/uploads/{key}/finish", body, format="json")


def upload(client: APIClient, content: bytes, name: str = "demo.tar.gz") -> Any:
    """Upload a file in parts, and return the response to the last request."""
    key = open_upload(client, content, name).json()["id"]
    for offset in range(0, len(content), PART_BYTES):
        assert send_part(client, key, offset, content[offset : offset + PART_BYTES]).status_code == 200
    return finish(client, key)


def make_spec(sha256: str, **script: Any) -> dict[str, Any]:
    return {"kind": "script", "name": "mine", "layout": {"dp": 2}, "script": {"upload": sha256, **script}}


def get_messages(response: Any) -> dict[str, str]:
    return {error["field"]: error["message"] for error in response.json()["errors"]}


def list_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "uploads").iterdir())


def test_equal_content_is_stored_once_and_can_be_downloaded(
    owner: User, stranger: User, api: Api, tmp_path: Path
) -> None:
    client = api(owner)
    made = upload(client, ARCHIVE).json()
    assert (made["sha256"], made["files"], made["scripts"]) == (
        compute_sha256(ARCHIVE),
        3,
        ["train.py", "pkg/run.py"],
    )
    assert (made["size"], made["unpacked_bytes"]) == (len(ARCHIVE), 2 * len(SCRIPT) + 1)
    assert upload(client, ARCHIVE, "other.tar.gz").json()["id"] == made["id"]
    known = open_upload(client, ARCHIVE, sha256=compute_sha256(ARCHIVE))
    assert (known.status_code, known.json()["id"]) == (200, made["id"])
    assert list_files(tmp_path) == [f"{made['id']}.archive"]
    answer = client.get(f"/api/v1/uploads/{made['id']}/archive")
    assert answer.content == ARCHIVE
    assert answer["Content-Disposition"] == 'attachment; filename="demo.tar.gz"'
    other = api(stranger)
    assert [one["id"] for one in client.get("/api/v1/uploads").json()] == [made["id"]]
    assert other.get("/api/v1/uploads").json() == []
    for path in (made["id"], f"{made['id']}/archive"):
        assert other.get(f"/api/v1/uploads/{path}").status_code == 404
    assert finish(other, made["id"]).status_code == 404
    assert other.delete(f"/api/v1/uploads/{made['id']}").status_code == 404
    assert open_upload(other, ARCHIVE, sha256=compute_sha256(ARCHIVE)).status_code == 201, "not known to this user"


def test_a_single_script_and_a_zip_file_are_uploads(owner: User, api: Api) -> None:
    client = api(owner)
    first, second = (upload(client, SCRIPT, "train.py").json() for _ in range(2))
    assert first == {**second, "sent": first["sent"]}, "an equal archive is made of an equal script"
    content = client.get(f"/api/v1/uploads/{first['id']}/archive")
    with tarfile.open(fileobj=io.BytesIO(content.content)) as tar:
        assert tar.getnames() == ["train.py"]
    assert content["Content-Disposition"] == 'attachment; filename="train.py.tar.gz"'
    assert upload(client, pack_zip([("a/b.py", SCRIPT)]), "demo.zip").json()["scripts"] == ["a/b.py"]


def test_incomplete_and_changed_uploads_are_refused(owner: User, api: Api, tmp_path: Path) -> None:
    client = api(owner)
    key = open_upload(client, ARCHIVE).json()["id"]
    send_part(client, key, 0, ARCHIVE[:50])
    assert "50 bytes arrived" in get_messages(finish(client, key))["size"]
    assert get_messages(send_part(client, key, 20, b"x")) == {
        "offset": "`offset` is 20, but the file has 50 bytes so far. Use this number."
    }
    assert send_part(client, key, 50, b"x" * len(ARCHIVE)).status_code == 409, "more than announced"
    send_part(client, key, 50, ARCHIVE[50:])
    changed = finish(client, key, sha256="0" * 64)
    assert (changed.status_code, compute_sha256(ARCHIVE) in get_messages(changed)["sha256"]) == (422, True)
    assert not Upload.objects.exists()
    assert list_files(tmp_path) == []
    assert send_part(client, key, 0, b"x").status_code == 404


def test_hostile_archive_is_refused_and_deleted(owner: User, api: Api, tmp_path: Path) -> None:
    client = api(owner)
    for content, words in (
        (pack_tar([make_file("../train.py")]), "leads out of the archive"),
        (pack_tar([make_special("data", tarfile.SYMTYPE, "/etc/passwd")]), "is a link"),
        (ARCHIVE[:-20], "damaged or incomplete"),
        (b"import torch", "neither a .tar.gz nor a .zip"),
    ):
        refused = upload(client, content)
        assert refused.status_code == 422
        assert words in get_messages(refused)["file"]
    assert not Upload.objects.exists()
    assert list_files(tmp_path) == []


def test_announcement_is_checked(owner: User, api: Api) -> None:
    client = api(owner)
    for body, field in (
        ({"name": "a.zip", "size": 20_000_001}, "size"),
        ({"name": "a.zip", "size": 0}, "size"),
        ({"name": "a\n.zip", "size": 1}, "name"),
        ({"name": "a.zip", "size": 1, "sha256": "x"}, "sha256"),
    ):
        refused = client.post("/api/v1/uploads", body, format="json")
        assert (refused.status_code, list(get_messages(refused))) == (422, [field])


def test_quota_of_a_user(owner: User, stranger: User, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_BYTES_PER_USER", 2 * len(ARCHIVE))
    client = api(owner)
    made = upload(client, ARCHIVE).json()
    refused = open_upload(client, ARCHIVE + b"x")
    assert refused.status_code == 409
    assert "Delete uploads" in get_messages(refused)["size"]
    assert open_upload(api(stranger), ARCHIVE + b"x").status_code == 201
    assert client.delete(f"/api/v1/uploads/{made['id']}").status_code == 204
    assert open_upload(client, ARCHIVE + b"x").status_code == 201


def test_job_uses_only_uploads_of_its_owner(owner: User, stranger: User, api: Api) -> None:
    sha256 = upload(api(owner), ARCHIVE).json()["sha256"]
    spec = make_spec(sha256, path="train.py")
    refused = api(stranger).post("/api/v1/jobs", spec, format="json")
    assert (refused.status_code, list(get_messages(refused))) == (422, ["script.upload"])
    made = api(owner).post("/api/v1/jobs", spec, format="json")
    assert made.status_code == 201, made.content
    job = Job.objects.get(pk=made.json()["id"])
    assert job.upload is not None
    assert job.upload.sha256 == sha256
    copy = api(owner).post(f"/api/v1/jobs/{job.id}/copy", {}, format="json").json()
    assert Job.objects.get(pk=copy["id"]).upload == job.upload
    kept = api(owner).delete(f"/api/v1/uploads/{job.upload_id}")
    assert (kept.status_code, "Cancel the job" in get_messages(kept)["upload"]) == (409, True)


def test_pages_show_the_upload_only_to_its_owner(owner: User, staff: User, api: Api) -> None:
    sha256 = upload(api(owner), ARCHIVE).json()["sha256"]
    job, _ = actions.submit(owner, make_spec(sha256, path="train.py"))
    pages = {}
    for user in (owner, staff):
        client = Client()
        client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
        paths = (f"/jobs/{job.id}/", f"/jobs/script/?from={job.id}")
        pages[user] = [client.get(path).content.decode() for path in paths]
    link = f"/api/v1/uploads/{job.upload_id}/archive"
    for page, form in pages.values():
        assert "from upload demo.tar.gz" in page
        assert sha256 in form
    assert link in pages[owner][0]
    assert link not in pages[staff][0]
    assert "Uploaded: demo.tar.gz, 3 files." in pages[owner][1]
    assert "another user owns it" in pages[staff][1]


@pytest.mark.parametrize(
    ("script", "field", "words"),
    [
        ({"path": "missing.py"}, "script.path", "Use train.py or pkg/run.py."),
        ({"module": "pkg.other"}, "script.module", "has no pkg/other.py"),
        ({"path": "train.py", "cwd": "missing"}, "script.cwd", "not a folder"),
        ({"path": "train.py", "cwd": "train.py"}, "script.cwd", "not a folder"),
        ({"path": "../train.py"}, "script.path", "is outside the upload"),
    ],
)
def test_script_outside_the_upload_is_refused(
    owner: User, api: Api, script: dict[str, str], field: str, words: str
) -> None:
    client = api(owner)
    refused = client.post("/api/v1/jobs", make_spec(upload(client, ARCHIVE).json()["sha256"], **script), format="json")
    assert (refused.status_code, list(get_messages(refused))) == (422, [field])
    assert words in get_messages(refused)[field]


def test_scripts_of_an_upload_are_accepted(owner: User, api: Api) -> None:
    client = api(owner)
    sha256 = upload(client, ARCHIVE).json()["sha256"]
    scripts = ({"path": "./pkg/run.py", "cwd": "."}, {"module": "pkg.run"}, {"path": "train.py", "cwd": "pkg"})
    for script in (*scripts, {"command": "accelerate launch train.py", "cwd": "pkg"}):
        made = client.post("/api/v1/jobs", make_spec(sha256, **script), format="json")
        assert made.status_code == 201, made.content


def start_attempt(job: Job) -> Member:
    attempt = Attempt.objects.create(job=job, number=job.attempt)
    return Member.objects.create(
        attempt=attempt, node=0, host_name="h", first_rank=0, num_ranks=2, ordered=timezone.now()
    )


def test_host_downloads_the_upload_with_the_secret_of_the_order(
    owner: User, stranger: User, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = upload(api(owner), ARCHIVE).json()
    job, _ = actions.submit(owner, make_spec(made["sha256"], path="train.py"))
    member = start_attempt(job)
    orders.build_launch_order(job, member, [0, 1], []).save()
    row = Outbox.objects.get()
    assert derive_upload_secret(job.id, 1) not in str(row.arguments), "the outbox stores no secrets"
    order = validate_launch_order(orders._complete_launch_order(row.arguments[0], 1.0))
    assert order["upload"] == {
        "sha256": made["sha256"],
        "size": len(ARCHIVE),
        "secret": derive_upload_secret(job.id, 1),
    }
    nobody, path = APIClient(), f"/api/v1/runs/{job.id}/1/upload"
    for header in ("", f"Upload {'0' * 64}", f"Run {order['upload']['secret']}", "Upload \u00e9"):
        assert nobody.get(path, headers={"Authorization": header}).status_code in (401, 403)
    headers = {"Authorization": f"Upload {order['upload']['secret']}"}
    assert nobody.get(path, headers=headers).content == ARCHIVE
    assert nobody.get(f"/api/v1/runs/{job.id}/2/upload", headers=headers).status_code in (401, 403)
    Attempt.objects.update(ended=timezone.now())
    assert nobody.get(path, headers=headers).status_code == 404


def test_scripts_of_hosts_have_no_upload_in_their_orders(owner: User) -> None:
    job, _ = actions.submit(owner, {**make_spec("0" * 64), "script": {"path": "train.py"}})
    order = orders.build_launch_order(job, start_attempt(job), [0, 1], [])
    order.save()
    sent = Outbox.objects.get().arguments[0]
    assert "upload" not in sent
    assert "upload" not in sent["spec"]["script"], "hosts of the previous version reject it"


def test_uploads_without_jobs_are_deleted_after_a_time(owner: User, api: Api, tmp_path: Path) -> None:
    client, now = api(owner), timezone.now()
    names = ("unused", "live", "recent", "old")
    made = {name: upload(client, pack_tar([make_file(f"{name}.py")])).json() for name in names}
    jobs = {name: actions.submit(owner, make_spec(made[name]["sha256"], path=f"{name}.py"))[0] for name in names[1:]}
    Job.objects.filter(pk__in=[jobs["recent"].pk, jobs["old"].pk]).update(status=Status.SUCCEEDED)
    Job.objects.filter(pk__in=[jobs["live"].pk, jobs["old"].pk]).update(created=now - timedelta(days=31))
    Upload.objects.update(sent=now - timedelta(hours=23))
    assert uploads.delete_unneeded() == 0
    Upload.objects.update(sent=now - timedelta(days=31))
    assert uploads.delete_unneeded() == 2
    left = {made["live"]["id"], made["recent"]["id"]}
    assert set(Upload.objects.values_list("pk", flat=True)) == left
    assert list_files(tmp_path) == sorted(f"{key}.archive" for key in left)
    gone = client.post(f"/api/v1/jobs/{jobs['old'].id}/copy", {}, format="json")
    assert list(get_messages(gone)) == ["script.upload"]


def test_full_disk_keeps_no_partial_part(owner: User, api: Api, settings: Any, tmp_path: Path) -> None:
    client, content = api(owner), bytes(4 * PAGE_BYTES)
    with mount_full_disk(tmp_path / "disk") as disk:
        filler = disk / "filling"
        os.truncate(filler, filler.stat().st_size - 3 * PAGE_BYTES)
        settings.STATE_DIR = disk
        key = open_upload(client, content).json()["id"]
        refused = send_part(client, key, 0, content)
        os.truncate(filler, 0)
        accepted = send_part(client, key, 0, content)
    assert (refused.status_code, "disk of the board is full" in refused.json()["detail"]) == (503, True)
    assert accepted.json() == {"size": len(content)}
