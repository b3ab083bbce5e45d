"""Read layouts of DeepSpeed JSON files, of accelerate YAML files, and of GPT-NeoX YAML files.

Sources of the defaults: deepspeed/runtime/config.py, src/accelerate/utils/dataclasses.py, and
megatron/neox_arguments/neox_args.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.facts.tool_layouts.settings import MAX_BATCH, MAX_TOKENS, ImportedLayout, Settings

_WITHOUT_EFFECT = (
    r"^(?:optimizer|scheduler|steps_per_print|wall_clock_breakdown|dump_state|tensorboard|wandb|csv_monitor|comms_logger)"
    r"|^(?:flops_profiler|gradient_clipping|prescale_gradients|checkpoint|data_efficiency|monitor_config|seed)"
    r"|^(?:fp16|bf16|bfloat16)\.(?:loss|initial|hyst|min_loss|auto_cast|consecutive|check)|^zero_allow_untested"
    r"|^zero_force|^zero_optimization\.(?:\w*bucket_size|overlap_comm|contiguous|stage3_\w+|sub_group_size|round_robin"
    r"|reduce_scatter|allgather_partitions|gather_16bit|ignore_unused|elastic_checkpoint|offload_\w+\.(?!device))"
)


def read_deepspeed(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a JSON file of DeepSpeed."""
    settings = Settings("DeepSpeed", _drop_auto(values), ranks, _WITHOUT_EFFECT)
    automatic = [key for key, value in values.items() if value == "auto" and "batch" in key]
    if automatic:
        names = ", ".join(f"`{key}`" for key in automatic[:4])
        settings.notes.append(f"The training script sets the values `auto` of {names}.")
    tp = settings.get_optional_size("tensor_parallel.autotp_size", "tensor_parallel.tp_size") or 1
    cp = settings.get_optional_size("sequence_parallel_size") or 1
    if cp > 1:
        settings.notes.append(
            "The plan uses ring attention instead of the all-to-all of Ulysses (`sequence_parallel_size`)."
        )
    total, micro_batch, accumulation = _read_batches(settings)
    file_ranks = None
    if total and micro_batch and accumulation:
        replicas, rest = divmod(total, micro_batch * accumulation)
        if rest:
            reason = f"Use a multiple of micro-batch size {micro_batch} x accumulation {accumulation}."
            raise settings.refuse("train_batch_size", reason)
        file_ranks = replicas * tp * cp
    dp = settings.compute_dp(file_ranks, {"tp": tp, "cp": cp})
    settings.set_degrees(dp=dp, tp=tp, cp=cp, pp=1)
    _set_batches(settings, total, micro_batch, accumulation)
    settings.layout["zero"] = settings.get_size("zero_optimization.stage", default=0, least=0, most=3)
    _note_offload(settings, "zero_optimization.offload_{}.device")
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = settings.get_optional_size(f"zero_optimization.{name}", least=-1)
        if name == "mics_shard_size" and size and size > 1 and dp % size == 0:
            settings.layout["dp_replicas"] = dp // size
        elif size and size > 1:
            settings.notes.append(f"The plan leaves out the second shard of the weights in each node (`{name}`).")
    settings.train["precision"] = _read_precision(settings)
    activations = [key for key in settings.values if key.startswith("activation_checkpointing.")]
    settings.skip("activation_checkpointing", *activations)
    settings.notes.append("The file does not contain whether the model recomputes activations. Set the recomputation.")
    settings.resources["stack"] = "deepspeed"
    return settings.build()


