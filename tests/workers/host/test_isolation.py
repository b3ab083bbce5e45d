"""The best that works on a host is taken, what does not is told, and what was asked for by name must work."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from contracts.control import LaunchOrder
from workers.host.apart.identity import user_of
from workers.host.apart.isolation import as_environment, isolated
from workers.host.apart.lending import lend
from workers.host.apart.sandbox import has_own_network, mounts, sandbox_prefix
from workers.host.settings import CHOSEN_USER, OWNERS, HostSettings, JobUser, SettingError, host_settings
from workers.host.start.programs import stays_here

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change user")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSettings:
    """All `auto`, in a folder that nobody else may pass through."""
    for name in ("JOB_USER", "SANDBOX"):
        monkeypatch.delenv(f"MESHBOARD_{name}", raising=False)
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MESHBOARD_HOST_KEY", "00")
    monkeypatch.setenv("MESHBOARD_STATE_DIR", str(tmp_path / "state"))
    tmp_path.chmod(0o700)
    return host_settings()


def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)


@needs_root
def test_where_bubblewrap_works_jobs_run_in_it_each_owner_s_as_a_user_of_nobody_s(settings: HostSettings) -> None:
    """Though Python and the run directory lie where that user may not go."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    chosen, note = isolated(settings)
    assert (chosen.sandbox, chosen.job_user, note) == ("bwrap", OWNERS, "")


