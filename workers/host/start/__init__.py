"""An order becomes an attempt, and an attempt its ranks."""
