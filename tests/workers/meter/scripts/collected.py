"""A user's own script that lets go of its model while a callback of an all-reduce still runs on gloo's thread."""

import gc
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=pair)
model(torch.ones(1, 4)).sum().backward()
running = threading.Event()


def slow(_: object) -> None:
    running.set()
    time.sleep(0.5)  # wait without the GIL, which the callback needs


reduced = torch.ones(8)
if dist.get_rank() == 0:
    time.sleep(0.5)  # wait until the other callback exists and runs on gloo's thread
work = dist.all_reduce(reduced, group=pair, async_op=True)
future = work.get_future().then(slow)
dist.barrier()
running.wait()
dist.destroy_process_group()
del pair, model, work, future
gc.collect()
sys.stdout.write("collected\n")
