"""Define faults whose author knew the trainer, but neither the verification nor the other faults."""

from __future__ import annotations

from tests.mutations.faults import (
    CONTEXT,
    DATA,
    LOAD,
    OPTIMIZER,
    PARALLELIZE,
    PIPELINE,
    SP,
    TENSOR,
    TRAINER,
    ZBV,
    ZERO,
    Edit,
    Fault,
)

DATASET = "workers/trainer/dataset.py"
LAYERS = "workers/trainer/model/layers.py"
MATMUL = "workers/trainer/parallel/matmul.py"
MOE = "workers/trainer/model/moe.py"
PLACEMENTS = "planner/facts/placements.py"
STATE = "workers/checkpoint/state.py"

INTERLEAVED = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
ZERO_BUBBLE = {"pp": 2, "schedule": "interleaved_zero_bubble"}
CLIPPED = {"grad_clip": 0.5}
EVALUATED = {"eval_every": 1}
LONGER = {"steps": 5}

BLIND_FAULTS: dict[str, Fault] = {
    # Optimizer: parameter groups, schedule, and clipping.
    "ZeRO moves matrices to the group without weight decay": Fault(
        (
            Edit(
                OPTIMIZER,
                "groups[parameter.ndim >= 2, is_sharded(parameter)]",
                "groups[parameter.ndim >= 2 and not is_sharded(parameter), is_sharded(parameter)]",
            ),
        ),
        "gpt",
        {"dp": 2, "zero": 1},
    ),
    "The schedule sets the learning rate of the first two parameter groups only": Fault(
        (Edit(TRAINER, "for group in self.optimizer.param_groups:", "for group in self.optimizer.param_groups[:2]:"),),
        "moe",
        {"dp": 2, "ep": 2, "zero": 3},
    ),
    "The cosine decay counts from the first step instead of the end of the warm-up": Fault(
        (
            Edit(
                OPTIMIZER,
                "done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)",
                "done = step / train.steps",
            ),
        ),
        "gpt",
        {"dp": 2},
    ),
    "Clipping skips the experts that ep shards": Fault(
        (
            Edit(
                OPTIMIZER,
                "    for p in model.parameters:\n        p.gradient.mul_(limit / norm)",
                "    for p in model.parameters:\n        if p.placement.ep is None:\n"
                "            p.gradient.mul_(limit / norm)",
            ),
        ),
        "moe",
        {"dp": 2, "ep": 2},
        train=CLIPPED,
    ),
    "The gradient norm counts a tied embedding on both ends of the pipeline": Fault(
        (Edit(PARALLELIZE, " * (2 if is_tied(spec, parameter) else 1)", ""),), "gpt", {"pp": 2}, train=CLIPPED
    ),
    # Gradients: sums, scales, and accumulation over micro-batches.
    "The tied head keeps its own gradient if one rank has both ends of the pipeline": Fault(
        (Edit(OPTIMIZER, "tied[0].copy_(tied[1].add_(tied[0]))", "tied[0].copy_(tied[1].add(tied[0]))"),),
        "gpt",
        ZBV,
        micro_batches=4,
    ),
    "The all-reduce starts after the first micro-batch, and later micro-batches are lost": Fault(
        (Edit(DATA, "[len(bucket) * self._backwards for bucket in self._buckets]", "[len(b) for b in self._buckets]"),),
        "gpt",
        {"dp": 2},
    ),
    "Backward divides the loss by the number of micro-batches again": Fault(
        (
            Edit(
                TRAINER,
                "torch.autograd.backward(output, gradient)",
                "scale = self._trainer.spec.train.micro_batches if gradient is None else 1\n"
                "            torch.autograd.backward(output / scale, gradient)",
            ),
        ),
        "llama",
        INTERLEAVED,
        micro_batches=4,
    ),
    "Deferred gradients of norms and biases keep the last micro-batch only": Fault(
        (
            Edit(
                MATMUL,
                "    return value if accumulated is None else accumulated.add_(value)",
                "    return value",
            ),
        ),
        "gpt",
        ZERO_BUBBLE,
        micro_batches=4,
        precisions=("fp32",),  # With bf16, another place accumulates.
    ),
    "ZeRO sums fp32 gradients in bf16": Fault(
        (
            Edit(
                ZERO,
                "MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)",
                "MixedPrecisionPolicy(param_dtype=compute)",
            ),
        ),
        "llama",
        {"dp": 2, "zero": 3},
        precisions=("bf16",),
    ),
    # Data: order, seed, and rows per rank.
    "Each dp replica adds its index to the seed of the data": Fault(
        (
            Edit(
                TRAINER,
                "self.dataset.train_batch(train.seed,",
                "self.dataset.train_batch(train.seed + self.mesh.coordinates.dp,",
            ),
        ),
        "llama",
        {"dp": 2},
    ),
    "The position in an epoch advances by the batch of one replica": Fault(
        (
            Edit(
                DATASET,
                "numbers = np.arange(step * global_batch, (step + 1) * global_batch)[rows]",
                "first = step * (rows.stop - rows.start)\n"
                "            numbers = np.arange(first, first + global_batch)[rows]",
            ),
        ),
        "llama",
        {"dp": 2},
        train={"sampling": "epochs"},
    ),
    "All dp replicas validate on the rows of the first replica": Fault(
        (
            Edit(
                TRAINER,
                "self.dataset.eval_batch(train.seed, train.global_batch, self._rows, train.seq_len)",
                "self.dataset.eval_batch(\n"
                "            train.seed, train.global_batch, slice(self._rows.stop - self._rows.start), train.seq_len\n"
                "        )",
            ),
        ),
        "gpt",
        {"dp": 2},
        train=EVALUATED,
    ),
    # Pipeline.
    "All received hidden states share one buffer": Fault(
        (
            Edit(
                PIPELINE,
                "        self._sends, self._aside = SendQueue(), SideStream(device)",
                "        self._sends, self._aside = SendQueue(), SideStream(device)\n"
                "        self._buffers: dict[str, torch.Tensor] = {}",
            ),
            Edit(
                PIPELINE,
                "part = torch.empty(self._shape.numel() // self._tp.degree, dtype=self._dtype, device=self._device)",
                "size = self._shape.numel() // self._tp.degree\n"
                "                part = self._buffers.setdefault(\n"
                "                    message.kind, torch.empty(size, dtype=self._dtype, device=self._device)\n"
                "                )",
            ),
        ),
        "gpt",
        {"pp": 2, "schedule": "gpipe"},
        micro_batches=4,
    ),
    "Later pipeline stages attend across documents": Fault(
        (
            Edit(
                TRAINER,
                "documents = get_document_ids(rows[:, :-1], self._trainer.spec.train.document_end)",
                "end = self._trainer.spec.train.document_end if hidden is None else None\n"
                "            documents = get_document_ids(rows[:, :-1], end)",
            ),
        ),
        "gpt",
        {"pp": 2},
        micro_batches=4,
        variant="documents",
    ),
    # Tensor and sequence parallelism.
    "Each tp rank adds the bias of a row-parallel layer before the sum": Fault(
        (
            Edit(LAYERS, "return linear(x, self.weight, None, self.strategy)", "return self(x)"),
            Edit(
                LAYERS,
                "return x if self.bias is None else x + read_parameter(self.bias, self.strategy).to(x.dtype)",
                "return x",
            ),
        ),
        "gpt",
        {"tp": 2},
    ),
    "Sequence parallelism adds the positions of the first part to each part": Fault(
        (Edit(TENSOR, "return x.chunk(self.degree, dim)[self.index] if", "return x.chunk(self.degree, dim)[0] if"),),
        "gpt",
        SP,
    ),
    "Unfused attention gives key/value heads to query heads in turn": Fault(
        (
            Edit(
                LAYERS,
                "k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)",
                "k, v = k.repeat(1, served, 1, 1), v.repeat(1, served, 1, 1)",
            ),
        ),
        "llama",
        {"tp": 2},
        train={"attention": "unfused"},
    ),
    "Selective recompute swaps gate and up of SwiGLU": Fault(
        (
            Edit(
                LAYERS,
                "with recompute_saved(inner, lambda: activate(gate, up)):",
                "with recompute_saved(inner, lambda: activate(up, gate)):",
            ),
        ),
        "llama",
        {"tp": 2, "recompute": "selective"},
    ),
    "The epsilon of norms is 1e-6": Fault((Edit(LAYERS, "NORM_EPS = 1e-5", "NORM_EPS = 1e-6"),), "llama", SP),
    # Context parallelism.
    "The last target of a cp rank's early chunk is the first token of its late chunk": Fault(
        (
            Edit(
                TRAINER,
                "            return decoder.loss_sum(output, cp.own_part(rows[:, 1:], 1)) / self._trainer.tokens",
                "            inputs, targets = cp.own_part(rows[:, :-1], 1), cp.own_part(rows[:, 1:], 1)\n"
                "            targets = torch.cat((inputs[:, 1:], targets[:, -1:]), 1)\n"
                "            return decoder.loss_sum(output, targets) / self._trainer.tokens",
            ),
        ),
        "llama",
        {"cp": 2},
    ),
    "Backward of ring attention normalizes by the scores of the own block": Fault(
        (Edit(CONTEXT, "before.copy_(torch.logaddexp(before, here))", "before = torch.logaddexp(before, here)"),),
        "llama",
        {"cp": 2},
    ),
    "A cp rank drops the gradient of a passing block that it receives": Fault(
        (
            Edit(
                CONTEXT,
                "self._in_flight = gradient if self._in_flight is None else self._in_flight + gradient",
                "self._in_flight = gradient",
            ),
        ),
        "llama",
        {"cp": 4},
        micro_batches=1,
    ),
    # Experts.
    "The expert index ignores cp, so cp ranks start with the same experts": Fault(
        (Edit(PLACEMENTS, "(place.dp * layout.cp + place.cp) % layout.ep", "place.dp % layout.ep"),),
        "moe",
        {"cp": 2, "ep": 2},
    ),
    "The first token above the capacity of an expert goes to the next slot": Fault(
        (Edit(MOE, "slot = torch.where(order < capacity,", "slot = torch.where(order <= capacity,"),),
        "moe",
        {"dp": 2, "ep": 2},
        variant="capacity",
    ),
    "Each tp rank adds the whole load-balancing loss": Fault(
        (
            Edit(
                PARALLELIZE,
                "moe.balance_loss / (spec.train.global_batch * layout.tp)",
                "moe.balance_loss / spec.train.global_batch",
            ),
        ),
        "moe",
        {"tp": 2},
    ),
    # Validation and checkpoints.
    "ZeRO-1 keeps gathered weights after a validation": Fault(
        (
            Edit(
                ZERO,
                "        for root in self._roots:\n            _free_gathered(root)",
                "        if self._frees_each:\n"
                "            for root in self._roots:\n                _free_gathered(root)",
            ),
        ),
        "gpt",
        {"dp": 2, "zero": 1},
        train=EVALUATED,
    ),
    "A resumed run reads the data from the first batch again": Fault(
        (
            Edit(
                TRAINER,
                "        self.batch: Tokens | None = None  # of the last step",
                "        self.batch: Tokens | None = None  # of the last step\n        self._num_batches = 0",
            ),
            Edit(
                TRAINER,
                "self.dataset.train_batch(train.seed, index,",
                "self.dataset.train_batch(train.seed, self._num_batches,",
            ),
            Edit(TRAINER, "        self.batch = batch", "        self.batch = batch\n        self._num_batches += 1"),
        ),
        "gpt",
        {"dp": 2},
        train=LONGER,
        resumed=2,
    ),
    "A resumed V schedule starts the tied head without Adam's moments": Fault(
        (
            Edit(
                STATE,
                "        for moment in MOMENTS:\n"
                "            get_local(optimizer.state[head][moment])"
                ".copy_(get_local(optimizer.state[embedding][moment]))\n",
                "",
            ),
        ),
        "gpt",
        ZBV,
        micro_batches=4,
        train=LONGER,
        resumed=2,
    ),
    "A resumed bf16 run computes its first step with initial weights": Fault(
        (Edit(LOAD, "    model.copy_masters_to_weights()\n", ""),),
        "llama",
        {"tp": 2},
        train=LONGER,
        resumed=2,
        precisions=("bf16",),
    ),
}
