"""Faults of training scripts with their correct verdicts, and healthy scripts that pause.

Each script begins with PRELUDE. `fault()` prints the time at which the fault begins.
"""

from __future__ import annotations

from typing import NamedTuple

PRELUDE = """
import ctypes, datetime, os, queue, signal, sys, threading, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
def fault(): print(f"FAULT {time.time()}", flush=True)
def start(timeout=300):
    global r, n, model, optimizer
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
    r, n = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch=None):
    model(torch.randn(8, 64) if batch is None else batch).sum().backward()
    optimizer.step(); optimizer.zero_grad(); time.sleep(0.05)
def steps(number):
    for _ in range(number): step()
def busy(seconds):
    end = time.time() + seconds
    while time.time() < end:
        x = torch.randn(64, 64)
        x = x @ x
"""


class ScriptFault(NamedTuple):
    """A script with a fault.

    Attributes:
        expected: Patterns that the verdict with its evidence must match.
        states: States of a verdict that names the fault.
    """

    script: str
    expected: tuple[str, ...]
    states: tuple[str, ...] = ("hung",)
    world: int = 2


WAITS = r"[Rr]ank 0 wait(?:s|ed) for rank 1, which did not enter all_reduce [\d,]+ on world"

FAULTS: dict[str, ScriptFault] = {
    "script: a rank sleeps": ScriptFault(
        "start(); steps(60)\nif r == 1:\n    fault()\n    time.sleep(3600)\nsteps(100)",
        (WAITS, r"Rank 1 sleeps in script\.py:\d+: `time\.sleep\(3600\)`", r"rank 0: in all_reduce of .*at script"),
    ),
    "script: barrier against all-reduce": ScriptFault(
        "start()\nsteps(60 if r == 0 else 40)\nfault()\ndist.barrier()",
        (r"In call \d+ on world, rank 1 calls barrier, but rank 0 calls all_reduce of [\d,]+ float32", "0: .*step"),
    ),
    "script: another size": ScriptFault(
        "start(120)\nfor i in range(100):\n    step()\n    if i == 50: fault()\n"
        "    dist.all_reduce(torch.ones(1025 if i == 50 and r == 1 else 262144))",
        (r"all_reduce of 262,144 float32", r"[Ss]ize", "rank 1"),
        ("failed",),
    ),
    "script: another operation": ScriptFault(
        "start(); steps(20)\nfault()\nt = torch.ones(8)\n"
        "dist.all_gather([t.clone(), t.clone()], t) if r == 1 else dist.all_reduce(t)",
        (
            r"rank 1 calls all_gather of 16 float32, but rank 0 calls all_reduce of 8 float32|"
            r"rank 0 calls all_reduce of 8 float32, but rank 1 calls all_gather of 16 float32",
        ),
    ),
    "script: another root": ScriptFault(
        "start(); steps(20)\nfault()\ndist.broadcast(torch.ones(8), r); dist.barrier()",
        (r"broadcast of 8 float32 from rank 0", r"broadcast of 8 float32 from rank 1"),
    ),
    "script: another dtype and size": ScriptFault(
        "start(); steps(20)\nfault()\ndist.all_reduce(torch.ones(8, dtype=torch.float64 if r else torch.float32))",
        (r"all_reduce of 8 float", "[Ss]ize"),
        ("failed",),
    ),
    "script: two groups in another order": ScriptFault(
        "start(); g = dist.new_group([0, 1]); t = torch.ones(8)\n"
        "for i in range(40):\n    step()\n    dist.all_reduce(t, group=g)\n"
        "fault()\nif r == 0:\n    dist.all_reduce(t); dist.all_reduce(t, group=g)\n"
        "else:\n    dist.all_reduce(t, group=g); dist.all_reduce(t)",
        (r"calls them in another order", r"rank 0: in all_reduce", r"rank 1: in all_reduce"),
    ),
    "script: a skipped collective": ScriptFault(
        "start(); t, u = torch.ones(8), torch.ones(16)\n"
        "for i in range(40):\n    step()\n    if i == 39: fault()\n"
        "    if not (i == 39 and r == 1): dist.broadcast(t, 0)\n    dist.all_reduce(u)\ndist.barrier()",
        (
            r"rank 1 calls all_reduce of 16 float32, but rank 0 calls broadcast of 8 float32 from rank 0|"
            r"[Rr]ank 1 skipped",
        ),
    ),
    "script: a rank leaves with code 0": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    sys.exit(0)\nsteps(100)",
        (WAITS, r"Rank 1 ended without an error"),
        ("hung", "failed"),
    ),
    "script: a rank leaves without exit handlers": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    os._exit(0)\nsteps(100)",
        (r"process of rank 1 has ended|rank 0 lost its connection in all_reduce.*Rank 1 has sent no last report",),
        ("hung", "failed"),
    ),
    "script: a rank raises": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    raise ValueError('bad sample 17')\nsteps(100)",
        (r"rank 1", r"ValueError: bad sample 17"),
        ("hung", "failed"),
    ),
    "script: a rank raises, but a thread holds it": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    threading.Thread(target=time.sleep, args=(3600,)).start()\n    fault()\n"
        "    raise ValueError('bad sample 17')\nsteps(100)",
        (WAITS, r"Rank 1 ended with ValueError: bad sample 17 in script\.py:\d+"),
    ),
    "script: a lock": ScriptFault(
        "start(); steps(30)\nlock = threading.Lock()\nif r == 1:\n    fault()\n    lock.acquire(); lock.acquire()\n"
        "steps(100)",
        (WAITS, r"Rank 1 waits for a lock.* in script\.py:\d+"),
    ),
    "script: input": ScriptFault(
        "start(); steps(30)\nsys.stdin = os.fdopen(os.pipe()[0])\nif r == 1:\n    fault()\n    input('go on? ')\n"
        "steps(100)",
        (WAITS, r"Rank 1 waits for input in script\.py:\d+"),
    ),
    "script: a loader without data": ScriptFault(
        "start()\nclass Data(torch.utils.data.Dataset):\n    def __len__(self): return 1000\n"
        "    def __getitem__(self, i):\n        if r == 1 and i == 200:\n            fault()\n"
        "            time.sleep(3600)\n"
        "        return torch.ones(64)\n"
        "for batch in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=0): step(batch)",
        (WAITS, r"Training data is being loaded on rank 1 in script\.py"),
        ("hung", "notice"),
    ),
    "script: a file without a writer": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    os.mkfifo(f'/tmp/fifo-{os.getpid()}')\n    fault()\n"
        "    open(f'/tmp/fifo-{os.getpid()}').read()\nsteps(100)",
        (WAITS, r"Rank 1 waits for a file or a disk in script\.py:\d+"),
        ("hung", "notice"),
    ),
    "script: code that does not end": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    busy(3600)\nsteps(100)",
        (WAITS, r"Rank 1 still computes in script\.py:\d+ in busy"),
        ("hung", "notice"),
    ),
    "script: a stopped process": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    os.kill(os.getpid(), signal.SIGSTOP)\nsteps(100)",
        (WAITS, r"The process of rank 1 is stopped"),
    ),
    "script: a killed process": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    os.kill(os.getpid(), signal.SIGKILL)\nsteps(100)",
        (r"rank 1",),
        ("failed",),
    ),
    "script: native code that holds the interpreter": ScriptFault(
        "start(); steps(30)\nif r == 1:\n    fault()\n    ctypes.PyDLL(None).sleep(3600)\nsteps(100)",
        (WAITS, r"Rank 1 sleeps|rank 1"),
    ),
    "script: a message that is not sent": ScriptFault(
        "start(); steps(30)\nif r == 0: dist.recv(torch.ones(4), 1)\nfault()\ntime.sleep(3600)",
        (r"[Rr]ank 0 waits for rank 1, which did not enter recv", r"Rank 1 sleeps in script\.py:\d+"),
    ),
    "script: a group that one rank does not create": ScriptFault(
        "start(); steps(30)\nif r == 0: dist.new_group([0, 1])\nfault()\ntime.sleep(3600)",
        (r"[Rr]ank 0 waits for rank 1, which did not enter `new_group`", r"Rank 1 sleeps in script\.py:\d+"),
    ),
    "script: a rank is missing in a subgroup": ScriptFault(
        "start(); a, b = dist.new_group([0, 1]), dist.new_group([1, 2]); steps(30)\n"
        "if r == 2:\n    fault()\n    time.sleep(3600)\n"
        "if r == 1: dist.all_reduce(torch.ones(8), group=b)\nif r < 2: dist.all_reduce(torch.ones(8), group=a)",
        (r"wait for rank 2, which did not enter all_reduce 1 on ranks 1-2", r"Rank 2 sleeps in script\.py:\d+"),
        world=3,
    ),
    "script: a collective timeout": ScriptFault(
        "start(12); steps(30)\nif r == 1:\n    fault()\n    time.sleep(3600)\nsteps(100)",
        (r"rank 0 waited for rank 1, which did not enter all_reduce \d+ on world", r"sleeps in script\.py:\d+"),
        ("failed",),
    ),
}

