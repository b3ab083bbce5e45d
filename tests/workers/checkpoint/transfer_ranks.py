"""Run three ranks on hosts without a shared root, which save, distribute, and check checkpoints."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.facts.parse_spec import parse_spec
from workers.checkpoint import folder, load, transfer
from workers.trainer.errors import UserError

SPEC = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}}


def main() -> None:
    base = Path(sys.argv[1])
    os.environ["LOCAL_RANK"] = "0"  # each is the first of its host
    transfer.BARRIER_CHUNKS = 1
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    job = base / str(rank) / "job"
    path = folder.get_step_folder(job / "1", 7)
    draft = folder.get_draft_path(path)
    draft.mkdir(parents=True)
    own = draft / f"__{rank}_0.distcp"
    own.write_bytes(bytes([rank]) * (transfer.COLLECTED_CHUNK_BYTES + 5 if rank else 3))  # more than one chunk travels
    result: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(result, folder.describe_files(draft, [own.name]))
    files = {name: entry for part in result for name, entry in part.items()}
    transfer.collect_files(draft, files, group)
    if rank == 0:
        folder.publish(draft, parse_spec(SPEC), 7, files, [1], {})
    dist.barrier()
    cut_off = draft.with_name(".step-00000003.draft")
    cut_off.mkdir()
    transfer.discard_draft(draft)
    left = draft.exists() or cut_off.exists()
    transfer.distribute(job, group, 2)
    damage = folder.find_damage(path, files)
    if rank == 2:
        first = path / "__0_0.distcp"  # which rank 0 would read from its own root
        first.write_bytes(bytes(len(first.read_bytes()) * [7]))
    looked = load._inspect(folder.Checkpoint(path, 7), group)
    # A newer one that rank 1 cannot take: a file is where its folder should be.
    newer = folder.get_step_folder(job / "2", 9)
    if rank == 0:
        draft = folder.get_draft_path(newer)
        draft.mkdir(parents=True)
        (draft / ".metadata").write_bytes(b"")
        folder.publish(draft, parse_spec(SPEC), 9, folder.describe_files(draft, [".metadata"]), [1], {})
    else:
        (job / "2").write_text("")
    dist.barrier()
    problem = ""
    try:
        transfer.distribute(job, group, 2)
    except UserError as error:
        problem = str(error)
    other = base / str(rank) / "other"
    if rank == 1:
        for step in (4, 8):
            draft = folder.get_draft_path(folder.get_step_folder(other / "1", step))
            draft.mkdir(parents=True)
            (draft / "__1_0.distcp").write_bytes(b"whole")
            path = folder.publish(
                draft, parse_spec(SPEC), step, folder.describe_files(draft, ["__1_0.distcp"]), [1], {}
            )
        (path / "__1_0.distcp").write_bytes(b"WHOLE")
    passed_over = transfer.distribute(other, group, 2)
    # All have one, and no other; one host's is cut short.
    third = base / str(rank) / "third"
    draft = folder.get_draft_path(folder.get_step_folder(third / "1", 5))
    draft.mkdir(parents=True)
    (draft / "__0_0.distcp").write_bytes(b"whole")
    path = folder.publish(draft, parse_spec(SPEC), 5, folder.describe_files(draft, ["__0_0.distcp"]), [1], {})
    if rank == 0:
        (path / "__0_0.distcp").write_bytes(b"wh")
    transfer.distribute(third, group, 2)
    mended = (path / "__0_0.distcp").read_bytes().decode()
    (other / "1.bak").mkdir(parents=True)
    (other / "1").rename(other / "1.bak" / "1")
    nothing = transfer.distribute(other, group, 2)
    (other / "1.bak" / "1").rename(other / "1")
    brought = [found.step for found in folder.list_complete(other)]
    have = [str(found.path.relative_to(job)) for found in folder.list_complete(job)]
    messages = {"left": left, "damage": damage, "problem": problem, "have": have, "brought": brought}
    messages |= {"looked": looked, "passed over": passed_over, "of others' folders": nothing, "mended": mended}
    (base / f"said-{rank}.json").write_text(json.dumps(messages))
    dist.destroy_process_group()
