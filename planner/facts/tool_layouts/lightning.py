"""Read layouts of Lightning and LitGPT YAML files.

Defaults are those of lightning/pytorch/trainer/trainer.py and lightning/pytorch/strategies.
Defaults of LitGPT are those of litgpt/pretrain.py and litgpt/finetune/full.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.facts.tool_layouts.settings import MAX_BATCH, MAX_TOKENS, ImportedLayout, Settings

_WITHOUT_EFFECT = (
    r"^(?:seed|seed_everything|ckpt_path|logger_name|out_dir|resume|eval|optimizer|lr_scheduler|tokenizer_dir|model\.name)"
    r"|^(?:checkpoint_dir|initial_checkpoint_dir|access_token|log|data\.(?!init_args\.batch_size|batch_size)|data$)"
    r"|^trainer\.(?:max|min|val|limit|log|logger|callbacks|enable|check_val|accelerator|benchmark|gradient_clip|num_sanity)"
    r"|^trainer\.(?:fast_dev|overfit|deterministic|inference|use_distributed|profiler|detect|barebones|sync|reload|default)"
    r"|^train\.(?:save|log|lr|epochs|max_tokens|max_steps|max_norm|min_lr|learning|weight|beta|tie)|\.(?:auto_wrap|state_dict)"
    r"|\.(?:timeout|find_unused|bucket_cap|gradient_as_bucket|static_graph|process_group|start_method|limit_all_gathers)"
)
_PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "fp32"),
    **dict.fromkeys(("bf16", "bf16-mixed", "16", "16-mixed"), "bf16"),
    **dict.fromkeys(("bf16-true", "16-true"), "bf16_state"),
    "transformer-engine": "fp8",
}
_SHARDING = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "_hybrid_shard_zero2": 2}


def read_lightning(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a YAML file of LightningCLI or LitGPT."""
    is_litgpt = not any(key.startswith("trainer.") for key in values)
    prefix = "" if is_litgpt else "trainer."
    settings = Settings("LitGPT" if is_litgpt else "Lightning", values, ranks, _WITHOUT_EFFECT)
    nodes = settings.get_size(f"{prefix}num_nodes", default=1)
    per_node = _count_devices(settings, f"{prefix}devices")
    file_ranks = per_node * nodes if per_node else None
    if is_litgpt:
        _read_litgpt_strategy(settings, file_ranks, nodes)
    else:
        _read_strategy(settings, file_ranks, nodes)
    precision = settings.get_choice((f"{prefix}precision",), _PRECISIONS, "32-true")
    if str(settings.get(f"{prefix}precision")).startswith("16"):
        settings.notes.append("The plan uses bf16 instead of fp16, which has the same number of bytes.")
    settings.train["precision"] = precision
    if is_litgpt:
        _read_litgpt_batch(settings)
    else:
        _read_batch(settings)
    return settings.build()


def _count_devices(settings: Settings, name: str) -> int | None:
    """Return the ranks per node, or None if all GPUs of the machine are used."""
    value = settings.get(name)
    if isinstance(value, list):
        return len(value) or None
    if str(value) in ("auto", "-1", "None"):
        return None
    return settings.get_size(name)


