"""Histories that nobody needs any more: of deleted jobs, too old, or beyond what all may take together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from django.conf import settings

from jobs.models import Job
from jobs.runs.history.store.bounds import raw_steps
from jobs.runs.history.store.folder import Folder, GoneError, Manifest, OvertakenError, histories, num_bytes
from jobs.runs.history.store.tables import RAW

DAY_S = 24 * 3600.0
IDS_AT_ONCE = 500


class Kept(NamedTuple):
    """A history, and what it takes."""

    folder: Folder
    manifest: Manifest
    ended: float | None


def forget_old(root: Path | None = None) -> dict[str, int]:
    """How many of each went."""
    root = root or settings.HISTORY_DIR
    gone = {"histories of deleted jobs": 0, "histories over their age": 0, "histories' raw steps": 0, "histories": 0}
    found = list(histories(root))
    jobs = _existing({job for job, _ in found})
    kept: list[Kept] = []
    oldest = time.time() - settings.HISTORY_DAYS * DAY_S
    for job, attempt in found:
        folder = Folder(root, job, attempt)
        if job not in jobs:
            folder.forget()
            gone["histories of deleted jobs"] += 1
            continue
        try:
            manifest = folder.manifest()
        except GoneError:
            continue
        if manifest["ended"] is not None and manifest["ended"] < oldest:
            folder.forget()
            gone["histories over their age"] += 1
            continue
        kept.append(Kept(folder, manifest, manifest["ended"]))
    gone["histories' raw steps"], gone["histories"] = _fit(kept)
    return gone


def _fit(kept: list[Kept]) -> tuple[int, int]:
    """Raw steps of the oldest go first, then the oldest whole; never of an attempt that still comes."""
    total = sum(num_bytes(one.manifest) for one in kept)
    ended = sorted((one for one in kept if one.ended is not None), key=lambda one: one.ended or 0.0)
    raw = whole = 0
    for one in ended:
        if total <= settings.HISTORY_BYTES:
            return raw, whole
        if size := num_bytes(one.manifest, RAW):
            total -= size
            raw += _drop_raw(one)
    for one in ended:
        if total <= settings.HISTORY_BYTES:
            break
        total -= num_bytes(one.manifest)
        one.folder.forget()
        whole += 1
    return raw, whole


def _drop_raw(one: Kept) -> int:
    one.manifest["raw_dropped"] += len(raw_steps(one.folder, one.manifest))
    try:
        for table in RAW:
            if parts := one.manifest["parts"].get(table):
                one.folder.replace(one.manifest, table, parts, [])
    except OvertakenError:
        return 0
    return 1


def _existing(jobs: set[str]) -> set[str]:
    found: set[str] = set()
    asked = sorted(jobs)
    for start in range(0, len(asked), IDS_AT_ONCE):
        found |= set(Job.objects.filter(id__in=asked[start : start + IDS_AT_ONCE]).values_list("id", flat=True))
    return found
