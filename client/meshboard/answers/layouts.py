"""Made by `make openapi` of docs/openapi.json: change that."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class Layout(TypedDict):
    """Parallel layout. Rank order from the inside out is tp, cp, dp, pp.

    ep splits the experts over neighbors among the dp x cp ranks, so ep adds no ranks.
    """

    balance: NotRequired[Literal["layers", "cost"]]
    """split layers over stages evenly (layers), or by cost including the output layer (cost)"""
    cp: NotRequired[int]
    """context parallel degree; each sequence is split over cp ranks"""
    cp_method: NotRequired[Literal["ring", "all_gather"]]
    """how cp ranks exchange keys and values"""
    dp: NotRequired[int]
    """data parallel degree"""
    dp_replicas: NotRequired[int]
    """number of HSDP replicas; ZeRO shards model state inside each replica"""
    ep: NotRequired[int]
    """expert parallel degree; experts are split over dp x cp ranks"""
    keep_gathered: NotRequired[bool]
    """with ZeRO-3 and pp > 1, keep gathered parameters until the rank starts another chunk"""
    pp: NotRequired[int]
    """pipeline parallel degree (stages)"""
    recompute: NotRequired[Literal["none", "selective", "full"]]
    """recompute activations during backward"""
    regather: NotRequired[bool]
    """with sequence_parallel, store sharded inputs and all-gather them again in backward"""
    scatter_gather: NotRequired[bool]
    """each tp rank sends only its shard between pipeline stages"""
    schedule: NotRequired[
        Literal[
            "naive", "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
        ]
    ]
    """pipeline schedule, used when pp > 1"""
    sequence_parallel: NotRequired[bool]
    """shard norms and residuals along the sequence over tp ranks"""
    tp: NotRequired[int]
    """tensor parallel degree"""
    virtual_stages: NotRequired[int]
    """number of layer chunks per pipeline stage"""
    zero: NotRequired[int]
    """ZeRO stage; 0 is DDP"""


class AutoSpec(TypedDict):
    """Constraints of an automatic layout. Each option has one value or a list of allowed values."""

    cluster: NotRequired[str | None]
    """name of a cluster that GET /clusters lists, or own:FIELD=NUMBER,... for an own accelerator; default the
    connected hosts
    """
    cp: NotRequired[int | list[int] | None]
    dp: NotRequired[int | list[int] | None]
    ep: NotRequired[int | list[int] | None]
    max_memory_bytes: NotRequired[int | None]
    """memory limit per rank (bytes)"""
    max_micro_batch: NotRequired[int]
    """largest micro-batch (sequences)"""
    max_ranks: NotRequired[int | None]
    """maximum number of ranks"""
    pp: NotRequired[int | list[int] | None]
    ranks: NotRequired[int | None]
    """number of ranks; by default, the number that gives the fastest step"""
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
