"""What crosses a process boundary, written down once.

`jobs` and `workers` never import each other. They meet here: in task names and Redis keys
(`contracts.names`), in what a host is asked to run and says about it (`contracts.control`), and in
what ranks say while they run (`contracts.telemetry`). `contracts.codec` checks what is sent and what is read.
"""
