"""Keep histories within their limits (docs/reference/bounds.md).

Within an attempt, traced steps are deleted first, and then old rows are merged. Totals stay exact, because
merged traffic adds up to the same counters per rank. A merged step is a mean. Across attempts, histories of deleted
jobs, expired histories, and the oldest histories are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from django.conf import settings

from jobs.models import Job
from jobs.runs.history.store.folder import (
    ConcurrentWriterError,
    HistoryFolder,
    HistoryManifest,
    NoHistoryError,
    get_num_bytes,
    iterate_histories,
)
from jobs.runs.history.store.query import HistoryTables, get_engine
from jobs.runs.history.store.schema import COUNTERS, GAUGE_NAMES, STEP_MEASURES, TABLES, TRACED_TABLES

MERGED_TABLES = ("steps", "traffic", "gauges", "metrics")
MAX_LOG_BYTES = 16 * 2**20
MAX_MARK_BYTES = 4 * 2**20
MAX_PASSES = 12  # each halves the number of rows
GAUGE_INTERVAL_S = 4.0


def enforce_limits(folder: HistoryFolder, manifest: HistoryManifest) -> None:
    """Delete and merge rows until the history is within its limits. Raise ConcurrentWriterError."""
    for _ in range(MAX_PASSES):
        if get_num_bytes(manifest, TRACED_TABLES) <= settings.HISTORY_RAW_BYTES or not _thin_traced_steps(
            folder, manifest
        ):
            break
    for _ in range(MAX_PASSES):
        if get_num_bytes(manifest, MERGED_TABLES) <= settings.HISTORY_ATTEMPT_BYTES or not _merge(folder, manifest):
            break
    if get_num_bytes(manifest, ("logs",)) > MAX_LOG_BYTES:
        _drop_old_lines(folder, manifest)
    if get_num_bytes(manifest, ("marks",)) > MAX_MARK_BYTES:
        _rewrite(folder, manifest, "marks", _MARKS, {})


def get_traced_steps(folder: HistoryFolder, manifest: HistoryManifest) -> list[int]:
    """Return the steps that are traced, in order."""
    with get_engine().cursor() as cursor:
        tables = HistoryTables(cursor, folder, manifest)
        union = " UNION ".join(f"SELECT DISTINCT step FROM {table}" for table in TRACED_TABLES)
        return [step for (step,) in tables.fetch_rows(f"SELECT step FROM ({union}) ORDER BY step")]


def _thin_traced_steps(folder: HistoryFolder, manifest: HistoryManifest) -> bool:
    """Delete every second traced step of the older half. Return False if no step is traced."""
    steps = get_traced_steps(folder, manifest)
    dropped = steps[: max(1, len(steps) // 2) : 2]
    if not dropped:
        return False
    dropped_steps = pa.array(dropped, pa.int64())
    manifest["raw_dropped"] += len(dropped)
    for table in TRACED_TABLES:
        if parts := manifest["parts"].get(table):
            remaining = (
                batch.filter(pc.invert(pc.is_in(batch["step"], dropped_steps)))
                for batch in folder.read_batches(table, parts)
            )
            folder.replace_files(manifest, table, parts, [folder.write_file(manifest, table, remaining)])
    return True


def _merge(folder: HistoryFolder, manifest: HistoryManifest) -> bool:
    """Merge old rows into rows of twice the width. Return False if the width exceeds the run.

    Rows of width w are old except in the newest w-th of the run.
    """
    first, last = manifest["first"], manifest["last"]
    if first is None or last is None or manifest["merged_s"] > last - first:
        return False
    width = 2 * manifest["merged_s"]
    middle = last - (last - first) / width
    manifest["merged_s"] = width
    for table, sql in (("traffic", _TRAFFIC), ("steps", _STEPS), ("gauges", _GAUGE), ("metrics", _METRICS)):
        if manifest["parts"].get(table):
            _rewrite(folder, manifest, table, sql, {"width": width, "middle": middle})
    return True


def _rewrite(folder: HistoryFolder, manifest: HistoryManifest, table: str, sql: str, values: dict[str, Any]) -> None:
    def read_batches() -> Iterator[pa.RecordBatch]:
        with get_engine().cursor() as cursor:
            HistoryTables(cursor, folder, manifest)
            for batch in cursor.sql(sql, params=values).to_arrow_reader(100_000):
                yield from pa.Table.from_batches([batch]).cast(TABLES[table]).to_batches()

    part = folder.write_file(manifest, table, read_batches())
    folder.replace_files(manifest, table, manifest["parts"][table], [part])


def _drop_old_lines(folder: HistoryFolder, manifest: HistoryManifest) -> None:
    """Delete the older half of the log rows."""
    parts = manifest["parts"]["logs"]
    num_dropped = sum(part["rows"] for part in parts) // 2

    def read_remaining() -> Iterator[pa.RecordBatch]:
        num_seen = 0
        for batch in folder.read_batches("logs", parts):
            start = min(batch.num_rows, max(0, num_dropped - num_seen))
            num_seen += batch.num_rows
            if start < batch.num_rows:
                yield batch.slice(start)

    folder.replace_files(manifest, "logs", parts, [folder.write_file(manifest, "logs", read_remaining())])


def _make_axis_means(column: str) -> str:
    """Return SQL for the mean of each axis per merged row. An axis that a step does not name counts as 0."""
    entries = f"SELECT rank, bin, over, unnest(map_entries({column})) AS entry FROM older"
    sums = f"SELECT rank, bin, entry.key AS axis, sum(entry.value * over) AS total FROM ({entries}) GROUP BY ALL"
    weights = f"SELECT rank, bin, sum(over) AS weight FROM older WHERE {column} IS NOT NULL GROUP BY ALL"
    mean = "map(list(axis ORDER BY axis), list((total / weight)::FLOAT ORDER BY axis))"
    return f"SELECT rank, bin, {mean} AS {column} FROM ({sums}) JOIN ({weights}) USING (rank, bin) GROUP BY rank, bin"


_TRAFFIC = (
    "SELECT CASE WHEN second < $middle THEN second // $width * $width ELSE second END AS second,"
    " rank, phase, op, axis, group_size, "
    + ", ".join(f"sum({name}) AS {name}" for name in COUNTERS)
    + " FROM traffic GROUP BY ALL ORDER BY second, rank"
)
# Ranks reach a step at different times, so a step is old on all ranks once it is old on one.
_STEPS = (
    "WITH old AS (SELECT DISTINCT step FROM steps WHERE time < $middle),"
    " older AS (SELECT *, (step - 1) // $width AS bin FROM steps WHERE step IN (FROM old)),"
    f" exposed AS ({_make_axis_means('exposed')}), hidden AS ({_make_axis_means('hidden')}),"
    " means AS (SELECT rank, bin, max(step) AS step, sum(over) AS over, max(time) AS time,"
    " max(tokens) AS tokens, max(samples) AS samples, "
    + ", ".join(
        f"sum({name} * over) FILTER ({name} IS NOT NULL) / sum(over) FILTER ({name} IS NOT NULL) AS {name}"
        for name in STEP_MEASURES
    )
    + " FROM older GROUP BY rank, bin)"
    f" SELECT {', '.join(TABLES['steps'].names)} FROM means LEFT JOIN exposed USING (rank, bin)"
    " LEFT JOIN hidden USING (rank, bin)"
    f" UNION ALL SELECT {', '.join(TABLES['steps'].names)} FROM steps WHERE step NOT IN (FROM old) ORDER BY step, rank"
)
# Bytes stay integers. A mean above 64 bits becomes null.
_GAUGE_MEANS = {
    name: f"try_cast(avg({name}) AS BIGINT)" if name.endswith("_bytes") else f"avg({name})" for name in GAUGE_NAMES
}
_GAUGE = (
    "SELECT rank, node, host, max(time) AS time, "
    + ", ".join(f"{_GAUGE_MEANS[name]} AS {name}" for name in GAUGE_NAMES)
    + " FROM gauges GROUP BY rank, node, host, CASE WHEN time < $middle"
    f" THEN floor(time / ({GAUGE_INTERVAL_S} * $width))"
    " ELSE time END ORDER BY time"
)
# Keep every second old value of a metric, and the first value that is not finite.
_METRICS = (
    "SELECT * EXCLUDE (nth, fault) FROM (SELECT *,"
    " row_number() OVER (PARTITION BY rank, name, source ORDER BY time) AS nth,"
    " row_number() OVER (PARTITION BY rank, name, source, not_finite ORDER BY time) AS fault FROM metrics)"
    " WHERE time >= $middle OR nth % 2 = $width % 2 OR (not_finite IS NOT NULL AND fault = 1) ORDER BY time, rank"
)
# Delete the older half of the most frequent kind, so that marks of the start remain.
_MARKS = (
    "WITH most AS (SELECT kind, count(*) // 2 AS gone FROM marks GROUP BY kind ORDER BY gone DESC LIMIT 1)"
    " SELECT marks.* FROM marks LEFT JOIN most USING (kind)"
    " QUALIFY row_number() OVER (PARTITION BY kind ORDER BY time) > coalesce(gone, 0) ORDER BY time"
)

DAY_S = 24 * 3600.0
IDS_PER_QUERY = 500


class StoredHistory(NamedTuple):
    """Locate a stored history."""

    folder: HistoryFolder
    manifest: HistoryManifest


def delete_old_histories(root: Path | None = None) -> dict[str, int]:
    """Delete histories above the limits. Return the number of deletions per reason."""
    root = root or settings.HISTORY_DIR
    deleted = {"histories of deleted jobs": 0, "histories over their age": 0, "histories' raw steps": 0, "histories": 0}
    all_histories = list(iterate_histories(root))
    jobs = _find_existing_jobs({job for job, _ in all_histories})
    remaining: list[StoredHistory] = []
    min_ended = time.time() - settings.HISTORY_DAYS * DAY_S
    for job, attempt in all_histories:
        folder = HistoryFolder(root, job, attempt)
        if job not in jobs:
            folder.delete()
            deleted["histories of deleted jobs"] += 1
            continue
        try:
            manifest = folder.read_manifest()
        except NoHistoryError:
            continue
        if manifest["ended"] is not None and manifest["ended"] < min_ended:
            folder.delete()
            deleted["histories over their age"] += 1
            continue
        remaining.append(StoredHistory(folder, manifest))
    deleted["histories' raw steps"], deleted["histories"] = _enforce_total_limit(remaining)
    return deleted


def _enforce_total_limit(stored: list[StoredHistory]) -> tuple[int, int]:
    """Delete traced steps of the oldest ended histories first, and then these histories."""
    total = sum(get_num_bytes(history.manifest) for history in stored)
    ended = [history for history in stored if history.manifest["ended"] is not None]
    ended.sort(key=lambda history: history.manifest["ended"] or 0.0)
    num_thinned = num_deleted = 0
    for history in ended:
        if total <= settings.HISTORY_BYTES:
            return num_thinned, num_deleted
        if traced_bytes := get_num_bytes(history.manifest, TRACED_TABLES):
            total -= traced_bytes
            num_thinned += _delete_traced_steps(history)
    for history in ended:
        if total <= settings.HISTORY_BYTES:
            break
        total -= get_num_bytes(history.manifest)
        history.folder.delete()
        num_deleted += 1
    return num_thinned, num_deleted


def _delete_traced_steps(history: StoredHistory) -> int:
    history.manifest["raw_dropped"] += len(get_traced_steps(history.folder, history.manifest))
    try:
        for table in TRACED_TABLES:
            if parts := history.manifest["parts"].get(table):
                history.folder.replace_files(history.manifest, table, parts, [])
    except ConcurrentWriterError:
        return 0
    return 1


def _find_existing_jobs(jobs: set[str]) -> set[str]:
    existing: set[str] = set()
    ids = sorted(jobs)
    for start in range(0, len(ids), IDS_PER_QUERY):
        existing |= set(Job.objects.filter(id__in=ids[start : start + IDS_PER_QUERY]).values_list("id", flat=True))
    return existing
