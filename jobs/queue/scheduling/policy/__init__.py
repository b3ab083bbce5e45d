"""Who goes first, who may have how much, and what becomes of a job by rule: pure functions, each of one rule."""
