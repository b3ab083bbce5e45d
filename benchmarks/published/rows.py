"""Read rows of published measurements from a CSV file."""

from __future__ import annotations

import csv
import hashlib
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
        """Repository that published the row."""
        return re.split(r"[:@]", self.fields["source_repo_path"], maxsplit=1)[0]

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
    def is_fit_half(self) -> bool:
        """Return True if constants may be fitted on the row, by a hash of its configuration without repeats."""
        text = "|".join(self.text(column) for column in _CONFIGURATION)
        return hashlib.sha256(text.encode()).digest()[0] % 2 == 0

    @property
    def sweep_key(self) -> tuple[str, ...]:
        """Key that runs with different layouts and batches share, but not those with other kernels or releases."""
        columns = ("source_repo_path", "gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
        return (*(self.text(column) for column in columns), self.text("precision"), self.release)

    @property
    def setting_key(self) -> tuple[str, ...]:
        """Model sizes, GPU, and precision, for which constants may have been fitted."""
        return tuple(self.text(column) for column in ("layers", "hidden", "heads", "ffn", "gpu", "precision"))

    @property
    def release(self) -> str:
        """Release of NVIDIA's software, or an empty text."""
        found = re.match(r"(\d\d\.\d\d(?:\.\d\d)?) (?:pre-training|sft|lora)\b", self.text("note").lower())
        return found[1] if found else ""

    @property
    def is_fine_tuning(self) -> bool:
        """Return True if the run fine-tunes a model, with or without adapters."""
        return self.has_adapters or re.search(r"\bsft\b", self.text("note").lower()) is not None

    @property
    def has_adapters(self) -> bool:
        return re.search(r"\blora\b", f"{self.text('model')} {self.text('note')}".lower()) is not None


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


def is_kempner(row: PublishedRow) -> bool:
    """Return True for rows of KempnerForge.

    Its nodes have 4 GPUs. Model and optimizer are in bf16, gradients are summed after the last micro-batch, and
    losses of bf16 logits use torch's kernels (benchmarks/mfu_scaling/mfu_bench.sh,
    kempnerforge/distributed/parallel.py, training/{grad,loss}.py).
    """
    return row.source == "KempnerInstitute/KempnerForge"


def has_unsharded_ends(row: PublishedRow) -> bool:
    """Return True if each tensor rank has the whole embedding and head, and norms of all tokens.

    This is so for pipeline stages of KempnerForge (kempnerforge/distributed/tensor_parallel.py, `is_pp_stage`).
    """
    return is_kempner(row) and row.count("pp", 1) > 1


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
