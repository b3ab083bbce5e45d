"""Which layout to take, and what lies one choice away."""
