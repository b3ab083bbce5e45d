"""Export a model as safetensors for the GPT-2, Llama, Mixtral, and tokenizer classes of Hugging Face."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from planner.facts.spec import ModelSpec
from workers.checkpoint.inference import LoadedModel, iter_named_tensors
from workers.trainer.errors import UserError, abbreviate
from workers.trainer.model.layers import NORM_EPS
from workers.trainer.tokenizer import END_OF_TEXT, Encoder

Tensors = dict[str, torch.Tensor]


def export(loaded: LoadedModel, out: Path, encoder: Encoder | None = None) -> Path:
    """Write model.safetensors, config.json, and the tokenizer files into a new folder.

    Raises:
        UserError: if the folder exists, cannot be written, or the format does not support the model.
    """
    tensors = dict(iter_named_tensors(loaded.spec, loaded.decoder))
    model = loaded.spec.model
    named, config = _gpt2(model, tensors) if model.arch == "gpt" else _llama(model, tensors)
    texts = _make_text_files(config, model, None if encoder is None else encoder.tokenizer)
    draft = out.with_name(f".{out.name}.draft")
    try:
        if out.exists():
            raise UserError(f"`--out` is {str(out)!r}, which exists. Use a new folder.")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file({name: t.contiguous().clone() for name, t in named}, draft / "model.safetensors", {"format": "pt"})
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        draft.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"`--out` is {abbreviate(str(out))}, which cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


def _make_text_files(config: dict[str, Any], model: ModelSpec, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the JSON files by name."""
    end = None if tokenizer is None else tokenizer.token_to_id(END_OF_TEXT)
    # The default ids of these classes would end a text anywhere.
    config = config | {"bos_token_id": end, "eos_token_id": end}
    texts = {"config.json": json.dumps(config, indent=1)}
    if tokenizer is not None:
        texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
        texts["tokenizer_config.json"] = json.dumps(_tokenizer_config(model, end is not None), indent=1)
    return texts


def _tokenizer_config(model: ModelSpec, has_end: bool) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    return config | ({"eos_token": END_OF_TEXT} if has_end else {})


def _gpt2(model: ModelSpec, tensors: Tensors) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
    if not model.tied_embeddings:
        raise UserError("`model.tied_embeddings` is false, but the GPT-2 format needs tied embeddings.")
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "n_positions": model.max_seq_len,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu",
        "layer_norm_epsilon": NORM_EPS,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    return list(_gpt2_tensors(model, tensors)), config


def _gpt2_tensors(model: ModelSpec, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of GPT-2: weights are (in, out), with queries, keys, and values in one tensor."""
    yield "transformer.wte.weight", tensors["embedding.weight"]
    yield "transformer.wpe.weight", tensors["positions.weight"]
    for kind in ("weight", "bias"):
        yield f"transformer.ln_f.{kind}", tensors[f"final_norm.{kind}"]
    for i in range(model.num_layers):
        own, theirs = f"layers.{i}", f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            fused = torch.cat([tensors[f"{own}.attention.{part}.{kind}"] for part in "qkv"])
            parts = {
                "attn.c_attn": fused,
                "attn.c_proj": tensors[f"{own}.attention.out.{kind}"],
                "mlp.c_fc": tensors[f"{own}.mlp.up.{kind}"],
                "mlp.c_proj": tensors[f"{own}.mlp.down.{kind}"],
            }
            for name, tensor in parts.items():
                yield f"{theirs}.{name}.{kind}", tensor.T if kind == "weight" else tensor
            yield f"{theirs}.ln_1.{kind}", tensors[f"{own}.attention_norm.{kind}"]
            yield f"{theirs}.ln_2.{kind}", tensors[f"{own}.mlp_norm.{kind}"]


def _llama(model: ModelSpec, tensors: Tensors) -> tuple[list[tuple[str, torch.Tensor]], dict[str, Any]]:
    moe = model.moe
    config = {
        "architectures": ["MixtralForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "mixtral" if moe else "llama",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": moe.expert_ffn_hidden_size if moe else model.ffn_hidden_size,
        "max_position_embeddings": model.max_seq_len,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": model.rope_base,
        "rope_parameters": _rope(model),
        "tie_word_embeddings": model.tied_embeddings,
        "dtype": "float32",
    }
    if moe:
        if moe.shared_experts or moe.dense_layers or moe.capacity_factor is not None or moe.experts_per_token < 2:
            text = "experts in every layer, at least 2 experts per token, no shared experts, and no capacity factor"
            raise UserError(f"`model.moe` does not fit the Mixtral format. It needs {text}.")
        config |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token}
    return list(_llama_tensors(model, tensors)), config


def _rope(model: ModelSpec) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": model.rope_base}
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    stretch = scaling.model_dump(exclude={"original_max_seq_len"})
    return plain | {"rope_type": "llama3", "original_max_position_embeddings": scaling.original_max_seq_len} | stretch


def _llama_tensors(model: ModelSpec, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.embed_tokens.weight", tensors["embedding.weight"]
    yield "model.norm.weight", tensors["final_norm.weight"]
    if not model.tied_embeddings:
        yield "lm_head.weight", tensors["head.weight"]
    for i in range(model.num_layers):
        own, theirs = f"layers.{i}", f"model.layers.{i}"
        yield f"{theirs}.input_layernorm.weight", tensors[f"{own}.attention_norm.weight"]
        yield f"{theirs}.post_attention_layernorm.weight", tensors[f"{own}.mlp_norm.weight"]
        for part, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "o_proj")):
            yield f"{theirs}.self_attn.{name}.weight", tensors[f"{own}.attention.{part}.weight"]
        if model.moe is None:
            for part in ("gate", "up", "down"):
                yield f"{theirs}.mlp.{part}_proj.weight", tensors[f"{own}.mlp.{part}.weight"]
            continue
        yield f"{theirs}.block_sparse_moe.gate.weight", tensors[f"{own}.moe.router.weight"]
        for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            for expert, matrix in enumerate(tensors[f"{own}.moe.experts.{part}.weight"]):
                yield f"{theirs}.block_sparse_moe.experts.{expert}.{name}.weight", matrix
