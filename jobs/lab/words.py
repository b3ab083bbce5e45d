"""The primitives in words: what each means, its PyTorch call, what it costs, and which strategy needs it.

Times are those of a ring over n ranks: alpha seconds a message, B bytes a second a link, S bytes of the full buffer
(Thakur, Rabenseifner and Gropp 2005; nccl-tests doc/PERFORMANCE.md). Bytes come from `planner.facts.collectives`.
"""

# ruff: noqa: RUF001 - formulas are written as the field writes them
from __future__ import annotations

from typing import NamedTuple

from planner.facts.collectives import algorithmic_bytes
from planner.facts.lab import metered_op
from planner.facts.spec import LabPrimitive

EXAMPLE_BYTES = 2**20  # the page writes 1 MiB
EXAMPLE_RANKS = (2, 4, 8, 16)
BOOKKEEPING = "no axis"


class Use(NamedTuple):
    strategy: str
    words: str


class Words(NamedTuple):
    """`sent` is what a bandwidth-optimal algorithm makes a rank send, of S payload bytes."""

    name: LabPrimitive
    title: str
    meaning: str
    call: str
    time: str
    sent: str
    uses: tuple[Use, ...]

    @property
    def rooted(self) -> bool:
        return self.name in ("broadcast", "scatter", "gather", "reduce")

    @property
    def slug(self) -> str:
        return self.name.replace("_", "-")

    @property
    def examples(self) -> list[tuple[int, int]]:
        """(group size, bytes a rank sends) for EXAMPLE_BYTES."""
        return [(n, algorithmic_bytes(metered_op(self.name), EXAMPLE_BYTES, n)) for n in EXAMPLE_RANKS]


_SHARE = "(n − 1)/n · S"
_SHARE_TIME = "(n − 1) α + (n − 1)/n · S / B"
_WHOLE_TIME = "(n − 1) α + S / B"

PRIMITIVES: tuple[Words, ...] = (
    Words(
        "broadcast",
        "Broadcast",
        "The root's tensor is copied to every rank.",
        "dist.broadcast(tensor, src=root)",
        _WHOLE_TIME,
        "S",
        (Use("DP", "DDP copies the first replica's parameters to all others before the first step."),),
    ),
    Words(
        "scatter",
        "Scatter",
        "The root cuts a tensor into one part a rank and gives each rank its own.",
        "dist.scatter(part, parts if rank == root else None, src=root)",
        _SHARE_TIME,
        f"{_SHARE} of the root",
        (Use("TP", "DTensor hands the parts of a full parameter out while a model is set up."),),
    ),
    Words(
        "gather",
        "Gather",
        "Every rank's part is collected on the root, in the order of the ranks.",
        "dist.gather(part, parts if rank == root else None, dst=root)",
        _SHARE_TIME,
        f"{_SHARE} into the root",
        (Use(BOOKKEEPING, "One rank collects results to write or show them; no strategy needs it in a step."),),
    ),
    Words(
        "all_gather",
        "All-gather",
        "Every rank's part is collected on every rank.",
        "dist.all_gather_single(full, part)",
        _SHARE_TIME,
        _SHARE,
        (
            Use("ZeRO-3", "Each layer's parameters are gathered before they are used, forward and backward."),
            Use("ZeRO-1, ZeRO-2", "The updated parameters are gathered once a step."),
            Use("SP", "The parts of the sequence are joined before a tensor-parallel product."),
            Use("CP", "All keys and values are gathered, where the ring is not used."),
        ),
    ),
    Words(
        "reduce",
        "Reduce",
        "The tensors of all ranks are added, and the root gets the sum.",
        "dist.reduce(tensor, dst=root, op=dist.ReduceOp.SUM)",
        _WHOLE_TIME,
        "S",
        (
            Use(
                "ZeRO-1, ZeRO-2",
                "Each part of the gradients could be reduced to its owner; one reduce-scatter does it at once.",
            ),
        ),
    ),
    Words(
        "all_reduce",
        "All-reduce",
        "The tensors of all ranks are added, and every rank gets the sum: a reduce-scatter, then an all-gather.",
        "dist.all_reduce(tensor, op=dist.ReduceOp.SUM)",
        "2 (n − 1) α + 2 (n − 1)/n · S / B",
        "2 (n − 1)/n · S",
        (
            Use("DP", "The gradients of all replicas are summed once a step."),
            Use("TP", "The partial products of a layer are summed, twice forward and twice backward."),
            Use("PP", "Tied embeddings sum their gradients over the first and the last stage."),
        ),
    ),
    Words(
        "reduce_scatter",
        "Reduce-scatter",
        "The tensors of all ranks are added, and every rank gets its own part of the sum.",
        "dist.reduce_scatter_single(part, full, op=dist.ReduceOp.SUM)",
        _SHARE_TIME,
        _SHARE,
        (
            Use("ZeRO-1, ZeRO-2, ZeRO-3", "Gradients are summed straight into the shard of the rank that keeps them."),
            Use("SP", "The partial products of a layer are summed and divided along the sequence."),
        ),
    ),
    Words(
        "all_to_all",
        "All-to-all",
        "Every rank sends a different part to every other: rows become columns.",
        "dist.all_to_all_single(received, sent)",
        _SHARE_TIME,
        _SHARE,
        (Use("EP", "Tokens travel to the ranks of their experts and back, forward and backward."),),
    ),
    Words(
        "send_recv",
        "Send and receive",
        "Each rank sends its tensor to the next and waits for one from the rank before it.",
        "dist.send(tensor, dst=after)\ndist.recv(received, src=before)",
        "α + S / B",
        "S",
        (Use("PP", "A stage sends activations to the next one, and their gradients come back."),),
    ),
    Words(
        "isend_irecv",
        "Isend and irecv",
        "The same exchange without waiting: both are started in one batch, and work goes on until they are needed.",
        "works = dist.batch_isend_irecv([\n"
        "    dist.P2POp(dist.isend, tensor, after),\n"
        "    dist.P2POp(dist.irecv, received, before),\n"
        "])\n"
        "for work in works:\n"
        "    work.wait()",
        "α + S / B",
        "S",
        (
            Use("CP", "Keys and values go round the ring while attention works on the block at hand."),
            Use("PP", "Interleaved schedules send and receive while another micro-batch is computed."),
        ),
    ),
    Words(
        "barrier",
        "Barrier",
        "No rank goes on before every rank has come.",
        "dist.barrier()",
        "⌈log₂ n⌉ α",
        "0",
        (
            Use(
                BOOKKEEPING,
                "Ranks agree that a file is written or a clock starts; no strategy needs it in a step.",
            ),
        ),
    ),
)
BY_NAME: dict[str, Words] = {words.name: words for words in PRIMITIVES}