def _read_strategy(settings: Settings, file_ranks: int | None, nodes: int) -> None:
    name = settings.find("trainer.strategy.class_path", "trainer.strategy")
    value = str(settings.get(name) or "auto").rpartition(".")[2].lower()
    prefix = "trainer.strategy.init_args."
    layout, tp = settings.layout, 1
    if value.startswith("modelparallel"):
        sizes = [settings.get(f"{prefix}{part}_parallel_size") for part in ("data", "tensor")]
        tp = settings.get_size(f"{prefix}tensor_parallel_size") if sizes[1] not in (None, "auto") else 0
        if not tp:
            # model_parallel.py: tensor parallelism inside a node, data parallelism between nodes.
            tp = max(1, (file_ranks or settings.requested_ranks or 1) // nodes)
            settings.assume(f"{prefix}tensor_parallel_size", "the number of devices per node")
        layout["zero"] = 3
        settings.resources["stack"] = "fsdp2_eager"
    elif value.startswith("fsdp"):
        layout["zero"] = settings.get_choice((f"{prefix}sharding_strategy",), _SHARDING, "full_shard")
        settings.resources["stack"] = "fsdp1"
    elif value.startswith("deepspeed"):
        stage = next((int(digit) for digit in "123" if f"stage_{digit}" in value), None)
        layout["zero"] = stage or settings.get_size(f"{prefix}stage", default=2, least=0, most=3)
        if "offload" in value or settings.get_flag(f"{prefix}offload_optimizer"):
            settings.notes.append("The plan keeps all state in GPU memory, without CPU offload.")
        settings.resources["stack"] = "deepspeed"
    elif value.startswith(("ddp", "auto", "singledevice")):
        layout["zero"] = 0
    else:
        raise settings.refuse(name, "The planner knows DDP, FSDP, DeepSpeed, and ModelParallelStrategy.")
    dp = settings.compute_dp(file_ranks, {"tp": tp})
    settings.set_degrees(dp=dp, tp=tp, pp=1, cp=1)
    _read_fsdp_options(settings, prefix, nodes)


def _read_fsdp_options(settings: Settings, prefix: str, nodes: int) -> None:
    policy = [key for key in settings.values if key.startswith(f"{prefix}activation_checkpointing")]
    settings.skip(f"{prefix}activation_checkpointing", *policy)
    recomputes = any(settings.values[key] not in (None, False, [], {}) for key in policy)
    settings.layout["recompute"] = "full" if recomputes else "none"
    if settings.get_flag(f"{prefix}cpu_offload"):
        settings.notes.append("The plan keeps all state in GPU memory, without CPU offload.")
    mesh = settings.get(f"{prefix}device_mesh")
    replicas = nodes if "hybrid" in str(settings.get(f"{prefix}sharding_strategy")).lower() else 1
    if isinstance(mesh, list) and len(mesh) == 2 and all(type(one) is int and one > 0 for one in mesh):
        replicas = mesh[0]
    dp = settings.layout["dp"]
    settings.layout["dp_replicas"] = replicas if settings.layout["zero"] and dp % replicas == 0 else 1


def _read_batch(settings: Settings) -> None:
    accumulation = settings.get_size("trainer.accumulate_grad_batches", default=1, most=MAX_BATCH)
    names = ("data.init_args.batch_size", "data.batch_size")
    micro_batch = settings.get_optional_size(*names, most=MAX_BATCH)
    settings.notes.append("The file does not contain the sequence length. Set the sequence length.")
    if micro_batch is None:
        settings.train["micro_batches"] = accumulation
        settings.notes.append("The file does not contain the batch. Set the batch.")
        return
    settings.set_batch(micro_batch * accumulation * settings.layout["dp"], micro_batch, names[0])


def _read_litgpt_strategy(settings: Settings, file_ranks: int | None, nodes: int) -> None:
    """Set the strategy that LitGPT has in its code: FSDP with several devices, inside each node for pretraining."""
    finetunes = settings.has("checkpoint_dir") or settings.has("data.init_args.mask_prompt")
    dp = settings.compute_dp(file_ranks, {})
    settings.set_degrees(dp=dp, pp=1, tp=1, cp=1)
    replicas = nodes if not finetunes and dp % nodes == 0 else 1
    settings.layout |= {
        "zero": 3 if dp > 1 else 0,
        "dp_replicas": replicas if dp > 1 else 1,
        "recompute": "full" if finetunes and dp > 1 else "none",
    }
    words = "FSDP with full recomputation" if finetunes else "FSDP in each node (HYBRID_SHARD)"
    settings.assumed.append(f"LitGPT sets the strategy in its code. The plan uses {words} for several devices.")
    if any(key.startswith("lora_") or key == "quantize" for key in settings.values):
        settings.notes.append("The plan trains all weights, without LoRA and without quantized weights.")
    settings.resources["stack"] = "fsdp1"


def _read_litgpt_batch(settings: Settings) -> None:
    total = settings.get_optional_size("train.global_batch_size", most=MAX_BATCH)
    micro_batch = settings.get_optional_size("train.micro_batch_size", most=MAX_BATCH)
    tokens = settings.get_optional_size("train.max_seq_length", "model.block_size", most=MAX_TOKENS)
    if tokens:
        settings.train["seq_len"] = tokens
    else:
        settings.notes.append("The file does not contain the sequence length. Set the sequence length.")
    settings.set_batch(total, micro_batch, "train.global_batch_size")
    settings.notes.append("The model was not imported. Choose the model, or import its config.json.")
