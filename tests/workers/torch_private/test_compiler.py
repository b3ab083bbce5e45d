"""AdamW, wrapped groups, and the private API of torch behave as in the checked version."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from workers.meter import Recorder, register_metered_backend
from workers.torch_private import CHECKED_ON
from workers.torch_private.compiler import AdamW, FakeTensorMode, storage_key

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


def test_adamw_matches_torch() -> None:
    actual, reference = ([torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)] for _ in range(2))
    made = [
        kind(own, lr=0.1, weight_decay=0.2, fused=True)
        for kind, own in ((AdamW, actual), (torch.optim.AdamW, reference))
    ]
    for step in range(3):
        for optimizer, own in zip(made, (actual, reference), strict=True):
            for parameter in own:
                parameter.grad = torch.full_like(parameter, 0.5 - step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, reference, strict=True))
    assert all(parameter.grad is None and not parameter.grad_fn for parameter in actual)
    stored, expected = (optimizer.state_dict() for optimizer in made)
    assert str(stored) == str(expected)
    made[0].load_state_dict(expected)
    assert str(made[0].state_dict()) == str(expected)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(0)
    dist.init_process_group(register_metered_backend(recorder, "cpu"), store=dist.HashStore(), rank=0, world_size=1)
    yield recorder
    dist.destroy_process_group()
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_script_has_the_same_traffic(recorder: Recorder) -> None:
    model = DistributedDataParallel(torch.nn.BatchNorm1d(4))  # whose buffers C++ sends in each forward

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        dist.all_reduce(y, async_op=True).wait()
        return y * 2

    before = {cell["op"]: cell["count"] for cell in recorder.get_cells()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace the builtin `_thread")
        step(torch.ones(2, 4))
    format_count = {cell["op"]: cell["count"] - before.get(cell["op"], 0) for cell in recorder.get_cells()}
    assert format_count == {"all_gather": 0, "all_reduce": 1, "broadcast": 2}, "two: its buffers are of two types"


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
