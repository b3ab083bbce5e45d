"""Read layouts of Megatron-LM arguments, of NeMo, and of Megatron-Bridge, which share the names of their settings.

Defaults are those of megatron/training/arguments.py and megatron/core/transformer/transformer_config.py of Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from planner.facts.tool_layouts.megatron_model import read_model
from planner.facts.tool_layouts.settings import MAX_BATCH, MAX_TOKENS, ImportedLayout, Settings
from planner.facts.tool_layouts.shell_arguments import CONDITION

Names = Callable[..., tuple[str, ...]]
# Sections of NeMo 1 (model), Megatron-Bridge (its older examples add _config), and NeMo 2 (trainer.strategy).
_SECTIONS = (
    *("model", "train", "ddp", "optimizer", "dataset", "mixed_precision"),
    *("model_config", "train_config", "ddp_config", "optimizer_config", "dataset_config", "mixed_precision_config"),
    *("trainer.strategy", "trainer.strategy.ddp", "trainer.plugins", "trainer.strategy.config"),
    *("model.config", "data", "optim.config", "model.optim", "model.data", "dist", "comm_overlap"),
)
_NO_EFFECT_ON_COST = (
    r"lr|min[-_]lr|decoupled[-_]|log|logging|wandb|tensorboard|save|load|ckpt|dist[-_]ckpt|auto[-_]detect[-_]ckpt|tokenizer"
    r"|vocab[-_]file|merge[-_]file|data[-_]|split|eval|exit|seed|init[-_]method|adam|weight[-_]decay|clip[-_]grad"
    r"|train[-_]iters|train[-_]samples|num[-_]workers|timing|profile|distributed[-_]timeout|manual[-_]gc|finetune"
    r"|no[-_]load|no[-_]save|no[-_]mmap|mock[-_]data|rotary[-_]|norm[-_]epsilon|layernorm[-_]epsilon|moe[-_]aux"
    r"|moe[-_]router[-_](load|score|dtype|num|group|pre|bias|topk[-_]scal)|mscale|beta[-_]|hysteresis|loss[-_]scale"
    r"|initial[-_]loss|master[-_]|node[-_]rank|rdzv|tiktoken|override|start[-_]weight|end[-_]weight|apply[-_]query"
    r"|attention[-_]softmax|use[-_]mcore[-_]models|empty[-_]unused|distributed[-_]backend|reset[-_]|eod|check[-_]for"
    r"|async[-_]save|use[-_](persistent|checkpoint)|no[-_]use[-_]tokenizer|no[-_]position|dataloader|trust[-_]"
    r"|fp8[-_](hybrid|e4m3|margin|interval|amax)|average[-_]in|mmap|path[-_]to[-_]cache|name|legacy|no[-_]create|exp[-_]manager"
)
_WITHOUT_EFFECT = (
    rf"^--(?:{_NO_EFFECT_ON_COST})|^(?:run|exp_manager|log|resume|checkpoint|logger|scheduler|rng|tokenizer)\b"
)
_WITHOUT_EFFECT += (
    r"|^(?:checkpoint|logger|scheduler|rng|profiling|tokenizer|dataset|optimizer)_config\.|^(?:profiling|ft|env)"
)
_WITHOUT_EFFECT += rf"|^ENV_VARS|^TEST_TYPE|^METRICS|^LAUNCHER|^name$|\.(?:{_NO_EFFECT_ON_COST})"
_WITHOUT_EFFECT += r"|_target_$|_call_$|^trainer\.(?:max|val|limit|enable|accelerator|use_dist|benchmark|gradient_clip)"
_WITHOUT_EFFECT += (
    r"|^model\.(?:tokenizer|nsys_profile)\.|^model\.optim\.(?:betas|sched|lr)|^(?:model\.)?data\.|^optim\."
)
_WITHOUT_EFFECT += r"|^trainer\.(?:accumulate_grad_batches|replace_sampler|callbacks|log)|^dataset\."
_BF16 = {"bf16", "bf16-mixed", "bfloat16"}
_FP16 = {"16", "fp16", "16-mixed"}
_FSDP_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


class _Style(NamedTuple):
    tool: str
    names: Names


def _name_arguments(*keys: str) -> tuple[str, ...]:
    return tuple(f"--{key.replace('_', '-')}" for key in keys)


def _name_fields(*keys: str) -> tuple[str, ...]:
    """Return the names of settings in all sections. The first key of the section model is the name in sentences."""
    return tuple(f"{section}.{key}" for key in keys for section in _SECTIONS)


def read_arguments(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert command-line arguments of Megatron-LM."""
    values = {key.removeprefix("MODEL_ARGS."): value for key, value in values.items()}
    values = {f"--{key[2:].replace('_', '-')}" if key.startswith("--") else key: v for key, v in values.items()}
    settings = Settings("Megatron-LM", values, ranks, _WITHOUT_EFFECT)
    if settings.get(CONDITION):
        settings.notes.append("The script has conditions (`if`). The plan uses the arguments of all branches.")
    return _read(settings, _name_arguments)


