"""The private API of torch is unchanged."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from workers.torch_private import CHECKED_ON
from workers.torch_private.compiler import FakeTensorMode, storage_key

SIGNATURES = {
    "_scaled_dot_product_flash_attention_for_cpu": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "_scaled_dot_product_flash_attention": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool "
    "is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor "
    "cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "_scaled_dot_product_flash_attention_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor "
    "out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool "
    "is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor "
    "grad_key, Tensor grad_value)",
    "_scaled_dot_product_efficient_attention": "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool "
    "compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor "
    "log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    "_scaled_dot_product_efficient_attention_backward": "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, "
    "Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
    "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
}


def test_the_installed_torch_is_the_checked_version() -> None:
    assert torch.__version__.split("+")[0] == CHECKED_ON, "check workers.torch_private against the new torch"


@pytest.mark.parametrize("name", SIGNATURES)
def test_kernel_schemas_are_unchanged(name: str) -> None:
    schema = str(getattr(torch.ops.aten, name).default._schema)
    assert schema == f"aten::{name}{SIGNATURES[name]}"


def test_private_group_api_is_unchanged() -> None:
    maker = list(inspect.signature(c10d._new_process_group_helper).parameters)
    assert maker[:3] == ["group_size", "group_rank", "global_ranks_in_group"]
    for entered in ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        assert hasattr(c10d._world, entered), entered
    assert list(inspect.signature(c10d._coalescing_manager).parameters) == ["group", "device", "async_ops"]
    assert hasattr(dist.ProcessGroup, "_register_backend")
    assert hasattr(dist.Work, "_get_duration")


def test_views_share_the_key_of_their_storage() -> None:
    with FakeTensorMode():
        one, other = torch.empty(4), torch.empty(4)
    keys = [storage_key(x.untyped_storage()) for x in (one, one[2:], other)]
    assert keys[0] == keys[1] != keys[2]
