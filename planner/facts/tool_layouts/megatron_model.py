"""Read the sizes of a model from settings of Megatron-LM, NeMo, and Megatron-Bridge."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from planner.facts.model_parts import BlockSpec
from planner.facts.spec import ModelSpec
from planner.facts.tool_layouts.settings import MAX_TOKENS, Settings
from planner.facts.validation import SpecError

MAX_LAYERS, MAX_SIZE = 1024, 4_194_304
MAX_ROPE_BASE = 1e12
# Tokens of tokenizers that a script names without a number.
VOCABULARIES = {"GPT2BPETokenizer": 50_257}
_FREQUENCY = re.compile(r"\(?\[0\]\*(\d{1,4})\s*\+\s*\[1\]\*\d{1,4}\)?\Z")
Names = Callable[..., tuple[str, ...]]


def read_model(settings: Settings, names: Names) -> dict[str, Any] | None:
    """Return the model of the file, or None with a note if the file does not describe one."""
    if not settings.has(*names("hidden_size")):
        settings.notes.append("The file does not contain the sizes of the model. Choose the model.")
        return None
    try:
        return _Reader(settings, names).read()
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"])
        settings.notes.append(f"The model was not imported, because its sizes are not valid: {reason}.")
    except SpecError as error:
        settings.notes.append(f"The model was not imported. {error.problems[0].message}")
    return None


class _Reader:
    def __init__(self, settings: Settings, names: Names) -> None:
        self.settings, self.names = settings, names

    def get(self, *keys: str) -> Any:
        return self.settings.get(*self.names(*keys))

    def flag(self, *keys: str) -> bool:
        return self.settings.get_flag(*self.names(*keys))

    def size(self, *keys: str, default: int, most: int = MAX_SIZE) -> int:
        found = self.settings.get_optional_size(*self.names(*keys), most=most)
        return default if found is None else found

    def required(self, *keys: str, most: int = MAX_SIZE) -> int:
        return self.settings.get_size(*self.names(*keys), most=most)

    def read(self) -> dict[str, Any]:
        settings = self.settings
        for key in ("hybrid_override_pattern", "hybrid_attention_ratio", "linear_attention_freq"):
            if self.get(key):
                raise settings.refuse(
                    settings.find(*self.names(key)), "The planner has no layers other than attention."
                )
        layers, hidden = self.required("num_layers", most=MAX_LAYERS), self.required("hidden_size")
        heads = self.required("num_attention_heads", most=4096)
        gated = self._is_gated()
        # arguments.py: two thirds of 4 x hidden in multiples of 64, because SwiGLU has three matrices.
        usual = int(4 * hidden * 2 / 3) // 64 * 64 if gated and "--swiglu" in settings.values else 4 * hidden
        ffn = self.size("ffn_hidden_size", default=usual)
        channels = self.size("kv_channels", default=hidden // heads)
        tokens = self.size("seq_length", "encoder_seq_length", "sequence_length", default=0, most=MAX_TOKENS)
        longest = max(self.size("max_position_embeddings", default=0, most=MAX_TOKENS), tokens)
        experts, latent = self._read_experts(ffn, layers), self._read_latent_attention()
        groups = self.size("num_query_groups", default=heads, most=4096)
        if self.names("x")[0].startswith("--") and not self.flag("group_query_attention"):
            groups = heads
        if self.get("mtp_num_layers"):
            settings.notes.append("The plan leaves out the layers for multi-token prediction (`mtp_num_layers`).")
        positions = self._read_positions()
        base, tied, block = (
            self.settings.get_number(*self.names("rotary_base"), most=MAX_ROPE_BASE),
            self._is_tied(),
            self._read_block(gated, positions, groups != heads),
        )
        if experts and not gated:
            text = "The planner supports experts only with a gated MLP (SwiGLU)."
            raise settings.refuse(settings.find(*self.names("num_experts", "num_moe_experts")), text)
        return ModelSpec.model_validate(
            {
                "arch": "llama" if gated else "gpt",
                "num_layers": layers,
                "hidden_size": hidden,
                "num_heads": heads,
                "num_kv_heads": heads if latent else groups,
                "head_dim": None if latent or channels * heads == hidden else channels,
                "ffn_hidden_size": ffn,
                "vocab_size": self._read_vocabulary(),
                "max_seq_len": longest or 2048,
                "tied_embeddings": tied,
                **({"rope_base": base} if base and positions == "rope" else {}),
                "moe": experts,
                "mla": latent,
                "block": block,
            }
        ).model_dump()

    def _is_gated(self) -> bool:
        activation = str(self.get("activation")).lower()
        flags = [self.flag(name) for name in ("swiglu", "gated_linear_unit", "quick_geglu")]
        return any(flags) or "glu" in activation

    def _is_tied(self) -> bool:
        shared = self.get("share_embeddings_and_output_weights")
        if shared is not None:
            return self.flag("share_embeddings_and_output_weights")
        return not self.flag("untie_embeddings_and_output_weights")

    def _read_vocabulary(self) -> int:
        """Return the size of the vocabulary, padded as Megatron does."""
        vocabulary = self.settings.get_optional_size(*self.names("padded_vocab_size"), most=MAX_SIZE)
        if vocabulary:
            return vocabulary
        tokenizer = self.get("tokenizer_type") or self.settings.get("model.tokenizer.type", "tokenizer.tokenizer_type")
        names = (*self.names("vocab_size"), "tokenizer.vocab_size")
        vocabulary = self.settings.get_optional_size(*names, most=MAX_SIZE)
        if vocabulary is None:
            usual = VOCABULARIES["GPT2BPETokenizer"] if "--merge-file" in self.settings.values else None
            vocabulary = VOCABULARIES.get(str(tokenizer), usual)
        if not vocabulary:
            raise self.settings.refuse(self.names("vocab_size")[0], "Add it to the file, or choose the model.")
        multiple = self.size("make_vocab_size_divisible_by", default=128) * self.settings.layout["tp"]
        padded: int = -(-vocabulary // multiple) * multiple
        return padded

    def _read_positions(self) -> str:
        found = str(self.get("position_embedding_type") or "learned_absolute").lower()
        if self.flag("use_rotary_position_embeddings"):
            found = "rope"
        choices = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
        if found not in choices:
            name = self.settings.find(*self.names("position_embedding_type"))
            raise self.settings.refuse(name, f"The planner knows {', '.join(choices)}.")
        return choices[found]

    def _read_block(self, gated: bool, positions: str, grouped: bool) -> dict[str, Any] | None:
        """Return the differences from the usual layers of the architecture, or None without any."""
        norm = str(self.get("normalization") or "LayerNorm").lower()
        added = self.get("add_bias_linear", "bias")
        biases = not self.flag("disable_bias_linear") if added is None else self.flag("add_bias_linear", "bias")
        found = {
            "positions": positions,
            "norm_bias": norm == "layernorm" or norm == "layernorm1p",
            "qkv_bias": biases or self.flag("add_qkv_bias", "qkv_bias"),
            "out_bias": biases,
            "mlp_bias": biases,
            "query_norm": "head" if self.flag("qk_layernorm") and not self.flag("multi_latent_attention") else "none",
        }
        usual = BlockSpec().model_dump() | dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias"), not gated)
        usual["positions"] = "rope" if gated else "learned"
        changed = {key: value for key, value in found.items() if value != usual[key]}
        if not gated and grouped:  # the usual gpt has no grouped queries
            changed["positions"] = positions
        return changed or None

    def _read_experts(self, ffn: int, layers: int) -> dict[str, Any] | None:
        number = self.settings.get_optional_size(*self.names("num_experts", "num_moe_experts"), most=4096, least=0)
        size = self.size("moe_ffn_hidden_size", default=ffn)
        shared = self.settings.get_optional_size(
            *self.names("moe_shared_expert_intermediate_size"), least=0, most=MAX_SIZE
        )
        top = self.size("moe_router_topk", default=2, most=256)
        bias = self.flag("moe_router_enable_expert_bias")
        frequency, gate = self.get("moe_layer_freq"), self.flag("moe_shared_expert_gate")
        if not number:
            return None
        return {
            "num_experts": number,
            "experts_per_token": top,
            "expert_ffn_hidden_size": size,
            "shared_experts": 1 if shared else 0,
            "shared_ffn_hidden_size": shared if shared and shared != size else None,
            "shared_gate": gate,
            "dense_layers": self._count_dense_layers(frequency, layers),
            "router_bias": bias,
        }

    def _count_dense_layers(self, frequency: object, layers: int) -> int:
        """Return the dense layers at the start, from 1, a list such as [0, 1, 1], or "[0]*1+[1]*2"."""
        if isinstance(frequency, str):
            if match := _FREQUENCY.match(frequency.strip()):
                return int(match[1])
            try:
                frequency = ast.literal_eval(frequency)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                frequency = "unknown"
        if frequency in (None, 1):
            return 0
        if isinstance(frequency, list) and len(frequency) == layers:
            dense: int = sum(one == 0 for one in frequency)
            if frequency == [0] * dense + [1] * (layers - dense):
                return dense
        name = self.settings.find(*self.names("moe_layer_freq"))
        raise self.settings.refuse(name, "The planner supports dense layers only before all layers with experts.")

    def _read_latent_attention(self) -> dict[str, Any] | None:
        found = {
            "q_rank": self.settings.get_optional_size(*self.names("q_lora_rank"), least=0) or 0,
            "kv_rank": self.settings.get_optional_size(*self.names("kv_lora_rank")),
            "nope_head_dim": self.settings.get_optional_size(*self.names("qk_head_dim")),
            "rope_head_dim": self.settings.get_optional_size(*self.names("qk_pos_emb_head_dim")),
            "value_head_dim": self.settings.get_optional_size(*self.names("v_head_dim")),
        }
        return found if self.flag("multi_latent_attention") else None
