"""Messages between processes.

`jobs` and `workers` never import each other. They share task names and Redis keys (`contracts.names`), orders and
reports of hosts (`contracts.control`), and the telemetry of ranks (`contracts.telemetry`). `contracts.codec` encodes
and validates these messages.
"""
