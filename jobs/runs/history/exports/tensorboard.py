"""An attempt's curves as an event file that TensorBoard reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from jobs.runs.history.exports.scalars import scalars
from jobs.runs.history.store.query import Tables, filed

VERSION = "brain.Event:2"  # what a reader looks for first


def event_file(job: str, attempt: int, spec: dict[str, Any]) -> BinaryIO:
    """A file that is gone once it is closed.

    Raises:
        GoneError, BusyError
    """
    return filed(job, attempt, lambda tables, path: _write(tables, spec, path))


def file_name(job: str, attempt: int) -> str:
    """TensorBoard looks for the middle of it."""
    return f"{job}-{attempt}.events.out.tfevents"


def _write(tables: Tables, spec: dict[str, Any], path: Path) -> None:
    began = float(tables.manifest["first"] or 0.0)
    with path.open("wb") as out:  # anew, where the files were replaced meanwhile
        writer = RecordWriter(out)
        writer.write(Event(wall_time=began, file_version=VERSION).SerializeToString())
        writer.write(Event(wall_time=began, step=0, summary=_text("spec", spec)).SerializeToString())
        for curve, step, time, value in scalars(tables):
            summary = Summary(value=[Summary.Value(tag=curve, simple_value=value)])
            writer.write(Event(wall_time=time, step=step, summary=summary).SerializeToString())


def _text(name: str, told: dict[str, Any]) -> Summary:
    words = TensorProto(dtype=DT_STRING, string_val=[f"```\n{json.dumps(told, indent=2)}\n```".encode()])
    words.tensor_shape.dim.add(size=1)
    shown = create_summary_metadata(display_name=name, description="")
    return Summary(value=[Summary.Value(tag=f"{name}/text_summary", metadata=shown, tensor=words)])
