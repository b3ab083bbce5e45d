"""What an attempt's history may take; beyond it raw steps go first, then roll-ups are merged.

docs/reference/bounds.md has the figures. Totals stay exact: merged traffic adds up to the same counters, rank by
rank. A merged step is a mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from django.conf import settings

from jobs.runs.history.store.folder import Folder, Manifest, num_bytes
from jobs.runs.history.store.query import Tables, engine
from jobs.runs.history.store.tables import RAW, TABLES

ROLLED_UP = ("steps", "traffic", "gauges")
LOG_BYTES = 16 * 2**20
MARK_BYTES = 4 * 2**20
MOST_PASSES = 12  # of halving, at one look
GAUGE_S = 4.0  # between two of a rank's

_CURVES = ("step_s", "loss", "grad_norm", "learning_rate", "data_s", "optimizer_s")
_COUNTED = ("calls", "completed", "payload_bytes", "algorithmic_bytes", "busy_s")
_GAUGES = [name for name in TABLES["gauges"].names if name not in ("rank", "node", "host", "time")]


def keep(folder: Folder, manifest: Manifest) -> None:
    """Below the bounds again.

    Raises:
        OvertakenError: nothing was changed.
    """
    for _ in range(MOST_PASSES):
        if num_bytes(manifest, RAW) <= settings.HISTORY_RAW_BYTES or not _thin_raw(folder, manifest):
            break
    for _ in range(MOST_PASSES):
        if num_bytes(manifest, ROLLED_UP) <= settings.HISTORY_ATTEMPT_BYTES or not _merge(folder, manifest):
            break
    if num_bytes(manifest, ("logs",)) > LOG_BYTES:
        _drop_old_lines(folder, manifest)
    if num_bytes(manifest, ("marks",)) > MARK_BYTES:
        _write_again(folder, manifest, "marks", _MARKS, {})


def raw_steps(folder: Folder, manifest: Manifest) -> list[int]:
    """Those that are kept event by event, in order."""
    with engine().cursor() as cursor:
        tables = Tables(cursor, folder, manifest)
        union = " UNION ".join(f"SELECT DISTINCT step FROM {table}" for table in RAW)
        return [step for (step,) in tables.rows(f"SELECT step FROM ({union}) ORDER BY step")]


def _thin_raw(folder: Folder, manifest: Manifest) -> bool:
    """Of the older half of the steps told event by event, every second one goes; False where there is none."""
    steps = raw_steps(folder, manifest)
    gone = steps[: max(1, len(steps) // 2) : 2]
    if not gone:
        return False
    gone_steps = pa.array(gone, pa.int64())
    manifest["raw_dropped"] += len(gone)
    for table in RAW:
        if parts := manifest["parts"].get(table):
            kept = (batch.filter(pc.invert(pc.is_in(batch["step"], gone_steps))) for batch in folder.batches(parts))
            folder.replace(manifest, table, parts, [folder.rewritten(manifest, table, kept)])
    return True


def _merge(folder: Folder, manifest: Manifest) -> bool:
    """Old rows become one for twice as long, and all but the newest part is old: of width w the newest w-th of the run
    stays as it is. False where that is no time any more."""
    first, last = manifest["first"], manifest["last"]
    if first is None or last is None or manifest["merged_s"] > last - first:
        return False
    width = 2 * manifest["merged_s"]
    middle = last - (last - first) / width
    manifest["merged_s"] = width
    for table, sql in (("traffic", _TRAFFIC), ("steps", _STEPS), ("gauges", _GAUGE)):
        if manifest["parts"].get(table):
            _write_again(folder, manifest, table, sql, {"width": width, "middle": middle})
    return True


def _write_again(folder: Folder, manifest: Manifest, table: str, sql: str, values: dict[str, Any]) -> None:
    part = folder.rewritten(manifest, table, _asked(folder, manifest, table, sql, values))
    folder.replace(manifest, table, manifest["parts"][table], [part])


def _asked(
    folder: Folder, manifest: Manifest, table: str, sql: str, values: dict[str, Any]
) -> Iterator[pa.RecordBatch]:
    with engine().cursor() as cursor:
        Tables(cursor, folder, manifest)
        for batch in cursor.sql(sql, params=values).to_arrow_reader(100_000):
            yield from pa.Table.from_batches([batch]).cast(TABLES[table]).to_batches()


def _drop_old_lines(folder: Folder, manifest: Manifest) -> None:
    """The older half of the rows."""
    parts = manifest["parts"]["logs"]
    going = sum(part["rows"] for part in parts) // 2

    def kept() -> Iterator[pa.RecordBatch]:
        seen = 0
        for batch in folder.batches(parts):
            start = min(batch.num_rows, max(0, going - seen))
            seen += batch.num_rows
            if start < batch.num_rows:
                yield batch.slice(start)

    folder.replace(manifest, "logs", parts, [folder.rewritten(manifest, "logs", kept())])


def _means_by_axis(column: str) -> str:
    """Of each merged row, the mean of each axis; an axis that a step did not name counts as 0 there."""
    entries = f"SELECT rank, bin, over, unnest(map_entries({column})) AS entry FROM older"
    sums = f"SELECT rank, bin, entry.key AS axis, sum(entry.value * over) AS total FROM ({entries}) GROUP BY ALL"
    weights = f"SELECT rank, bin, sum(over) AS weight FROM older WHERE {column} IS NOT NULL GROUP BY ALL"
    mean = "map(list(axis ORDER BY axis), list((total / weight)::FLOAT ORDER BY axis))"
    return f"SELECT rank, bin, {mean} AS {column} FROM ({sums}) JOIN ({weights}) USING (rank, bin) GROUP BY rank, bin"


def _mean(gauge: str) -> str:
    """As its table has it: bytes are whole, and the mean of the largest is one too many for 64 bits."""
    return f"try_cast(avg({gauge}) AS BIGINT)" if gauge.endswith("_bytes") else f"avg({gauge})"


_TRAFFIC = (
    "SELECT CASE WHEN second < $middle THEN second // $width * $width ELSE second END AS second,"
    " rank, phase, op, axis, group_size, "
    + ", ".join(f"sum({name}) AS {name}" for name in _COUNTED)
    + " FROM traffic GROUP BY ALL ORDER BY second, rank"
)
# Ranks are not at one step at one time: a step is old on all of them once it is on one.
_STEPS = (
    "WITH old AS (SELECT DISTINCT step FROM steps WHERE time < $middle),"
    " older AS (SELECT *, (step - 1) // $width AS bin FROM steps WHERE step IN (FROM old)),"
    f" exposed AS ({_means_by_axis('exposed')}), hidden AS ({_means_by_axis('hidden')}),"
    " means AS (SELECT rank, bin, max(step) AS step, sum(over) AS over, max(time) AS time,"
    " max(tokens) AS tokens, "
    + ", ".join(
        f"sum({name} * over) FILTER ({name} IS NOT NULL) / sum(over) FILTER ({name} IS NOT NULL) AS {name}"
        for name in _CURVES
    )
    + " FROM older GROUP BY rank, bin)"
    f" SELECT {', '.join(TABLES['steps'].names)} FROM means LEFT JOIN exposed USING (rank, bin)"
    " LEFT JOIN hidden USING (rank, bin)"
    f" UNION ALL SELECT {', '.join(TABLES['steps'].names)} FROM steps WHERE step NOT IN (FROM old) ORDER BY step, rank"
)
_GAUGE = (
    "SELECT rank, node, host, max(time) AS time, "
    + ", ".join(f"{_mean(name)} AS {name}" for name in _GAUGES)
    + f" FROM gauges GROUP BY rank, node, host, CASE WHEN time < $middle THEN floor(time / ({GAUGE_S} * $width))"
    " ELSE time END ORDER BY time"
)
# The older half of the kind that there are most of: how a run began, and went on, stays.
_MARKS = (
    "WITH most AS (SELECT kind, count(*) // 2 AS gone FROM marks GROUP BY kind ORDER BY gone DESC LIMIT 1)"
    " SELECT marks.* FROM marks LEFT JOIN most USING (kind)"
    " QUALIFY row_number() OVER (PARTITION BY kind ORDER BY time) > coalesce(gone, 0) ORDER BY time"
)
