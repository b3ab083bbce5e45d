"""Read rows of published measurements from a CSV file."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["time", "out_of_memory", "peak", "steady"]

KINDS: dict[str, Kind] = {
    "step_time_s": "time",
    "tokens_per_s_per_gpu": "time",
    "tokens_per_s": "time",
    "samples_per_s": "time",
    "model_tflops_per_gpu": "time",
    "out_of_memory": "out_of_memory",
    "peak_memory_bytes": "peak",
    "peak_memory_gb": "peak",
    "peak_memory_gib": "peak",
    "steady_memory_bytes": "steady",
}
_BYTES = {"bytes": 1.0, "gb": 1e9, "gib": 2.0**30}
# Sources whose figures in "GB" are multiples of 2^30 bytes: kempnerforge/metrics/memory.py divides by 1024 ** 3.
CALLS_GIB_GB = ("KempnerInstitute/KempnerForge",)
_COUNTS = ("gpus", "layers", "hidden", "heads", "seq", "global_batch", "micro_batch", "tp", "pp", "dp")
# Columns that identify a configuration. Measured values and sources are not part of it.
_CONFIGURATION = (
    *("gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "global_batch", "micro_batch"),
    *("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "recompute", "precision"),
)


class SkipError(Exception):
    """Reason why a row cannot be planned."""


class PublishedRow(NamedTuple):
    """A measurement. `fields` has the text of all columns, `value` the measured number."""

    fields: dict[str, str]
    kind: Kind
    value: float

    @property
    def source(self) -> str:
        """Repository or paper that published the row. Tables, threads, and years of one source are the same source."""
        name = re.split(r"[:@]| PR #| issue #| table | on a ", self.fields["source_repo_path"], maxsplit=1)[0]
        return re.sub(r"_v\d[\d.]*$", "", name)

    def text(self, column: str) -> str:
        return self.fields.get(column, "")

    def count(self, column: str, default: int | None = None) -> int:
        """Return the whole number of a column.

        Raises:
            SkipError: The column is empty and has no default.
        """
        number = _parse_number(self.text(column))
        if number is not None and number >= 0 and number == int(number):
            return int(number)
        if default is None:
            raise SkipError(f"no {column}")
        return default

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, from the row or from tokens per second and GPU."""
        arguments = _parse_number(self.text("step_time_s"))
        if arguments:
            return arguments
        name = self.fields["measure_name"]
        if name == "step_time_s":
            return self.value
        samples = self.count("global_batch")
        tokens = samples * self.count("seq")
        rates = {"tokens_per_s_per_gpu": (tokens, self.count("gpus")), "tokens_per_s": (tokens, 1)}
        work, ranks = rates.get(name, (samples, 1))
        return work / (self.value * ranks) if name != "model_tflops_per_gpu" else None

    @property
    def num_bytes(self) -> float:
        """Bytes of a memory measurement."""
        unit = self.fields["measure_name"].rsplit("_", 1)[-1]
        return self.value * _BYTES["gib" if unit == "gb" and self.source in CALLS_GIB_GB else unit]

    @property
    def sweep_key(self) -> tuple[str, ...]:
        """Key that runs with different layouts and batches share, but not those with other kernels or releases."""
        columns = ("source_repo_path", "gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
        return (*(self.text(column) for column in columns), self.text("precision"))

    @property
    def has_adapters(self) -> bool:
        return re.search(r"\bq?lora\b", f"{self.text('model')} {self.text('note')}".lower()) is not None


_COLUMNS = ("source_repo_path", "model", *_CONFIGURATION, "measure_name", "measure_value", "note")


def read_rows(path: Path) -> list[PublishedRow | SkipError]:
    """Return all rows, or the reason why a line has no measurement.

    Raises:
        ValueError: A required column is missing.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if missing := [name for name in _COLUMNS if name not in (lines.fieldnames or ())]:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        return [_parse_row(fields) for fields in lines]


def _parse_row(raw: dict[str, str | None]) -> PublishedRow | SkipError:
    fields = {name: (value or "").strip() for name, value in raw.items() if isinstance(name, str)}
    kind, value = KINDS.get(fields.get("measure_name", "")), _parse_number(fields.get("measure_value", ""))
    fields.setdefault("source_repo_path", "unknown")
    if kind is None:
        return SkipError(f"measures {fields.get('measure_name') or 'nothing'}")
    if value is None or value <= 0:
        return SkipError("measurement is not a positive number")
    return PublishedRow(fields, kind, value)


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
