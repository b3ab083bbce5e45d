"""How well jobs are kept from the host and from each other."""
