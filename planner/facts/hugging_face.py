"""Convert the `config.json` of a Hugging Face model to a model spec.

The model has the same number of parameters as the weights that belong to the config, and the planner computes its
memory, FLOPs, and traffic. `planner.facts.spec_rules.find_unsupported_fields` checks if the trainer can run it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from planner.facts.model_families import FAMILIES, FIELDS_WITHOUT_COST, OTHER_LAYERS, ExpertNames, Family
from planner.facts.model_parts import BlockSpec, MlaSpec, MoeSpec
from planner.facts.spec import ModelSpec
from planner.facts.validation import Problem, SpecError

MAX_CONFIG_BYTES = 65_536
MAX_LISTED_NAMES = 8
MAX_VALUE_CHARACTERS = 40
MAX_SIZE = 4_194_304  # of a dimension
MAX_LAYERS = 1024
MAX_TOKENS = 16_777_216  # of a sequence
ATTENTION_LAYERS = ("full_attention", "attention", "sliding_attention")
LAYER_LISTS = ("layer_types", "layers_block_type")
# Parts of the names of fields that change the layers of a model.
_STRUCTURE = re.compile("expert|moe|mamba|ssm|lora_rank|cross_attention|conv|layer_types|linear_")
# Fields of the layers that a config of an unknown model type may have.
GENERIC_FAMILY = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", window="optional")
FALCON_LAYERS = ("new_decoder_architecture", "parallel_attn", "multi_query", "alibi", "num_ln_in_parallel_attn")


class ImportedModel(NamedTuple):
    """Model of a config.

    Attributes:
        notes: Sentences about fields that the plan leaves out.
        is_assumed: The model type is unknown, and the layers are assumed to be those of Llama.
    """

    model: ModelSpec
    notes: tuple[str, ...]
    is_assumed: bool


def parse_config(text: str | bytes) -> ImportedModel:
    """Parse the text of a config.json.

    Raises:
        SpecError: The text is not JSON, or the planner cannot plan the model.
    """
    if len(text if isinstance(text, bytes) else text.encode(errors="replace")) > MAX_CONFIG_BYTES:
        raise SpecError([_describe_long_config()])
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        message = f"`config` is not valid JSON: {reason}. Use the file config.json of the model."
        raise SpecError([Problem("config", message)]) from None
    return read_config(data)


def read_config(data: object) -> ImportedModel:
    """Convert a parsed config.json.

    Raises:
        SpecError: With the field that cannot be planned, its value, and the fix.
    """
    config = _Config(_check_size(data))
    text = config.data.get("text_config")
    if isinstance(text, Mapping):
        config = _Config(_check_size(text), prefix="config.text_config", tied=config.data.get("tie_word_embeddings"))
        config.notes.append("The plan contains only the language model in `text_config`.")
    return _read_model(config)


def _describe_long_config() -> Problem:
    return Problem("config", f"`config` is too long. Use a config.json of at most {MAX_CONFIG_BYTES // 1024} KiB.")


def _check_size(data: object) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        text = f"`config` is {_format_value(data)}. Use the object in the file config.json of a model."
        raise SpecError([Problem("config", text)])
    try:
        size = len(json.dumps(data, default=str, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:  # an escape such as \ud800
        text = f"`config` contains {error.object[error.start]!a}. Use valid Unicode text."
        raise SpecError([Problem("config", text)]) from None
    except (RecursionError, ValueError):
        size = MAX_CONFIG_BYTES + 1
    if size > MAX_CONFIG_BYTES:
        raise SpecError([_describe_long_config()])
    return {str(name): value for name, value in data.items()}


class _Config:
    """Fields of a config with their checks. Remembers which fields were read, and the notes about the others."""

    def __init__(self, data: dict[str, Any], *, prefix: str = "config", tied: object = None) -> None:
        self.data, self.prefix, self.notes = data, prefix, list[str]()
        self.family, self.read = GENERIC_FAMILY, {"model_type", "text_config", "is_encoder_decoder"}
        if isinstance(tied, bool):
            self.data.setdefault("tie_word_embeddings", tied)

    def refuse(self, name: str, reason: str) -> SpecError:
        """Return the error of a field."""
        field = f"{self.prefix}.{name}"
        value = self.data.get(name)
        found = "missing" if value is None else _format_value(value)
        return SpecError([Problem(field, f"`{field}` is {found}. {reason}")])

    def get(self, name: str) -> Any:
        """Return the value of a field, or its default in the family."""
        self.read.add(name)
        value = self.data.get(name)
        return self.family.defaults.get(name) if value is None else value

    def get_name(self, name: str) -> str:
        """Return the name that the config uses for a field of Llama: that of the family, or that of Llama."""
        own = self.family.names.get(name, name)
        self.read |= {name, own}
        return own if own in self.data or name not in self.data else name

    def get_size(self, name: str, *, most: int = MAX_SIZE, least: int = 1, default: int | None = None) -> int:
        """Return a required whole number, or its default."""
        found = self.get_optional_size(name, most=most, least=least)
        if found is not None:
            return found
        if default is None:
            raise self.refuse(name, f"Add it with a whole number from {least} to {most:,}.")
        return default

    def get_optional_size(self, name: str, *, most: int = MAX_SIZE, least: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"Use a whole number from {least} to {most:,}.")
        return value

    def get_flag(self, flag: bool | str) -> bool:
        """Return a fixed value, or that of the named field. A missing field is false."""
        if isinstance(flag, bool):
            return flag
        value = self.get(flag)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(flag, "Use true or false.")
        return bool(value)

    def get_list(self, name: str) -> list[Any] | None:
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > MAX_LAYERS):
            raise self.refuse(name, f"Use a list with one entry per layer, and at most {MAX_LAYERS} entries.")
        return value

    def list_unread(self) -> list[str]:
        """Return the fields that were not read and can change the cost. Fields without a value cannot."""
        known = self.read | FIELDS_WITHOUT_COST
        unread = (name for name, value in self.data.items() if value not in (None, False, [], {}))
        return sorted(name for name in unread if name not in known and not name.startswith(self.family.unused_prefix))


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a very large number"
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_CHARACTERS else text[: MAX_VALUE_CHARACTERS - 3] + "..."


def _format_names(names: list[str]) -> str:
    shown = [f"`{name[:MAX_VALUE_CHARACTERS]}`" for name in names[:MAX_LISTED_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def _read_model(config: _Config) -> ImportedModel:
    name = config.data.get("model_type")
    if name is not None and not isinstance(name, str):
        raise config.refuse("model_type", "Use text, for example llama.")
    _refuse_other_models(config, name)
    family = FAMILIES.get(name or "")
    is_assumed = family is None
    config.family = family or GENERIC_FAMILY
    model = _build_model(config, name or "")
    unread = config.list_unread()
    if is_assumed and unread:
        text = f"The model type is unknown, and the planner does not know these fields: {_format_names(unread)}. "
        text += "Use a config of a known family such as llama, qwen3, or mixtral, or enter the sizes of the model."
        raise config.refuse("model_type", text)
    if found := next((field for field in unread if _STRUCTURE.search(field)), None):
        text = f"Models of type {name} have no such field, and the field can change the layers. "
        raise config.refuse(found, text + "Remove the field, or enter the sizes of the model.")
    notes = [*_list_notes(config, model)]
    if unread:
        notes.append(f"The plan does not use these fields: {_format_names(unread)}.")
    if is_assumed:
        notes.append(f"The model type {_format_value(name)} is unknown. The plan assumes layers like those of Llama.")
    return ImportedModel(model, tuple(config.notes + notes), is_assumed)


def _refuse_other_models(config: _Config, name: str | None) -> None:
    """Raise the error of an encoder, or of the first layer that is not attention with an MLP."""
    use = "Use a model whose layers are all attention with an MLP."
    if config.data.get("is_encoder_decoder") is True:
        raise config.refuse("is_encoder_decoder", "Use a decoder-only model.")
    if name == "granitemoehybrid" and not config.data.get("layer_types"):
        raise config.refuse("layer_types", "Layer 0 is mamba without this field. Add it with the type of each layer.")
    for key in LAYER_LISTS:
        for index, kind in enumerate(config.get_list(key) or []):
            if kind not in ATTENTION_LAYERS:
                text = f"Layer {index} is {_format_value(kind)}, whose cost the planner does not predict. {use}"
                raise config.refuse(key, text)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and (found := pattern.replace("*", "").replace("-", "")):
        text = f"Layer {pattern.index(found[0])} is {_format_value(found[0])}, whose cost the planner does not predict."
        raise config.refuse("hybrid_override_pattern", f"{text} {use}")
    if name in OTHER_LAYERS:
        text = f"This model has {OTHER_LAYERS[name]} layers, whose cost the planner does not predict. {use}"
        raise config.refuse("model_type", text)


def _build_model(config: _Config, name: str) -> ModelSpec:
    family = config.family
    layers = config.get_size(config.get_name("num_hidden_layers"), most=MAX_LAYERS)
    hidden = config.get_size(config.get_name("hidden_size"), most=1_048_576)
    heads = config.get_size(config.get_name("num_attention_heads"), most=4096)
    latent = _read_latent_attention(config) if family.latent_attention else None
    kv_heads = heads if latent else _read_kv_heads(config, name, heads)
    head_dim = None if latent else config.get_optional_size(config.get_name("head_dim"), most=65536)
    if latent:
        config.read |= {"head_dim", "num_key_value_heads", "qk_head_dim"}
    if hidden % heads and not head_dim:
        text = f"The hidden size {hidden} is not divisible by it. Use a divisor of {hidden}, or add head_dim."
        raise config.refuse(config.get_name("num_attention_heads"), text)
    if heads % kv_heads:
        raise config.refuse(config.get_name("num_key_value_heads"), f"Use a divisor of the {heads} attention heads.")
    inner = config.get_name("intermediate_size")
    default = 4 * hidden if name in ("gpt2", "gpt_bigcode", "falcon", "bloom") else None
    experts = _read_experts(config, layers) if family.experts else None
    ffn = config.get_size(inner, default=default)
    if family.experts and experts is None and family.experts.shared_size == "shared_intermediate_size":
        ffn = config.get_size("shared_intermediate_size")  # granitemoehybrid without experts
    tokens = _read_max_seq_len(config, name)
    window, windowed = _read_window(config, layers, tokens)
    positions = _read_positions(config, name)
    scaling, base = _read_rope(config) if positions == "rope" else (None, None)
    return ModelSpec.model_validate(
        {
            "arch": "llama" if family.gated else "gpt",
            "num_layers": layers,
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": None if head_dim is None or head_dim * heads == hidden else head_dim,
            "ffn_hidden_size": ffn,
            "vocab_size": config.get_size(config.get_name("vocab_size"), least=256),
            "max_seq_len": tokens,
            "tied_embeddings": config.get_flag("tie_word_embeddings"),
            **({"rope_base": base} if base else {}),
            "rope_scaling": scaling,
            "sliding_window": window,
            "moe": experts,
            "mla": latent,
            "block": _read_block(config, name, positions, windowed, grouped=kv_heads != heads),
        }
    )


def _read_kv_heads(config: _Config, name: str, heads: int) -> int:
    field = config.get_name("num_key_value_heads")
    config.read |= {"num_attention_heads", "num_key_value_heads"}
    if name == "chatglm" and not config.get_flag("multi_query_attention"):
        config.read.add(field)
        return heads
    if name == "falcon":
        config.read |= {*FALCON_LAYERS, "num_kv_heads", "n_head_kv"}
        if config.get_flag("new_decoder_architecture"):
            field = "n_head_kv" if "n_head_kv" in config.data else "num_kv_heads"
            return config.get_size(field, most=4096, default=heads)
    if name in ("falcon", "gpt_bigcode"):
        return 1 if "multi_query" not in config.data or config.get_flag("multi_query") else heads
    return config.get_size(field, most=4096, default=heads)


def _read_max_seq_len(config: _Config, name: str) -> int:
    field = config.get_name("max_position_embeddings")
    if name == "baichuan" and "max_position_embeddings" not in config.data:
        field = "model_max_length"
    config.read.add("model_max_length")
    return config.get_size(field, most=MAX_TOKENS)


def _read_positions(config: _Config, name: str) -> str:
    # Baichuan-13B has ALiBi, and its config has no maximum position.
    if name == "baichuan" and "max_position_embeddings" not in config.data:
        return "none"
    if name == "falcon" and config.get_flag("alibi"):
        return "none"
    return config.family.positions


def _read_rope(config: _Config) -> tuple[dict[str, Any] | None, float | None]:
    """Return the scaling of Llama 3.1, and the base."""
    found: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise config.refuse(key, "Use an object.")
        inner = (value or {}).get("full_attention")  # Some configs have an object per type of layer.
        found |= inner if isinstance(inner, Mapping) else value or {}
    base = config.get("rope_theta") or config.get("rotary_emb_base") or found.get("rope_theta")
    if base is not None and (type(base) not in (int, float) or not 1 < base <= 1e12):
        raise config.refuse("rope_theta", "Use a number above 1, and at most 1e12.")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind != "llama3":
        if kind != "default":
            config.notes.append(f"The RoPE scaling {_format_value(kind)} changes no cost and is left out.")
        return None, None if base is None else float(base)
    names = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
    scaling: dict[str, Any] = {}
    for name, key in names.items():
        number = found.get(key)
        if type(number) not in (int, float) or not 0 < number <= 1e6:  # type: ignore[operator]
            raise config.refuse("rope_scaling", f"Use a `{key}` above 0, and at most 1e6.")
        scaling[name] = float(number)  # type: ignore[arg-type]
    tokens = found.get("original_max_position_embeddings")
    if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
        raise config.refuse("rope_scaling", "Use an `original_max_position_embeddings` of 1 or more tokens.")
    return {**scaling, "original_max_seq_len": tokens}, None if base is None else float(base)


def _read_window(config: _Config, layers: int, tokens: int) -> tuple[int | None, int | None]:
    """Return the sliding window, and the layers that have it. A window of all tokens is none."""
    kind, types = config.family.window, config.get_list("layer_types")
    config.read |= {"use_sliding_window", "max_window_layers"}
    pattern = config.get_optional_size("sliding_window_pattern", most=MAX_LAYERS)
    window = None if kind == "none" else config.get_optional_size("sliding_window", most=MAX_TOKENS)
    if window is None or window >= tokens:
        return None, None
    if kind == "optional" and not config.get_flag("use_sliding_window"):
        return None, None
    if types is not None:
        if len(types) != layers:
            raise config.refuse("layer_types", f"Use one entry for each of the {layers} layers.")
        windowed = Counter(types)["sliding_attention"]
    elif kind == "pattern":
        windowed = layers - layers // (pattern or 1)
    elif kind == "optional":
        windowed = max(0, layers - config.get_size("max_window_layers", most=MAX_LAYERS, least=0, default=0))
    else:
        windowed = layers
    return (window, windowed) if windowed else (None, None)


def _read_latent_attention(config: _Config) -> dict[str, Any]:
    if config.get_flag("attention_bias"):
        raise config.refuse("attention_bias", "Latent attention is planned without biases. Use false.")
    return MlaSpec(
        q_rank=config.get_size("q_lora_rank", most=65536, default=0),
        kv_rank=config.get_size("kv_lora_rank", most=65536),
        nope_head_dim=config.get_size("qk_nope_head_dim", most=4096),
        rope_head_dim=config.get_size("qk_rope_head_dim", most=4096, least=2),
        value_head_dim=config.get_size("v_head_dim", most=4096),
    ).model_dump()


def _read_experts(config: _Config, layers: int) -> dict[str, Any] | None:
    """Return the mixture of experts, or None if the config has no experts."""
    names = config.family.experts
    assert names is not None
    number = config.get_optional_size(names.number, most=4096, least=0)
    config.read |= {name for name in (names.size, names.shared_number, names.shared_size) if name}
    config.read |= {"num_experts_per_tok", "experts_per_token"}
    if not number:
        return None
    if number < 2:
        raise config.refuse(names.number, "Use 2 or more experts, or remove the field.")
    for step in ("decoder_sparse_step", "moe_layer_freq"):
        if config.get_size(step, most=MAX_LAYERS, default=1) != 1:
            raise config.refuse(step, "The planner supports experts in every layer after the dense layers. Use 1.")
    size, shared = config.get_size(names.size), 0
    shared_size = config.get_optional_size(names.shared_size, least=0) if names.shared_size else None
    if names.shared_number:
        shared = config.get_optional_size(names.shared_number, most=64, least=0) or 0
    elif shared_size:
        shared = 1
    limit = config.get("swiglu_limit") if names.swiglu_limit else None
    if limit is not None and (type(limit) not in (int, float) or not 0 < limit <= 1e6):
        raise config.refuse("swiglu_limit", "Use a number above 0, and at most 1e6.")
    return MoeSpec(
        num_experts=number,
        experts_per_token=config.get_size(
            "experts_per_token" if "num_experts_per_tok" not in config.data else "num_experts_per_tok",
            most=min(256, number),
        ),
        expert_ffn_hidden_size=size,
        shared_experts=shared,
        shared_ffn_hidden_size=shared_size if shared and shared_size != size else None,
        shared_gate=names.shared_gate and shared > 0,
        dense_layers=_read_dense_layers(config, names, layers),
        router_bias=names.router_bias,
        expert_bias=names.expert_bias,
        swiglu_limit=None if limit is None else float(limit),
    ).model_dump()


def _read_dense_layers(config: _Config, names: ExpertNames, layers: int) -> int:
    dense = config.get_optional_size(names.dense_layers, most=layers - 1, least=0) if names.dense_layers else 0
    first = config.get_list("mlp_only_layers") or []
    if first and sorted(map(str, first)) != sorted(map(str, range(len(first)))):
        raise config.refuse("mlp_only_layers", "The planner supports dense layers only before all others.")
    if len(first) >= layers:
        raise config.refuse("mlp_only_layers", f"Use at most {layers - 1} of the {layers} layers.")
    return dense or len(first)


def _read_block(
    config: _Config, name: str, positions: str, windowed: int | None, *, grouped: bool
) -> dict[str, Any] | None:
    """Return the differences of the layers from those of `arch`, or None without any."""
    family = config.family
    num_norms: int = family.num_norms
    parallel = config.get_flag(family.parallel)
    if name == "falcon":
        num_norms, parallel = _read_falcon_norms(config)
    if name == "phi" and config.get_flag("qk_layernorm"):
        raise config.refuse("qk_layernorm", "The planner supports no norms of queries and keys for phi. Use false.")
    gpt = not family.gated
    found: dict[str, Any] = {
        "positions": positions,
        "norm_weight": family.norm != "none",
        "norm_bias": family.norm == "layer",
        "num_norms": num_norms,
        "parallel": parallel,
        "query_norm": family.query_norm if config.get_flag(family.query_norm_flag) else "none",
        "qkv_bias": config.get_flag(family.qkv_bias),
        "out_bias": config.get_flag(family.out_bias),
        "mlp_bias": config.get_flag(family.mlp_bias),
        "head_bias": config.get_flag(family.head_bias),
        "embedding_norm": family.embedding_norm,
        "attention_sinks": family.attention_sinks,
        "windowed_layers": windowed,
    }
    usual = BlockSpec().model_dump() | dict.fromkeys(("norm_bias", "qkv_bias", "out_bias", "mlp_bias"), gpt)
    usual["positions"] = "learned" if gpt else "rope"
    changed = {key: value for key, value in found.items() if value != usual[key]}
    if gpt and grouped:  # the usual gpt has no grouped queries
        changed["positions"] = positions
    return changed or None


def _read_falcon_norms(config: _Config) -> tuple[int, bool]:
    """Return the norms of a Falcon layer, and whether attention and MLP are parallel."""
    if config.get_flag("new_decoder_architecture"):
        return config.get_size("num_ln_in_parallel_attn", most=2, default=2), True
    parallel = "parallel_attn" not in config.data or config.get_flag("parallel_attn")
    return (1 if parallel else 2), parallel


def _list_notes(config: _Config, model: ModelSpec) -> Iterator[str]:
    """Yield the notes about fields that are known, but not planned."""
    if config.data.get("num_nextn_predict_layers"):
        yield "The plan leaves out the layers for multi-token prediction (`num_nextn_predict_layers`)."
    if config.data.get("quantization_config") or config.data.get("compression_config"):
        yield "The plan uses the precision of the job instead of the quantized weights."
    if model.block is not None and model.block.parallel:
        yield "Tensor parallelism is planned with one all-reduce for attention and one for the MLP."
    activation = config.data.get("hidden_activation") or config.data.get("hidden_act")
    if model.is_gated and isinstance(activation, str) and activation not in ("silu", "swish"):
        yield f"The MLP is planned as SwiGLU instead of {_format_value(activation)}, which has equal cost."
