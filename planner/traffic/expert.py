"""Expert parallelism: tokens to their experts and back (GShard 2006.16668 section 3.2)."""

from __future__ import annotations

from planner.layout import axis_group
from planner.precision import mix_of
from planner.spec import JobSpec
from planner.traffic.shapes import Held, micro_batch_tokens
from planner.traffic.tally import Tally


def dispatched_bytes(spec: JobSpec) -> int:
    """Hidden states one rank hands to an all-to-all: each token once for each of its experts.

    With tokens spread evenly over the experts; a real router only comes near it.
    """
    assert spec.model.moe is not None
    tokens = micro_batch_tokens(spec) // (spec.layout.tp if spec.layout.sequence_parallel else 1)
    hidden = spec.model.hidden_size * mix_of(spec.train.precision).compute
    return tokens * spec.model.moe.experts_per_token * hidden


def experts(tally: Tally, spec: JobSpec, held: Held, *, backward: bool) -> None:
    """Dispatch and combine in each layer with experts; full recompute repeats both in backward."""
    if spec.layout.ep == 1 or not held.num_moe_layers:
        return
    exchanges = 4 if backward and spec.layout.recompute == "full" else 2
    count = spec.train.micro_batches * held.num_moe_layers * exchanges
    tally.add("all_to_all", "ep", axis_group(spec.layout, "ep"), dispatched_bytes(spec), count)