def _drop_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without those that the Hugging Face Trainer sets."""
    return {key: None if value == "auto" else value for key, value in values.items()}


def _read_batches(settings: Settings) -> tuple[int | None, int | None, int | None]:
    return (
        settings.get_optional_size("train_batch_size", most=MAX_BATCH),
        settings.get_optional_size("train_micro_batch_size_per_gpu", most=MAX_BATCH),
        settings.get_optional_size("gradient_accumulation_steps", most=MAX_BATCH),
    )


def _set_batches(settings: Settings, total: int | None, micro_batch: int | None, accumulation: int | None) -> None:
    """Set the batch from two of three sizes, as DeepSpeedConfig._set_batch_related_parameters does."""
    dp = settings.layout["dp"]
    if micro_batch is None and total is not None:
        micro_batch, rest = divmod(total, dp * (accumulation or 1))
        if rest or not micro_batch:
            raise settings.refuse(
                "train_batch_size", f"Use a multiple of {dp * (accumulation or 1)} (dp x accumulation)."
            )
    if micro_batch is not None and total is None:
        if accumulation is None:
            settings.assume("gradient_accumulation_steps", 1)
        total = micro_batch * (accumulation or 1) * dp
    elif micro_batch is not None and accumulation is not None and total is not None:
        total = micro_batch * accumulation * dp  # with other ranks than in the file, the batch changes
    settings.set_batch(total, micro_batch, "train_batch_size")


def _note_offload(settings: Settings, pattern: str) -> None:
    for part, words in (("optimizer", "the optimizer state"), ("param", "the weights")):
        device = settings.get(pattern.format(part))
        if device not in (None, "none", False):
            settings.notes.append(f"The plan keeps {words} in GPU memory, without offload to {str(device)[:20]}.")
    settings.skip("zero_optimization.cpu_offload")


def _read_precision(settings: Settings) -> str:
    """Return the precision. DeepSpeed keeps gradients in 16 bits unless `data_types` changes it (runtime/engine.py)."""
    is_bf16 = settings.get_flag("bf16.enabled", "bfloat16.enabled")
    is_fp16 = settings.get_flag("fp16.enabled")
    accumulates = str(settings.get("data_types.grad_accum_dtype"))
    if not is_bf16 and not is_fp16:
        settings.assume("bf16.enabled", "false (fp32)")
        return "fp32"
    if is_fp16:
        settings.notes.append("The plan uses bf16 instead of fp16, which has the same number of bytes.")
    return "bf16" if accumulates in ("fp32", "float32") else "bf16_gradients"


_NEOX_MODEL = (
    r"^(?:num_layers|hidden_size|num_attention_heads|num_kv_heads|max_position_embeddings|norm|pos_emb|rotary_pct|attention_config"
    r"|no_weight_tying|gpt_j_\w+|output_layer_parallelism|activation|intermediate_size|mlp_type|make_vocab_size_divisible_by"
    r"|use_bias_in_\w+|bias_\w+|\w*fusion|init_method|output_layer_init_method|\w*dropout|rms_norm_epsilon|mlp_multiple_of)"
)
_NEOX_WITHOUT_EFFECT = (
    rf"{_WITHOUT_EFFECT}|{_NEOX_MODEL}"
    r"|^(?:vocab_file|merge_file|save|load|data_path|data_impl|split|train_iters|lr_|min_lr|warmup|eval_|log_|weight_decay|keep"
    r"|tokenizer|tensorboard|use_wandb|wandb|launcher|num_workers|distributed_backend|include|hostfile|finetune|attention_softmax"
    r"|train_data|valid_data|test_data|train_micro_batch_size|git_hash|deepspeed|synchronize|partition_activations"
    r"|checkpoint_num_layers|checkpoint_in_cpu|checkpoint_factor|extra_save_iters|attention_backend)"
)


def read_neox(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a YAML file of GPT-NeoX."""
    values = {key.replace("-", "_"): value for key, value in values.items()}
    settings = Settings("GPT-NeoX", values, ranks, _NEOX_WITHOUT_EFFECT)
    pp = settings.get_size("pipe_parallel_size", default=1, least=0) or 1
    tp = settings.get_size("model_parallel_size", default=1)
    cp = settings.get_size("context_parallel_size", default=1)
    total, micro_batch, accumulation = _read_batches(settings)
    replicas = total // (micro_batch * accumulation) if total and micro_batch and accumulation else None
    dp = settings.compute_dp(replicas and replicas * pp * tp * cp, {"pp": pp, "tp": tp, "cp": cp})
    settings.set_degrees(dp=dp, pp=pp, tp=tp, cp=cp)
    _set_batches(settings, total, micro_batch, accumulation)
    length = settings.get_optional_size("seq_length", most=MAX_TOKENS)
    if length:
        settings.train["seq_len"] = length
    sequence = settings.get_flag("sequence_parallel") and tp > 1
    settings.layout |= {
        "zero": settings.get_size("zero_optimization.stage", default=0, least=0, most=3),
        "recompute": "full" if settings.get_flag("checkpoint_activations") else "none",
        "sequence_parallel": sequence,
        "regather": sequence,
    }
    _note_offload(settings, "zero_optimization.offload_{}.device")
    settings.train["precision"] = _read_neox_precision(settings)
    settings.notes.append("The file does not contain the vocabulary. Choose the model, or import its config.json.")
    settings.resources["stack"] = "deepspeed"
    return settings.build()


