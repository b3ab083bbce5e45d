"""What torch imports when it is first needed: hundreds of modules, tens of MiB of a process that are not training's."""

# ruff: noqa: F401 - imported to be there
from __future__ import annotations


def load_for_given_gradients() -> None:
    """`torch.autograd.backward` with gradients compares their shapes by sympy, symbols or not."""
    import torch.fx.experimental.symbolic_shapes


def load_for_hidden_operations() -> None:
    """FSDP2's hooks and a custom operator's gradients are kept out of compiled code, by asking the compiler."""
    import torch._dynamo


def load_compiler() -> None:
    """`torch.compile` and Inductor."""
    import torch._dynamo
    import torch._inductor.compile_fx
