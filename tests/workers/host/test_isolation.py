"""The choice of an isolation, and the sandbox."""

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
from workers.host.isolation import (
    build_sandbox_prefix,
    can_unshare_network,
    choose_isolation,
    get_isolation_variables,
    get_job_user,
    get_python_paths,
    plan_mounts,
    share_folder,
)
from workers.host.programs import needs_only_this_host
from workers.host.settings import (
    DEFAULT_JOB_USER,
    USER_PER_OWNER,
    HostSettingError,
    HostSettings,
    JobUser,
    read_host_settings,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change user")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSettings:
    """Return settings with `auto` in a folder that other users cannot pass."""
    for name in ("JOB_USER", "SANDBOX", "ALLOW_ROOT_JOBS"):
        monkeypatch.delenv(f"MESHBOARD_{name}", raising=False)
    monkeypatch.setenv("MESHBOARD_REDIS_URL", "redis://127.0.0.1:1/0")
    monkeypatch.setenv("MESHBOARD_HOST_KEY", "00")
    monkeypatch.setenv("MESHBOARD_STATE_DIR", str(tmp_path / "state"))
    tmp_path.chmod(0o700)
    return read_host_settings()


def without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _name: None)


@needs_root
def test_chooses_bubblewrap_with_one_user_per_owner(settings: HostSettings) -> None:
    """Check Python and a run directory in folders that the user cannot pass."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    chosen, note = choose_isolation(settings)
    assert (chosen.sandbox, chosen.job_user, note) == ("bwrap", USER_PER_OWNER, "")


@needs_root
def test_without_bubblewrap_skips_a_user_without_access(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_bubblewrap(monkeypatch)
    chosen, note = choose_isolation(replace(settings, allow_root_jobs=True))
    assert (chosen.sandbox, chosen.job_user) == ("off", None)
    assert note.startswith(
        "jobs run as root, without bubblewrap: MESHBOARD_SANDBOX: bubblewrap is not installed; "
        f"MESHBOARD_JOB_USER: uid {DEFAULT_JOB_USER.uid} cannot start {sys.executable}: "
    )
    assert "Permission denied" in note


@needs_root
@pytest.mark.parametrize(("job_user", "why"), [("auto", "bubblewrap is not installed"), ("none", "JOB_USER is none")])
def test_refuses_to_run_jobs_as_root(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, job_user: str, why: str
) -> None:
    without_bubblewrap(monkeypatch)
    monkeypatch.setenv("MESHBOARD_JOB_USER", job_user)
    with pytest.raises(HostSettingError, match=rf"^Jobs would run as root \(.*{why}.*MESHBOARD_ALLOW_ROOT_JOBS=1"):
        choose_isolation(read_host_settings())
    monkeypatch.setenv("MESHBOARD_ALLOW_ROOT_JOBS", "1")
    chosen, _ = choose_isolation(read_host_settings())
    assert (chosen.sandbox, chosen.job_user) == ("off", None)


@needs_root
def test_skips_a_user_who_cannot_read_python_paths(settings: HostSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    closed = Path("/etc/shadow")  # stands for a package that only root may read
    paths = {*get_python_paths(), closed}
    monkeypatch.setattr("workers.host.isolation.get_python_paths", lambda: paths)
    chosen, note = choose_isolation(replace(settings, allow_root_jobs=True))
    assert (chosen.sandbox, chosen.job_user) == ("bwrap", None)
    assert note == f"jobs run as root, in bubblewrap: MESHBOARD_SANDBOX: bubblewrap: uid 65530 cannot reach {closed}"


@needs_root
def test_uses_one_user_when_owner_ids_are_unavailable(settings: HostSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a container that maps only 65,536 user IDs."""
    refused = "MESHBOARD_JOB_USER: uid 65536 cannot start python: setpriv: setresuid failed: Invalid argument"
    monkeypatch.setattr(
        "workers.host.isolation._try_isolation", lambda _settings, _box, user: refused * (user == USER_PER_OWNER)
    )
    chosen, note = choose_isolation(settings)
    assert (chosen.sandbox, chosen.job_user) == ("bwrap", DEFAULT_JOB_USER)
    assert note == f"jobs run as uid 65530, in bubblewrap: {refused}"


