"""How Django writes values, by language."""
