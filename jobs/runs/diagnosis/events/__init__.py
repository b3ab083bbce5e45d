"""Steps that were told event by event: who met whom, who waited, how fast data moved."""
