"""Load the whole model of a checkpoint in one process, evaluate it, sample text, and export it for transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from planner.facts.placements import TensorBox
from planner.facts.spec import JobSpec, ModelSpec
from workers.checkpoint.folder import STEP, list_candidates
from workers.checkpoint.load import find_undamaged, read_tensors
from workers.checkpoint.state import BoxedTensor
from workers.disk import discard_path
from workers.trainer.dataset import load_dataset, load_job_tokenizer
from workers.trainer.documents import (
    END_OF_TEXT,
    TOKENS,
    Encoder,
    check_vocab_size,
    get_suffix,
    load_tokenizer,
    make_byte_encoder,
)
from workers.trainer.errors import UserError, abbreviate
from workers.trainer.model import Decoder, Strategy
from workers.trainer.model.decoder import iter_model_parameters
from workers.trainer.model.layers import NORM_EPS
from workers.trainer.parallel.context_parallel import get_document_ids

NUM_BYTES = 256
INVALID_BYTE = b"\xff"  # invalid in UTF-8, shown as U+FFFD
Tensors = dict[str, torch.Tensor]


def find_tokenizer(spec: JobSpec, path: Path | None, data_root: Path | None) -> Encoder | None:
    """Load the tokenizer at `path`, or the job's tokenizer below the data root. None if neither is known.

    Raises:
        UserError: if the file is missing or invalid, or has more tokens than the model.
    """
    if path is not None:
        encoder = load_tokenizer(path, f"`--tokenizer` {str(path)!r}")
    elif spec.train.tokenizer is not None and data_root is not None:
        encoder = load_job_tokenizer(data_root, spec.train.tokenizer)
    else:
        return None
    check_vocab_size(encoder, spec.model.vocab_size)
    return encoder


def get_text_encoder(spec: JobSpec, path: Path | None, data_root: Path | None) -> Encoder:
    """Return the encoder of the job: a tokenizer, or bytes. Raises UserError."""
    if found := find_tokenizer(spec, path, data_root):
        return found
    train, size = spec.train, spec.model.vocab_size
    if train.tokenizer is not None:
        text = f"`--tokenizer` is missing, but the job uses the tokenizer {train.tokenizer!r} (`train.tokenizer`)."
        raise UserError(f"{text} Use --tokenizer PATH, or --data-root with the folder above the tokenizer.")
    if get_suffix(Path(train.data)) == TOKENS and size != NUM_BYTES:
        text = f"`--tokenizer` is missing, but the job reads tokens from {train.data!r} with a vocabulary of {size}."
        raise UserError(f"{text} Use the tokenizer that made the tokens.")
    return make_byte_encoder()


def encode_prompt(encoder: Encoder, prompt: str) -> list[int]:
    """Return the tokens of a prompt. Raises UserError."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError("`--prompt` is not UTF-8.") from None
    (tokens,) = encoder.encode([prompt])
    if not tokens:
        raise UserError("`--prompt` has no tokens. Use at least one token.")
    return tokens


def decode_tokens(encoder: Encoder, tokens: list[int]) -> str:
    """Return the text of tokens, including special tokens. Invalid bytes become U+FFFD."""
    if encoder.tokenizer is None:
        found = b"".join(bytes([token]) if token < NUM_BYTES else INVALID_BYTE for token in tokens)
        return found.decode(errors="replace")
    return str(encoder.tokenizer.decode(tokens, skip_special_tokens=False))


class LoadedModel(NamedTuple):
    """Store a loaded model, and the spec and step of its checkpoint."""

    spec: JobSpec
    step: int
    decoder: Decoder


def load_model(path: Path, log: Callable[[str], None]) -> LoadedModel:
    """Load a checkpoint (job/attempt/step-n), or the newest undamaged checkpoint of a folder. Raises UserError."""
    path = path.resolve()
    root = path.parents[2] if STEP.fullmatch(path.name) and len(path.parents) > 2 else path.parent
    found = find_undamaged(list_candidates(root, str(path.relative_to(root))), None, log)
    manifest = found.manifest
    model = manifest.spec.model
    decoder = Decoder(model, range(model.num_layers), Strategy(), torch.float32, first=True, last=True)
    state = {}
    for name, tensor in iter_named_tensors(manifest.spec, decoder):
        shape = tuple(tensor.shape)
        state[f"model.{name}"] = BoxedTensor(tensor, TensorBox((0,) * len(shape), shape), shape)
    read_tensors(state, found)
    return LoadedModel(manifest.spec, manifest.step, decoder)


