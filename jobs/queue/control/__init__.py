"""The controller: its stages, and what it does by rule."""
