"""Published measurements against the planner: step time, ranking, fit and memory (`python -m benchmarks.published`)."""
