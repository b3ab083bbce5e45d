"""Measure the overhead of the meter: collectives and steps on a metered and on a plain group, alternating in one run.

    python -m benchmarks.metering [--blocks N]

Two gloo ranks have one thread each. The side "on" uses the metered group in a traced step. Its exporter sends counters,
steps, timelines, and gauges to a reader. "Off" is torch's group. "Control" is a second plain group, which shows the
difference between two equal sides. All sides take turns in the same processes on equal models, so a slow moment
affects all of them. Figures are medians. The goal is 0.5% of a step, or 10 us per collective. The time of the exporter
thread is measured separately with the clock of the thread. Recorder, history, and diagnosis run on the board, not on a
rank.
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
MAX_STEP_OVERHEAD = 0.005
MAX_COLLECTIVE_OVERHEAD_S = 10e-6
LAYERS, HIDDEN, HEADS, SEQ, BATCH, VOCAB = 4, 256, 4, 128, 4, 256
STEPS_PER_TURN = 5
SPANS = ("data", "forward", "backward", "optimizer")
CALLS_PER_TURN = 200
WARM_UP_BLOCKS = 2


class Transformer(nn.Module):
    """A small decoder from (batch, seq) tokens to (batch, seq, VOCAB) logits."""

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


def build_ddp(group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(Transformer(), process_group=group)


def build_zero3(group: dist.ProcessGroup) -> nn.Module:
    model, mesh = Transformer(), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class StepMeter:
    """Recorder of the side "on", with an exporter during its turns and the CPU seconds of its thread."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        self.recorder, self._path = recorder, path
        self._exporter: Exporter | None = None
        self.cpu_s = 0.0

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Run the exporter for a turn. The final flush does not count, because a run has only one."""
        self._exporter = Exporter(self.recorder, self._path, "bench", 1)
        clock = time.pthread_getcpuclockid(_get_thread_id(self._exporter))
        yield
        self.cpu_s += time.clock_gettime(clock)
        if not self._exporter.close(10):
            raise RuntimeError("the reader did not take what the exporter sent")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace a step and export its item, as the trainer does."""
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


def _get_thread_id(exporter: Exporter) -> int:
    ident = exporter._thread.ident
    assert ident is not None, "it runs"
    return ident


def train_step(model: nn.Module, group: dist.ProcessGroup, rank: int, meter: StepMeter | None) -> Callable[[], None]:
    """Run an optimizer step with the global loss, traced if `meter` is not None."""
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


def build_tiny_collective(group: dist.ProcessGroup) -> Callable[[], None]:
    buffer = torch.zeros(1)
    return lambda: dist.all_reduce(buffer, group=group)


