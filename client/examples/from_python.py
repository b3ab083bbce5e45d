"""Plan a layout, run it, and compare measured with predicted traffic."""

import os
import sys

from meshboard import Client, RefusedError
from meshboard.answers import JobSpec

SPEC: JobSpec = {
    "name": "from Python",
    "model": {"preset": "gpt-tiny"},
    "layout": {"tp": 2, "sequence_parallel": True},
    "train": {"steps": 5},
}


def main() -> None:
    with Client(os.environ["MESHBOARD_URL"], os.environ["MESHBOARD_TOKEN"]) as board:
        estimate = board.plan(SPEC)["estimate"]
        if estimate is not None:
            print(f"predicted: {estimate['time']['step_s']:.3g} s per step, {estimate['peak_memory_bytes']:,} B")
        try:
            job = board.submit(SPEC, key=os.environ["BUILD"])  # A repeated build gets the existing job.
        except RefusedError as error:
            sys.exit("\n".join(f"{field}: {message}" for field, message in error.problems))
        job = board.wait(job.id, timeout_s=3600)
        results = board.results(job.id)
        print(f"{job.id} has {job.status}, traffic difference {results['off_bytes']} B")
        for rank, rows in results["verdicts"].items():
            for row in rows:
                sent = f"{row['measured_bytes']:,} B, {row['predicted_bytes']:,} B predicted"
                print(f"rank {rank} {row['phase']} {row['axis']} {row['op']}: {sent}")


if __name__ == "__main__":
    main()
