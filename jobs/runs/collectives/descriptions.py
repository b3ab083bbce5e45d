"""Describe each collective: meaning, PyTorch call, cost, and the strategies that use it.

Times are for a ring of n ranks with a latency of alpha seconds per message and B bytes per second. S is the size of
the full buffer. Sources: Thakur, Rabenseifner and Gropp 2005, nccl-tests doc/PERFORMANCE.md. Bytes come from
`planner.facts.collectives`.
"""

# ruff: noqa: RUF001 - formulas use mathematical signs
from __future__ import annotations

from typing import NamedTuple

from planner.facts.collectives import compute_algorithmic_bytes, get_metered_op
from planner.facts.spec import LabPrimitive

EXAMPLE_BYTES = 2**20  # 1 MiB on the page
EXAMPLE_RANKS = (2, 4, 8, 16)
BOOKKEEPING = "outside steps"


class CollectiveUse(NamedTuple):
    strategy: str
    words: str


class CollectiveDescription(NamedTuple):
    """Describe a collective. `sent`: bytes per rank of a bandwidth-optimal algorithm, for S payload bytes."""

    name: LabPrimitive
    title: str
    meaning: str
    call: str
    time: str
    sent: str
    uses: tuple[CollectiveUse, ...]

    @property
    def rooted(self) -> bool:
        return self.name in ("broadcast", "scatter", "gather", "reduce")

    @property
    def slug(self) -> str:
        return self.name.replace("_", "-")

    @property
    def examples(self) -> list[tuple[int, int]]:
        """Return (group size, bytes per rank) for EXAMPLE_BYTES."""
        return [(n, compute_algorithmic_bytes(get_metered_op(self.name), EXAMPLE_BYTES, n)) for n in EXAMPLE_RANKS]


_SHARE = "(n − 1)/n · S"
_SHARE_TIME = "(n − 1) α + (n − 1)/n · S / B"
_WHOLE_TIME = "(n − 1) α + S / B"

PRIMITIVES: tuple[CollectiveDescription, ...] = (
    CollectiveDescription(
        "broadcast",
        "Broadcast",
        "Copies the tensor of the root to every rank.",
        "dist.broadcast(tensor, src=root)",
        _WHOLE_TIME,
        "S",
        (
            CollectiveUse(
                "DP", "DDP copies the parameters of the first replica to the other replicas before the first step."
            ),
        ),
    ),
    CollectiveDescription(
        "scatter",
        "Scatter",
        "Splits the tensor of the root and sends one shard to each rank.",
        "dist.scatter(part, parts if rank == root else None, src=root)",
        _SHARE_TIME,
        f"{_SHARE} from the root",
        (CollectiveUse("TP", "DTensor distributes the shards of a full parameter during model setup."),),
    ),
    CollectiveDescription(
        "gather",
        "Gather",
        "Collects the shards of all ranks on the root, in rank order.",
        "dist.gather(part, parts if rank == root else None, dst=root)",
        _SHARE_TIME,
        f"{_SHARE} to the root",
        (
            CollectiveUse(
                BOOKKEEPING, "One rank collects results to write or show them. Training steps do not use a gather."
            ),
        ),
    ),
    CollectiveDescription(
        "all_gather",
        "All-gather",
        "Collects the shards of all ranks on every rank.",
        "dist.all_gather_single(full, part)",
        _SHARE_TIME,
        _SHARE,
        (
            CollectiveUse(
                "ZeRO-3", "Gathers the parameters of each layer before the forward and backward of the layer."
            ),
            CollectiveUse("ZeRO-1, ZeRO-2", "Gathers the updated parameters once per step."),
            CollectiveUse("SP", "Gathers the sequence shards before a tensor-parallel matmul."),
            CollectiveUse("CP", "Gathers all keys and values of the sequence, unless ring attention is used."),
        ),
    ),
    CollectiveDescription(
        "reduce",
        "Reduce",
        "Sums the tensors of all ranks on the root.",
        "dist.reduce(tensor, dst=root, op=dist.ReduceOp.SUM)",
        _WHOLE_TIME,
        "S",
        (
            CollectiveUse(
                "ZeRO-1, ZeRO-2",
                "Could send each gradient shard to the rank that owns it. One reduce-scatter replaces these calls.",
            ),
        ),
    ),
    CollectiveDescription(
        "all_reduce",
        "All-reduce",
        "Sums the tensors of all ranks on every rank. An all-reduce equals a reduce-scatter and an all-gather.",
        "dist.all_reduce(tensor, op=dist.ReduceOp.SUM)",
        "2 (n − 1) α + 2 (n − 1)/n · S / B",
        "2 (n − 1)/n · S",
        (
            CollectiveUse("DP", "Sums the gradients of all replicas once per step."),
            CollectiveUse(
                "TP", "Sums the partial matmul results of each layer, twice in forward and twice in backward."
            ),
            CollectiveUse("PP", "Sums the gradients of tied embeddings over the first and the last stage."),
        ),
    ),
    CollectiveDescription(
        "reduce_scatter",
        "Reduce-scatter",
        "Sums the tensors of all ranks and leaves one shard of the sum on each rank.",
        "dist.reduce_scatter_single(part, full, op=dist.ReduceOp.SUM)",
        _SHARE_TIME,
        _SHARE,
        (
            CollectiveUse("ZeRO-1, ZeRO-2, ZeRO-3", "Sums gradients and leaves each shard on the rank that owns it."),
            CollectiveUse("SP", "Sums the partial matmul results of a layer and splits them along the sequence."),
        ),
    ),
    CollectiveDescription(
        "all_to_all",
        "All-to-all",
        "Sends a different shard from every rank to every other rank, like a matrix transpose.",
        "dist.all_to_all_single(received, sent)",
        _SHARE_TIME,
        _SHARE,
        (CollectiveUse("EP", "Sends tokens to the ranks of their experts and back, in forward and backward."),),
    ),
    CollectiveDescription(
        "send_recv",
        "Send and receive",
        "Sends a tensor to the next rank, then waits for a tensor from the previous rank.",
        "dist.send(tensor, dst=after)\ndist.recv(received, src=before)",
        "α + S / B",
        "S",
        (CollectiveUse("PP", "Sends activations to the next stage and gradients back."),),
    ),
    CollectiveDescription(
        "isend_irecv",
        "Isend and irecv",
        "Exchanges tensors with both neighbor ranks without blocking. Compute continues until it needs the data.",
        "works = dist.batch_isend_irecv([\n"
        "    dist.P2POp(dist.isend, tensor, after),\n"
        "    dist.P2POp(dist.irecv, received, before),\n"
        "])\n"
        "for work in works:\n"
        "    work.wait()",
        "α + S / B",
        "S",
        (
            CollectiveUse(
                "CP", "Passes keys and values around the ring of ranks while attention computes the current block."
            ),
            CollectiveUse("PP", "Interleaved schedules exchange tensors while another micro-batch computes."),
        ),
    ),
    CollectiveDescription(
        "barrier",
        "Barrier",
        "Blocks every rank until all ranks have arrived.",
        "dist.barrier()",
        "⌈log₂ n⌉ α",
        "0",
        (
            CollectiveUse(
                BOOKKEEPING,
                "Ranks wait until a file is written or a timer starts. Training steps do not use a barrier.",
            ),
        ),
    ),
)
BY_NAME: dict[str, CollectiveDescription] = {words.name: words for words in PRIMITIVES}