def time_calls(run: Callable[[], None], times: int) -> list[float]:
    """Return the seconds of each call."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return taken


def compare_sides(
    sides: dict[str, Callable[[], None]], meter: StepMeter, blocks: int, times: int, *, in_one_step: bool
) -> dict[str, Any]:
    """Return the median seconds of each side, the ratios to "off" per block, and the seconds of the exporter thread.

    Args:
        in_one_step: Trace a whole turn as one step, or let each call trace its own step.
    """
    wall_s, meter.cpu_s = 0.0, 0.0
    taken: dict[str, list[float]] = {side: [] for side in sides}
    blocks_of_medians = []
    num_calls = 0
    for block in range(WARM_UP_BLOCKS + blocks):
        medians = {}
        for side in rotate(list(sides), block):
            dist.barrier()
            before = count_calls(meter.recorder)
            with ExitStack() as stack:
                if side == "on":
                    stack.enter_context(meter.exporting())
                if side == "on" and in_one_step:
                    stack.enter_context(meter.step())
                seconds = time_calls(sides[side], times)
            if side == "on":
                wall_s += sum(seconds)
                num_calls = count_calls(meter.recorder) - before
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


def rotate(sides: list[str], by: int) -> list[str]:
    by %= len(sides)
    return sides[by:] + sides[:by]


def count_calls(recorder: Recorder) -> int:
    return sum(cell["count"] for cell in recorder.get_cells() if cell["op"] != "barrier")


def measure_collective_cost_s() -> float:
    """Return seconds of the meter per collective, with a backend that does nothing."""
    nothing = dist.new_group(backend="fake")
    recorder = Recorder(0)
    recorder.enable_tracing()
    recorder.begin_step(1)
    recorder.set_phase("step")
    sides = [MeteredProcessGroup(nothing, "own", recorder, [torch.device("cpu")], range(WORLD)), nothing]
    buffers, how = [torch.zeros(1)], dist.AllreduceOptions()
    how.asyncOp = False
    medians = [statistics.median(time_calls(lambda g=g: g.allreduce(buffers, how).wait(), 5000)) for g in sides]  # type: ignore[misc]
    return medians[0] - medians[1]


def measure_step_cost_s(path: str) -> float:
    """Return seconds that the training thread spends on the trace of a step, without its collectives."""
    recorder = Recorder(0)
    meter = StepMeter(recorder, path)
    recorder.set_phase("step")
    recorder.issue("all_reduce", "own", WORLD, 4)()  # create counters to send

    def step() -> None:
        with meter.step():
            for work in SPANS:
                with recorder.time_span(work, 0, 0):  # type: ignore[arg-type]  # they are
                    pass

    with meter.exporting():
        return statistics.median(time_calls(step, 1000))


def rank_main(rank: int, store: str, path: str, blocks: int, output: str) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder = Recorder(rank)
    backend = register_metered_backend(recorder, "cpu")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=WORLD)
    groups = {"on": dist.new_group(), "off": dist.new_group(backend="gloo"), "control": dist.new_group(backend="gloo")}
    text: dict[str, Any] = {}
    tiny = {side: build_tiny_collective(group) for side, group in groups.items()}
    meter = StepMeter(recorder, path)
    text["collective"] = compare_sides(tiny, meter, blocks, CALLS_PER_TURN, in_one_step=True)
    for name, parallel in (("DDP", build_ddp), ("ZeRO-3", build_zero3)):
        result = {"on": meter}
        steps = {side: train_step(parallel(group), group, rank, result.get(side)) for side, group in groups.items()}
        text[name] = compare_sides(steps, meter, blocks, STEPS_PER_TURN, in_one_step=False)
    text["own_s"], text["step_own_s"] = measure_collective_cost_s(), measure_step_cost_s(path)
    if rank == 0:
        Path(output).write_text(json.dumps(text))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run_reader(listener: socket.socket) -> None:
    """Read and discard everything, in place of a supervisor."""

    def read(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def format_ratio(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.4f} [{low:.4f} to {high:.4f}]"


def print_report(said: dict[str, Any]) -> list[str]:
    one = said["collective"]["seconds"]
    added_s = one["on"] - one["off"]
    lines = [
        "ratios are medians [quartiles] of pairs; control/off compares plain runs and shows the noise",
        f"small all-reduce: on {one['on'] * 1e6:.1f} us, off {one['off'] * 1e6:.1f} us, "
        f"on/off {format_ratio(said['collective']['ratios']['on'])}, "
        f"control/off {format_ratio(said['collective']['ratios']['control'])}",
        f"added per collective: {added_s * 1e6:.1f} us; meter {said['own_s'] * 1e6:.1f} us per collective "
        f"and {said['step_own_s'] * 1e6:.1f} us per step (goal 10 us per collective: "
        f"{'met' if said['own_s'] <= MAX_COLLECTIVE_OVERHEAD_S else 'MISSED'})",
    ]
    for name in ("DDP", "ZeRO-3"):
        step = said[name]
        seconds = step["seconds"]
        share = (max(added_s, said["own_s"]) * step["calls"] + said["step_own_s"]) / seconds["off"]
        lines += [
            f"{name} step: on {seconds['on'] * 1e3:.2f} ms, off {seconds['off'] * 1e3:.2f} ms, "
            f"on/off {format_ratio(step['ratios']['on'])}, control/off {format_ratio(step['ratios']['control'])}",
            f"{name} step: {step['calls']:.0f} collectives, metering is {share:.3%} of the step "
            f"(goal {MAX_STEP_OVERHEAD:.1%}: {'met' if share <= MAX_STEP_OVERHEAD else 'MISSED'}); exporter thread: "
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
        threading.Thread(target=run_reader, args=(listener,), daemon=True).start()
        mains = [partial(rank_main, rank, store, path, blocks, output) for rank in range(WORLD)]
        ranks = [context.Process(target=run_and_exit, args=(main,)) for main in mains]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
        print("\n".join(print_report(json.loads(Path(output).read_text()))))


if __name__ == "__main__":
    main()