@needs_root
def test_without_it_a_user_who_cannot_get_there_is_not_taken_and_that_is_told(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_bubblewrap(monkeypatch)
    chosen, note = isolated(settings)
    assert (chosen.sandbox, chosen.job_user) == ("off", None)
    assert note.startswith(
        "jobs run as root, without bubblewrap: MESHBOARD_SANDBOX: bubblewrap is not installed; "
        f"MESHBOARD_JOB_USER: uid {CHOSEN_USER.uid} cannot start {sys.executable}: "
    )
    assert "Permission denied" in note


@needs_root
def test_a_user_who_can_start_python_and_cannot_read_what_it_needs_is_not_taken(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    closed = Path("/etc/shadow")  # stands for a package that only root may read
    monkeypatch.setattr("workers.host.apart.isolation.of_python", lambda: {closed})
    chosen, note = isolated(settings)
    assert (chosen.sandbox, chosen.job_user) == ("bwrap", None)
    assert note == f"jobs run as root, in bubblewrap: MESHBOARD_SANDBOX: bubblewrap: uid 65530 cannot reach {closed}"


@needs_root
def test_where_the_owners_ids_are_not_to_be_had_one_user_is_taken_for_all_and_that_is_told(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container of a user namespace that maps 65,536 ids: the kernel knows no others."""
    refused = "MESHBOARD_JOB_USER: uid 65536 cannot start python: setpriv: setresuid failed: Invalid argument"
    monkeypatch.setattr("workers.host.apart.isolation._trial", lambda _settings, _box, user: refused * (user == OWNERS))
    chosen, note = isolated(settings)
    assert (chosen.sandbox, chosen.job_user) == ("bwrap", CHOSEN_USER)
    assert note == f"jobs run as uid 65530, in bubblewrap: {refused}"


@needs_root
def test_where_bubblewrap_may_make_no_network_that_is_told(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without CAP_SYS_ADMIN of its own: jobs run in it, and share loopback."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    monkeypatch.setattr("workers.host.apart.sandbox.OWN_NETWORK", ["--no-such-option"])
    chosen, note = isolated(settings)
    assert (chosen.sandbox, chosen.job_user) == ("bwrap", OWNERS)
    assert note == (
        "jobs run as one user per owner, in bubblewrap: "
        "jobs share the loopback network of this machine, because bubblewrap cannot create a network"
    )


def order_of(owner: int) -> LaunchOrder:
    return LaunchOrder(v=1, job="job", attempt=1, spec={}, slots=[0], expires=0.0, owner=owner)


def test_each_owner_s_jobs_are_another_user_s_and_no_id_is_a_container_s(settings: HostSettings) -> None:
    boxed = replace(settings, job_user=OWNERS, sandbox="bwrap")
    first, second, last = (user_of(order_of(owner), boxed) for owner in (1, 2, 2**63 - 1))
    assert (first, second) == (OWNERS._replace(uid=65_537), OWNERS._replace(uid=65_538))
    assert last is not None
    assert 65_536 <= last.uid < 524_288
    plain = user_of(order_of(2), replace(boxed, sandbox="off"))
    assert plain is not None
    assert plain.gid == plain.uid == 65_538, "what is lent to one group is not another owner's"
    for fixed in (CHOSEN_USER, None):
        assert user_of(order_of(2), replace(boxed, job_user=fixed)) == fixed


@needs_root
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("JOB_USER", "12345:12345", f"^MESHBOARD_JOB_USER: uid 12345 cannot start {sys.executable}: .*denied"),
        ("SANDBOX", "bwrap", "^MESHBOARD_SANDBOX: bubblewrap is not installed$"),
    ],
)
def test_what_was_asked_for_by_name_must_work(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    without_bubblewrap(monkeypatch)
    monkeypatch.setenv("MESHBOARD_SANDBOX", "off")
    monkeypatch.setenv(f"MESHBOARD_{name}", value)
    with pytest.raises(SettingError, match=why):
        isolated(host_settings())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("SANDBOX", "docker", "is 'docker'. Use auto, bwrap, or off."),
        ("JOB_USER", "1000:staff", "is '1000:staff'. Use owners, a user name, or UID:GID."),
        ("JOB_USER", "0:0", "which is root"),
    ],
)
def test_a_senseless_setting_is_named(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(f"MESHBOARD_{name}", value)
    with pytest.raises(SettingError, match=f"MESHBOARD_{name}.*{why}"):
        host_settings()


def test_a_run_directory_that_cannot_be_is_named(settings: HostSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SettingError, match=r"^MESHBOARD_RUN_DIR is .*/file/runs, which cannot be created: Not a directory$"
    ):
        isolated(replace(settings, run_dir=tmp_path / "file" / "runs"))


@needs_root
@pytest.mark.parametrize("user", [None, OWNERS, CHOSEN_USER, JobUser("daemon", 1, 1)])
def test_a_supervisor_is_told_what_its_host_worker_chose(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, user: JobUser | None
) -> None:
    monkeypatch.setattr("workers.host.apart.isolation._trial", lambda *_: "")
    monkeypatch.setattr("workers.host.apart.isolation._wanted", lambda _: [("bwrap", user)])
    chosen, _ = isolated(settings)
    for name, value in as_environment(chosen).items():
        monkeypatch.setenv(name, value)
    assert host_settings() == chosen


def test_all_that_a_job_has_no_business_with_is_hidden(settings: HostSettings, tmp_path: Path) -> None:
    for folder in (settings.run_dir, settings.checkpoint_root, tmp_path / "data"):
        folder.mkdir(parents=True)
    seen = mounts(settings, [tmp_path / "data"], [], tmp_path)
    closed = {folder for folder in tmp_path.parents if not folder.stat().st_mode & 0o001}
    expected = {settings.state_dir, settings.run_dir, settings.checkpoint_root, Path("/run").resolve(), tmp_path}
    assert expected | closed <= seen.hidden


@needs_root
@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ({}, True),
        ({"spec": {"kind": "lab"}}, True),
        ({"spec": {"kind": "script"}}, False),
        ({"gang": {"nodes": []}}, False),
        ({"checkpoint": {"name": "a", "host": "here"}}, True),
        ({"checkpoint": {"name": "a", "host": "there", "lent": {}}}, False),
    ],
)
def test_a_job_whose_ranks_need_nobody_else_has_a_loopback_of_its_own(
    changed: dict[str, Any], stays: bool, settings: HostSettings, tmp_path: Path
) -> None:
    assert stays_here(cast(LaunchOrder, {"spec": {}, **changed})) == stays
    if not has_own_network():
        pytest.skip("bubblewrap makes no network here")
    prefix = sandbox_prefix(settings, [], [tmp_path], tmp_path, tmp_path, alone=tmp_path if stays else None)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        knock = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        knocked = subprocess.run([*prefix, sys.executable, "-c", knock], capture_output=True, text=True, check=False)
    assert ("ConnectionRefusedError" in knocked.stderr, knocked.returncode == 0) == (stays, not stays)


def test_in_a_network_of_its_own_a_name_that_nobody_knows_is_not_one_to_ask_for_later(
    settings: HostSettings, tmp_path: Path
) -> None:
    if not has_own_network():
        pytest.skip("bubblewrap makes no network here")
    prefix = sandbox_prefix(settings, [], [tmp_path], tmp_path, tmp_path, alone=tmp_path)
    ask = "import socket; socket.getnameinfo(('::ffff:127.0.0.1', 80, 0, 0), socket.NI_NAMEREQD)"
    asked = subprocess.run([*prefix, sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "Name or service not known" in asked.stderr


def test_what_is_lent_stays_its_owner_s_and_nothing_outside_the_root_is(tmp_path: Path) -> None:
    root, outside = tmp_path / "scripts", tmp_path / "etc"
    for folder in (root / "mine", outside):
        folder.mkdir(parents=True, mode=0o755)
    lend(root / "mine", root, CHOSEN_USER)
    lend(outside, root, CHOSEN_USER)
    lent, other = (root / "mine").stat(), outside.stat()
    assert (lent.st_uid, lent.st_gid, oct(lent.st_mode & 0o7777)) == (0, CHOSEN_USER.gid, oct(0o3775))
    assert (other.st_gid, oct(other.st_mode & 0o7777)) == (0, oct(0o755))


def test_a_home_that_the_worker_was_started_in_stays_hidden(
    settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` puts the folder that it is started in on Python's path, and what Python is read from is shown."""
    home = tmp_path / "home"
    (home / "code").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "path", [str(home), str(home / "code"), *sys.path])
    found = mounts(settings, [], [], tmp_path / "tmp")
    assert home in found.hidden
    assert home not in found.read
    assert home / "code" in found.read