def _read_neox_precision(settings: Settings) -> str:
    name = settings.get("precision")
    if name in ("bfloat16", "fp16"):
        if name == "fp16":
            settings.notes.append("The plan uses bf16 instead of fp16, which has the same number of bytes.")
        settings.skip("fp16.enabled", "bf16.enabled", "fp16.fp16", "fp16.type", "bf16.type")
        return "bf16_gradients"
    settings.skip("fp16.fp16", "fp16.type", "bf16.type")
    return _read_precision(settings)


_ACCELERATE_WITHOUT_EFFECT = (
    r"^(?:compute_environment|debug|machine_rank|main_|rdzv|same_network|tpu_|use_cpu|enable_cpu_affinity|gpu_ids)"
    r"|^(?:downcast_bf16|dynamo_config|mpirun_config|commands|command_file|fp8_config|num_machines|tpu)"
    r"|^fsdp_config\.fsdp_(?:auto_wrap|backward|forward|cpu_ram|state_dict|sync_module|use_orig|transformer|min_num)"
    r"|^deepspeed_config\.(?:gradient_clipping|zero3_|deepspeed_(?:hostfile|multinode|exclusion|inclusion|moe))"
    r"|^megatron_lm_config\.megatron_lm_gradient_clipping"
)
_STRATEGIES = {
    "full_shard": (3, False),
    "shard_grad_op": (2, False),
    "no_shard": (0, False),
    "hybrid_shard": (3, True),
    "hybrid_shard_zero2": (2, True),
}
_STRATEGIES |= {str(number): found for number, found in enumerate([*_STRATEGIES.values()], start=1)}
_MIXED = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}


