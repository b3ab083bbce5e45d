"""Config files of other tools with the layout that they describe.

Each text has the settings of a published file that matter for the layout, in the form of that file. `source` names the
repository and the path of the file. The expected values were worked out by hand from the code of the tool.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """File of a tool, and the expected fields of `layout` and `train`.

    Attributes:
        parameters: Size of the model in the file, or None if the file describes no model.
        unread: Settings that the planner does not understand.
    """

    source: str
    text: str
    tool: str
    ranks: int | None
    layout: dict[str, Any]
    train: dict[str, Any]
    parameters: int | None = None
    stack: str | None = None
    unread: tuple[str, ...] = ()


DEGREES = {"dp": 1, "pp": 1, "tp": 1, "cp": 1}
TITAN = "pytorch/torchtitan: torchtitan/models"
TITAN_405B = """
[job]
description = "Llama 3 405B training"
[model]
name = "llama3"
flavor = "405B"
converters = "float8"
[optimizer]
name = "AdamW"
lr = 8e-5
[training]
batch_size = 2
seq_len = 8192
compile = true
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = 'full' # ['none', 'selective', 'full']
[float8]
enable_fsdp_float8_all_gather = true
"""
TITAN_671B = """
[model]
name = "deepseek_v3"
flavor = "671B"
[training]
local_batch_size = 8
seq_len = 4096
steps = 10_000
[parallelism]
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default" # default / never / always
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = 'op'
[compile]
enable = true
components = ["loss"]
[quantize.linear.float8]
filter_fqns = ["output", "router.gate"]
"""
TITAN_HSDP = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
global_batch_size = 128
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[activation_checkpoint]
mode = "none"
"""
TITAN_2024 = """
[model]
name = "llama3"
flavor = "70B"
[training]
batch_size = 8
seq_len = 8192
tensor_parallel_degree = 8
data_parallel_shard_degree = 4
compile = false
dataset = "c4"
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "GPipe"
pipeline_parallel_microbatches = 4
[activation_checkpoint]
mode = "full"
"""
MEGATRON = "NVIDIA/Megatron-LM"
GPT3_175B = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
# Change for multinode config
NUM_NODES=128
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --weight-decay 0.1
    --fp16
    --lr 6.0e-5
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
DATA_ARGS=(
    --vocab-file $VOCAB_FILE
    --merge-file $MERGE_FILE
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    --save $CHECKPOINT_PATH
"""
LLAMA3_8B_FP8 = """#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=1
TP_SIZE=1
CP_SIZE=1
MICRO_BATCH_SIZE=1
SEQ_LENGTH=8192
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank ${NODE_RANK:-0}
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 1000000
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE
    --global-batch-size ${GBS:-128}
    --bf16
    --grad-reduce-in-bf16
)
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    --context-parallel-size $CP_SIZE
    # --pipeline-model-parallel-size $PP_SIZE
    --sequence-parallel
)
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
DATA_ARGS_LIST+=("--mock-data" "--vocab-size 128256")
"""
MIXTRAL_8X22B = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
TEST_TYPE: "release"
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 8
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --sequence-parallel: true
  --disable-bias-linear: true
  --micro-batch-size: 1
  --global-batch-size: 256
  --untie-embeddings-and-output-weights: true
  --position-embedding-type: rope
  --normalization: RMSNorm
  --swiglu: true
  --num-layers: 56
  --hidden-size: 6144
  --ffn-hidden-size: 16384
  --num-attention-heads: 48
  --group-query-attention: true
  --num-query-groups: 8
  --seq-length: 4096
  --vocab-size: 32768
  --make-vocab-size-divisible-by: 128
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --expert-model-parallel-size: 8
  --num-experts: 8
  --moe-router-topk: 2
  --moe-grouped-gemm: true
  --moe-token-dispatcher-type: alltoall
  --data-path: ${DATA_BLEND}
  --bf16: true
METRICS:
  - "iteration-time"
"""
GPT3_VP = """
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-file: ${DATA_PATH}/vocab.json
  --merge-file: ${DATA_PATH}/merges.txt
  --transformer-impl: local
  --tensor-model-parallel-size: 1
  --pipeline-model-parallel-size: 4
  --num-layers-per-virtual-pipeline-stage: 1
  --recompute-granularity: full
  --recompute-method: uniform
  --recompute-num-layers: 1
  --bf16: true
"""
GPT3_CP = """
MODEL_ARGS:
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --context-parallel-size: 2
  --sequence-parallel: true
  --cp-comm-type: a2a
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
"""
MEGATRON_FSDP = """
torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 128 --seq-length 8192 \\
  --tensor-model-parallel-size 1 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params \\
  --use-distributed-optimizer --bf16 --hidden-dropout 0 --attention-dropout 0
"""
BRIDGE_OVERRIDE = """
model_config:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 2
  context_parallel_size: 1
train_config:
  train_iters: 500000
  global_batch_size: 256
  micro_batch_size: 4
optimizer_config:
  lr: 0.00025
ddp_config:
  grad_reduce_in_fp32: true
"""
BRIDGE_DEEPSEEK = """
_target_: megatron.bridge.training.config.ConfigContainer
ddp:
  average_in_collective: true
  data_parallel_sharding_strategy: no_shard
  grad_reduce_in_fp32: false
  overlap_grad_reduce: false
  use_distributed_optimizer: true
  use_megatron_fsdp: false
mixed_precision:
  bf16: true
  fp8: hybrid
  grad_reduce_in_fp32: false
model:
  add_bias_linear: false
  bf16: true
  expert_model_parallel_size: 64
  expert_tensor_parallel_size: 1
  ffn_hidden_size: 18432
  fp8: null
  gated_linear_unit: true
  hidden_dropout: 0.0
  hidden_size: 7168
  kv_channels: 64
  kv_lora_rank: 512
  make_vocab_size_divisible_by: 1280
  moe_ffn_hidden_size: 2048
  moe_layer_freq: "[0]*3+[1]*58"
  moe_router_enable_expert_bias: true
  moe_router_topk: 8
  moe_shared_expert_intermediate_size: 2048
  moe_token_dispatcher_type: flex
  multi_latent_attention: true
  normalization: RMSNorm
  num_attention_heads: 128
  num_layers: 61
  num_moe_experts: 256
  num_query_groups: 128
  pipeline_model_parallel_layout: Et|(tt|)*30mL
  pipeline_model_parallel_size: 8
  position_embedding_type: rope
  q_lora_rank: 1536
  qk_head_dim: 128
  qk_layernorm: true
  qk_pos_emb_head_dim: 64
  recompute_granularity: selective
  recompute_modules:
  - mla_up_proj
  - mlp
  seq_length: 4096
  sequence_parallel: true
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  v_head_dim: 128
  virtual_pipeline_model_parallel_size: 4
  vocab_size: 129280
train:
  global_batch_size: 8192
  micro_batch_size: 1
"""
NEMO_175B = """
run:
  name: gpt3_175b
trainer:
  num_nodes: 128
  devices: 8
  accelerator: gpu
  precision: bf16
  max_steps: 75000
model:
  micro_batch_size: 1
  global_batch_size: 2048
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 8
  virtual_pipeline_model_parallel_size: 12 # interleaved pipeline
  encoder_seq_length: 2048
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 96
  hidden_size: 12288
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 96
  hidden_dropout: 0.1
  make_vocab_size_divisible_by: 128
  activations_checkpoint_granularity: selective
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 0
  sequence_parallel: True
  tokenizer:
    library: 'megatron'
    type: 'GPT2BPETokenizer'
  megatron_amp_O2: True
  transformer_engine: True
  fp8: False
  fp8_hybrid: True
  gradient_accumulation_fusion: True
  optim:
    name: distributed_fused_adam
    overlap_grad_sync: True
    lr: 0.9e-4
"""
NEMO_2 = """
trainer:
  devices: 8
  num_nodes: 4
  plugins:
    _target_: nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision
    precision: bf16-mixed
    fp8: hybrid
    grad_reduce_in_fp32: false
  strategy:
    _target_: nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy
    context_parallel_size: 2
    ddp:
      use_distributed_optimizer: true
      overlap_grad_reduce: true
    pipeline_model_parallel_size: 1
    sequence_parallel: true
    tensor_model_parallel_size: 2
    virtual_pipeline_model_parallel_size: null
data:
  global_batch_size: 128
  micro_batch_size: 1
  seq_length: 8192
"""
DS_PIPE = """
{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2,
 "steps_per_print": 10, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "bf16": {"enabled": true},
 "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000}, "wall_clock_breakdown": false}
"""
DS_AUTO = """
{"fp16": {"enabled": true, "loss_scale": 0},
 "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
   "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": "auto", "zero_quantized_weights": true},
 "gradient_accumulation_steps": 1, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
"""
DS_TP = """
{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4},
 "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_accumulation_steps": 4}
"""
ACCELERATE_FSDP1 = """
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
"""
ACCELERATE_ND = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_reshard_after_forward: true
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
tpu_env: []
"""
ACCELERATE_HYBRID = """
distributed_type: FSDP
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_offload_params: true
mixed_precision: no
num_machines: 4
num_processes: 32
"""
ACCELERATE_DS = """
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  zero3_init_flag: true
  zero_stage: 3
