"""Rows of published measurements as they stand in the file: one line a measurement, numbers where there are any."""

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
# Whose figures in "GB" are of 2^30 bytes: kempnerforge/metrics/memory.py divides by 1024 ** 3.
CALLS_GIB_GB = ("KempnerInstitute/KempnerForge",)
_COUNTS = ("gpus", "layers", "hidden", "heads", "seq", "global_batch", "micro_batch", "tp", "pp", "dp")
# What a configuration is; what was measured of it and where it was written down are not.
_CONFIGURATION = (
    *("gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "global_batch", "micro_batch"),
    *("tp", "pp", "vpp", "dp", "cp", "ep", "zero", "recompute", "precision"),
)


class SkipError(Exception):
    """Why a row cannot be planned."""


class PublishedRow(NamedTuple):
    """One line. `fields` holds the text of every column, `value` the measurement, `seconds` a step where known."""

    fields: dict[str, str]
    kind: Kind
    value: float

    @property
    def source(self) -> str:
        """Repository that published it."""
        return re.split(r"[:@]", self.fields["source_repo_path"], maxsplit=1)[0]

    def text(self, column: str) -> str:
        return self.fields.get(column, "")

    def count(self, column: str, default: int | None = None) -> int:
        """A column's whole number.

        Raises:
            SkipError: it holds none, and there is no default.
        """
        number = _number(self.text(column))
        if number is not None and number >= 0 and number == int(number):
            return int(number)
        if default is None:
            raise SkipError(f"no {column}")
        return default

    @property
    def seconds(self) -> float | None:
        """Of one step: as given, or from tokens a second and GPU."""
        given = _number(self.text("step_time_s"))
        if given:
            return given
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
        """Of a memory measurement."""
        unit = self.fields["measure_name"].rsplit("_", 1)[-1]
        return self.value * _BYTES["gib" if unit == "gb" and self.source in CALLS_GIB_GB else unit]

    @property
    def is_fit_half(self) -> bool:
        """Whether constants may be fitted on it: by a hash of the configuration, so that its repeats go together."""
        text = "|".join(self.text(column) for column in _CONFIGURATION)
        return hashlib.sha256(text.encode()).digest()[0] % 2 == 0

    @property
    def sweep(self) -> tuple[str, ...]:
        """Runs that differ in their layout and batch share it, with what `benchmarks.published.predict` knows of their
        kernels; a release of the software is no layout."""
        columns = ("source_repo_path", "gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
        return (*(self.text(column) for column in columns), self.text("precision"), self.release)

    @property
    def setting(self) -> tuple[str, ...]:
        """Whose constants may have been chosen on it: the model, by its sizes, the GPU and the precision."""
        return tuple(self.text(column) for column in ("layers", "hidden", "heads", "ffn", "gpu", "precision"))

    @property
    def release(self) -> str:
        """Of NVIDIA's software, where a row names one."""
        found = re.match(r"(\d\d\.\d\d(?:\.\d\d)?) (?:pre-training|sft|lora)\b", self.text("note").lower())
        return found[1] if found else ""

    @property
    def tunes(self) -> bool:
        """Whether a trained model is trained on: all of it, or adapters alone."""
        return self.adapts or re.search(r"\bsft\b", self.text("note").lower()) is not None

    @property
    def adapts(self) -> bool:
        return re.search(r"\blora\b", f"{self.text('model')} {self.text('note')}".lower()) is not None


_COLUMNS = ("source_repo_path", "model", *_CONFIGURATION, "measure_name", "measure_value", "note")


def read_rows(path: Path) -> list[PublishedRow | SkipError]:
    """Every line, or why it holds no measurement.

    Raises:
        ValueError: a column is missing, without which every row would be planned as if it said nothing there.
    """
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if missing := [name for name in _COLUMNS if name not in (lines.fieldnames or ())]:
            raise ValueError(f"{path} has no column {', '.join(missing)}")
        return [_row(fields) for fields in lines]


def of_kempner(row: PublishedRow) -> bool:
    """Whether the row is of KempnerForge: nodes of 4 GPUs, model and optimiser in bf16 throughout, gradients summed
    after the last micro-batch, losses of bf16 logits by torch's own kernels (benchmarks/mfu_scaling/mfu_bench.sh,
    kempnerforge/distributed/parallel.py, training/{grad,loss}.py)."""
    return row.source == "KempnerInstitute/KempnerForge"


def has_whole_ends(row: PublishedRow) -> bool:
    """Whether every tensor rank has all of the table and of the head, and norms all tokens: of KempnerForge's stages of
    a pipe (kempnerforge/distributed/tensor_parallel.py, `is_pp_stage`)."""
    return of_kempner(row) and row.count("pp", 1) > 1


def _row(raw: dict[str, str | None]) -> PublishedRow | SkipError:
    fields = {name: (value or "").strip() for name, value in raw.items() if isinstance(name, str)}
    kind, value = KINDS.get(fields.get("measure_name", "")), _number(fields.get("measure_value", ""))
    fields.setdefault("source_repo_path", "unknown")
    if kind is None:
        return SkipError(f"measures {fields.get('measure_name') or 'nothing'}")
    if value is None or value <= 0:
        return SkipError("measurement is not a positive number")
    return PublishedRow(fields, kind, value)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
