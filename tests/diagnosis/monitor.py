"""Read the streams of an attempt, and diagnose it repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgpack

from contracts.names import telemetry_stream
from contracts.telemetry.batches import Batch
from jobs.runs.diagnosis import Diagnosis, HostRanks, PlannedRun, VerdictPayload
from planner.cost.estimate import estimate
from planner.facts.parse_spec import parse_spec
from planner.hardware.catalog import CLUSTERS, DEFAULT_CLUSTER

POLL_S = 1.0


class DiagnosisMonitor:
    """Monitor of an attempt. `client` is connected to the Redis of its hosts."""

    def __init__(self, client: Any, job: str, spec: Mapping[str, Any], members: Sequence[HostRanks] = ()) -> None:
        self._client = client
        self._cursors = {telemetry_stream(job, 1, node): "-" for node in range(max(1, len(members)))}
        parsed, cpu = parse_spec(spec), CLUSTERS[DEFAULT_CLUSTER["cpu"]]
        is_script = parsed.script is not None
        run = PlannedRun(
            parsed.model_dump(mode="json"),
            {} if is_script else dict(estimate(parsed, cpu)),
            parsed.layout.world_size,
            hardware=cpu.model_dump(mode="json"),
            members=members,
        )
        self.diagnosis = Diagnosis(run)
        self.items = 0

    def read(self) -> None:
        """Read new batches."""
        for node, stream in enumerate(self._cursors):
            while entries := self._client.xrange(stream, min=self._cursors[stream], count=50):
                for entry_id, fields in entries:
                    self._cursors[stream] = f"({entry_id.decode()}"
                    self._add_batch(msgpack.unpackb(fields[b"b"]), node)

    def _add_batch(self, batch: Batch, node: int) -> None:
        for item in batch["items"]:
            self.items += 1
            self.diagnosis.add(item, node, batch.get("clock"))

    def diagnose(self) -> VerdictPayload:
        self.read()
        return self.diagnosis.make_verdict(time.time())

    def diagnose_repeatedly(self, seconds: float) -> Iterator[VerdictPayload]:
        """Diagnose every POLL_S for these seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            yield self.diagnose()
            time.sleep(max(0.0, POLL_S - (time.monotonic() - began)))

    def wait_for(self, says: Callable[[VerdictPayload], bool], seconds: float) -> VerdictPayload | None:
        """Return the first diagnosis that matches, or None after the timeout."""
        return next((result for result in self.diagnose_repeatedly(seconds) if says(result)), None)
