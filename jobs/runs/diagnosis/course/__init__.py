"""How a run goes from its start to its end: its stages, its steps, its training."""
