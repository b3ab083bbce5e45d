"""Read layouts of torchtitan TOML files and of nanotron YAML files.

Defaults are those of torchtitan/config/job_config.py, and of src/nanotron/config in nanotron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.facts.hugging_face import read_config
from planner.facts.presets import PRESETS
from planner.facts.tool_layouts.settings import MAX_BATCH, MAX_TOKENS, ImportedLayout, Settings
from planner.facts.validation import SpecError

PARALLELISM, AC = "parallelism.", "activation_checkpoint."
_TITAN_WITHOUT_EFFECT = (
    r"^(?:job|profiling|metrics|lr_scheduler|checkpoint|comm|validation|debug|memory_estimation)\."
    r"|^model\.(?:tokenizer_path|hf_assets_path|print_after|norm_type)|^optimizer\.(?:name|lr|beta|eps|weight|impl|early)"
    r"|^training\.(?:max_norm|steps|dataset|gc_|seed|deterministic|warmup|data_parallel_type|mixed_precision_reduce)"
    r"|^(?:float8|mx|quantize)\.|^experimental\.custom|^compile\.components|^fault_tolerance\.(?:process|replica|min_)"
    r"|^parallelism\.(?:disable_loss_parallel|enable_compiled_autograd|pipeline_parallel_schedule_csv)"
)
_SCHEDULES = {
    "1f1b": ("1f1b", 1),
    "gpipe": ("gpipe", 1),
    "interleaved1f1b": ("interleaved_1f1b", 2),
    "loopedbfs": ("looped_bfs", 2),
    "interleavedzerobubble": ("interleaved_zero_bubble", 2),
    "zbvzerobubble": ("zbv", 2),
    "dualpipev": ("dualpipev", 2),
}
_PRESETS = {
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3-405b",
    ("deepseek_v3", "671b"): "deepseek-v3",
}


def read_torchtitan(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a TOML file of torchtitan. Files of 2024 have their degrees in `training` and `experimental`."""
    settings = Settings("torchtitan", values, ranks, _TITAN_WITHOUT_EFFECT)
    tp = settings.get_size(*_name_degree("tensor"), default=1)
    pp = settings.get_size(*_name_degree("pipeline"), default=1)
    cp = settings.get_size(*_name_degree("context"), default=1)
    replicas = settings.get_size(f"{PARALLELISM}data_parallel_replicate_degree", default=1)
    names = (f"{PARALLELISM}data_parallel_shard_degree", "training.data_parallel_shard_degree")
    name = settings.find(*names, "training.data_parallel_degree")
    if not settings.has(name):
        settings.assume(name, "-1 (the remaining ranks)")
    if str(settings.get(name)) in ("-1", "None"):
        shards = settings.compute_dp(None, {"tp": tp, "pp": pp, "cp": cp, "replicas": replicas})
    else:
        shards = settings.get_size(name)
    ep = settings.get_optional_size(f"{PARALLELISM}expert_parallel_degree") or 1
    expert_tp = settings.get_optional_size(f"{PARALLELISM}expert_tensor_parallel_degree")
    if ep > 1 and expert_tp not in (None, tp):
        settings.notes.append(f"The plan divides each expert over tp {tp} instead of expert tp {expert_tp}.")
    settings.set_degrees(dp=replicas * shards, tp=tp, pp=pp, cp=cp, ep=ep)
    settings.model = _choose_preset(settings)
    _read_titan_sharding(settings, replicas, shards * cp)
    _read_titan_pipeline(settings)
    _read_titan_training(settings)
    return settings.build()


def _name_degree(axis: str) -> tuple[str, ...]:
    key = f"{axis}_parallel_degree"
    return f"{PARALLELISM}{key}", f"training.{key}", f"experimental.{key}"


def _choose_preset(settings: Settings) -> dict[str, Any] | None:
    name, flavor = str(settings.get("model.name")).lower(), str(settings.get("model.flavor")).lower()
    preset = _PRESETS.get((name, flavor))
    if preset is None:
        settings.notes.append(
            f"The planner has no preset for model {name[:40]}, flavor {flavor[:40]}. Choose the model."
        )
        return None
    return {"preset": preset}


def _read_titan_sharding(settings: Settings, replicas: int, shards: int) -> None:
    """Read how FSDP gathers weights. With pipeline stages, the default gathers once per step (apply_fsdp)."""
    policy = settings.get_choice(
        (f"{PARALLELISM}fsdp_reshard_after_forward",),
        {"default": "default", "always": "always", "never": "never"},
        "default",
    )
    stays_gathered = policy == "never" or (policy == "default" and settings.layout["pp"] > 1)
    zero = (1 if settings.layout["pp"] > 1 else 2) if stays_gathered else 3
    # parallelize_llama.py: without FSDP, the replicas use DDP.
    settings.layout["zero"] = zero if shards > 1 else 0
    settings.layout["dp_replicas"] = replicas if shards > 1 else 1


