"""REST of what a run sends and what is kept of it, wherever it was launched."""
