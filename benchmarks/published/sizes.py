"""Sizes of models that a row names and does not tell, as NVIDIA's tables do where they add a word to a known name.

Each from the model's own configuration (config.json on its page), a mixture's `ffn` of one expert.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published.rows import PublishedRow


class _Sizes(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int


# (pattern in the model's name, its sizes): first match wins. Vision and other generations of a name are other models.
_NAMED = (
    (r"^deepseek-?v3(?!\.\d)", _Sizes(61, 7168, 128, 128, 2048, 129280)),
    (r"^kimi-k2(?!\.\d)", _Sizes(61, 7168, 64, 64, 2048, 163840)),
    (r"^qwen3-30b-a3b", _Sizes(48, 2048, 32, 4, 768, 151936)),
    (r"^qwen3-235b-a22b", _Sizes(94, 4096, 64, 4, 1536, 151936)),
    (r"^gpt-oss-120b", _Sizes(36, 2880, 64, 8, 2880, 201088)),
    (r"^gpt-oss-20b", _Sizes(24, 2880, 64, 8, 2880, 201088)),
    (r"^llama-?3(\.\d)?-8b", _Sizes(32, 4096, 32, 8, 14336, 128256)),
    (r"^llama-?3(\.\d)?-70b", _Sizes(80, 8192, 64, 8, 28672, 128256)),
    (r"^llama-?3(\.\d)?-405b", _Sizes(126, 16384, 128, 8, 53248, 128256)),
)


def sized(row: PublishedRow) -> PublishedRow:
    """The row, with its model's sizes where it tells none of them."""
    if any(row.text(column) for column in _Sizes._fields):
        return row
    name = re.sub(r"[ _]+", "-", row.text("model").lower())
    found = next((sizes for pattern, sizes in _NAMED if re.search(pattern, name)), None)
    if found is None:
        return row
    return row._replace(fields=row.fields | {column: str(size) for column, size in found._asdict().items()})
