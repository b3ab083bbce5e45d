"""HTML forms derived from the models of a spec."""
