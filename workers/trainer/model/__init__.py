"""GPT, Llama, and Mixtral decoders: the layers of one chunk on one rank.

Parameter names and shapes match `planner.facts.models`. Hidden states are (batch, seq[/cp][/tp], hidden) in the compute
dtype. Norms, routers, and the loss run in fp32.
"""

from workers.trainer.model.decoder import Block, Decoder, get_unit_parameter, init_weights, list_unit_modules
from workers.trainer.model.layers import Attention, Linear, Mlp, Norm, Strategy, Table, apply_rotary, compute_rotary

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "Linear",
    "Mlp",
    "Norm",
    "Strategy",
    "Table",
    "apply_rotary",
    "compute_rotary",
    "get_unit_parameter",
    "init_weights",
    "list_unit_modules",
]
