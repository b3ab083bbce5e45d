"""Define the faults: the changed source text and a small run that shows each fault."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.facts.spec import JobSpec
from tests.parity.cases import make_spec

SP = {"tp": 2, "sequence_parallel": True}
ZBV = {"pp": 2, "schedule": "zbv", "virtual_stages": 2}


class Edit(NamedTuple):
    """Replace `old`, which occurs once in `file`, with `new`."""

    file: str
    old: str
    new: str


class Fault(NamedTuple):
    """Describe a fault. A run without the fault trains `resumed` steps first, and the faulty run resumes from it.

    `precisions`: those in which the changed source text has an effect. `train` may set another one.
    """

    edits: tuple[Edit, ...]
    arch: str
    layout: dict[str, Any]
    micro_batches: int = 2
    variant: str = ""
    train: dict[str, Any] = {}
    resumed: int = 0
    precisions: tuple[str, ...] = ("fp32", "bf16")

    @property
    def spec(self) -> JobSpec:
        return self.build_spec()

    def build_spec(self, precision: str = "fp32") -> JobSpec:
        """Return the run of the fault, in this precision if the fault does not need another one."""
        train = {"steps": 3, "eval_every": 0, "verify": "on", "precision": precision, **self.train}
        train |= {"checkpoint_every": train["steps"]} if self.resumed else {}  # else it looks for none
        return make_spec(self.arch, self.layout, self.micro_batches, self.variant, train)


OPTIMIZER = "workers/trainer/optimizer.py"
PARALLELIZE = "workers/trainer/parallel/parallelize.py"
PIPELINE = "workers/trainer/parallel/pipeline_parallel.py"
TENSOR = "workers/trainer/parallel/tensor_parallel.py"
CONTEXT = "workers/trainer/parallel/context_parallel.py"
DATA = "workers/trainer/parallel/data_parallel.py"
ZERO = "workers/trainer/parallel/zero.py"
TRAINER = "workers/trainer/trainer.py"
LOAD = "workers/checkpoint/load.py"
TRAFFIC = "planner/cost/traffic.py"

NO_SP_SUM = Edit(OPTIMIZER, "layout.sequence_parallel or ", "")
NO_SHARED_SUM = Edit(OPTIMIZER, "if mesh.key_values is not None:", "if False:")
NO_EMBEDDING = Edit(
    PARALLELIZE,
    "ordered = {p: holders[p] for p in finished if (p in divided) == experts}",
    "ordered = {p: holders[p] for p in finished if (p in divided) == experts"
    " and p is not getattr(decoders[0].embedding, 'weight', None)}",
)

# If trainer and planner share a fault, the bytes match the plan, so traffic checks cannot find it.
NO_INPUT_SUM = (
    Edit(
        TENSOR,
        "part_grad, work = start(ctx.matmuls.input_gradient(rows, weights).view_as(whole), ctx.group)",
        "part_grad = ctx.matmuls.input_gradient(rows, weights).view_as(whole)",
    ),
    Edit(TENSOR, "        work.wait()\n        return part_grad", "        return part_grad"),
)
FAULTS: dict[str, Fault] = {
    # Missing sums.
    "Gradients are not summed over tp with sequence parallelism": Fault((NO_SP_SUM,), "gpt", SP),
    "Trainer and planner omit the gradient sum over tp with sequence parallelism": Fault(
        (NO_SP_SUM, Edit(TRAFFIC, "layout.sequence_parallel or is_router", "is_router")), "gpt", SP
    ),
    "The embedding gradient is not reduced over dp": Fault((NO_EMBEDDING,), "llama", {"dp": 2}),
    "Trainer and planner omit the reduction of the embedding gradient over dp": Fault(
        (
            NO_EMBEDDING,
            Edit(
                "planner/cost/axis_traffic.py",
                "    count, total = _count_buckets(units, experts, element)",
                "    units = tuple(u._replace(parameters=tuple(p for p in u.parameters"
                " if p.name != 'embedding.weight')) for u in units)\n"
                "        count, total = _count_buckets(units, experts, element)",
            ),
        ),
        "llama",
        {"dp": 2},
    ),
    "Gradients of shared key/value heads are not summed": Fault((NO_SHARED_SUM,), "llama", {"tp": 2}, 2, "one kv head"),
    "Trainer and planner omit the gradient sum of shared key/value heads": Fault(
        (NO_SHARED_SUM, Edit(TRAFFIC, "(sharing, [(p, n) for p, n in parameters if is_key_or_value(p)]),", "")),
        "llama",
        {"tp": 2},
        2,
        "one kv head",
    ),
    "Input gradients are not summed over tp": Fault(NO_INPUT_SUM, "llama", {"tp": 2}),
    "With fp8, input gradients are not summed over tp": Fault(
        NO_INPUT_SUM, "llama", {"tp": 2}, 2, "", {"precision": "fp8"}
    ),
    "Each stage uses only its own gradient of the tied embedding": Fault(
        (Edit(OPTIMIZER, "dist.all_reduce(tied[0], group=mesh.embedding)", "pass"),), "gpt", {"pp": 2}
    ),
    "With ZBV, the tied embedding uses only one of two gradients": Fault(
        (Edit(OPTIMIZER, "tied[0].copy_(tied[1].add_(tied[0]))", "tied[0].copy_(tied[1])"),), "gpt", ZBV, 4
    ),
    "Gradients are not reduced across HSDP replicas": Fault(
        (Edit(ZERO, "root.set_requires_all_reduce(last)", "root.set_requires_all_reduce(False)"),),
        "llama",
        {"dp": 4, "zero": 2, "dp_replicas": 2},
    ),
    "Ring attention uses only local key/value gradients": Fault(
        (Edit(CONTEXT, "return self._own_gradient + self._in_flight", "return self._own_gradient"),), "llama", {"cp": 2}
    ),
    "Gradient buckets are reduced before the last micro-batch": Fault(
        (Edit(DATA, "len(bucket) * self._backwards for", "len(bucket) for"),), "llama", {"dp": 2}
    ),
    "The fp32 gradient contains only the first micro-batch": Fault(
        (Edit("workers/trainer/parallel/data_parallel.py", "master.grad.add_(gradient)", "pass"),),
        "llama",
        {"tp": 2},
        2,
        "",
        {"precision": "bf16"},
    ),
    # Wrong scales.
    "Gradients are averaged instead of summed over dp": Fault(
        (Edit(DATA, "work.wait()", "work.wait()\n            flat.div_(2)"),), "gpt", {"dp": 2}
    ),
    "ZeRO divides gradients by the number of ranks": Fault(
        (Edit(ZERO, "    module.set_gradient_divide_factor(1.0)\n", ""),), "llama", {"dp": 2, "zero": 3}
    ),
    "Each tp rank adds the bias before the sum over tp": Fault(
        (
            Edit(
                "workers/trainer/model/layers.py",
                "return linear(x, self.weight, None, self.strategy)",
                "return linear(x, self.weight, self.bias, self.strategy)",
            ),
        ),
        "gpt",
        {"tp": 2},
    ),
    "The gradient norm counts replicas twice": Fault((Edit(OPTIMIZER, " / copies", ""),), "gpt", {"dp": 2}),
    # Old or missing values.
    "ZeRO-1 uses old weights after a validation": Fault(
        (Edit(ZERO, "        for root in self._roots:\n            _free_gathered(root)", "        pass"),),
        "llama",
        {"dp": 2, "zero": 1},
        2,
        "",
        {"eval_every": 1},
    ),
    "The bf16 weights are not updated from the master weights": Fault(
        (Edit(PARALLELIZE, "held.weight.copy_(held.master)", "pass"),), "llama", {"dp": 2}, 2, "", {"precision": "bf16"}
    ),
    "A pipeline stage does not wait for the message it needs": Fault(
        (Edit(PIPELINE, "        work.wait()\n        return self._tp", "        return self._tp"),),
        "llama",
        {"pp": 2},
    ),
    "Ring attention does not wait for the next key/value block": Fault(
        (
            Edit(
                CONTEXT,
                "            for work in works:\n                work.wait()\n            block",
                "            block",
            ),
        ),
        "llama",
        {"cp": 2},
    ),
    "The weight gradient contains only one micro-batch": Fault(
        (
            Edit(
                "workers/trainer/parallel/matmul.py",
                "parameter.grad = summed(parameter.grad)",
                "parameter.grad = summed(None)",
            ),
        ),
        "llama",
        ZBV,
        4,
        precisions=("fp32",),  # bf16 adds each gradient to a separate fp32 sum
    ),
    # Wrong shards and data.
    "All replicas read the same sequences": Fault(
        (
            Edit(
                TRAINER,
                "slice(mesh.coordinates.dp * replica_rows, (mesh.coordinates.dp + 1) * replica_rows)",
                "slice(0, replica_rows)",
            ),
        ),
        "gpt",
        {"dp": 2},
    ),
    "Replicas start with different weights": Fault(
        (Edit("workers/trainer/model/decoder.py", "= whole[", "= (1 + 1e-3 * place.dp) * whole["),),
        "gpt",
        {"dp": 2},
    ),
    "All tp ranks use the first weight shard": Fault(
        (Edit("planner/facts/placements.py", "return experts, place.tp, shard", "return experts, 0, shard"),),
        "llama",
        {"tp": 2},
    ),
    "The tp split does not treat the value projection as key/value heads": Fault(
        (
            Edit(
                "planner/facts/model_shapes.py",
                '.startswith(("attention.k.", "attention.v."))',
                '.startswith("attention.k.")',
            ),
        ),
        "llama",
        {"tp": 2},
        2,
        "one kv head",
    ),
    "A pipeline stage also contains the first layer of the next stage": Fault(
        (
            Edit(
                "planner/facts/stages.py",
                "return StageChunks(tuple(runs[c] for c in held),",
                "return StageChunks(tuple(range(runs[c].start, runs[c].stop + (index == 0)) for c in held),",
            ),
        ),
        "llama",
        {"pp": 2},
    ),
    "With ZBV, the second chunk of each rank is on the wrong stage": Fault(
        (
            Edit(
                "planner/facts/layout.py",
                "return (stage, 2 * layout.pp - 1 - stage)",
                "return (stage, layout.pp + stage)",
            ),
        ),
        "llama",
        ZBV,
        4,
    ),
    # Wrong positions.
    "Each cp rank counts positions from its own first token": Fault(
        (
            Edit(
                CONTEXT,
                "return self.own_part(torch.arange(seq_len * self.degree, device=device), 0)",
                "return torch.arange(seq_len, device=device)",
            ),
        ),
        "llama",
        {"cp": 2},
    ),
    "The loss includes targets of other vocabulary shards": Fault(
        (Edit(TENSOR, ".squeeze(-1).masked_fill(~mine, 0)", ".squeeze(-1)"),), "gpt", {"tp": 2}
    ),
    "The embedding lookup includes rows of other vocabulary shards": Fault(
        (Edit(TENSOR, ", table) * mine.unsqueeze(-1)", ", table)"),), "gpt", {"tp": 2}
    ),
    "Tokens are sent to the wrong expert": Fault(
        (Edit("workers/trainer/model/moe.py", "if ep.degree == 1:", "if True:"),),
        "moe",
        {"dp": 2, "ep": 2},
    ),
    "The router skips the best expert of each token": Fault(
        (
            Edit(
                "workers/trainer/model/moe.py",
                "gates, experts = probabilities.topk(self.experts_per_token, dim=-1)",
                "worse = self.strategy.ep.degree > 1\n"
                "        gates, experts = (\n"
                "            part[..., worse:] for part in probabilities.topk(self.experts_per_token + worse, dim=-1)\n"
                "        )",
            ),
        ),
        "moe",
        {"dp": 2, "ep": 2},
    ),
    "Each expert rank loses the last token that it receives": Fault(
        (
            Edit(
                "workers/trainer/parallel/expert_parallel.py",
                "received, sent, group=group)\n    return out",
                "received, sent, group=group)\n    return out.index_fill(0, torch.tensor([len(out) - 1]), 0)",
            ),
        ),
        "moe",
        {"dp": 2, "ep": 2},
    ),
    # Faults after the first steps.
    "Key gradients are halved from step 4": Fault(
        (
            Edit(
                TRAINER,
                "            reduce_shared_gradients(self.spec, self.model, self.mesh)\n",
                "            reduce_shared_gradients(self.spec, self.model, self.mesh)\n"
                "        for held in self.model.parameters if index >= 3 and self.mesh.layout.world_size > 1 else []:\n"
                "            held.gradient.mul_(0.5 if '.k.' in held.name else 1)\n",
            ),
        ),
        "llama",
        {"dp": 2},
        train={"steps": 6},
    ),
    "The learning rate decays only for some weights": Fault(
        (
            Edit(
                TRAINER,
                "for group in self.optimizer.param_groups:",
                "for group in self.optimizer.param_groups[: 1 if self.mesh.layout.world_size > 1 else None]:",
            ),
        ),
        "llama",
        {"dp": 2},
        train={"steps": 100, "warmup_steps": 0},
    ),
    "The validation loss is averaged instead of summed over dp": Fault(
        (
            Edit(
                TRAINER,
                "            dist.all_reduce(total)\n",
                "            dist.all_reduce(total)\n            total /= self.mesh.layout.dp\n",
            ),
        ),
        "gpt",
        {"dp": 2},
        train={"steps": 6, "eval_every": 3},
    ),
    # Faults without verification.
    "With verification off, each replica uses a different data seed": Fault(
        (Edit(TRAINER, "train_batch(train.seed,", "train_batch(train.seed + self.mesh.coordinates.dp,"),),
        "gpt",
        {"dp": 2},
        train={"verify": "off"},
    ),
    # Faults at a resume.
    "The optimizer moments of one shard are not loaded": Fault(
        (
            Edit(
                LOAD,
                "    read_tensors(state, checkpoint_found)\n",
                "    partial = get_model_state(spec, coordinates, model)\n"
                "    read_tensors(state if coordinates.dp == 0 else partial, checkpoint_found)\n",
            ),
        ),
        "llama",
        {"dp": 2, "zero": 1},
        train={"steps": 6, "verify": "off"},
        resumed=3,
    ),
    "The Adam step count restarts when a run resumes": Fault(
        (
            Edit(
                LOAD,
                "set_optimizer_steps(model, optimizer, manifest.step)",
                "set_optimizer_steps(model, optimizer, manifest.step if spec.layout.world_size == 1 else 0)",
            ),
        ),
        "llama",
        {"dp": 2},
        train={"steps": 6},
        resumed=3,
    ),
    "The bf16 weights differ from the loaded master weights": Fault(
        (Edit(LOAD, "    model.copy_masters_to_weights()\n", ""),),
        "llama",
        {"dp": 2},
        train={"steps": 6, "precision": "bf16"},
        resumed=3,
    ),
}
