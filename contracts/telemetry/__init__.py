"""Telemetry of running ranks.

A rank sends `Frame`s (4-byte big-endian length, then msgpack) over the unix socket of its supervisor. Every 100 ms, the
supervisor merges the items of all ranks into one `Batch`, which is one entry of a Redis Stream. Browsers receive the
same `Batch`. Counters are cumulative since the start of the rank, so a lost or thinned item loses no byte.

Units: bytes, seconds, unix seconds for `time`. Version 1. A reader refuses another version.
"""