def read_nemo(values: Mapping[str, Any], ranks: int | None) -> ImportedLayout:
    """Convert a config of NeMo or Megatron-Bridge."""
    return _read(Settings("NeMo", values, ranks, _WITHOUT_EFFECT), _name_fields)


def _read(settings: Settings, names: Names) -> ImportedLayout:
    tp = settings.get_size(*names("tensor_model_parallel_size", "model_parallel_size"), default=1)
    pp = settings.get_size(*names("pipeline_model_parallel_size"), default=1)
    cp = settings.get_size(*names("context_parallel_size"), default=1)
    dp = settings.compute_dp(_read_ranks(settings, names), {"tp": tp, "pp": pp, "cp": cp})
    settings.set_degrees(dp=dp, tp=tp, pp=pp, cp=cp, ep=_read_experts(settings, names, tp))
    _read_sharding(settings, names)
    _read_tensor_parallelism(settings, names)
    settings.model = read_model(settings, names)
    _read_pipeline(settings, names)
    _read_batch(settings, names)
    _read_precision(settings, names)
    _read_recompute(settings, names)
    _read_kernels(settings, names)
    return settings.build()


def _read_ranks(settings: Settings, names: Names) -> int | None:
    """Return the ranks that the launcher starts, or None if the file has no launcher."""
    if names is _name_arguments:
        per_node = settings.get_optional_size("--nproc-per-node")
        nodes = settings.get_optional_size("--nnodes") if per_node else None
        settings.skip("--nnodes")
    else:
        per_node = settings.get_optional_size("trainer.devices")
        nodes = settings.get_optional_size("trainer.num_nodes")
    if per_node is None:
        return None
    return per_node * (nodes or 1)


def _read_experts(settings: Settings, names: Names, tp: int) -> int:
    """Return the expert-parallel degree if tensor parallelism divides each expert, as the planner assumes."""
    ep = settings.get_optional_size(*names("expert_model_parallel_size")) or 1
    if ep == 1 and not settings.has(*names("num_experts", "num_moe_experts")):
        settings.skip(*names("expert_tensor_parallel_size"))
        return 1
    expert_tp = settings.get_optional_size(*names("expert_tensor_parallel_size")) or tp
    if ep * expert_tp % tp:
        name = settings.find(*names("expert_tensor_parallel_size"))
        raise settings.refuse(name, f"The planner needs expert parallel ranks that are a multiple of tp {tp}.")
    if expert_tp != tp and ep > 1:
        text = f"The plan divides each expert over tp {tp} with ep {ep * expert_tp // tp}"
        settings.notes.append(f"{text}, instead of expert tp {expert_tp} with ep {ep}.")
    return ep * expert_tp // tp