def read_accelerate(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a YAML file of accelerate."""
    settings = Settings("accelerate", values, ranks, _ACCELERATE_WITHOUT_EFFECT)
    kinds = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
    kind = settings.get_choice(("distributed_type",), {one.lower(): one for one in kinds} | {"false": "NO"}, "no")
    file_ranks = 1 if kind == "NO" else settings.get_optional_size("num_processes")
    settings.skip("num_processes")
    precision = settings.get_choice(("mixed_precision",), _MIXED, "no")
    if str(settings.get("mixed_precision")) == "fp16":
        settings.notes.append("The plan uses bf16 instead of fp16, which has the same number of bytes.")
    settings.train["precision"] = precision
    reads = {"DEEPSPEED": _read_deepspeed_plugin, "MEGATRON_LM": _read_megatron_plugin}
    reads.get(kind, _read_torch)(settings, file_ranks, kind == "FSDP")
    return settings.build()


def _read_torch(settings: Settings, file_ranks: int | None, is_sharded: bool) -> None:
    """Read DDP or FSDP, with the degrees of the section parallelism_config."""
    prefix = "parallelism_config.parallelism_config_"
    tp = settings.get_optional_size(f"{prefix}tp_size") or 1
    cp = settings.get_optional_size(f"{prefix}cp_size") or 1
    ulysses = settings.get_optional_size(f"{prefix}sp_size") or 1
    if ulysses > 1:
        settings.notes.append("The plan uses ring attention instead of the all-to-all of Ulysses (sp_size).")
    cp *= ulysses
    replicas = settings.get_optional_size(f"{prefix}dp_replicate_size")
    shards = settings.get_optional_size(f"{prefix}dp_shard_size")
    if replicas is None and shards is None:
        dp = settings.compute_dp(file_ranks, {"tp": tp, "cp": cp})
    else:
        dp = (replicas or 1) * (shards or 1)
        total = dp * tp * cp
        if file_ranks and file_ranks != total:
            raise settings.refuse("num_processes", f"The sizes in parallelism_config need {total} processes.")
    settings.set_degrees(dp=dp, tp=tp, cp=cp, pp=1)
    settings.layout["cp_method"] = "all_gather" if settings.get(f"{prefix}cp_comm_strategy") != "alltoall" else "ring"
    if not is_sharded:
        settings.layout["zero"] = 0
        settings.notes.append("The plan uses bf16 weights. Autocast of DDP keeps weights and gradients in fp32.")
        _note_missing_batch(settings)
        return
    zero, is_hybrid = _read_fsdp(settings)
    if is_hybrid and replicas is None:
        replicas = settings.get_optional_size("num_machines") or 1
    settings.layout |= {"zero": zero, "dp_replicas": (replicas or 1) if zero and dp % (replicas or 1) == 0 else 1}
    _note_missing_batch(settings)


def _read_fsdp(settings: Settings) -> tuple[int, bool]:
    """Return the ZeRO stage, and whether only the ranks of a machine shard the weights."""
    prefix = "fsdp_config.fsdp_"
    version = settings.get_size(f"{prefix}version", default=1, most=2)
    settings.resources["stack"] = "fsdp2_eager" if version == 2 else "fsdp1"
    recomputes = settings.get_flag(f"{prefix}activation_checkpointing")
    settings.layout["recompute"] = "full" if recomputes else "none"
    if settings.get_flag(f"{prefix}offload_params"):
        settings.notes.append("The plan keeps all state in GPU memory, without CPU offload.")
    name, reshards = f"{prefix}sharding_strategy", f"{prefix}reshard_after_forward"
    if settings.has(name) or str(settings.get(reshards)).lower() in _STRATEGIES:
        found: tuple[int, bool] = settings.get_choice((name, reshards), _STRATEGIES, "full_shard")
        return found
    if version == 2:
        return (3 if settings.get_flag(reshards, default=True) else 2), False
    settings.assume(name, "FULL_SHARD")
    return 3, False


def _note_missing_batch(settings: Settings) -> None:
    accumulation = settings.get_optional_size("gradient_accumulation_steps", most=MAX_BATCH)
    if accumulation:
        settings.train["micro_batches"] = accumulation
    settings.notes.append("The file does not contain the batch and the sequence length. Set both.")


def _read_deepspeed_plugin(settings: Settings, file_ranks: int | None, _: bool) -> None:
    prefix = "deepspeed_config."
    file = settings.get(f"{prefix}deepspeed_config_file")
    if file is not None:
        text = f"The file refers to {str(file)[:80]!r}, which has the ZeRO stage and the batch."
        raise settings.refuse(f"{prefix}deepspeed_config_file", f"{text} Import that file instead.")
    settings.set_degrees(dp=settings.compute_dp(file_ranks, {}), pp=1, tp=1, cp=1)
    settings.layout["zero"] = settings.get_size(f"{prefix}zero_stage", default=2, least=0, most=3)
    _note_offload(settings, prefix + "offload_{}_device")
    accumulation = settings.get_optional_size(f"{prefix}gradient_accumulation_steps", most=MAX_BATCH)
    if accumulation:
        settings.train["micro_batches"] = accumulation
    if settings.train["precision"] == "bf16":
        settings.train["precision"] = "bf16_gradients"
    settings.resources["stack"] = "deepspeed"
    settings.notes.append("The file does not contain the batch and the sequence length. Set both.")


def _read_megatron_plugin(settings: Settings, file_ranks: int | None, _: bool) -> None:
    prefix = "megatron_lm_config.megatron_lm_"
    tp = settings.get_size(f"{prefix}tp_degree", default=1)
    pp = settings.get_size(f"{prefix}pp_degree", default=1)
    settings.set_degrees(dp=settings.compute_dp(file_ranks, {"tp": tp, "pp": pp}), tp=tp, pp=pp, cp=1)
    sequence = settings.get_flag(f"{prefix}sequence_parallelism") and tp > 1
    settings.layout |= {
        "sequence_parallel": sequence,
        "regather": sequence,
        "zero": int(settings.get_flag(f"{prefix}use_distributed_optimizer")),
        "recompute": "selective" if settings.get_flag(f"{prefix}recompute_activations") else "none",
    }
    count = settings.get_optional_size(f"{prefix}num_micro_batches", most=MAX_BATCH)
    if count:
        settings.train["micro_batches"] = count
    settings.resources["stack"] = "megatron"
    settings.notes.append("The file does not contain the batch and the sequence length. Set both.")