HEALTHY: dict[str, str] = {
    "script: a long import": "time.sleep(30 if os.environ['RANK'] == '1' else 0)\nstart()\nsteps(10**6)",
    "script: a slow first step": (
        "start()\ndef compile_first():\n    busy(25 + 10 * r)\ncompile_first()\nsteps(10**6)"
    ),
    "script: rank 0 evaluates": (
        "start()\ndef evaluate():\n    with torch.no_grad(): busy(40)\n"
        "while True:\n    steps(100)\n    if r == 0: evaluate()\n    dist.barrier()"
    ),
    "script: rank 0 saves": (
        "start()\ndef save_checkpoint():\n    busy(15)\n    time.sleep(15)\n"
        "while True:\n    steps(100)\n    if r == 0: save_checkpoint()\n    dist.barrier()"
    ),
    "script: uneven loading": (
        "start()\nimport random\nrandom.seed(r)\nclass Data(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        while True:\n"
        "            time.sleep(random.expovariate(1 / 0.3) + 14 * (random.random() < 0.005))\n"
        "            yield torch.ones(64)\n"
        "for batch in torch.utils.data.DataLoader(Data(), batch_size=8): step(batch)"
    ),
    "script: ranks end at different times": (
        "start()\nsteps(200)\ndist.barrier()\ndist.destroy_process_group()\ntime.sleep(40 * r)"
    ),
    "script: gradient accumulation": (
        "start()\nwhile True:\n    for _ in range(20):\n        with model.no_sync():\n"
        "            model(torch.randn(8, 64)).sum().backward(); time.sleep(0.2 + 0.1 * r)\n    step()"
    ),
    "script: groups": (
        "start(); g = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]\n"
        "while True:\n    for _ in range(50):\n"
        "        dist.all_reduce(torch.ones(100), group=g[r // 2]); time.sleep(0.1)\n"
        "    busy(3 * r)\n    dist.all_reduce(torch.ones(100), group=g[2 + r % 2])"
    ),
    "script: long steps": "start()\nwhile True:\n    busy(20 + 5 * r)\n    step()",
    "script: a slow rank": "start()\nwhile True:\n    busy(3.0 * r)\n    step()",
}
WORLDS = {"script: groups": 4}