def _read_sharding(settings: Settings, names: Names) -> None:
    zero = int(settings.get_flag(*names("use_distributed_optimizer")))
    optimizer = settings.get("model.optim.name")
    zero = 1 if optimizer == "distributed_fused_adam" else zero
    if settings.get_flag(*names("use_megatron_fsdp", "use_custom_fsdp")):
        zero = settings.get_choice(names("data_parallel_sharding_strategy"), _FSDP_STAGES, "no_shard")
    elif settings.get_flag(*names("use_torch_fsdp2")):
        zero = 3
    settings.skip(*names("data_parallel_sharding_strategy"))
    replicas = settings.get_optional_size(*names("num_distributed_optimizer_instances")) or 1
    settings.layout |= {"zero": zero, "dp_replicas": replicas if zero else 1}
    overlap = settings.get_flag(*names("overlap_grad_reduce")) or settings.get_flag("model.optim.overlap_grad_sync")
    settings.skip(*names("overlap_param_gather"), "model.optim.overlap_param_sync")
    settings.train["overlap"] = overlap


def _read_tensor_parallelism(settings: Settings, names: Names) -> None:
    tp, pp = settings.layout["tp"], settings.layout["pp"]
    sequence = settings.get_flag(*names("sequence_parallel")) and tp > 1
    method = str(settings.get(*names("cp_comm_type")) or "p2p")
    # Megatron keeps the sharded input of a matmul and gathers it again in backward (2205.05198 section 4.2.2), and
    # stages send a shard of the activations per tensor rank (2104.04473 section 4.1).
    settings.layout |= {
        "sequence_parallel": sequence,
        "regather": sequence,
        "scatter_gather": pp > 1 and tp > 1 and not sequence,
        "cp_method": "all_gather" if method == "all_gather" else "ring",
    }
    if settings.layout["cp"] > 1 and method not in ("p2p", "all_gather"):
        settings.notes.append(f"The plan uses ring attention instead of `{method[:40]}` for context parallelism.")


