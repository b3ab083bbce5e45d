"""Read single settings of a tool's config file, and collect the layout that they describe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.facts.layout import MAX_RANKS
from planner.facts.tool_layouts.documents import refuse

MAX_LISTED_KEYS = 100
MAX_BATCH = 1_000_000
MAX_TOKENS = 16_777_216
_MAX_VALUE_CHARACTERS = 40
_REFERENCE = re.compile(r"\$\{(\.?)([\w.]+)\}\Z")  # OmegaConf
_PRODUCT = re.compile(r"\$\{multiply:\s*(\d{1,9}),\s*(\$\{\.?[\w.]+\})\}\Z")  # NeMo
_WHOLE = re.compile(r"[0-9]{1,12}\Z")
_NUMBER = re.compile(r"[0-9]{0,12}(?:\.?[0-9]{1,12}|[0-9]\.)(?:[eE][-+]?[0-9]{1,2})?\Z")
_YES, _NO = ("true", "yes", "1"), ("false", "no", "0", "none")


class ImportedLayout(NamedTuple):
    """Layout of a config file.

    Attributes:
        tool: Name of the tool that the file belongs to.
        spec: Sections layout, train, and resources of a job spec. Has a model if the file describes one.
        ranks: Number of ranks.
        assumed: Sentences about settings that are not in the file.
        notes: Sentences about settings that the plan represents in another way, or leaves out.
        not_understood: Keys that were not read.
    """

    tool: str
    spec: dict[str, Any]
    ranks: int
    assumed: tuple[str, ...]
    notes: tuple[str, ...]
    not_understood: tuple[str, ...]


class Settings:
    """Values of a file with their checks. Remembers which keys were read, and collects the layout.

    Args:
        ranks: Number of ranks of the request, which has priority over the number in the file.
        without_effect: Pattern of keys that change neither memory nor traffic nor time.
    """

    def __init__(self, tool: str, values: Mapping[str, Any], ranks: int | None, without_effect: str) -> None:
        self.tool, self.values, self.requested_ranks = tool, values, ranks
        self.layout: dict[str, Any] = {}
        self.train: dict[str, Any] = {}
        self.resources: dict[str, Any] = {"device": "cuda", "stack": "unknown"}
        self.model: dict[str, Any] | None = None
        self.assumed: list[str] = []
        self.notes: list[str] = []
        self._read: set[str] = set()
        self._without_effect = re.compile(without_effect)

    def skip(self, *names: str) -> None:
        """Mark settings as understood that do not change the layout."""
        self._read.update(names)

    def find(self, *names: str) -> str:
        """Return the first name that has a value, or the first name. All names are marked as read."""
        self._read.update(names)
        present = [name for name in names if self._resolve(name) is not None]
        if not present:
            return names[0]
        first, *others = present
        for other in others:
            if str(self._resolve(other)) != str(self._resolve(first)):
                text = f"`{first}` is {self._format(first)}, but `{other}` is {self._format(other)}."
                raise refuse(f"{text} Use equal values, or remove one of them.")
        return first

    def get(self, *names: str) -> Any:
        """Return the value of the first name that has one."""
        return self._resolve(self.find(*names))

    def has(self, *names: str) -> bool:
        return self.get(*names) is not None

    def _resolve(self, name: str) -> Any:
        """Return a value, with references of OmegaConf to other values replaced."""
        value, factor = self.values.get(name), 1
        for _ in range(4):
            if not isinstance(value, str):
                break
            if product := _PRODUCT.match(value):
                factor, value = factor * int(product[1]), product[2]
            reference = _REFERENCE.match(value)
            if reference is None:
                break
            path = f"{name.rpartition('.')[0]}.{reference[2]}" if reference[1] else reference[2]
            if path not in self.values:
                return value
            value = self.values[path]
        return value * factor if factor > 1 and type(value) is int else value

    def _format(self, name: str) -> str:
        value = self._resolve(name)
        text = "an object" if isinstance(value, Mapping) else json.dumps(value, default=str)
        return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."

    def refuse(self, name: str, reason: str) -> Exception:
        """Return the error of a setting."""
        if self._resolve(name) is None:
            return refuse(f"`{name}` is missing. {reason}")
        return refuse(f"`{name}` is {self._format(name)}. {reason}")

    def get_optional_size(self, *names: str, least: int = 1, most: int = MAX_RANKS) -> int | None:
        """Return a whole number, or None if the file has none."""
        name = self.find(*names)
        value = self._resolve(name)
        if value is None:
            return None
        if isinstance(value, str) and _WHOLE.match(value):
            value = int(value)
        if isinstance(value, str) and "$" in value:
            raise self.refuse(name, "The file does not set this variable. Replace it with a number.")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"Use one whole number from {least} to {most:,}.")
        return value

    def get_size(self, *names: str, default: int | None = None, least: int = 1, most: int = MAX_RANKS) -> int:
        """Return a whole number. Without a default, the file needs it."""
        value = self.get_optional_size(*names, least=least, most=most)
        if value is not None:
            return value
        if default is None:
            raise self.refuse(names[0], f"Add it with a whole number from {least} to {most:,}.")
        self.assume(names[0], default)
        return default

    def get_number(self, *names: str, most: float) -> float | None:
        """Return a number from 0, or None if the file has none."""
        name = self.find(*names)
        value = self._resolve(name)
        if isinstance(value, str) and _NUMBER.match(value):
            value = float(value)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 <= value <= most:
            raise self.refuse(name, f"Use a number from 0 to {most:,g}.")
        return float(value)

    def get_flag(self, *names: str, default: bool = False) -> bool:
        """Return a flag. A flag that is not in the file has the default without a sentence."""
        name = self.find(*names)
        value = self._resolve(name)
        if value is None:
            return default
        text = str(value).lower()
        if text not in (*_YES, *_NO):
            raise self.refuse(name, "Use true or false.")
        return text in _YES

    def get_choice(self, names: tuple[str, ...], choices: Mapping[str, Any], default: str) -> Any:
        """Return what a text means, regardless of its case."""
        name = self.find(*names)
        value = self._resolve(name)
        if value is None:
            self.assume(name, default)
            return choices[default]
        key = str(value).lower()
        if key not in choices:
            raise self.refuse(name, f"The planner knows these values: {', '.join(choices)}.")
        return choices[key]

    def assume(self, name: str, value: object) -> None:
        """Add a sentence about a setting that has the default of the tool."""
        self.assumed.append(f"`{name}` is not in the file. The default of {self.tool} is {value}.")

    def compute_dp(self, file_ranks: int | None, others: Mapping[str, int]) -> int:
        """Return the data-parallel degree: all ranks divided by the product of the other degrees."""
        ranks = self.requested_ranks or file_ranks
        product = 1
        for degree in others.values():
            product *= degree
        words = " x ".join(f"{name} {degree}" for name, degree in others.items())
        if ranks is None:
            text = (
                f"The file of {self.tool} does not contain the number of ranks, which the data-parallel degree needs."
            )
            raise refuse(f"{text} Enter the number of ranks, a multiple of {product} ({words}).")
        if ranks % product:
            text = f"The number of ranks is {ranks}, which is not a multiple of {product} ({words})."
            raise refuse(f"{text} Change the number of ranks, or the degrees in the file.")
        if file_ranks and file_ranks != ranks:
            self.notes.append(f"The plan uses {ranks} ranks instead of the {file_ranks} ranks in the file.")
        return ranks // product

    def set_degrees(self, **degrees: int) -> None:
        """Set the degrees of the layout. The product has to be the number of ranks of the request."""
        self.layout |= degrees
        total = self.count_ranks()
        if self.requested_ranks and self.requested_ranks != total:
            text = f"The number of ranks is {self.requested_ranks}, but the degrees in the file need {total} ranks."
            raise refuse(f"{text} Change the number of ranks, or the degrees in the file.")
        if total > MAX_RANKS:
            raise refuse(f"The degrees in the file need {total:,} ranks. The planner supports {MAX_RANKS:,} ranks.")

    def count_ranks(self) -> int:
        total = 1
        for axis in ("dp", "pp", "tp", "cp"):
            total *= self.layout.get(axis, 1)
        return total

    def set_batch(self, global_batch: int | None, micro_batch: int | None, name: str) -> None:
        """Set the batch, and the micro-batches per data-parallel rank.

        Args:
            global_batch: Sequences per step of all ranks, or None for one micro-batch per data-parallel rank.
            micro_batch: Sequences per micro-batch, or None if the file has none.
            name: Setting of the global batch, for errors.
        """
        dp = self.layout["dp"]
        if micro_batch is None:
            if global_batch is not None:
                self.train["global_batch"] = global_batch
            self.notes.append("The file does not contain the micro-batch size. Set the number of micro-batches.")
            return
        batch = global_batch or dp * micro_batch
        if batch > MAX_BATCH:
            raise refuse(f"The batch of the file has {batch:,} sequences. The planner supports {MAX_BATCH:,}.")
        if batch % (dp * micro_batch):
            text = f"`{name}` is {batch}, which is not a multiple of {dp * micro_batch}"
            reason = f"(micro-batch size {micro_batch} x dp {dp})"
            raise refuse(f"{text} {reason}. Change the batch, the micro-batch size, or the number of ranks.")
        self.train |= {"global_batch": batch, "micro_batches": batch // (dp * micro_batch)}

    def build(self) -> ImportedLayout:
        """Return the layout with everything that was assumed, noted, and not understood."""
        unread = [
            key
            for key, value in self.values.items()
            if key not in self._read and value not in (None, [], {}) and not self._without_effect.search(key)
        ]
        shown = unread[:MAX_LISTED_KEYS]
        if len(unread) > len(shown):
            self.notes.append(f"{len(unread) - len(shown)} more settings were not understood.")
        if self.layout["dp"] * self.layout["cp"] == 1:  # nothing to shard
            self.layout |= {"zero": 0, "dp_replicas": 1}
        spec = {"layout": self.layout, "train": self.train, "resources": self.resources}
        if self.model is not None:
            spec["model"] = self.model
        return ImportedLayout(self.tool, spec, self.count_ranks(), tuple(self.assumed), tuple(self.notes), tuple(shown))
