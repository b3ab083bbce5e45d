"""Scalars of TensorBoard event files, which TensorBoard's own writer writes."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from workers.host.supervisor import event_files
from workers.host.supervisor.event_files import EventFiles, parse_event

OWN = frozenset({os.getuid()})


def read(files: EventFiles) -> list[tuple[int, dict[str, Any]]]:
    return [(item["step"], item["values"] | item.get("not_finite", {})) for item in files.read()]


def test_follows_the_files_of_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "SEARCH_INTERVAL_S", 0.0)
    old = tmp_path / "old"
    with SummaryWriter(str(old)) as writer:
        writer.add_scalar("loss", 9.0, 1)
    for file in old.iterdir():
        os.utime(file, (1.0, 1.0))
    files = EventFiles([tmp_path], 0, OWN)
    files._began_s = time.time() - 60  # modification times have the resolution of the disk
    assert read(files) == []
    with SummaryWriter(str(tmp_path / "runs" / "a")) as writer:
        writer.add_scalar("loss", 2.5, 10)
        writer.add_scalar("loss", float("nan"), 11)
        writer.add_scalar("new", 1.5, 12, new_style=True)
        writer.add_text("note", "x" * 5000, 12)
        writer.flush()
        assert read(files) == [(10, {"loss": 2.5}), (11, {"loss": "nan"}), (12, {"new": 1.5})]
        writer.add_scalar("loss", 2.0, 13)
        writer.flush()
        assert read(files) == [(13, {"loss": 2.0})]


def test_files_of_other_users_are_skipped(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 2.5, 10)
    for owners, values in ((frozenset({os.getuid() + 1}), []), (OWN, [(10, {"loss": 2.5})])):
        files = EventFiles([tmp_path], 0, owners)
        files._began_s = 0
        assert read(files) == values


def test_links_pipes_and_garbage_are_skipped(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with SummaryWriter(str(secret)) as writer:
        writer.add_scalar("secret", 1.0, 1)
    job = tmp_path / "job"
    job.mkdir()
    [file] = secret.iterdir()
    (job / "a.tfevents").symlink_to(file)
    (job / "folder").symlink_to(secret)
    os.mkfifo(job / "b.tfevents")
    (job / "c.tfevents").write_bytes(struct.pack("<Q", 2**64 - 1) + b"x" * 100)
    (job / "d.tfevents").write_bytes(struct.pack("<Q", 20) + b"\xff" * 200)
    files = EventFiles([job], 0, OWN)
    files._began_s = 0
    assert read(files) == []
    assert read(files) == []


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x2a\x05ab", b"\x0b", b"\x10", b"\x2a\x04\x0a\x02\x0a\x09"])
def test_malformed_events_have_no_scalars(data: bytes) -> None:
    assert parse_event(data) == []