@needs_root
def test_notes_that_bubblewrap_cannot_create_a_network(settings: HostSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a container without CAP_SYS_ADMIN, where jobs share the loopback network."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    monkeypatch.setattr("workers.host.isolation.OWN_NETWORK", ["--no-such-option"])
    chosen, note = choose_isolation(settings)
    assert (chosen.sandbox, chosen.job_user) == ("bwrap", USER_PER_OWNER)
    assert note == (
        "jobs run as one user per owner, in bubblewrap: "
        "jobs share the loopback network of this machine, because bubblewrap cannot create a network"
    )


def make_order(owner: int) -> LaunchOrder:
    return LaunchOrder(v=1, job="job", attempt=1, spec={}, slots=[0], expires=0.0, owner=owner)


def test_each_owner_gets_a_separate_user_id(settings: HostSettings) -> None:
    boxed = replace(settings, job_user=USER_PER_OWNER, sandbox="bwrap")
    first, second, last = (get_job_user(make_order(owner), boxed) for owner in (1, 2, 2**63 - 1))
    assert (first, second) == (USER_PER_OWNER._replace(uid=65_537), USER_PER_OWNER._replace(uid=65_538))
    assert last is not None
    assert 65_536 <= last.uid < 524_288
    plain = get_job_user(make_order(2), replace(boxed, sandbox="off"))
    assert plain is not None
    assert plain.gid == plain.uid == 65_538, "what is lent to one group is not another owner's"
    for fixed in (DEFAULT_JOB_USER, None):
        assert get_job_user(make_order(2), replace(boxed, job_user=fixed)) == fixed


@needs_root
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("JOB_USER", "12345:12345", f"^MESHBOARD_JOB_USER: uid 12345 cannot start {sys.executable}: .*denied"),
        ("SANDBOX", "bwrap", "^MESHBOARD_SANDBOX: bubblewrap is not installed$"),
    ],
)
def test_isolation_set_by_name_must_work(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    without_bubblewrap(monkeypatch)
    monkeypatch.setenv("MESHBOARD_SANDBOX", "off")
    monkeypatch.setenv(f"MESHBOARD_{name}", value)
    with pytest.raises(HostSettingError, match=why):
        choose_isolation(read_host_settings())


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("SANDBOX", "docker", "is 'docker'. Use auto, bwrap, or off."),
        ("JOB_USER", "1000:staff", "is '1000:staff'. Use owners, a user name, or UID:GID."),
        ("JOB_USER", "0:0", "which is root"),
    ],
)
def test_names_an_invalid_setting(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(f"MESHBOARD_{name}", value)
    with pytest.raises(HostSettingError, match=f"MESHBOARD_{name}.*{why}"):
        read_host_settings()


def test_names_a_run_directory_that_cannot_be_created(settings: HostSettings, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        HostSettingError, match=r"^MESHBOARD_RUN_DIR is .*/file/runs, which cannot be created: Not a directory$"
    ):
        choose_isolation(replace(settings, run_dir=tmp_path / "file" / "runs"))


@needs_root
@pytest.mark.parametrize("user", [None, USER_PER_OWNER, DEFAULT_JOB_USER, JobUser("daemon", 1, 1)])
def test_supervisor_gets_the_chosen_isolation(
    settings: HostSettings, monkeypatch: pytest.MonkeyPatch, user: JobUser | None
) -> None:
    monkeypatch.setattr("workers.host.isolation._try_isolation", lambda *_: "")
    monkeypatch.setattr("workers.host.isolation._list_candidates", lambda _: [("bwrap", user)])
    monkeypatch.setenv("MESHBOARD_ALLOW_ROOT_JOBS", "1")
    settings = read_host_settings()
    chosen, _ = choose_isolation(settings)
    for name, value in get_isolation_variables(chosen).items():
        monkeypatch.setenv(name, value)
    assert read_host_settings() == chosen


def test_hides_all_paths_that_a_job_does_not_need(settings: HostSettings, tmp_path: Path) -> None:
    for folder in (settings.run_dir, settings.checkpoint_root, tmp_path / "data"):
        folder.mkdir(parents=True)
    seen = plan_mounts(settings, [tmp_path / "data"], [], tmp_path)
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
def test_job_on_one_host_gets_a_private_loopback(
    changed: dict[str, Any], stays: bool, settings: HostSettings, tmp_path: Path
) -> None:
    assert needs_only_this_host(cast(LaunchOrder, {"spec": {}, **changed})) == stays
    if not can_unshare_network():
        pytest.skip("bubblewrap makes no network here")
    prefix = build_sandbox_prefix(
        settings, [], [tmp_path], tmp_path, tmp_path, private_network=tmp_path if stays else None
    )
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        knock = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        knocked = subprocess.run([*prefix, sys.executable, "-c", knock], capture_output=True, text=True, check=False)
    assert ("ConnectionRefusedError" in knocked.stderr, knocked.returncode == 0) == (stays, not stays)


def test_unknown_name_fails_permanently_in_a_private_network(settings: HostSettings, tmp_path: Path) -> None:
    if not can_unshare_network():
        pytest.skip("bubblewrap makes no network here")
    prefix = build_sandbox_prefix(settings, [], [tmp_path], tmp_path, tmp_path, private_network=tmp_path)
    ask = "import socket; socket.getnameinfo(('::ffff:127.0.0.1', 80, 0, 0), socket.NI_NAMEREQD)"
    request = subprocess.run([*prefix, sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "Name or service not known" in request.stderr


def test_shared_folder_keeps_its_owner_and_stays_inside_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "scripts", tmp_path / "etc"
    for folder in (root / "mine", outside):
        folder.mkdir(parents=True, mode=0o755)
    share_folder(root / "mine", root, DEFAULT_JOB_USER)
    share_folder(outside, root, DEFAULT_JOB_USER)
    lent, other = (root / "mine").stat(), outside.stat()
    assert (lent.st_uid, lent.st_gid, oct(lent.st_mode & 0o7777)) == (0, DEFAULT_JOB_USER.gid, oct(0o3775))
    assert (other.st_gid, oct(other.st_mode & 0o7777)) == (0, oct(0o755))
    foreign = root / "foreign"
    foreign.mkdir(mode=0o755)
    (root / "link").symlink_to(foreign)  # another job can replace a folder by a link after the check
    with pytest.raises(OSError, match="link"):
        share_folder(root / "link", root, DEFAULT_JOB_USER)
    assert foreign.stat().st_gid == 0


def test_hides_the_home_folder_that_is_the_working_directory(
    settings: HostSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the working directory, which `python -m` adds to Python's path."""
    home = tmp_path / "home"
    (home / "code").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(sys, "path", [str(home), str(home / "code"), *sys.path])
    found = plan_mounts(settings, [], [], tmp_path / "tmp")
    assert home in found.hidden
    assert home not in found.read
    assert home / "code" in found.read
