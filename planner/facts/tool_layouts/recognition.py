"""Recognize the tool of a config file by its settings, and read its layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from planner.facts.layout import MAX_RANKS
from planner.facts.tool_layouts.deepspeed import read_accelerate, read_deepspeed, read_neox
from planner.facts.tool_layouts.documents import parse_document, refuse
from planner.facts.tool_layouts.lightning import read_lightning
from planner.facts.tool_layouts.megatron import read_arguments, read_nemo
from planner.facts.tool_layouts.settings import ImportedLayout
from planner.facts.tool_layouts.torchtitan import read_nanotron, read_torchtitan


class _Tool(NamedTuple):
    """A tool, with a pattern of the keys that only its files have."""

    name: str
    keys: re.Pattern[str]
    example: str
    read: Callable[[Mapping[str, Any], int | None], ImportedLayout]


_DEGREE = r"(?:tensor|pipeline|context|data|expert)\w*_parallel\w*_degree"
_MEGATRON_SIZE = r"(?:tensor|pipeline)_model_parallel_size"
TOOLS = (
    _Tool(
        "torchtitan",
        re.compile(rf"^(?:parallelism|experimental|training)\.{_DEGREE}$|^training\.local_batch_size$"),
        "parallelism.tensor_parallel_degree",
        read_torchtitan,
    ),
    _Tool(
        "Megatron-LM",
        re.compile(r"^(?:MODEL_ARGS\.)?--(?:tensor|pipeline|num|micro|global|hidden|use)[-_]\w"),
        "--tensor-model-parallel-size",
        read_arguments,
    ),
    _Tool(
        "NeMo",
        re.compile(rf"^(?:model|model_config|trainer\.strategy|model\.config)\.{_MEGATRON_SIZE}$"),
        "model.tensor_model_parallel_size",
        read_nemo,
    ),
    _Tool(
        "DeepSpeed",
        re.compile(r"^(?:zero_optimization(?:\.|$)|train_batch_size$|train_micro_batch_size_per_gpu$)"),
        "zero_optimization.stage",
        read_deepspeed,
    ),
    _Tool(
        "GPT-NeoX",
        re.compile(r"^(?:pipe|model)[-_]parallel[-_]size$"),
        "pipe_parallel_size",
        read_neox,
    ),
    _Tool(
        "accelerate",
        re.compile(r"^(?:distributed_type|compute_environment)$|^(?:fsdp|megatron_lm|parallelism)_config\."),
        "distributed_type",
        read_accelerate,
    ),
    _Tool(
        "Lightning",
        re.compile(r"^trainer\.(?:strategy|devices|num_nodes)(?:\.|$)|^train\.(?:global|micro)_batch_size$"),
        "trainer.strategy",
        read_lightning,
    ),
    _Tool("nanotron", re.compile(r"^parallelism\.(?:dp|pp|tp)$"), "parallelism.tp", read_nanotron),
)


def read_layout(text: str, ranks: int | None = None) -> ImportedLayout:
    """Return the layout of a config file of another tool.

    Args:
        ranks: Number of ranks, if the file has none, or to plan another number.

    Raises:
        SpecError: The file is not a known config, or has a setting that cannot be planned.
    """
    if ranks is not None and not 1 <= ranks <= MAX_RANKS:
        raise refuse(f"The number of ranks is {ranks}. Use a whole number from 1 to {MAX_RANKS:,}.")
    values = parse_document(text)
    found = [tool for tool in TOOLS if any(map(tool.keys.search, values))]
    # The trainer section of NeMo is that of Lightning, and NeMo's train section has the batch of Megatron.
    # Files of GPT-NeoX contain the settings of DeepSpeed.
    if len(found) > 1:
        contained = {"Lightning", "DeepSpeed"} if any(tool.name == "GPT-NeoX" for tool in found) else {"Lightning"}
        found = [tool for tool in found if tool.name not in contained]
    if len(found) > 1:
        names = " and ".join(tool.name for tool in found)
        raise refuse(f"The file has settings of {names}. Import one file per tool.")
    if not found:
        raise refuse(_describe_unknown(values))
    return found[0].read(values, ranks)


def _describe_unknown(values: Mapping[str, Any]) -> str:
    if "model_type" in values and ("hidden_size" in values or "n_embd" in values or "architectures" in values):
        return (
            "The file is a config.json of a Hugging Face model, without a layout. Use Import config.json for the file."
        )
    known = ", ".join(f"{tool.name} (`{tool.example}`)" for tool in TOOLS)
    keys = ", ".join(f"`{key[:40]}`" for key in list(values)[:5])
    return f"The file is not a config that the planner knows. Its first settings are {keys}. Known tools: {known}."
