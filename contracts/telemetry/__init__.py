"""What a rank says while it runs, and how it travels.

A rank sends `Frame`s (4-byte big-endian length, then msgpack) over its supervisor's unix socket. The
supervisor merges the items of all ranks every 100 ms into one `Batch`, one Redis Stream entry.
Browsers get the same `Batch`. Counters are cumulative since the rank started, so a lost or thinned
item loses no byte: the next one carries the truth.

Units: bytes, seconds, unix seconds for `time`. Version 1; a reader refuses another version.
"""
