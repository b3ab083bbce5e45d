"""What metering costs: the same collectives and steps on a metered and a plain group, turn about in one run.

    python -m benchmarks.metering [--blocks N]

Two gloo ranks of one thread each. "On" is the metered group inside a step that is kept event by event, as in every run:
its exporter sends counters, step items, timelines, gauges and where it stands to a reader. "Off" is torch's own group,
and so is "control", which shows how far two equal sides differ here. Sides take turns in the same processes on equal
models, so that a slow moment hits all; figures are medians. The goal is 0.5% of a step, or 10 us a collective. What the
exporter's thread takes beside training is told apart, by that thread's own clock. Recorder, history and diagnosis are
the board's: they take nothing of a rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from contracts.telemetry.batches import Item
from contracts.telemetry.items import StepItem, Work
from workers.meter import Exporter, Recorder, register_metered_backend
from workers.meter.process_group import MeteredProcessGroup
from workers.meter.rank_exit import run_and_exit

# Registers torch's "fake" backend, whose collectives do nothing.
from workers.torch_private.groups import fake_store  # noqa: F401

WORLD = 2
GOAL = 0.005
COLLECTIVE_GOAL_S = 10e-6
LAYERS, HIDDEN, HEADS, SEQ, BATCH, VOCAB = 4, 256, 4, 128, 4, 256
STEPS_PER_TURN = 5
SPANS = ("data", "forward", "backward", "optimizer")
CALLS_PER_TURN = 200
WARM_UP_BLOCKS = 2


class Transformer(nn.Module):
    """A small decoder: (batch, seq) tokens to (batch, seq, VOCAB) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def ddp(group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(Transformer(), process_group=group)


def zero3(group: dist.ProcessGroup) -> nn.Module:
    model, mesh = Transformer(), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Meter:
    """What the side that is on has: a recorder, and while it is its turn an exporter, of whose thread `cpu_s` are."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        self.recorder, self._path = recorder, path
        self._exporter: Exporter | None = None
        self.cpu_s = 0.0

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """For a turn. What is left to send after it counts for nothing: a run has that once."""
        self._exporter = Exporter(self.recorder, self._path, "bench", 1)
        clock = time.pthread_getcpuclockid(_ident(self._exporter))
        yield
        self.cpu_s += time.clock_gettime(clock)
        if not self._exporter.close(10):
            raise RuntimeError("the reader did not take what the exporter sent")

    @contextmanager
    def step(self) -> Iterator[None]:
        """As the trainer has it around a step: what is issued inside is of it, and it is told."""
        number, began = self.recorder.completed_steps + 1, time.perf_counter()
        self.recorder.set_phase("step")
        self.recorder.begin_step(number)
        yield
        elapsed = time.perf_counter() - began
        parts = self.recorder.end_step(number)
        self.send(
            StepItem(
                kind="step",
                rank=self.recorder.rank,
                time=time.time(),
                step=number,
                ran=number,
                steps=number,
                step_s=elapsed,
                tokens=BATCH * SEQ,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=1e-4,
                cells=self.recorder.get_cells("step"),
                parts=parts,
            )
        )

    def send(self, item: Item) -> None:
        assert self._exporter is not None, "it is not its turn"
        self._exporter.send(item)


def _ident(exporter: Exporter) -> int:
    ident = exporter._thread.ident
    assert ident is not None, "it runs"
    return ident


def train_step(model: nn.Module, group: dist.ProcessGroup, rank: int, meter: Meter | None) -> Callable[[], None]:
    """One optimiser step with the global loss, as a trainer makes it; with a meter, told as the trainer tells it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(rank))

    def doing(work: Work) -> AbstractContextManager[None]:
        return meter.recorder.time_span(work, 0, 0) if meter is not None else nullcontext()

    def step() -> None:
        with doing("data"):
            read, wanted = tokens[:, :-1], tokens[:, 1:].flatten()
        with doing("forward"):
            loss = nn.functional.cross_entropy(model(read).flatten(0, 1), wanted)
        with doing("backward"):
            loss.backward()
        with doing("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss.detach(), group=group)

    def told() -> None:
        assert meter is not None
        with meter.step():
            step()

    return step if meter is None else told


def tiny_collective(group: dist.ProcessGroup) -> Callable[[], None]:
    buffer = torch.zeros(1)
    return lambda: dist.all_reduce(buffer, group=group)


def turn(run: Callable[[], None], times: int) -> list[float]:
    """Seconds of each run."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def compare(
    sides: dict[str, Callable[[], None]], meter: Meter, blocks: int, times: int, *, in_one_step: bool
) -> dict[str, Any]:
    """Median seconds of each side, the ratios of "on" and of "control" to "off" in each block of turns, and what the
    exporter's thread took of the turns that are on. `in_one_step`: all of a turn is one; else each makes its own."""
    wall_s, meter.cpu_s = 0.0, 0.0
    taken: dict[str, list[float]] = {side: [] for side in sides}
    blocks_of_medians = []
    num_calls = 0
    for block in range(WARM_UP_BLOCKS + blocks):
        medians = {}
        for side in rotated(list(sides), block):
            dist.barrier()
            before = calls(meter.recorder)
            with ExitStack() as stack:
                if side == "on":
                    stack.enter_context(meter.exporting())
                if side == "on" and in_one_step:
                    stack.enter_context(meter.step())
                seconds = turn(sides[side], times)
            if side == "on":
                wall_s += sum(seconds)
                num_calls = calls(meter.recorder) - before
            medians[side] = statistics.median(seconds)
            if block >= WARM_UP_BLOCKS:
                taken[side] += seconds
        if block >= WARM_UP_BLOCKS:
            blocks_of_medians.append(medians)
    return {
        "seconds": {side: statistics.median(all_s) for side, all_s in taken.items()},
        "ratios": {side: [m[side] / m["off"] for m in blocks_of_medians] for side in sides},
        "calls": num_calls / times,
        "exporter_share": meter.cpu_s / wall_s,
    }


def rotated(sides: list[str], by: int) -> list[str]:
    by %= len(sides)
    return sides[by:] + sides[:by]


def calls(recorder: Recorder) -> int:
    return sum(cell["count"] for cell in recorder.get_cells() if cell["op"] != "barrier")


def own_cost_s() -> float:
    """Seconds of the meter's own work for one collective, over a backend that does nothing."""
    nothing = dist.new_group(backend="fake")
    recorder = Recorder(0)
    recorder.enable_tracing()
    recorder.begin_step(1)
    recorder.set_phase("step")
    sides = [MeteredProcessGroup(nothing, "own", recorder, [torch.device("cpu")], range(WORLD)), nothing]
    buffers, how = [torch.zeros(1)], dist.AllreduceOptions()
    how.asyncOp = False
    medians = [statistics.median(turn(lambda g=g: g.allreduce(buffers, how).wait(), 5000)) for g in sides]  # type: ignore[misc]
    return medians[0] - medians[1]


def step_cost_s(path: str) -> float:
    """Seconds of the training thread's own work for one step around its collectives: its beginning and end, its spans,
    and the item that it hands to its exporter."""
    recorder = Recorder(0)
    meter = Meter(recorder, path)
    recorder.set_phase("step")
    recorder.issue("all_reduce", "own", WORLD, 4)()  # there are counters to tell

    def step() -> None:
        with meter.step():
            for work in SPANS:
                with recorder.time_span(work, 0, 0):  # type: ignore[arg-type]  # they are
                    pass

    with meter.exporting():
        return statistics.median(turn(step, 1000))


def rank_main(rank: int, store: str, path: str, blocks: int, output: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder = Recorder(rank)
    backend = register_metered_backend(recorder, "cpu")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    groups = {"on": dist.new_group(), "off": dist.new_group(backend="gloo"), "control": dist.new_group(backend="gloo")}
    said: dict[str, Any] = {}
    tiny = {side: tiny_collective(group) for side, group in groups.items()}
    meter = Meter(recorder, path)
    said["collective"] = compare(tiny, meter, blocks, CALLS_PER_TURN, in_one_step=True)
    for name, parallel in (("DDP", ddp), ("ZeRO-3", zero3)):
        told = {"on": meter}
        steps = {side: train_step(parallel(group), group, rank, told.get(side)) for side, group in groups.items()}
        said[name] = compare(steps, meter, blocks, STEPS_PER_TURN, in_one_step=False)
    said["own_s"], said["step_own_s"] = own_cost_s(), step_cost_s(path)
    if rank == 0:
        Path(output).write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def read_everything(listener: socket.socket) -> None:
    """A supervisor that reads and forgets."""

    def read(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def ratio(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.4f} [{low:.4f} to {high:.4f}]"


def report(said: dict[str, Any]) -> list[str]:
    one = said["collective"]["seconds"]
    added_s = one["on"] - one["off"]
    lines = [
        "ratios are medians [quartiles] of pairs; control/off compares plain runs and shows the noise",
        f"small all-reduce: on {one['on'] * 1e6:.1f} us, off {one['off'] * 1e6:.1f} us, "
        f"on/off {ratio(said['collective']['ratios']['on'])}, "
        f"control/off {ratio(said['collective']['ratios']['control'])}",
        f"added per collective: {added_s * 1e6:.1f} us; meter {said['own_s'] * 1e6:.1f} us per collective "
        f"and {said['step_own_s'] * 1e6:.1f} us per step (goal 10 us per collective: "
        f"{'met' if said['own_s'] <= COLLECTIVE_GOAL_S else 'MISSED'})",
    ]
    for name in ("DDP", "ZeRO-3"):
        step = said[name]
        seconds = step["seconds"]
        share = (max(added_s, said["own_s"]) * step["calls"] + said["step_own_s"]) / seconds["off"]
        lines += [
            f"{name} step: on {seconds['on'] * 1e3:.2f} ms, off {seconds['off'] * 1e3:.2f} ms, "
            f"on/off {ratio(step['ratios']['on'])}, control/off {ratio(step['ratios']['control'])}",
            f"{name} step: {step['calls']:.0f} collectives, metering is {share:.3%} of the step "
            f"(goal {GOAL:.1%}: {'met' if share <= GOAL else 'MISSED'}); exporter thread: "
            f"{step['exporter_share']:.2%} of a processor",
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of turns measured (default 20)")
    blocks = parser.parse_args().blocks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path, store, output = f"{folder}/s", f"{folder}/store", f"{folder}/output.json"
        listener.bind(path)
        listener.listen()
        threading.Thread(target=read_everything, args=(listener,), daemon=True).start()
        mains = [partial(rank_main, rank, store, path, blocks, output) for rank in range(WORLD)]
        ranks = [context.Process(target=run_and_exit, args=(main,)) for main in mains]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
        print("\n".join(report(json.loads(Path(output).read_text()))))


if __name__ == "__main__":
    main()
