"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Layout(TypedDict):
    """How the ranks divide the work. Rank order: tp innermost, then cp, dp, and pp outermost.

    Experts are divided over `ep` neighbours among the dp x cp ranks, so ep adds no ranks.
    """

    balance: NotRequired[Literal["layers", "cost"]]
    """stages hold as many layers, or cost: the head counts too"""
    cp: NotRequired[int]
    """context parallel degree: parts of each sequence"""
    cp_method: NotRequired[Literal["ring", "all_gather"]]
    """how cp ranks see each other's keys and values"""
    dp: NotRequired[int]
    """data parallel degree"""
    dp_replicas: NotRequired[int]
    """HSDP: ZeRO shards inside each of so many replicas"""
    ep: NotRequired[int]
    """expert parallel degree: experts over dp x cp ranks"""
    keep_gathered: NotRequired[bool]
    """ZeRO-3 under a pipe: what is gathered stays while a rank works on one chunk"""
    pp: NotRequired[int]
    """pipeline parallel degree (stages)"""
    recompute: NotRequired[Literal["none", "selective", "full"]]
    """activations computed again in backward"""
    regather: NotRequired[bool]
    """SP keeps inputs divided and gathers them again in backward"""
    scatter_gather: NotRequired[bool]
    """each tp rank sends its part over a stage boundary"""
    schedule: NotRequired[
        Literal[
            "naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
        ]
    ]
    """pipeline schedule, used when pp > 1"""
    sequence_parallel: NotRequired[bool]
    """shard norms and residual along sequence over tp"""
    tp: NotRequired[int]
    """tensor parallel degree"""
    virtual_stages: NotRequired[int]
    """chunks of layers a stage holds"""
    zero: NotRequired[int]
    """ZeRO stage; 0 is plain DDP"""


class AutoSpec(TypedDict):
    """What must hold of the layout that is chosen. Of an option, one value or a list of those allowed."""

    cluster: NotRequired[str | None]
    """a name of /clusters; else the hosts connected now"""
    cp: NotRequired[int | list[int] | None]
    dp: NotRequired[int | list[int] | None]
    ep: NotRequired[int | list[int] | None]
    max_memory_bytes: NotRequired[int | None]
    """of a rank"""
    max_micro_batch: NotRequired[int]
    """sequences"""
    max_ranks: NotRequired[int | None]
    """no more than these"""
    pp: NotRequired[int | list[int] | None]
    ranks: NotRequired[int | None]
    """exactly so many; else as many as pay"""
    recompute: NotRequired[Literal["none", "selective", "full"] | list[Literal["none", "selective", "full"]] | None]
    schedule: NotRequired[
        Literal[
            "naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
        ]
        | list[
            Literal[
                "naive",
                "gpipe",
                "1f1b",
                "interleaved_1f1b",
                "looped_bfs",
                "interleaved_zero_bubble",
                "zbv",
                "dualpipev",
            ]
        ]
        | None
    ]
    sequence_parallel: NotRequired[bool | list[bool] | None]
    tp: NotRequired[int | list[int] | None]
    virtual_stages: NotRequired[int | list[int] | None]
    zero: NotRequired[int | list[int] | None]
