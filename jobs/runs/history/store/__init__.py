"""Store the history of an attempt: its tables, their limits, and queries."""