mixed_precision: bf16
num_processes: 16
"""
ACCELERATE_MEGATRON = """
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_processes: 8
"""
LIGHTNING_FSDP = """
seed_everything: 42
trainer:
  num_nodes: 2
  devices: 8
  precision: bf16-mixed
  accumulate_grad_batches: 4
  max_epochs: 1
  strategy:
    class_path: lightning.pytorch.strategies.FSDPStrategy
    init_args:
      sharding_strategy: HYBRID_SHARD
      auto_wrap_policy: [modelgenerator.huggingface_models.fm4bio.modeling_fm4bio.FM4BioLayer]
      activation_checkpointing_policy: [modelgenerator.huggingface_models.fm4bio.modeling_fm4bio.FM4BioLayer]
data:
  class_path: modelgenerator.data.DMSFitnessPrediction
  init_args:
    batch_size: 2
"""
LIGHTNING_DEEPSPEED = """
trainer:
  devices: [0, 1, 2, 3]
  precision: bf16-true
  strategy: deepspeed_stage_2_offload
"""
LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
precision: bf16-true
devices: 4
num_nodes: 1
data:
  class_path: litgpt.data.Alpaca2k
  init_args:
    mask_prompt: false
train:
  global_batch_size: 64
  micro_batch_size: 4
  max_seq_length: 512
  max_tokens:
eval:
  interval: 25
"""
NANOTRON = """
general:
  project: debug
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    eos_token_id: 2
    hidden_act: silu
    hidden_size: 16
    initializer_range: 0.02
    intermediate_size: 64
    is_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 4
    rms_norm_eps: 1.0e-05
    tie_word_embeddings: true
    vocab_size: 256
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 1
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: true
  tp_mode: REDUCE_SCATTER
tokens:
  batch_accumulation_per_replica: 4
  micro_batch_size: 2
  sequence_length: 256
  train_steps: 15
"""
NANOTRON_AFAB = """
model:
  dtype: float32
optimizer:
  accumulate_grad_in_fp32: false
  zero_stage: 0
parallelism:
  dp: 4
  pp: 1
  tp: 8
  recompute_layer: true
tokens:
  micro_batch_size: 1
  sequence_length: 4096
"""
SEQUENCE = {"sequence_parallel": True, "regather": True}
NEOX_20B = """
{
  # parallelism settings
  "pipe-parallel-size": 4,
  "model-parallel-size": 2,
  "num-layers": 44,
  "hidden-size": 6144,
  "num-attention-heads": 64,
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "gpt_j_residual": true,
  "zero_optimization": {
  "stage": 1,
  "allgather_partitions": True,
  "reduce_bucket_size": 1260000000,
  },
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 32,
  "checkpoint-activations": true,
  "checkpoint-num-layers": 1,
  "fp16": {
    "fp16": true,
    "enabled": true,
    "loss_scale": 0,
  },
  "train-iters": 150000,
}
"""
CASES = (
    Case(
        "EleutherAI/gpt-neox: configs/20B.yml",
        NEOX_20B,
        "GPT-NeoX",
        96,
        DEGREES | {"dp": 12, "pp": 4, "tp": 2, "zero": 1, "recompute": "full", "sequence_parallel": False},
        {"global_batch": 1536, "micro_batches": 32, "seq_len": 2048, "precision": "bf16_gradients"},
        stack="deepspeed",
    ),
    Case(
        f"{TITAN}/llama3/train_configs/llama3_405b.toml",
        TITAN_405B,
        "torchtitan",
        128,
        {"dp": 16, "tp": 8, "pp": 1, "cp": 1, "zero": 3, "recompute": "full", "sequence_parallel": True},
        {"global_batch": 32, "micro_batches": 1, "seq_len": 8192, "precision": "fp8", "compile": True},
        405_853_388_800,
        "fsdp2",
    ),
    Case(
        f"{TITAN}/deepseek_v3/train_configs/deepseek_v3_671b.toml, with pp 4, tp 8, and ep 8",
        TITAN_671B,
        "torchtitan",
        256,
        {"dp": 8, "tp": 8, "pp": 4, "ep": 8, "zero": 1, "schedule": "interleaved_1f1b", "virtual_stages": 2}
        | {"recompute": "selective", **SEQUENCE},
        {"global_batch": 64, "micro_batches": 8, "seq_len": 4096, "precision": "bf16"},
        671_026_419_200,
        "fsdp2",
    ),
    Case(
        "pytorch/torchtitan: tests/integration_tests/features.py, hsdp+cp",
        TITAN_HSDP,
        "torchtitan",
        None,
        {"dp": 8, "cp": 2, "tp": 1, "pp": 1, "zero": 3, "dp_replicas": 2, "cp_method": "ring", "recompute": "none"},
        {"global_batch": 128, "micro_batches": 4, "seq_len": 8192, "precision": "bf16", "compile": False},
        8_030_261_248,
        "fsdp2_eager",
    ),
    Case(
        "pytorch/torchtitan, release 2024: train_configs/llama3_70b.toml, with pp 2",
        TITAN_2024,
        "torchtitan",
        64,
        {"dp": 4, "tp": 8, "pp": 2, "zero": 1, "schedule": "gpipe", "virtual_stages": 1, "recompute": "full"},
        {"global_batch": 32, "micro_batches": 4, "seq_len": 8192, "precision": "bf16"},
        70_553_706_496,
    ),
    Case(
        f"{MEGATRON}: examples/gpt3/train_gpt3_175b_distributed.sh",
        GPT3_175B,
        "Megatron-LM",
        None,
        {"dp": 8, "tp": 8, "pp": 16, "cp": 1, "ep": 1, "zero": 0, "schedule": "1f1b", "scatter_gather": True}
        | {"recompute": "none", "sequence_parallel": False},
        {"global_batch": 1536, "micro_batches": 192, "seq_len": 2048, "precision": "bf16_gradients", "dropout": True},
        174_615_846_912,
        "megatron",
    ),
    Case(
        f"{MEGATRON}: examples/llama/train_llama3_8b_h100_fp8.sh",
        LLAMA3_8B_FP8,
        "Megatron-LM",
        None,
        {**DEGREES, "dp": 8, "zero": 1, "sequence_parallel": False, "recompute": "none"},
        {"global_batch": 128, "micro_batches": 16, "seq_len": 8192, "precision": "fp8_gradients", "overlap": True},
        8_030_261_248,
        unread=("--fp8-param-gather",),
    ),
    Case(
        f"{MEGATRON}: tests/functional_tests/test_cases/core/models/gpt/mixtral_8x22b_tp2pp8ep8vpp1_release",
        MIXTRAL_8X22B,
        "Megatron-LM",
        128,
        {"dp": 8, "tp": 2, "pp": 8, "ep": 8, "zero": 1, **SEQUENCE},
        {"global_batch": 256, "micro_batches": 32, "seq_len": 4096, "precision": "bf16", "dropout": False},
        140_630_071_296,
        unread=("--moe-grouped-gemm",),
    ),
    Case(
        f"{MEGATRON}: tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp1_pp4_vp1",
        GPT3_VP,
        "Megatron-LM",
        8,
        {"dp": 2, "pp": 4, "tp": 1, "schedule": "interleaved_1f1b", "virtual_stages": 3, "recompute": "full"},
        {"global_batch": 32, "micro_batches": 4, "precision": "bf16", "attention": "unfused", "dropout": True},
        64_109_568,
    ),
    Case(
        f"{MEGATRON}: tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp2_pp2_cp2_nondeterministic",
        GPT3_CP,
        "Megatron-LM",
        16,
        {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "cp_method": "ring", **SEQUENCE},
        {"global_batch": 32, "micro_batches": 4, "seq_len": 1024, "precision": "fp32"},
    ),
    Case(
        f"{MEGATRON}: examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh, in bf16",
        MEGATRON_FSDP,
        "Megatron-LM",
        None,
        {**DEGREES, "dp": 8, "zero": 3},
        {"global_batch": 128, "micro_batches": 16, "seq_len": 8192, "precision": "bf16"},
    ),
    Case(
        "NVIDIA-NeMo/Megatron-Bridge: examples/llm/llama3_8b/conf/llama3_8b_pretrain_override_example.yaml",
        BRIDGE_OVERRIDE,
        "NeMo",
        8,
        {"dp": 2, "tp": 2, "pp": 2, "cp": 1},
        {"global_batch": 256, "micro_batches": 32},
    ),
    Case(
        "NVIDIA-NeMo/Megatron-Bridge: scripts/performance/dryrun_configs/deepseek, h100_fp8_sc_v1",
        BRIDGE_DEEPSEEK,
        "NeMo",
        1024,
        {"dp": 64, "tp": 2, "pp": 8, "ep": 32, "zero": 1, "virtual_stages": 4, "recompute": "selective", **SEQUENCE},
        {"global_batch": 8192, "micro_batches": 128, "seq_len": 4096, "precision": "fp8_gradients", "overlap": False},
        671_044_769_280,
        "megatron",
    ),
    Case(
        "NVIDIA/NeMo-Framework-Launcher: launcher_scripts/conf/training/gpt3/175b.yaml",
        NEMO_175B,
        "NeMo",
        None,
        {"dp": 32, "tp": 4, "pp": 8, "zero": 1, "virtual_stages": 12, "recompute": "selective", **SEQUENCE},
        {"global_batch": 2048, "micro_batches": 64, "seq_len": 2048, "precision": "bf16", "dropout": True},
        174_609_555_456,
        unread=("model.gradient_accumulation_fusion",),
    ),
    Case(
        "NVIDIA/NeMo: nemo/collections/llm/recipes/llama3_8b.py, as its YAML",
        NEMO_2,
        "NeMo",
        None,
        {"dp": 8, "tp": 2, "cp": 2, "pp": 1, "zero": 1, **SEQUENCE},
        {"global_batch": 128, "micro_batches": 16, "seq_len": 8192, "precision": "fp8_gradients", "overlap": True},
    ),
    Case(
        "deepspeedai/DeepSpeedExamples: training/pipeline_parallelism/ds_config.json, in bf16 with ZeRO-1",
        DS_PIPE,
        "DeepSpeed",
        None,
        {**DEGREES, "dp": 16, "zero": 1},
        {"global_batch": 256, "micro_batches": 2, "precision": "bf16_gradients"},
        stack="deepspeed",
    ),
    Case(
        "huggingface/accelerate: examples/deepspeed_config_templates/zero_stage3_offload_config.json",
        DS_AUTO,
        "DeepSpeed",
        8,
        {**DEGREES, "dp": 8, "zero": 3},
        {"precision": "bf16_gradients"},
        unread=("zero_optimization.zero_quantized_weights",),
    ),
    Case(
        "deepspeedai/DeepSpeedExamples: training/tensor_parallel/hf_integration/configs/ds_config.json",
        DS_TP,
        "DeepSpeed",
        32,
        {"dp": 8, "tp": 4, "pp": 1, "cp": 1, "zero": 1},
        {"global_batch": 64, "micro_batches": 4, "precision": "bf16"},
    ),
    Case(
        "huggingface/accelerate: examples/config_yaml_templates/fsdp.yaml, with SHARD_GRAD_OP",
        ACCELERATE_FSDP1,
        "accelerate",
        None,
        {**DEGREES, "dp": 2, "zero": 2, "recompute": "none"},
        {"precision": "bf16"},
        stack="fsdp1",
    ),
    Case(
        "huggingface/accelerate: examples/torch_native_parallelism/configs/tp_hsdp.yaml",
        ACCELERATE_ND,
        "accelerate",
        None,
        {"dp": 4, "tp": 2, "pp": 1, "cp": 1, "zero": 3, "dp_replicas": 2, "recompute": "full"},
        {"precision": "bf16"},
        stack="fsdp2_eager",
    ),
    Case(
        "huggingface/accelerate: examples/slurm/fsdp_config.yaml, with HYBRID_SHARD on 4 machines",
        ACCELERATE_HYBRID,
        "accelerate",
        None,
        {**DEGREES, "dp": 32, "zero": 3, "dp_replicas": 4},
        {"precision": "fp32"},
    ),
    Case(
        "huggingface/accelerate: usage guide of DeepSpeed, plugin with ZeRO-3",
        ACCELERATE_DS,
        "accelerate",
        None,
        {**DEGREES, "dp": 16, "zero": 3},
        {"micro_batches": 4, "precision": "bf16_gradients"},
        stack="deepspeed",
    ),
    Case(
        "huggingface/accelerate: usage guide of Megatron-LM",
        ACCELERATE_MEGATRON,
        "accelerate",
        None,
        {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "recompute": "selective", **SEQUENCE},
        {"micro_batches": 2, "precision": "bf16"},
        stack="megatron",
    ),
    Case(
        "genbio-ai/ModelGenerator: docs, distributed inference with FSDPStrategy",
        LIGHTNING_FSDP,
        "Lightning",
        None,
        {**DEGREES, "dp": 16, "zero": 3, "dp_replicas": 2, "recompute": "full"},
        {"global_batch": 128, "micro_batches": 4, "precision": "bf16"},
        stack="fsdp1",
    ),
    Case(
        "Lightning-AI/pytorch-lightning: docs/source-pytorch/advanced/model_parallel/deepspeed.rst",
        LIGHTNING_DEEPSPEED,
        "Lightning",
        None,
        {**DEGREES, "dp": 4, "zero": 2},
        {"micro_batches": 1, "precision": "bf16_state"},
        stack="deepspeed",
    ),
    Case(
        "Lightning-AI/litgpt: config_hub/finetune/llama-3-8b/full.yaml",
        LITGPT,
        "LitGPT",
        None,
        {**DEGREES, "dp": 4, "zero": 3, "recompute": "full"},
        {"global_batch": 64, "micro_batches": 4, "seq_len": 512, "precision": "bf16_state"},
    ),
    Case(
        "huggingface/nanotron: examples/config_tiny_llama.yaml",
        NANOTRON,
        "nanotron",
        None,
        {"dp": 2, "pp": 2, "tp": 2, "cp": 1, "ep": 1, "zero": 1, "schedule": "1f1b", "recompute": "none", **SEQUENCE},
        {"global_batch": 16, "micro_batches": 4, "seq_len": 256, "precision": "bf16"},
        12_368,
    ),
    Case(
        "huggingface/nanotron: src/nanotron/config/parallelism_config.py, with its defaults",
        NANOTRON_AFAB,
        "nanotron",
        None,
        {"dp": 4, "pp": 1, "tp": 8, "zero": 0, "schedule": "gpipe", "sequence_parallel": False, "recompute": "full"},
        {"global_batch": 4, "micro_batches": 1, "seq_len": 4096, "precision": "fp32"},
    ),
)