def _read_pipeline(settings: Settings, names: Names) -> None:
    pp, layers = settings.layout["pp"], settings.get_optional_size(*names("num_layers"))
    stages = settings.get_optional_size(
        *names("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    )
    name = settings.find(*names("num_layers_per_virtual_pipeline_stage"))
    per_stage = settings.get_optional_size(name)
    if stages is None and per_stage is not None and pp > 1:
        if layers is None or layers % (pp * per_stage):
            raise settings.refuse(name, f"Add the number of layers, a multiple of {pp * per_stage} (pp {pp}).")
        stages = layers // (pp * per_stage)
    stages = (stages or 1) if pp > 1 else 1
    settings.layout |= {"schedule": "interleaved_1f1b" if stages > 1 else "1f1b", "virtual_stages": stages}
    if pp > 1 and settings.has(*names("pipeline_model_parallel_layout")):
        settings.notes.append("The plan divides the layers evenly instead of by `pipeline_model_parallel_layout`.")


def _read_batch(settings: Settings, names: Names) -> None:
    length = names("seq_length", "encoder_seq_length", "sequence_length")
    tokens = settings.get_optional_size(*length, most=MAX_TOKENS)
    if tokens:
        settings.train["seq_len"] = tokens
    else:
        settings.notes.append("The file does not contain the sequence length.")
    micro_batch = settings.get_optional_size(*names("micro_batch_size"), most=MAX_BATCH)
    total = names("global_batch_size")
    if settings.has(*names("rampup_batch_size")):
        settings.notes.append("The plan uses the final batch size of `rampup_batch_size`.")
    global_batch = settings.get_optional_size(*total, most=MAX_BATCH)
    settings.set_batch(global_batch, micro_batch, settings.find(*total))


def _read_precision(settings: Settings, names: Names) -> None:
    recipe = str(settings.get("trainer.precision", "trainer.plugins.precision", "mixed_precision") or "").lower()
    is_bf16 = settings.get_flag(*names("bf16")) or recipe in _BF16 or recipe.startswith("bf16")
    is_fp16 = settings.get_flag(*names("fp16")) or recipe in _FP16 or recipe.startswith("fp16")
    fp8 = settings.get(*names("fp8_format", "fp8"))
    is_fp8 = str(fp8).lower() not in ("none", "false") or "fp8" in recipe
    if settings.get_flag("model.transformer_engine") and not settings.get_flag("model.fp8"):
        is_fp8 = False
    keeps_fp32 = settings.get(*names("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32"))
    reduces_bf16 = settings.get_flag(*names("grad_reduce_in_bf16")) or str(keeps_fp32).lower() == "false"
    if keeps_fp32 is None and is_fp16 and names is _name_arguments:
        reduces_bf16 = True  # only bf16 turns --accumulate-allreduce-grads-in-fp32 on by itself
    if not is_bf16 and not is_fp16 and not is_fp8:
        settings.train["precision"] = "fp32"
        if not recipe:
            settings.assume(names("bf16")[0], "false (fp32)")
        return
    if is_fp16:
        settings.notes.append("The plan uses bf16 instead of fp16, which has the same number of bytes.")
    settings.train["precision"] = ("fp8" if is_fp8 else "bf16") + ("_gradients" if reduces_bf16 else "")
    if settings.get("model.megatron_amp_O2") is False:
        settings.notes.append("The plan uses bf16 weights, as with `megatron_amp_O2`. Without it, weights are in fp32.")


def _read_recompute(settings: Settings, names: Names) -> None:
    keys = names("recompute_granularity", "activations_checkpoint_granularity")
    found = str(settings.get(*keys) or "none").lower()
    if settings.get_flag(*names("recompute_activations")):
        found = "selective"
    if settings.get_flag(*names("checkpoint_activations")):
        found = "full"
    if found not in ("none", "selective", "full"):
        raise settings.refuse(settings.find(*keys), "Use selective or full.")
    method = settings.get(*names("recompute_method", "activations_checkpoint_method"))
    count = settings.get_optional_size(*names("recompute_num_layers", "activations_checkpoint_num_layers"), least=0)
    if found == "full" and method == "block":
        text = f"The plan recomputes all layers. The file recomputes {count or 1} layers per pipeline stage."
        settings.notes.append(text)
    elif found == "full" and count is not None and count > 1:
        settings.notes.append(f"The plan stores the input of each layer. The file stores each {count}th input.")
    modules = settings.get(*names("recompute_modules"))
    if found == "selective" and modules not in (None, "core_attn", ["core_attn"]):
        settings.notes.append(
            "The plan recomputes the core of attention instead of the modules in `recompute_modules`."
        )
    settings.layout["recompute"] = found


def _read_kernels(settings: Settings, names: Names) -> None:
    """Read kernels, dropout, and options of the software stack."""
    backend = str(settings.get(*names("attention_backend")) or "auto").rpartition(".")[2].lower()
    local = str(settings.get(*names("transformer_impl"))) == "local"
    flash = settings.get_flag(*names("use_flash_attn"))
    settings.train["attention"] = "unfused" if backend in ("unfused", "local") or (local and not flash) else "fused"
    dropouts = [settings.get_number(*names(key), most=1) for key in ("hidden_dropout", "attention_dropout")]
    if names is _name_arguments and None in dropouts:
        settings.assume(names("hidden_dropout")[0], 0.1)
    default = 0.1 if names is _name_arguments else 0
    settings.train["dropout"] = any((default if rate is None else rate) > 0 for rate in dropouts)
    software: dict[str, Any] = {}
    dispatcher = settings.get(*names("moe_token_dispatcher_type"))
    has_experts = settings.has(*names("num_experts", "num_moe_experts"))
    if has_experts and dispatcher in ("alltoall", "flex"):
        software["dispatcher"] = dispatcher
    elif has_experts and settings.layout["ep"] > 1:
        settings.notes.append("The plan sends tokens to experts with all-to-all instead of all-gather.")
        software["dispatcher"] = "alltoall"
    if settings.get_flag(*names("overlap_moe_expert_parallel_comm")):
        software["overlap_experts"] = True
    if settings.get_flag(*names("deterministic_mode")):
        software["deterministic"] = True
    settings.resources |= {"stack": "megatron", **({"software": software} if software else {})}