def _read_titan_pipeline(settings: Settings) -> None:
    name = f"{PARALLELISM}pipeline_parallel_schedule"
    settings.skip(name, "experimental.pipeline_parallel_schedule")
    per_stage = settings.get_optional_size(f"{PARALLELISM}pipeline_parallel_layers_per_stage")
    splits = settings.get(f"{PARALLELISM}pipeline_parallel_split_points", "experimental.pipeline_parallel_split_points")
    pp = settings.layout["pp"]
    if pp == 1:
        return
    names = (name, "experimental.pipeline_parallel_schedule")
    schedule, chunks = settings.get_choice(names, _SCHEDULES, "1f1b")
    if per_stage and settings.model and schedule not in ("1f1b", "gpipe"):
        layers = PRESETS[settings.model["preset"]].model.num_layers
        less = [
            settings.get_optional_size(f"{PARALLELISM}pipeline_parallel_{end}_stage_less_layers", least=0)
            for end in ("first", "last")
        ]
        total = layers + sum(1 if one is None else one for one in less)
        chunks = max(1, -(-total // per_stage) // pp)
    if splits:
        settings.notes.append("The plan divides the layers evenly instead of by `pipeline_parallel_split_points`.")
    settings.layout |= {"schedule": schedule, "virtual_stages": chunks}


def _read_titan_training(settings: Settings) -> None:
    layout, train = settings.layout, settings.train
    train["seq_len"] = settings.get_size("training.seq_len", default=2048, most=MAX_TOKENS)
    local = settings.get_size("training.local_batch_size", "training.batch_size", default=8, most=MAX_BATCH)
    name = "training.global_batch_size"
    total = None if str(settings.get(name)) in ("-1", "None") else settings.get_size(name, most=MAX_BATCH)
    part = settings.get_optional_size(f"{PARALLELISM}pipeline_parallel_microbatch_size", most=MAX_BATCH)
    count = settings.get_optional_size("experimental.pipeline_parallel_microbatches", most=MAX_BATCH)
    micro_batch = local
    if layout["pp"] > 1:
        micro_batch = part or (local // count if count and local % count == 0 else 1)
        if local % micro_batch:
            raise settings.refuse(f"{PARALLELISM}pipeline_parallel_microbatch_size", f"Use a divisor of {local}.")
        if part is None and count is None:
            settings.assume(f"{PARALLELISM}pipeline_parallel_microbatch_size", 1)
    settings.set_batch(total or local * layout["dp"], micro_batch, name)
    train["precision"] = _read_titan_precision(settings)
    layout["recompute"] = _read_titan_recompute(settings)
    sequence = layout["tp"] > 1
    rotate = settings.get_choice(
        (f"{PARALLELISM}context_parallel_rotate_method", "experimental.context_parallel_rotate_method"),
        {"allgather": "all_gather", "alltoall": "ring"},
        "allgather",
    )
    compiles = settings.get_flag("compile.enable", "training.compile")
    asynchronous = settings.get_flag(
        f"{PARALLELISM}enable_async_tensor_parallel", "experimental.enable_async_tensor_parallel"
    )
    if asynchronous and sequence:
        settings.notes.append("The plan does not overlap tensor-parallel communication (async tensor parallelism).")
    if settings.get_flag("training.enable_cpu_offload"):
        settings.notes.append("The plan keeps all state in GPU memory, without CPU offload.")
    layout |= {
        "sequence_parallel": sequence,
        "regather": sequence and layout["recompute"] == "selective",
        "cp_method": rotate,
    }
    train["compile"] = compiles
    settings.resources["stack"] = "fsdp2" if compiles else "fsdp2_eager"


def _read_titan_precision(settings: Settings) -> str:
    converters = str(settings.get("model.converters") or "").lower()
    if "float8" in converters or "mx" in converters or settings.get_flag("float8.enable_float8_linear"):
        return "fp8"
    if settings.get("training.dtype") == "bfloat16":
        return "bf16_state"
    name = "training.mixed_precision_param"
    found: str = settings.get_choice((name,), {"bfloat16": "bf16", "float32": "fp32"}, "bfloat16")
    return found


def _read_titan_recompute(settings: Settings) -> str:
    modes = {"none": "none", "full": "full", "selective": "selective", "memory_budget": "memory_budget"}
    mode: str = settings.get_choice((f"{AC}mode",), modes, "selective")
    option = settings.get(f"{AC}selective_ac_option")
    if mode == "memory_budget":
        settings.notes.append("The plan uses selective recompute instead of a memory budget.")
        return "selective"
    if mode == "selective" and str(option or "2") not in ("op", "1"):
        text = (
            f"The plan recomputes single operations. The file recomputes one of every {str(option or 2)[:20]} layers."
        )
        settings.notes.append(text)
    return "full" if mode == "selective" and str(option) == "1" else mode


_NANOTRON_WITHOUT_EFFECT = (
    r"^(?:checkpoints|data_stages|general|lighteval|logging|profiler|s3_upload|tokenizer|metrics_logging)(?:\.|$)"
    r"|^optimizer\.(?:adam_|torch_adam|clip_grad|learning_rate|optimizer_factory|weight_decay)|^model\.(?:init_method|ddp_bucket)"
    r"|^tokens\.(?:limit_|train_steps|val_check)|^parallelism\.tp_linear_async"
)
_ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}
_MODES = {"all_reduce": False, "reduce_scatter": True}
_TYPES = {"is_llama_config": "llama", "is_qwen2_config": "qwen2", "is_starcoder2_config": "starcoder2"}


def read_nanotron(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a YAML file of nanotron."""
    settings = Settings("nanotron", values, ranks, _NANOTRON_WITHOUT_EFFECT)
    degrees = {axis: settings.get_size(f"{PARALLELISM}{axis}") for axis in ("dp", "pp", "tp")}
    degrees["cp"] = settings.get_optional_size(f"{PARALLELISM}context_parallel_size") or 1
    degrees["ep"] = settings.get_optional_size(f"{PARALLELISM}expert_parallel_size") or 1
    settings.set_degrees(**degrees)
    layout = settings.layout
    sequence = settings.get_choice((f"{PARALLELISM}tp_mode",), _MODES, "all_reduce") and layout["tp"] > 1
    regather = settings.get_flag(f"{PARALLELISM}tp_recompute_allgather", default=True)
    full = settings.get_flag(f"{PARALLELISM}recompute_layer")
    if settings.get_flag(f"{PARALLELISM}moe_layer_recompute") and not full:
        settings.notes.append("The plan does not recompute the experts alone (`moe_layer_recompute`).")
    layout |= {
        "schedule": settings.get_choice((f"{PARALLELISM}pp_engine",), _ENGINES, "afab"),
        "sequence_parallel": sequence,
        "regather": sequence and regather,
        "recompute": "full" if full else "none",
        "zero": settings.get_size("optimizer.zero_stage", default=0, least=0, most=3),
    }
    micro_batch = settings.get_size("tokens.micro_batch_size", most=MAX_BATCH)
    accumulation = settings.get_size("tokens.batch_accumulation_per_replica", default=1, most=MAX_BATCH)
    settings.train["seq_len"] = settings.get_size("tokens.sequence_length", most=MAX_TOKENS)
    settings.set_batch(micro_batch * accumulation * layout["dp"], micro_batch, "tokens.micro_batch_size")
    types = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16", "double": "fp32"}
    precision = settings.get_choice(("model.dtype",), types, "bfloat16")
    accumulates = settings.get_flag("optimizer.accumulate_grad_in_fp32")
    if precision == "bf16" and not accumulates:
        precision = "bf16_gradients"
    settings.train["precision"] = precision
    settings.notes.append("The step time is for unknown software, because the planner has no rows of nanotron.")
    settings.model = _read_nanotron_model(settings)
    return settings.build()


def _read_nanotron_model(settings: Settings) -> dict[str, Any] | None:
    prefix = "model.model_config."
    config = {key.removeprefix(prefix): value for key, value in settings.values.items() if key.startswith(prefix)}
    kinds = [kind for name, kind in _TYPES.items() if config.pop(name, None)]
    settings.skip(*(key for key in settings.values if key.startswith(prefix)))
    multiple = settings.get_optional_size("model.make_vocab_size_divisible_by", most=MAX_TOKENS) or 1
    vocabulary = config.get("vocab_size")
    if type(vocabulary) is int:
        config["vocab_size"] = -(-vocabulary // (multiple * settings.layout["tp"])) * multiple * settings.layout["tp"]
    try:
        found = read_config({**config, "model_type": kinds[0] if kinds else None})
    except SpecError as error:
        message = error.problems[0].message.replace("`config.", f"`{prefix}")
        settings.notes.append(f"The model was not imported. {message}")
        return None
    settings.notes.extend(found.notes)
    longest = max(found.model.max_seq_len, settings.train["seq_len"])  # nanotron trains longer sequences, too
    return {**found.model.model_dump(), "max_seq_len": longest}
