"""Script of a user with its own groups and an all-to-all, which fails during a collective."""

import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
mine = evens if rank % 2 == 0 else odds
x = torch.full((8,), float(rank))
dist.all_reduce(x, group=mine)
assert x[0] == (2.0 if rank % 2 == 0 else 4.0), x
tp_group = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
dist.all_reduce(x, group=tp_group)
pp_group = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
dist.batch_isend_irecv([dist.P2POp(dist.isend if rank < 2 else dist.irecv, x, (rank + 2) % 4)])[0].wait()
out = torch.empty(8)
dist.all_to_all_single(out, torch.arange(8.0) + 100 * rank)
assert out.tolist() == [100.0 * r + 2 * rank + i for r in range(4) for i in range(2)]
dist.barrier()
if len(sys.argv) > 1:
    if rank != 1:
        signal.pause()  # no other rank joins the collective that rank 1 leaves behind
    left_behind = dist.all_reduce(x, group=odds, async_op=True)
    raise SystemExit(int(sys.argv[1]))
