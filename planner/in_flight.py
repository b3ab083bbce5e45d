"""How many chunks' activations a pipeline rank keeps at most, by schedule."""

from planner.spec import Layout


def chunks_in_flight(layout: Layout, stage: int, micro_batches: int) -> int:
    """Peak number of (chunk, micro-batch) pairs between their forward and the end of their backward."""
    m, p, v = micro_batches, layout.pp, layout.virtual_stages
    if p == 1 or layout.schedule == "naive":
        return v
    if layout.schedule in ("gpipe", "looped_bfs"):
        return m * v
    if v == 1:
        return min(m, p - stage)
    if layout.schedule in ("zbv", "dualpipev"):
        return min(2 * m, 2 * p + (layout.schedule == "dualpipev"))
    return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)
