"""GPT, Llama and Mixtral decoders, as much of them as one chunk of one rank holds.

Parameter names and shapes match `planner.facts.model_shapes`.
Hidden states are (batch, seq[/cp][/tp], hidden) in the compute type; norms, routers and the loss run in fp32.
"""

from workers.trainer.model.attention import Attention, rotary, rotate
from workers.trainer.model.decoder import Block, Decoder, initialise, unit_modules, unit_parameter
from workers.trainer.model.layers import Linear, Mlp, Norm, Strategy, Table

__all__ = [
    "Attention",
    "Block",
    "Decoder",
    "Linear",
    "Mlp",
    "Norm",
    "Strategy",
    "Table",
    "initialise",
    "rotary",
    "rotate",
    "unit_modules",
    "unit_parameter",
]