def iter_named_tensors(spec: JobSpec, decoder: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the whole model, in order."""
    for name, _ in iter_model_parameters(spec.model):
        yield name, decoder.get_parameter(name).detach()


@torch.no_grad()
def evaluate(loaded: LoadedModel, data: str, data_root: Path, sequences: int) -> float:
    """Return the mean loss per token in nats, over held-out sequences as in a validation of the job."""
    train, model = loaded.spec.train, loaded.spec.model
    corpus = load_dataset(
        data, data_root, model.vocab_size, train.seq_len, column=train.column, tokenizer=train.tokenizer
    )
    total = 0.0
    for first in range(sequences):
        batch = corpus.eval_batch(train.seed, sequences, slice(first, first + 1), train.seq_len)
        rows = torch.from_numpy(batch)
        output = loaded.decoder(rows[:, :-1], get_document_ids(rows[:, :-1], train.document_end))
        total += float(loaded.decoder.loss_sum(output, rows[:, 1:]))
    return total / (sequences * train.seq_len)


@torch.no_grad()
def sample(loaded: LoadedModel, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """Draw `count` tokens after `prompt` from softmax(logits / temperature). 0 takes the most probable token."""
    model = loaded.spec.model
    if not prompt or max(prompt) >= model.vocab_size:
        raise UserError(f"`--prompt` has a token outside the vocabulary. Use tokens below {model.vocab_size}.")
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.max_seq_len :]])
        documents = get_document_ids(window, loaded.spec.train.document_end)
        logits = loaded.decoder(window, documents)[0, -1].float()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        probabilities = (logits / temperature).softmax(-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return tokens[len(prompt) :]


def export(loaded: LoadedModel, out: Path, encoder: Encoder | None = None) -> Path:
    """Write model.safetensors, config.json, and the tokenizer files into a new folder. Raises UserError."""
    tensors = dict(iter_named_tensors(loaded.spec, loaded.decoder))
    model = loaded.spec.model
    named, config = _gpt2(model, tensors) if model.arch == "gpt" else _llama(model, tensors)
    texts = _make_text_files(config, model, None if encoder is None else encoder.tokenizer)
    draft = out.with_name(f".{out.name}.draft")
    try:
        if out.exists():
            raise UserError(f"`--out` is {str(out)!r}, which exists. Use a new folder.")
        discard_path(draft)
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
        discard_path(draft)
    return out


def _make_text_files(config: dict[str, Any], model: ModelSpec, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the JSON files by name."""
    end = None if tokenizer is None else tokenizer.token_to_id(END_OF_TEXT)
    # The default ids of these classes would end a text anywhere.
    config = config | {"bos_token_id": end, "eos_token_id": end}
    texts = {"config.json": json.dumps(config, indent=1)}
    if tokenizer is not None:
        texts["tokenizer.json"] = tokenizer.to_str(pretty=True)
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.max_seq_len,
            "clean_up_tokenization_spaces": False,
        } | ({} if end is None else {"eos_token": END_OF_TEXT})
        texts["tokenizer_config.json"] = json.dumps(tokenizer_config, indent=1)
    return texts


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
        "rope_parameters": get_rope_parameters(model),
        "tie_word_embeddings": model.tied_embeddings,
        "dtype": "float32",
    }
    if moe:
        if moe.shared_experts or moe.dense_layers or moe.capacity_factor is not None or moe.experts_per_token < 2:
            text = "experts in every layer, at least 2 experts per token, no shared experts, and no capacity factor"
            raise UserError(f"`model.moe` does not fit the Mixtral format. It needs {text}.")
        config |= {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.experts_per_token}
    return list(_llama_tensors(model, tensors)), config


def get_rope_parameters(model: ModelSpec) -> dict[str, Any]:
    """Return the rotary embedding in the format of transformers."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if (scaling := model.rope_scaling) is not None:
        parameters |= {"rope_type": "llama3", "original_max_position_embeddings": scaling.original_max_seq_len}
        parameters |= scaling.model_dump(exclude={"original_max_seq_len"})
    return parameters


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
